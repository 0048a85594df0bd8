/* Vectorised convolutions on all cores: see convolve.h. Results are as exact as those of kernels/conv2d.c, but not the
 * same bits. */
#include "../conv2d.h"

#include <stddef.h>

#include "convolve.h"
#include "convolve_depthwise.h"

static int is_depthwise(const conv2d_shape *s)
{
    return s->groups == s->C && s->C == s->K && s->R * s->S <= MAX_DEPTHWISE_TAPS;
}

static depthwise_shape depthwise(const conv2d_shape *s)
{
    return (depthwise_shape){
        s->B, s->H, s->W, s->C, s->P, s->Q, s->R, s->S,
        s->stride_h, s->stride_w, s->pad_h, s->pad_w, s->dilation_h, s->dilation_w,
    };
}

void conv2d_forward(float *restrict y, const float *x, const float *w, const float *b, const conv2d_shape *s)
{
    const int C = s->C / s->groups, K = s->K / s->groups;
    if (is_depthwise(s)) {
        const depthwise_shape shape = depthwise(s);
        convolve_depthwise_forward(y, x, w, b, &shape);
        return;
    }
    for (int g = 0; g < s->groups; g++) {
        convolve(&(convolution){
            .y = y + g * K, .x = x + g * C, .w = w + g * K * s->R * s->S * C, .b = b == NULL ? NULL : b + g * K,
            .B = s->B, .H = s->H, .W = s->W, .C = C, .P = s->P, .Q = s->Q, .K = K, .R = s->R, .S = s->S,
            .stride_h = s->stride_h, .stride_w = s->stride_w, .pad_h = s->pad_h, .pad_w = s->pad_w,
            .dilation_h = s->dilation_h, .dilation_w = s->dilation_w,
            .x_image = s->H * s->W * s->C, .x_row = s->W * s->C, .x_pixel = s->C,
            .y_image = s->P * s->Q * s->K, .y_row = s->Q * s->K, .y_pixel = s->K,
            .w_filter = s->R * s->S * C, .w_row = s->S * C, .w_column = C, .w_channel = 1,
        });
    }
}

void conv2d_backward_weight(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s)
{
    const int C = s->C / s->groups, K = s->K / s->groups;
    if (is_depthwise(s)) {
        const depthwise_shape shape = depthwise(s);
        convolve_depthwise_backward_weight(dw, dy, x, &shape);
        return;
    }
    for (int g = 0; g < s->groups; g++) {
        convolve_backward_weight(&(weight_gradient){
            .dw = dw + g * K * s->R * s->S * C, .dy = dy + g * K, .x = x + g * C,
            .B = s->B, .H = s->H, .W = s->W, .C = C, .P = s->P, .Q = s->Q, .K = K, .R = s->R, .S = s->S,
            .stride_h = s->stride_h, .stride_w = s->stride_w, .pad_h = s->pad_h, .pad_w = s->pad_w,
            .dilation_h = s->dilation_h, .dilation_w = s->dilation_w,
            .x_image = s->H * s->W * s->C, .x_row = s->W * s->C, .x_pixel = s->C, .dy_pixel = s->K,
        });
    }
}

/* Along one side: the pixels first, first + stride, … of the image, and the taps that meet them: `count`, from the last
 * one down in steps of `step`, as a convolution of dy with this padding and dilation. */
typedef struct {
    int count, last, step, pad, dilation, pixels;
} phase;

static int greatest_common_divisor(int a, int b)
{
    while (b != 0) {
        const int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static phase phase_of(int first, int side, int taps, int stride, int pad, int dilation)
{
    phase result = {.pixels = first < side ? (side - first + stride - 1) / stride : 0};
    const int common = greatest_common_divisor(stride, dilation);
    result.step = stride / common;
    result.dilation = dilation / common;
    for (int tap = 0; tap < taps; tap++) {
        if ((first + pad - tap * dilation) % stride == 0) {
            result.count++;
            result.last = tap;
            result.pad = -(first + pad - tap * dilation) / stride;
        }
    }
    return result;
}

static void clear(float *restrict dx, const conv2d_shape *s)
{
    for (int i = 0; i < s->B * s->H * s->W * s->C; i++) {
        dx[i] = 0.0f;
    }
}

/* The pixels of x fall into stride_h x stride_w phases. The gradient of one phase is a convolution of dy with the taps
 * that meet it, last tap first. */
static void backward_input_phase(
    float *restrict dx, const float *dy, const float *w, const conv2d_shape *s, int g, int top, int left)
{
    const int C = s->C / s->groups, K = s->K / s->groups, filter = s->R * s->S * C;
    const phase h = phase_of(top, s->H, s->R, s->stride_h, s->pad_h, s->dilation_h);
    const phase v = phase_of(left, s->W, s->S, s->stride_w, s->pad_w, s->dilation_w);
    if (h.count == 0 || v.count == 0 || h.pixels == 0 || v.pixels == 0) {
        return; /* zeros already */
    }
    convolve(&(convolution){
        .y = dx + (top * s->W + left) * s->C + g * C, .x = dy + g * K,
        .w = w + g * K * filter + (h.last * s->S + v.last) * C, .b = NULL,
        .B = s->B, .H = s->P, .W = s->Q, .C = K, .P = h.pixels, .Q = v.pixels, .K = C, .R = h.count, .S = v.count,
        .stride_h = 1, .stride_w = 1, .pad_h = h.pad, .pad_w = v.pad,
        .dilation_h = h.dilation, .dilation_w = v.dilation,
        .x_image = s->P * s->Q * s->K, .x_row = s->Q * s->K, .x_pixel = s->K,
        .y_image = s->H * s->W * s->C, .y_row = s->stride_h * s->W * s->C, .y_pixel = s->stride_w * s->C,
        .w_filter = 1, .w_row = -h.step * s->S * C, .w_column = -v.step * C, .w_channel = filter,
    });
}

void conv2d_backward_input(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s)
{
    if (is_depthwise(s)) {
        const depthwise_shape shape = depthwise(s);
        convolve_depthwise_backward_input(dx, dy, w, &shape);
        return;
    }
    if (s->stride_h > 1 || s->stride_w > 1) {
        clear(dx, s); /* a phase may have no taps */
    }
    for (int g = 0; g < s->groups; g++) {
        for (int top = 0; top < s->stride_h; top++) {
            for (int left = 0; left < s->stride_w; left++) {
                backward_input_phase(dx, dy, w, s, g, top, left);
            }
        }
    }
}
