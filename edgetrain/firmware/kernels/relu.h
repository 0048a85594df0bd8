/* y = max(x, 0). The result may be written over the first input. */
#ifndef RELU_H
#define RELU_H

void relu_forward(float *y, const float *x, int n);
void relu_backward(float *dx, const float *dy, const float *y, int n);

#endif
