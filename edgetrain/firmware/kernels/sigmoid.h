/* y = 1 / (1 + exp(-x)). The result may be written over the first input. */
#ifndef SIGMOID_H
#define SIGMOID_H

void sigmoid_forward(float *y, const float *x, int n);
void sigmoid_backward(float *dx, const float *dy, const float *y, int n);

#endif
