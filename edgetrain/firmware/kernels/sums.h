/* Sums that every kernel shares. The order of the additions is fixed, so results are the same bits on every core. */
#ifndef SUMS_H
#define SUMS_H

#include <stddef.h>

/* A loop of a few rounds, known when the program is built, written out: its arrays become registers. */
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif
/* A function that is built anew for each call, with what is constant there. */
#define FOR_EACH_CALL static inline __attribute__((always_inline))
/* One that is not: registers are few, and each loop should have them all. */
#define BY_ITSELF static __attribute__((noinline))

static inline int at_least(int a, int b)
{
    return a > b ? a : b;
}

static inline int at_most(int a, int b)
{
    return a < b ? a : b;
}

/* `value` of K numbers, over and over; zeros where it is NULL. */
static inline void fill(float *y, const float *value, int rows, int K)
{
    for (int k = 0; k < K; k++) {
        y[k] = value == NULL ? 0.0f : value[k];
    }
    const float *before = y;
    for (float *next = y + K, *const end = y + rows * K; next < end; next++) {
        *next = *before++;
    }
}

/* Four partial sums: less rounding than one, and four multiply-adds that need not wait for each other. */
static inline float dot(const float *a, const float *b, int n)
{
    float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        s0 += a[i] * b[i];
        s1 += a[i + 1] * b[i + 1];
        s2 += a[i + 2] * b[i + 2];
        s3 += a[i + 3] * b[i + 3];
    }
    for (; i < n; i++) {
        s0 += a[i] * b[i];
    }
    return (s0 + s1) + (s2 + s3);
}

/* The same over every `step_a`-th and `step_b`-th number. */
static inline float dot_strided(const float *a, int step_a, const float *b, int step_b, int n)
{
    float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        s0 += a[0] * b[0];
        s1 += a[step_a] * b[step_b];
        s2 += a[2 * step_a] * b[2 * step_b];
        s3 += a[3 * step_a] * b[3 * step_b];
        a += 4 * step_a;
        b += 4 * step_b;
    }
    for (; i < n; i++) {
        s0 += a[0] * b[0];
        a += step_a;
        b += step_b;
    }
    return (s0 + s1) + (s2 + s3);
}

/* Adds to sums[0..3] the products of a with four rows of b, which lie `step_b` apart: a is read once for all of them.
 * Runs of 8 are summed by themselves, against rounding. */
static inline void dot_four(float *restrict sums, const float *a, const float *b, int step_b, int n)
{
    float t0 = sums[0], t1 = sums[1], t2 = sums[2], t3 = sums[3];
    const float *b1 = b + step_b, *b2 = b1 + step_b, *b3 = b2 + step_b;
    for (int first = 0; first < n; first += 8) {
        const int end = at_most(first + 8, n);
        float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
        for (int i = first; i < end; i++) {
            const float value = a[i];
            s0 += value * b[i];
            s1 += value * b1[i];
            s2 += value * b2[i];
            s3 += value * b3[i];
        }
        t0 += s0;
        t1 += s1;
        t2 += s2;
        t3 += s3;
    }
    sums[0] = t0;
    sums[1] = t1;
    sums[2] = t2;
    sums[3] = t3;
}

/* A sum that carries along what rounding loses (Kahan), for statistics over many numbers. */
typedef struct {
    float total, lost;
} exact_sum;

static inline void exact_add(exact_sum *sum, float value)
{
    const float corrected = value - sum->lost;
    const float total = sum->total + corrected;
    sum->lost = (total - sum->total) - corrected;
    sum->total = total;
}

#endif
