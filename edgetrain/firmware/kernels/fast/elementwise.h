/* Elementwise kernels, TASK_ELEMENTS elements a task. */
#ifndef ELEMENTWISE_H
#define ELEMENTWISE_H

#include "parallel.h"
#include "vector.h"

enum { TASK_ELEMENTS = 8192 };

typedef struct {
    float *y;
    const float *a, *b;
    int n;
    float low, high;
} elements;

ALWAYS_INLINE elements elements_of(const void *context, int task)
{
    elements e = *(const elements *)context;
    const int start = task * TASK_ELEMENTS;
    e.y += start;
    e.a += start;
    e.b = e.b == 0 ? 0 : e.b + start;
    e.n = min_int(TASK_ELEMENTS, e.n - start);
    return e;
}

ALWAYS_INLINE void for_elements(const elements *e, task_function *body)
{
    parallel_for(ceil_div(e->n, TASK_ELEMENTS), e->n / LANES, body, e);
}

#endif
