#include "relu.h"

void relu_forward(float *y, const float *x, int n)
{
    for (int i = 0; i < n; i++) {
        y[i] = x[i] > 0.0f ? x[i] : 0.0f;
    }
}

void relu_backward(float *dx, const float *dy, const float *y, int n)
{
    for (int i = 0; i < n; i++) {
        dx[i] = y[i] > 0.0f ? dy[i] : 0.0f;
    }
}
