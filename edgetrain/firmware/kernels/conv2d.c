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

/* One number of y: the taps [r0, r1) x [t0, t1) of filter k over the image that starts at row h0, column w0. */
static float one_result(
    const float *x, const float *w, const conv2d_shape *s, int h0, int w0, int r0, int r1, int t0, int t1, int k)
{
    const int C = s->C / s->groups, K = s->K / s->groups;
    float sum = 0.0f;
    for (int r = r0; r < r1; r++) {
        const float *image = x + ((h0 + r * s->dilation_h) * s->W + w0) * s->C + k / K * C;
        const float *filter = w + (k * s->R + r) * s->S * C;
        for (int t = t0; t < t1; t++) {
            sum += dot(image + t * s->dilation_w * s->C, filter + t * C, C);
        }
    }
    return sum;
}

/* Four filters at once, where a row of taps is one run in memory. */
static void four_results(
    float *restrict sums, const float *x, const float *w, const conv2d_shape *s, int h0, int w0, int r0, int r1, int t0,
    int t1)
{
    const int filter = s->R * s->S * s->C;
    sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
    for (int r = r0; r < r1; r++) {
        const float *image = x + ((h0 + r * s->dilation_h) * s->W + w0 + t0) * s->C;
        dot_four(sums, image, w + (r * s->S + t0) * s->C, filter, (t1 - t0) * s->C);
    }
}

void conv2d_forward(float *restrict y, const float *x, const float *w, const float *b, const conv2d_shape *s)
{
    const int filter = s->R * s->S * (s->C / s->groups);
    const int row_is_one_run = s->groups == 1 && s->dilation_w == 1;
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p < s->P; p++) {
            const int h0 = p * s->stride_h - s->pad_h;
            const int r0 = first_tap(h0, s->dilation_h), r1 = end_tap(h0, s->dilation_h, s->R, s->H);
            for (int q = 0; q < s->Q; q++) {
                const int w0 = q * s->stride_w - s->pad_w;
                const int t0 = first_tap(w0, s->dilation_w), t1 = end_tap(w0, s->dilation_w, s->S, s->W);
                int k = 0;
                for (; row_is_one_run && k + 4 <= s->K; k += 4) {
                    four_results(y + k, x, w + k * filter, s, h0, w0, r0, r1, t0, t1);
                }
                for (; k < s->K; k++) {
                    y[k] = one_result(x, w, s, h0, w0, r0, r1, t0, t1, k);
                }
                for (k = 0; b != NULL && k < s->K; k++) {
                    y[k] = y[k] + b[k];
                }
                y += s->K;
            }
        }
        x += s->H * s->W * s->C;
    }
}

/* Where one tap of the filters met the image: row p of y, columns [q0, q1), `start` + q stride_w of the image. */
typedef struct {
    int r, start, q0, q1;
} met_taps;

/* The gradient of `count` (4 or 1) weights that lie side by side, of tap t of filter k from channel c of the image on:
 * the sum over all places where they met the image, row by row. */
static void weights_of_tap(
    float *restrict dw, const float *dy, const float *x, const conv2d_shape *s, met_taps t, int k, int c, int count)
{
    float w0 = 0.0f, w1 = 0.0f, w2 = 0.0f, w3 = 0.0f;
    const int step = s->stride_w * s->C;
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p < s->P; p++) {
            const int h = p * s->stride_h - s->pad_h + t.r * s->dilation_h;
            if (h < 0 || h >= s->H || t.q1 <= t.q0) {
                continue;
            }
            const float *gradient = dy + ((n * s->P + p) * s->Q + t.q0) * s->K + k;
            const float *image = x + ((n * s->H + h) * s->W + t.start + t.q0 * s->stride_w) * s->C + c;
            if (count == 1) {
                w0 += dot_strided(gradient, s->K, image, step, t.q1 - t.q0);
                continue;
            }
            float r0 = 0.0f, r1 = 0.0f, r2 = 0.0f, r3 = 0.0f;
            for (int q = t.q0; q < t.q1; q++) {
                const float g = *gradient;
                r0 += g * image[0];
                r1 += g * image[1];
                r2 += g * image[2];
                r3 += g * image[3];
                gradient += s->K;
                image += step;
            }
            w0 += r0;
            w1 += r1;
            w2 += r2;
            w3 += r3;
        }
    }
    dw[0] = w0;
    if (count == 4) {
        dw[1] = w1;
        dw[2] = w2;
        dw[3] = w3;
    }
}

void conv2d_backward_weight(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s)
{
    const int C = s->C / s->groups, K = s->K / s->groups;
    for (int k = 0; k < s->K; k++) {
        for (int r = 0; r < s->R; r++) {
            for (int column = 0; column < s->S; column++) {
                const int start = column * s->dilation_w - s->pad_w;
                const met_taps t = {
                    r, start, first_tap(start, s->stride_w), end_tap(start, s->stride_w, s->Q, s->W),
                };
                int c = 0;
                for (; c + 4 <= C; c += 4) {
                    weights_of_tap(dw + c, dy, x, s, t, k, k / K * C + c, 4);
                }
                for (; c < C; c++) {
                    weights_of_tap(dw + c, dy, x, s, t, k, k / K * C + c, 1);
                }
                dw += C;
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

/* Tap by tap: each adds to all channels of its place what the gradients there bring. */
void conv2d_backward_input(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s)
{
    const int C = s->C / s->groups, K = s->K / s->groups;
    const int filter = s->R * s->S * C;
    for (int n = 0; n < s->B; n++) {
        for (int h = 0; h < s->H; h++) {
            for (int v = 0; v < s->W; v++) {
                for (int c = 0; c < s->C; c++) {
                    dx[c] = 0.0f;
                }
                for (int r = 0; r < s->R; r++) {
                    const int p = met_at(h, r, s->pad_h, s->dilation_h, s->stride_h, s->P);
                    for (int t = 0; p >= 0 && t < s->S; t++) {
                        const int q = met_at(v, t, s->pad_w, s->dilation_w, s->stride_w, s->Q);
                        if (q < 0) {
                            continue;
                        }
                        const float *gradient = dy + ((n * s->P + p) * s->Q + q) * s->K;
                        const float *weight = w + (r * s->S + t) * C;
                        for (int g = 0; g < s->groups; g++) {
                            for (int c = 0; c < C; c++) {
                                const float *of_group = weight + g * K * filter + c;
                                dx[g * C + c] += dot_strided(gradient + g * K, 1, of_group, filter, K);
                            }
                        }
                    }
                }
                dx += s->C;
            }
        }
    }
}
