/* The largest number of each window; `where` keeps which place of the window it came from, in one byte. */
#ifndef MAX_POOL2D_H
#define MAX_POOL2D_H

#include <stdint.h>

#include "pool2d.h"

void max_pool2d_forward(float *restrict y, uint8_t *restrict where, const float *x, const pool2d_shape *s);
void max_pool2d_backward(float *restrict dx, const float *dy, const uint8_t *where, const pool2d_shape *s);

#endif
