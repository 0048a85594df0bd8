#include "permute.h"

void permute_to_nchw(float *restrict y, const float *x, int B, int H, int W, int C)
{
    for (int n = 0; n < B; n++) {
        for (int c = 0; c < C; c++) {
            for (int i = 0; i < H * W; i++) {
                *y++ = x[(n * H * W + i) * C + c];
            }
        }
    }
}

void permute_to_nhwc(float *restrict y, const float *x, int B, int H, int W, int C)
{
    for (int n = 0; n < B; n++) {
        for (int i = 0; i < H * W; i++) {
            for (int c = 0; c < C; c++) {
                *y++ = x[(n * C + c) * H * W + i];
            }
        }
    }
}
