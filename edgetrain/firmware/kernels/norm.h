/* Batch norm over x [rows, C], together with the clamp that follows it (-inf and inf without one).
 *
 *     statistics        mean and 1 / sqrt(variance + eps) of a batch; updates the running ones, where given
 *     invstd            1 / sqrt(variance + eps) of the running variance: a frozen batch norm
 *     apply             y = clamp((x - mean) * invstd * weight + bias, low, high); y may be x
 *     backward          gradients of x, weight and bias from that of y; dx may be dy
 *     backward_frozen   the same where mean and invstd are constants
 */
#ifndef NORM_H
#define NORM_H

/* Per channel. weight and bias may be NULL: one and zero. */
typedef struct {
    const float *mean, *invstd, *weight, *bias;
    float low, high;
} norm_channels;

void norm_statistics(
    float *restrict mean, float *restrict invstd, const float *x, float *running_mean, float *running_var, int rows,
    int C, float momentum, float eps);
void norm_invstd(float *restrict invstd, const float *variance, int C, float eps);
void norm_apply(float *y, const float *x, norm_channels channels, int rows, int C);
void norm_backward(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels,
    int rows, int C);
void norm_backward_frozen(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels,
    int rows, int C);

#endif
