/* Convolution of each channel by a filter of its own, 3 x 3: x [B, H, W, C], w [C, 3, 3], y [B, P, Q, C].
 * The stride is 1 or 2; padding is at most 3 - stride. Other depthwise convolutions: depthwise.h. */
#ifndef DEPTHWISE3X3_H
#define DEPTHWISE3X3_H

typedef struct {
    int B, H, W, C;
    int P, Q;
    int stride, pad_h, pad_w;
} depthwise3x3_shape;

/* b: one number for each of the C filters, or NULL. */
void depthwise3x3_forward(
    float *restrict y, const float *x, const float *w, const float *b, const depthwise3x3_shape *s);
void depthwise3x3_backward_weight(float *restrict dw, const float *dy, const float *x, const depthwise3x3_shape *s);
void depthwise3x3_backward_input(float *restrict dx, const float *dy, const float *w, const depthwise3x3_shape *s);

#endif
