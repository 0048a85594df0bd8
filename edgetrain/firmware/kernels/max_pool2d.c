#include "max_pool2d.h"

#include <math.h>

void max_pool2d_forward(float *restrict y, uint8_t *restrict argmax, const float *x, const pool2d_shape *s)
{
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p < s->P; p++) {
            for (int q = 0; q < s->Q; q++) {
                for (int c = 0; c < s->C; c++) {
                    float max = -INFINITY;
                    int position = -1;
                    for (int r = 0; r < s->R; r++) {
                        const int h = p * s->stride_h - s->pad_h + r;
                        for (int t = 0; h >= 0 && h < s->H && t < s->S; t++) {
                            const int v = q * s->stride_w - s->pad_w + t;
                            if (v < 0 || v >= s->W) {
                                continue;
                            }
                            const float value = x[((n * s->H + h) * s->W + v) * s->C + c];
                            /* The first of equal maxima counts; NaN wins. */
                            if (position < 0 || value > max || (value != value)) {
                                max = value;
                                position = r * s->S + t;
                            }
                        }
                    }
                    *y++ = max;
                    *argmax++ = (uint8_t)position;
                }
            }
        }
    }
}

void max_pool2d_backward(float *restrict dx, const float *dy, const uint8_t *argmax, const pool2d_shape *s)
{
    for (int i = 0; i < s->B * s->H * s->W * s->C; i++) {
        dx[i] = 0.0f;
    }
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p < s->P; p++) {
            for (int q = 0; q < s->Q; q++) {
                for (int c = 0; c < s->C; c++) {
                    const int h = p * s->stride_h - s->pad_h + *argmax / s->S;
                    const int v = q * s->stride_w - s->pad_w + *argmax % s->S;
                    dx[((n * s->H + h) * s->W + v) * s->C + c] += *dy++;
                    argmax++;
                }
            }
        }
    }
}
