#include "group_norm.h"

#include <math.h>
#include <stddef.h>

#include "sums.h"

void group_norm_forward(
    float *restrict y, float *restrict mean, float *restrict invstd, const float *x, const float *weight,
    const float *bias, const group_norm_shape *s, float eps)
{
    const int C = s->C / s->groups;
    const float count = (float)(C * s->places);
    for (int n = 0; n < s->B; n++) {
        for (int g = 0; g < s->groups; g++) {
            const int first = n * s->places * s->C + g * C;
            exact_sum sum = {0.0f, 0.0f}, squares = {0.0f, 0.0f};
            for (int i = 0; i < s->places; i++) {
                for (int c = 0; c < C; c++) {
                    exact_add(&sum, x[first + i * s->C + c]);
                }
            }
            const float centre = sum.total / count;
            for (int i = 0; i < s->places; i++) {
                for (int c = 0; c < C; c++) {
                    const float from_mean = x[first + i * s->C + c] - centre;
                    exact_add(&squares, from_mean * from_mean);
                }
            }
            const float scale = 1.0f / sqrtf(squares.total / count + eps);
            mean[n * s->groups + g] = centre;
            invstd[n * s->groups + g] = scale;
            for (int i = 0; i < s->places; i++) {
                for (int c = 0; c < C; c++) {
                    const float normed = (x[first + i * s->C + c] - centre) * scale;
                    const float scaled = weight == NULL ? normed : normed * weight[g * C + c];
                    y[first + i * s->C + c] = bias == NULL ? scaled : scaled + bias[g * C + c];
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
            const int first = n * s->places * s->C + g * C;
            const float centre = mean[n * s->groups + g], scale = invstd[n * s->groups + g];
            exact_sum all = {0.0f, 0.0f}, all_normed = {0.0f, 0.0f};
            for (int c = 0; c < C; c++) {
                exact_sum sum = {0.0f, 0.0f}, sum_normed = {0.0f, 0.0f};
                for (int i = 0; i < s->places; i++) {
                    const float flows = dy[first + i * s->C + c];
                    exact_add(&sum, flows);
                    exact_add(&sum_normed, flows * (x[first + i * s->C + c] - centre));
                }
                const float along = sum_normed.total * scale;
                const float factor = weight == NULL ? 1.0f : weight[g * C + c];
                dbias[g * C + c] += sum.total;
                dweight[g * C + c] += along;
                exact_add(&all, sum.total * factor);
                exact_add(&all_normed, along * factor);
            }
            for (int i = 0; i < s->places; i++) {
                for (int c = 0; c < C; c++) {
                    const int at = first + i * s->C + c;
                    const float factor = weight == NULL ? 1.0f : weight[g * C + c];
                    const float normed = (x[at] - centre) * scale;
                    dx[at] = (dy[at] * factor - all.total / count - normed * (all_normed.total / count)) * scale;
                }
            }
        }
    }
}
