/* The gradient of a bias: the sum of dy [rows, C] over its rows. */
#ifndef BIAS_H
#define BIAS_H

void bias_backward(float *restrict db, const float *dy, int rows, int C);

#endif
