/* y = min(max(x, low), high): ReLU6 has 0 and 6. The result may be written over the first input. */
#ifndef CLAMP_H
#define CLAMP_H

void clamp_forward(float *y, const float *x, int n, float low, float high);
void clamp_backward(float *dx, const float *dy, const float *y, int n, float low, float high);

#endif
