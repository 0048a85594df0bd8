#include "mse.h"

#include "kernel.h"

void mse_forward(float *restrict loss, const float *x, const float *target, int n, int mean)
{
    kahan_sum sum = {0.0f, 0.0f};
    for (int i = 0; i < n; i++) {
        kahan_add(&sum, (x[i] - target[i]) * (x[i] - target[i]));
    }
    *loss = mean ? sum.total / (float)n : sum.total;
}

void mse_backward(float *restrict dx, const float *x, const float *target, int n, int mean)
{
    const float scale = mean ? 2.0f / (float)n : 2.0f;
    for (int i = 0; i < n; i++) {
        dx[i] = (x[i] - target[i]) * scale;
    }
}
