#include "../clamp.h"

#include "elementwise.h"

static void forward_task(const void *context, int task)
{
    const elements e = elements_of(context, task);
    for (int i = 0; i < e.n; i++) {
        e.y[i] = e.a[i] < e.low ? e.low : e.a[i] > e.high ? e.high : e.a[i];
    }
}

void clamp_forward(float *y, const float *x, int n, float low, float high)
{
    for_elements(&(elements){.y = y, .a = x, .n = n, .low = low, .high = high}, forward_task);
}

static void backward_task(const void *context, int task)
{
    const elements e = elements_of(context, task);
    for (int i = 0; i < e.n; i++) {
        e.y[i] = e.b[i] > e.low && e.b[i] < e.high ? e.a[i] : 0.0f;
    }
}

void clamp_backward(float *dx, const float *dy, const float *y, int n, float low, float high)
{
    for_elements(&(elements){.y = dx, .a = dy, .b = y, .n = n, .low = low, .high = high}, backward_task);
}
