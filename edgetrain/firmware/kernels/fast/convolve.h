/* Convolutions and dense layers, forward and backward, as implicit gemm. Sizes are those of one group of channels.
 *
 *     convolve                   y[n, p, q, k] = b[k] + sum over r, s, c of x[n, h, v, c] w(k, r, s, c), with h =
 *                                p stride_h - pad_h + r dilation_h, v likewise, and x zero in the padding
 *     convolve_backward_weight   dw[k, r, s, c] = sum over n, p, q of dy[n, p, q, k] x[n, h, v, c]
 *
 * Strides count floats and may be those of a part of a tensor, such as every second row or some channels.
 */
#ifndef CONVOLVE_H
#define CONVOLVE_H

typedef struct {
    float *y;
    const float *x, *w, *b;
    int B, H, W, C, P, Q, K, R, S;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int x_image, x_row, x_pixel;
    int y_image, y_row, y_pixel;
    int w_filter, w_row, w_column, w_channel;
} convolution;

void convolve(const convolution *c);

typedef struct {
    float *dw;
    const float *dy, *x;
    int B, H, W, C, P, Q, K, R, S;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int x_image, x_row, x_pixel, dy_pixel;
} weight_gradient;

void convolve_backward_weight(const weight_gradient *g);

#endif
