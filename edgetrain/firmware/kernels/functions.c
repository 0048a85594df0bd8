/* exp, log and tanh in float alone, within about one unit in the last place. Polynomials are those of Cephes. */
#include "functions.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* x = k ln 2 + r with |r| <= ln 2 / 2; exp x = 2^k exp r. ln 2 is subtracted in two parts, the first of few bits. */
float exp_float(float x)
{
    if (!(x < 88.7228394f)) {
        return x >= 88.7228394f ? INFINITY : x; /* too large, or not a number */
    }
    if (x < -103.972084f) {
        return 0.0f;
    }
    const float scaled = x * 1.44269504f;
    const int k = (int)(scaled + (scaled < 0.0f ? -0.5f : 0.5f));
    const float r = (x - (float)k * 0.693359375f) - (float)k * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const float y = (p * r * r + r) + 1.0f;
    /* 2^k in two factors: neither is out of range where the result is not. */
    const int half = k / 2;
    return y * from_bits((uint32_t)(half + 127) << 23) * from_bits((uint32_t)(k - half + 127) << 23);
}

/* x = 2^k m with sqrt(1/2) <= m < sqrt(2); log x = k ln 2 + log m. */
float log_float(float x)
{
    if (!(x > 0.0f)) {
        return x == 0.0f ? -INFINITY : NAN;
    }
    if (!(x <= 3.40282347e38f)) {
        return x; /* infinite */
    }
    int k = 0;
    if (x < 1.17549435e-38f) { /* subnormal */
        x *= 8388608.0f;
        k = -23;
    }
    const uint32_t bits = to_bits(x);
    k += (int)(bits >> 23) - 126;
    float m = from_bits((bits & 0x007fffffu) | 0x3f000000u);
    if (m < 0.707106781f) {
        k -= 1;
        m += m;
    }
    const float f = m - 1.0f, z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    float y = p * f * z;
    y += -2.12194440e-4f * (float)k;
    y -= 0.5f * z;
    return (f + y) + 0.693359375f * (float)k;
}

float tanh_float(float x)
{
    const float size = x < 0.0f ? -x : x;
    if (size > 9.1f) {
        return x < 0.0f ? -1.0f : 1.0f;
    }
    if (size >= 0.625f) {
        const float y = 1.0f - 2.0f / (exp_float(size + size) + 1.0f);
        return x < 0.0f ? -y : y;
    }
    const float z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return p * z * x + x;
}
