/* The mean of each window. count_pad: the padding counts as zeros; otherwise only pixels of the image count. */
#ifndef AVG_POOL2D_H
#define AVG_POOL2D_H

#include "pool2d.h"

void avg_pool2d_forward(float *restrict y, const float *x, const pool2d_shape *s, int count_pad);
void avg_pool2d_backward(float *restrict dx, const float *dy, const pool2d_shape *s, int count_pad);

#endif
