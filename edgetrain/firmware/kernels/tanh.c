#include "tanh.h"

#include "functions.h"

void tanh_forward(float *y, const float *x, int n)
{
    for (int i = 0; i < n; i++) {
        y[i] = tanh_float(x[i]);
    }
}

void tanh_backward(float *dx, const float *dy, const float *y, int n)
{
    for (int i = 0; i < n; i++) {
        dx[i] = dy[i] * (1.0f - y[i] * y[i]);
    }
}
