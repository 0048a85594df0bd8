#include "dense.h"

#include <stddef.h>

#include "sums.h"

void dense_forward(float *restrict y, const float *x, const float *w, const float *b, int B, int I, int O)
{
    for (int n = 0; n < B; n++) {
        for (int o = 0; o < O; o++) {
            const float sum = dot(x + n * I, w + o * I, I);
            *y++ = b == NULL ? sum : sum + b[o];
        }
    }
}

void dense_backward_weight(float *restrict dw, const float *dy, const float *x, int B, int I, int O)
{
    for (int o = 0; o < O; o++) {
        for (int i = 0; i < I; i++) {
            *dw++ = dot_strided(dy + o, O, x + i, I, B);
        }
    }
}

void dense_backward_input(float *restrict dx, const float *dy, const float *w, int B, int I, int O)
{
    for (int n = 0; n < B; n++) {
        for (int i = 0; i < I; i++) {
            *dx++ = dot_strided(dy + n * O, 1, w + i, I, O);
        }
    }
}
