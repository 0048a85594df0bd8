/* Images [B, H, W, C] as [B, C, H, W] and back: where a model makes a vector of an image. */
#ifndef PERMUTE_H
#define PERMUTE_H

void permute_to_nchw(float *restrict y, const float *x, int B, int H, int W, int C);
void permute_to_nhwc(float *restrict y, const float *x, int B, int H, int W, int C);

#endif
