/* y = 1 / (1 + exp(-x)). The result may lie over the first argument. */
#ifndef SIGMOID_H
#define SIGMOID_H

void sigmoid_forward(float *y, const float *x, int n);
void sigmoid_backward(float *dx, const float *dy, const float *y, int n);

#endif
