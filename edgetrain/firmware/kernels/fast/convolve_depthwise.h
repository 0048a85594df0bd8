/* Convolutions whose filters each see one channel of their own: x [B, H, W, C], w [C, R, S], y [B, P, Q, C]. */
#ifndef CONVOLVE_DEPTHWISE_H
#define CONVOLVE_DEPTHWISE_H

enum { MAX_DEPTHWISE_TAPS = 256 };

typedef struct {
    int B, H, W, C, P, Q, R, S;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
} depthwise_shape;

void convolve_depthwise_forward(float *y, const float *x, const float *w, const float *b, const depthwise_shape *s);
void convolve_depthwise_backward_weight(float *dw, const float *dy, const float *x, const depthwise_shape *s);
void convolve_depthwise_backward_input(float *dx, const float *dy, const float *w, const depthwise_shape *s);

#endif
