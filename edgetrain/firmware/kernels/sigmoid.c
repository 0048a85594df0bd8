#include "sigmoid.h"

#include "functions.h"

void sigmoid_forward(float *y, const float *x, int n)
{
    for (int i = 0; i < n; i++) {
        y[i] = 1.0f / (1.0f + exp_float(-x[i]));
    }
}

void sigmoid_backward(float *dx, const float *dy, const float *y, int n)
{
    for (int i = 0; i < n; i++) {
        dx[i] = dy[i] * (1.0f - y[i]) * y[i];
    }
}
