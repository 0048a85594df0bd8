/* Group norm over x [B, places, C]: each sample's channels in groups, mean and invstd [B, groups].
 * weight and bias may be NULL: one and zero. dx may be dy. */
#ifndef GROUP_NORM_H
#define GROUP_NORM_H

typedef struct {
    int B, places, C, groups;
} group_norm_shape;

void group_norm_forward(
    float *restrict y, float *restrict mean, float *restrict invstd, const float *x, const float *weight,
    const float *bias, const group_norm_shape *s, float eps);
void group_norm_backward(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, const float *mean,
    const float *invstd, const float *weight, const group_norm_shape *s);

#endif
