/* y = tanh(x). The result may be written over the first input. */
#ifndef TANH_H
#define TANH_H

void tanh_forward(float *y, const float *x, int n);
void tanh_backward(float *dx, const float *dy, const float *y, int n);

#endif
