#include "group_norm.h"

#include <math.h>
#include <stddef.h>

#include "kernel.h"

void group_norm_forward(
    float *restrict y, float *restrict mean, float *restrict invstd, const float *x, const float *weight,
    const float *bias, const group_norm_shape *s, float eps)
{
    const int C = s->C / s->groups;
    const float count = (float)(C * s->places);
    for (int n = 0; n < s->B; n++) {
        for (int g = 0; g < s->groups; g++) {
            const int base = n * s->places * s->C + g * C;
            kahan_sum sum = {0.0f, 0.0f}, squares = {0.0f, 0.0f};
            for (int i = 0; i < s->places; i++) {
                for (int c = 0; c < C; c++) {
                    kahan_add(&sum, x[base + i * s->C + c]);
                }
            }
            const float center = sum.total / count;
            for (int i = 0; i < s->places; i++) {
                for (int c = 0; c < C; c++) {
                    const float deviation = x[base + i * s->C + c] - center;
                    kahan_add(&squares, deviation * deviation);
                }
            }
            const float scale = 1.0f / sqrtf(squares.total / count + eps);
            mean[n * s->groups + g] = center;
            invstd[n * s->groups + g] = scale;
            for (int i = 0; i < s->places; i++) {
                for (int c = 0; c < C; c++) {
                    const float normed = (x[base + i * s->C + c] - center) * scale;
                    const float scaled = weight == NULL ? normed : normed * weight[g * C + c];
                    y[base + i * s->C + c] = bias == NULL ? scaled : scaled + bias[g * C + c];
                }
            }
        }
    }
}

void group_norm_backward(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, const float *mean,
    const float *invstd, const float *weight, const group_norm_shape *s)
{
    const int C = s->C / s->groups;
    const float count = (float)(C * s->places);
    for (int c = 0; c < s->C; c++) {
        dweight[c] = 0.0f;
        dbias[c] = 0.0f;
    }
    for (int n = 0; n < s->B; n++) {
        for (int g = 0; g < s->groups; g++) {
            const int base = n * s->places * s->C + g * C;
            const float center = mean[n * s->groups + g], scale = invstd[n * s->groups + g];
            kahan_sum all = {0.0f, 0.0f}, all_normed = {0.0f, 0.0f};
            for (int c = 0; c < C; c++) {
                kahan_sum sum = {0.0f, 0.0f}, sum_normed = {0.0f, 0.0f};
                for (int i = 0; i < s->places; i++) {
                    const float gradient = dy[base + i * s->C + c];
                    kahan_add(&sum, gradient);
                    kahan_add(&sum_normed, gradient * (x[base + i * s->C + c] - center));
                }
                const float weight_gradient = sum_normed.total * scale;
                const float factor = weight == NULL ? 1.0f : weight[g * C + c];
                dbias[g * C + c] += sum.total;
                dweight[g * C + c] += weight_gradient;
                kahan_add(&all, sum.total * factor);
                kahan_add(&all_normed, weight_gradient * factor);
            }
            for (int i = 0; i < s->places; i++) {
                for (int c = 0; c < C; c++) {
                    const int at = base + i * s->C + c;
                    const float factor = weight == NULL ? 1.0f : weight[g * C + c];
                    const float normed = (x[at] - center) * scale;
                    dx[at] = (dy[at] * factor - all.total / count - normed * (all_normed.total / count)) * scale;
                }
            }
        }
    }
}
