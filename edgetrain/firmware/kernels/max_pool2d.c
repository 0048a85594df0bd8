#include "max_pool2d.h"

#include <math.h>

void max_pool2d_forward(float *restrict y, uint8_t *restrict where, const float *x, const pool2d_shape *s)
{
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p < s->P; p++) {
            for (int q = 0; q < s->Q; q++) {
                for (int c = 0; c < s->C; c++) {
                    float most = -INFINITY;
                    int found = -1;
                    for (int r = 0; r < s->R; r++) {
                        const int h = p * s->stride_h - s->pad_h + r;
                        for (int t = 0; h >= 0 && h < s->H && t < s->S; t++) {
                            const int v = q * s->stride_w - s->pad_w + t;
                            if (v < 0 || v >= s->W) {
                                continue;
                            }
                            const float value = x[((n * s->H + h) * s->W + v) * s->C + c];
                            /* The first place counts where several are as large; what is not a number wins. */
                            if (found < 0 || value > most || (value != value)) {
                                most = value;
                                found = r * s->S + t;
                            }
                        }
                    }
                    *y++ = most;
                    *where++ = (uint8_t)found;
                }
            }
        }
    }
}

void max_pool2d_backward(float *restrict dx, const float *dy, const uint8_t *where, const pool2d_shape *s)
{
    for (int i = 0; i < s->B * s->H * s->W * s->C; i++) {
        dx[i] = 0.0f;
    }
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p < s->P; p++) {
            for (int q = 0; q < s->Q; q++) {
                for (int c = 0; c < s->C; c++) {
                    const int h = p * s->stride_h - s->pad_h + *where / s->S;
                    const int v = q * s->stride_w - s->pad_w + *where % s->S;
                    dx[((n * s->H + h) * s->W + v) * s->C + c] += *dy++;
                    where++;
                }
            }
        }
    }
}
