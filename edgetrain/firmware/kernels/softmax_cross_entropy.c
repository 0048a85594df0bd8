#include "softmax_cross_entropy.h"

#include "functions.h"
#include "kernel.h"

int labels_in_range(const int32_t *labels, int B, int C)
{
    for (int n = 0; n < B; n++) {
        if (labels[n] < 0 || labels[n] >= C) {
            return 0;
        }
    }
    return 1;
}

void softmax_cross_entropy_forward(
    float *restrict loss, float *restrict log_softmax, const float *logits, const int32_t *labels, int B, int C,
    int mean)
{
    kahan_sum total = {0.0f, 0.0f};
    for (int n = 0; n < B; n++) {
        const float *row = logits + n * C;
        float max = row[0];
        for (int c = 1; c < C; c++) {
            max = row[c] > max ? row[c] : max;
        }
        kahan_sum sum = {0.0f, 0.0f};
        for (int c = 0; c < C; c++) {
            kahan_add(&sum, exp_float(row[c] - max));
        }
        const float log_sum = log_float(sum.total);
        for (int c = 0; c < C; c++) {
            log_softmax[n * C + c] = (row[c] - max) - log_sum;
        }
        kahan_add(&total, -log_softmax[n * C + labels[n]]);
    }
    *loss = mean ? total.total / (float)B : total.total;
}

void softmax_cross_entropy_backward(float *dx, const float *log_softmax, const int32_t *labels, int B, int C, int mean)
{
    const float scale = mean ? 1.0f / (float)B : 1.0f;
    for (int n = 0; n < B; n++) {
        for (int c = 0; c < C; c++) {
            const float target = c == labels[n] ? 1.0f : 0.0f;
            dx[n * C + c] = (exp_float(log_softmax[n * C + c]) - target) * scale;
        }
    }
}
