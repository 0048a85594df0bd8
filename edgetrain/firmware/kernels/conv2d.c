#include "conv2d.h"

#include <stddef.h>

#include "sums.h"

/* The taps [first, end) of a filter's row that meet the image, when the row starts at `start`. */
static int first_tap(int start, int dilation)
{
    return start < 0 ? (-start + dilation - 1) / dilation : 0;
}

static int end_tap(int start, int dilation, int taps, int side)
{
    return start >= side ? 0 : at_most(taps, (side - start + dilation - 1) / dilation);
}

void conv2d_forward(float *restrict y, const float *x, const float *w, const float *b, const conv2d_shape *s)
{
    const int C = s->C / s->groups, K = s->K / s->groups;
    const int row_is_one_run = s->groups == 1 && s->dilation_w == 1;
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p < s->P; p++) {
            const int h0 = p * s->stride_h - s->pad_h;
            const int r0 = first_tap(h0, s->dilation_h), r1 = end_tap(h0, s->dilation_h, s->R, s->H);
            for (int q = 0; q < s->Q; q++) {
                const int w0 = q * s->stride_w - s->pad_w;
                const int t0 = first_tap(w0, s->dilation_w), t1 = end_tap(w0, s->dilation_w, s->S, s->W);
                for (int k = 0; k < s->K; k++) {
                    float sum = 0.0f;
                    for (int r = r0; r < r1; r++) {
                        const int h = h0 + r * s->dilation_h;
                        const float *image = x + ((n * s->H + h) * s->W + w0) * s->C + k / K * C;
                        const float *filter = w + (k * s->R + r) * s->S * C;
                        if (row_is_one_run) {
                            sum += dot(image + t0 * C, filter + t0 * C, at_least(t1 - t0, 0) * C);
                            continue;
                        }
                        for (int t = t0; t < t1; t++) {
                            sum += dot(image + t * s->dilation_w * s->C, filter + t * C, C);
                        }
                    }
                    *y++ = b == NULL ? sum : sum + b[k];
                }
            }
        }
    }
}

/* Each weight by itself: the sum over all places where it met the image, row by row. */
void conv2d_backward_weight(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s)
{
    const int C = s->C / s->groups, K = s->K / s->groups;
    for (int k = 0; k < s->K; k++) {
        for (int r = 0; r < s->R; r++) {
            for (int t = 0; t < s->S; t++) {
                /* The columns [q0, q1) of y for which tap t lies inside the image. */
                const int start = t * s->dilation_w - s->pad_w;
                const int q0 = first_tap(start, s->stride_w), q1 = end_tap(start, s->stride_w, s->Q, s->W);
                for (int c = 0; c < C; c++) {
                    float sum = 0.0f;
                    for (int n = 0; n < s->B; n++) {
                        for (int p = 0; p < s->P; p++) {
                            const int h = p * s->stride_h - s->pad_h + r * s->dilation_h;
                            if (h < 0 || h >= s->H || q1 <= q0) {
                                continue;
                            }
                            const float *gradient = dy + ((n * s->P + p) * s->Q + q0) * s->K + k;
                            const int column = start + q0 * s->stride_w;
                            const float *image = x + ((n * s->H + h) * s->W + column) * s->C + k / K * C + c;
                            sum += dot_strided(gradient, s->K, image, s->stride_w * s->C, q1 - q0);
                        }
                    }
                    *dw++ = sum;
                }
            }
        }
    }
}

/* The place in y that tap `tap` met when it lay on `place` of x, or -1. */
static int met_at(int place, int tap, int pad, int dilation, int stride, int side)
{
    const int at = place + pad - tap * dilation;
    return at < 0 || at % stride != 0 || at / stride >= side ? -1 : at / stride;
}

void conv2d_backward_input(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s)
{
    const int C = s->C / s->groups, K = s->K / s->groups;
    const int filter = s->R * s->S * C;
    for (int n = 0; n < s->B; n++) {
        for (int h = 0; h < s->H; h++) {
            for (int v = 0; v < s->W; v++) {
                for (int c = 0; c < s->C; c++) {
                    const int group = c / C;
                    float sum = 0.0f;
                    for (int r = 0; r < s->R; r++) {
                        const int p = met_at(h, r, s->pad_h, s->dilation_h, s->stride_h, s->P);
                        for (int t = 0; p >= 0 && t < s->S; t++) {
                            const int q = met_at(v, t, s->pad_w, s->dilation_w, s->stride_w, s->Q);
                            if (q < 0) {
                                continue;
                            }
                            const float *gradient = dy + ((n * s->P + p) * s->Q + q) * s->K + group * K;
                            const float *weight = w + group * K * filter + (r * s->S + t) * C + c % C;
                            sum += dot_strided(gradient, 1, weight, filter, K);
                        }
                    }
                    *dx++ = sum;
                }
            }
        }
    }
}
