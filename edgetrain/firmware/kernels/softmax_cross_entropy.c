#include "softmax_cross_entropy.h"

#include "functions.h"
#include "sums.h"

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
    float *restrict loss, float *restrict logs, const float *logits, const int32_t *labels, int B, int C, int mean)
{
    exact_sum total = {0.0f, 0.0f};
    for (int n = 0; n < B; n++) {
        const float *row = logits + n * C;
        float most = row[0];
        for (int c = 1; c < C; c++) {
            most = row[c] > most ? row[c] : most;
        }
        exact_sum sum = {0.0f, 0.0f};
        for (int c = 0; c < C; c++) {
            exact_add(&sum, exp_float(row[c] - most));
        }
        const float log_sum = log_float(sum.total);
        for (int c = 0; c < C; c++) {
            logs[n * C + c] = (row[c] - most) - log_sum;
        }
        exact_add(&total, -logs[n * C + labels[n]]);
    }
    *loss = mean ? total.total / (float)B : total.total;
}

void softmax_cross_entropy_backward(float *dx, const float *logs, const int32_t *labels, int B, int C, int mean)
{
    const float scale = mean ? 1.0f / (float)B : 1.0f;
    for (int n = 0; n < B; n++) {
        for (int c = 0; c < C; c++) {
            const float target = c == labels[n] ? 1.0f : 0.0f;
            dx[n * C + c] = (exp_float(logs[n * C + c]) - target) * scale;
        }
    }
}
