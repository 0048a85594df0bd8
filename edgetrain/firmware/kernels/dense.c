#include "dense.h"

#include <stddef.h>

#include "gemm.h"

void dense_forward(float *restrict y, const float *x, const float *w, const float *b, int B, int I, int O)
{
    for (int n = 0; b != NULL && n < B; n++) {
        for (int o = 0; o < O; o++) {
            y[n * O + o] = b[o];
        }
    }
    const gemm_shape s = {
        .M = B, .N = O, .y_m = O, .a_m = I, .b_n = I, .outer = ONCE, .middle = ONCE, .inner = {I, 1, 1},
        .overwrite = b == NULL,
    };
    gemm_nt(y, x, w, &s);
}

void dense_backward_weight(float *restrict dw, const float *dy, const float *x, int B, int I, int O)
{
    const gemm_shape s = {
        .M = O, .N = I, .y_m = I, .a_m = 1, .b_n = 1, .outer = ONCE, .middle = ONCE, .inner = {B, O, I},
        .overwrite = 1,
    };
    gemm_tn(dw, dy, x, &s);
}

void dense_backward_input(float *restrict dx, const float *dy, const float *w, int B, int I, int O)
{
    const gemm_shape s = {
        .M = B, .N = I, .y_m = I, .a_m = O, .b_n = 1, .outer = ONCE, .middle = ONCE, .inner = {O, 1, I},
        .overwrite = 1,
    };
    gemm_nn(dx, dy, w, &s);
}
