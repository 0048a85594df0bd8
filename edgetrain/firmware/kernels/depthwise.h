/* Convolution of each channel by filters of its own: x [B, H, W, C], w [K, R, S], y [B, P, Q, K], where K is a multiple
 * of C. S is 3, 5 or more. Along rows of the image the stride is 1, or it is 2 and the dilation is 1. */
#ifndef DEPTHWISE_H
#define DEPTHWISE_H

#include "conv2d.h"

/* b: one number for each of the K filters, or NULL. */
void depthwise_forward(float *restrict y, const float *x, const float *w, const float *b, const conv2d_shape *s);
void depthwise_backward_weight(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s);
void depthwise_backward_input(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s);

#endif
