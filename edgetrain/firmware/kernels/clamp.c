#include "clamp.h"

void clamp_forward(float *y, const float *x, int n, float low, float high)
{
    for (int i = 0; i < n; i++) {
        y[i] = x[i] < low ? low : x[i] > high ? high : x[i];
    }
}

void clamp_backward(float *dx, const float *dy, const float *y, int n, float low, float high)
{
    for (int i = 0; i < n; i++) {
        dx[i] = y[i] > low && y[i] < high ? dy[i] : 0.0f;
    }
}
