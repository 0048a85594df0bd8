/* The mean over all pixels (places) of an image: x [B, places, C], y [B, C]. */
#ifndef GLOBAL_AVG_POOL_H
#define GLOBAL_AVG_POOL_H

void global_avg_pool_forward(float *restrict y, const float *x, int B, int places, int C);
void global_avg_pool_backward(float *restrict dx, const float *dy, int B, int places, int C);

#endif
