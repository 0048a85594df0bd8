/* Squared error of x against a target: the mean over all n numbers, or the sum. */
#ifndef MSE_H
#define MSE_H

void mse_forward(float *restrict loss, const float *x, const float *target, int n, int mean);
void mse_backward(float *restrict dx, const float *x, const float *target, int n, int mean);

#endif
