/* Convolutions whose filters each see one channel of their own: groups = C = K. */
#ifndef CONVOLVE_DEPTHWISE_H
#define CONVOLVE_DEPTHWISE_H

#include "../conv2d.h"

enum { MOST_DEPTHWISE_TAPS = 256 };
void convolve_depthwise_forward(float *y, const float *x, const float *w, const float *b, const conv2d_shape *s);
void convolve_depthwise_backward_weight(float *dw, const float *dy, const float *x, const conv2d_shape *s);
void convolve_depthwise_backward_input(float *dx, const float *dy, const float *w, const conv2d_shape *s);

#endif
