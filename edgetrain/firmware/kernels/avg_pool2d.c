#include "avg_pool2d.h"

#include "kernel.h"

/* The pixels of one window that lie in the image, and what their sum is divided by. */
typedef struct {
    int h0, h1, v0, v1;
    float count;
} window;

static window window_at(const pool2d_shape *s, int p, int q, int count_pad)
{
    window w;
    const int h = p * s->stride_h - s->pad_h, v = q * s->stride_w - s->pad_w;
    const int padded = (min_int(h + s->R, s->H + s->pad_h) - h) * (min_int(v + s->S, s->W + s->pad_w) - v);
    w.h0 = max_int(h, 0);
    w.h1 = min_int(h + s->R, s->H);
    w.v0 = max_int(v, 0);
    w.v1 = min_int(v + s->S, s->W);
    w.count = (float)(count_pad ? padded : (w.h1 - w.h0) * (w.v1 - w.v0));
    return w;
}

void avg_pool2d_forward(float *restrict y, const float *x, const pool2d_shape *s, int count_pad)
{
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p < s->P; p++) {
            for (int q = 0; q < s->Q; q++) {
                const window w = window_at(s, p, q, count_pad);
                for (int c = 0; c < s->C; c++) {
                    float sum = 0.0f;
                    for (int h = w.h0; h < w.h1; h++) {
                        for (int v = w.v0; v < w.v1; v++) {
                            sum += x[((n * s->H + h) * s->W + v) * s->C + c];
                        }
                    }
                    *y++ = sum / w.count;
                }
            }
        }
    }
}

void avg_pool2d_backward(float *restrict dx, const float *dy, const pool2d_shape *s, int count_pad)
{
    for (int i = 0; i < s->B * s->H * s->W * s->C; i++) {
        dx[i] = 0.0f;
    }
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p < s->P; p++) {
            for (int q = 0; q < s->Q; q++) {
                const window w = window_at(s, p, q, count_pad);
                for (int c = 0; c < s->C; c++) {
                    const float part = *dy++ / w.count;
                    for (int h = w.h0; h < w.h1; h++) {
                        for (int v = w.v0; v < w.v1; v++) {
                            dx[((n * s->H + h) * s->W + v) * s->C + c] += part;
                        }
                    }
                }
            }
        }
    }
}
