#include "../relu.h"

#include "elementwise.h"

static void forward_task(const void *context, int task)
{
    const elements e = elements_of(context, task);
    for (int i = 0; i < e.n; i++) {
        e.y[i] = e.a[i] > 0.0f ? e.a[i] : 0.0f;
    }
}

void relu_forward(float *y, const float *x, int n)
{
    for_elements(&(elements){.y = y, .a = x, .n = n}, forward_task);
}

static void backward_task(const void *context, int task)
{
    const elements e = elements_of(context, task);
    for (int i = 0; i < e.n; i++) {
        e.y[i] = e.b[i] > 0.0f ? e.a[i] : 0.0f;
    }
}

void relu_backward(float *dx, const float *dy, const float *y, int n)
{
    for_elements(&(elements){.y = dx, .a = dy, .b = y, .n = n}, backward_task);
}
