#include "norm.h"

#include <math.h>
#include <stddef.h>

#include "kernel.h"

void norm_statistics(
    float *restrict mean, float *restrict invstd, const float *x, float *running_mean, float *running_var, int rows,
    int C, float momentum, float eps)
{
    for (int c = 0; c < C; c++) {
        kahan_sum sum = {0.0f, 0.0f}, squares = {0.0f, 0.0f};
        for (int row = 0; row < rows; row++) {
            kahan_add(&sum, x[row * C + c]);
        }
        mean[c] = sum.total / (float)rows;
        for (int row = 0; row < rows; row++) {
            const float deviation = x[row * C + c] - mean[c];
            kahan_add(&squares, deviation * deviation);
        }
        invstd[c] = 1.0f / sqrtf(squares.total / (float)rows + eps);
        if (running_mean != NULL && running_var != NULL) {
            const float unbiased = squares.total / (float)max_int(rows - 1, 1);
            running_mean[c] = momentum * mean[c] + (1.0f - momentum) * running_mean[c];
            running_var[c] = momentum * unbiased + (1.0f - momentum) * running_var[c];
        }
    }
}

void norm_invstd(float *restrict invstd, const float *variance, int C, float eps)
{
    for (int c = 0; c < C; c++) {
        invstd[c] = 1.0f / sqrtf(variance[c] + eps);
    }
}

static float scale_of(norm_channels channels, int c)
{
    return channels.weight == NULL ? channels.invstd[c] : channels.invstd[c] * channels.weight[c];
}

/* The result before the clamp. */
static float normed(norm_channels channels, int c, float x)
{
    const float y = (x - channels.mean[c]) * scale_of(channels, c);
    return channels.bias == NULL ? y : y + channels.bias[c];
}

static float clamp(norm_channels channels, float y)
{
    return y < channels.low ? channels.low : y > channels.high ? channels.high : y;
}

/* The gradient before the clamp: zero where y was clamped. */
static float masked(norm_channels channels, int c, float x, float dy)
{
    const float y = normed(channels, c, x);
    return y > channels.low && y < channels.high ? dy : 0.0f;
}

void norm_apply(float *y, const float *x, norm_channels channels, int rows, int C)
{
    for (int row = 0; row < rows; row++) {
        for (int c = 0; c < C; c++) {
            y[row * C + c] = clamp(channels, normed(channels, c, x[row * C + c]));
        }
    }
}

static void sums_of_gradient(
    float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels, int rows,
    int C)
{
    for (int c = 0; c < C; c++) {
        kahan_sum sum = {0.0f, 0.0f}, sum_normed = {0.0f, 0.0f};
        for (int row = 0; row < rows; row++) {
            const float value = x[row * C + c];
            const float gradient = masked(channels, c, value, dy[row * C + c]);
            kahan_add(&sum, gradient);
            kahan_add(&sum_normed, gradient * (value - channels.mean[c]));
        }
        dbias[c] = sum.total;
        dweight[c] = sum_normed.total * channels.invstd[c];
    }
}

void norm_backward(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels,
    int rows, int C)
{
    sums_of_gradient(dweight, dbias, dy, x, channels, rows, C);
    for (int row = 0; row < rows; row++) {
        for (int c = 0; c < C; c++) {
            const float value = x[row * C + c];
            const float gradient = masked(channels, c, value, dy[row * C + c]);
            const float projection = (value - channels.mean[c]) * channels.invstd[c] * (dweight[c] / (float)rows);
            dx[row * C + c] = (gradient - dbias[c] / (float)rows - projection) * scale_of(channels, c);
        }
    }
}

void norm_backward_frozen(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels,
    int rows, int C)
{
    sums_of_gradient(dweight, dbias, dy, x, channels, rows, C);
    for (int row = 0; row < rows; row++) {
        for (int c = 0; c < C; c++) {
            dx[row * C + c] = masked(channels, c, x[row * C + c], dy[row * C + c]) * scale_of(channels, c);
        }
    }
}
