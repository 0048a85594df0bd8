#include "global_avg_pool.h"

#include "kernel.h"

void global_avg_pool_forward(float *restrict y, const float *x, int B, int places, int C)
{
    for (int n = 0; n < B; n++) {
        for (int c = 0; c < C; c++) {
            kahan_sum sum = {0.0f, 0.0f};
            for (int i = 0; i < places; i++) {
                kahan_add(&sum, x[(n * places + i) * C + c]);
            }
            *y++ = sum.total / (float)places;
        }
    }
}

void global_avg_pool_backward(float *restrict dx, const float *dy, int B, int places, int C)
{
    for (int n = 0; n < B; n++) {
        for (int i = 0; i < places; i++) {
            for (int c = 0; c < C; c++) {
                *dx++ = dy[n * C + c] / (float)places;
            }
        }
    }
}
