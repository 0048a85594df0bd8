/* Channels of several tensors side by side: y [rows, C] holds x [rows, width] from channel `start` on. */
#ifndef CONCAT_H
#define CONCAT_H

void concat_forward(float *restrict y, const float *x, int rows, int C, int start, int width);
void concat_backward(float *restrict dx, const float *dy, int rows, int C, int start, int width);

#endif
