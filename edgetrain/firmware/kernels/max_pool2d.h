/* The maximum of each window; `argmax` keeps its position in the window, row by row, in one byte. */
#ifndef MAX_POOL2D_H
#define MAX_POOL2D_H

#include <stdint.h>

#include "pool2d.h"

void max_pool2d_forward(float *restrict y, uint8_t *restrict argmax, const float *x, const pool2d_shape *s);
void max_pool2d_backward(float *restrict dx, const float *dy, const uint8_t *argmax, const pool2d_shape *s);

#endif
