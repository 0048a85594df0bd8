#include "adam.h"

#include <math.h>
#include <stddef.h>

/* x to the power n, by squaring. In double, as the bias corrections are small differences. */
static double power(double x, int n)
{
    double y = 1.0;
    for (; n > 0; n /= 2) {
        y = n % 2 != 0 ? y * x : y;
        x = x * x;
    }
    return y;
}

void adam_update(
    float *w, const float *gradient, float *mean, float *square, float *largest, float *step, int n,
    const adam_settings *s)
{
    *step += 1.0f;
    const int count = (int)*step;
    const float rate = (float)(s->learning_rate / (1.0 - power(s->beta1, count)));
    const float root_correction = (float)sqrt(1.0 - power(s->beta2, count));
    const float shrink = s->decoupled ? (float)(1.0 - s->learning_rate * (double)s->weight_decay) : 1.0f;
    const float new_mean = (float)(1.0 - s->beta1);
    const float old_square = (float)s->beta2, new_square = (float)(1.0 - s->beta2);
    for (int i = 0; i < n; i++) {
        float g = s->maximize ? -gradient[i] : gradient[i];
        w[i] = w[i] * shrink;
        g = s->decoupled ? g : g + s->weight_decay * w[i];
        mean[i] = mean[i] + new_mean * (g - mean[i]);
        square[i] = old_square * square[i] + new_square * g * g;
        float denominator = square[i];
        if (largest != NULL) {
            largest[i] = denominator > largest[i] ? denominator : largest[i];
            denominator = largest[i];
        }
        w[i] = w[i] - rate * (mean[i] / (sqrtf(denominator) / root_correction + s->eps));
    }
}
