/* A dense layer is a convolution of images of one pixel. */
#include "../dense.h"

#include "convolve.h"

void dense_forward(float *restrict y, const float *x, const float *w, const float *b, int B, int I, int O)
{
    convolve(&(convolution){
        .y = y, .x = x, .w = w, .b = b, .B = B, .H = 1, .W = 1, .C = I, .P = 1, .Q = 1, .K = O, .R = 1, .S = 1,
        .stride_h = 1, .stride_w = 1, .dilation_h = 1, .dilation_w = 1,
        .x_image = I, .x_row = I, .x_pixel = I, .y_image = O, .y_row = O, .y_pixel = O,
        .w_filter = I, .w_row = I, .w_column = I, .w_channel = 1,
    });
}

void dense_backward_weight(float *restrict dw, const float *dy, const float *x, int B, int I, int O)
{
    convolve_backward_weight(&(weight_gradient){
        .dw = dw, .dy = dy, .x = x, .B = B, .H = 1, .W = 1, .C = I, .P = 1, .Q = 1, .K = O, .R = 1, .S = 1,
        .stride_h = 1, .stride_w = 1, .dilation_h = 1, .dilation_w = 1,
        .x_image = I, .x_row = I, .x_pixel = I, .dy_pixel = O,
    });
}

void dense_backward_input(float *restrict dx, const float *dy, const float *w, int B, int I, int O)
{
    convolve(&(convolution){
        .y = dx, .x = dy, .w = w, .B = B, .H = 1, .W = 1, .C = O, .P = 1, .Q = 1, .K = I, .R = 1, .S = 1,
        .stride_h = 1, .stride_w = 1, .dilation_h = 1, .dilation_w = 1,
        .x_image = O, .x_row = O, .x_pixel = O, .y_image = I, .y_row = I, .y_pixel = I,
        .w_filter = 1, .w_row = I, .w_column = I, .w_channel = I,
    });
}
