/* Convolution of images: x [B, H, W, C], filters w [K, R, S, C / groups], y [B, P, Q, K]. */
#ifndef CONV2D_H
#define CONV2D_H

typedef struct {
    int B, H, W, C;
    int P, Q, K;
    int R, S, groups;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
} conv2d_shape;

/* b: one number for each of the K filters, or NULL. */
void conv2d_forward(float *restrict y, const float *x, const float *w, const float *b, const conv2d_shape *s);
void conv2d_backward_weight(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s);
void conv2d_backward_input(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s);

#endif
