/* The vectorised conv2d recognises depthwise convolutions itself. */
#include "../depthwise.h"

void depthwise_forward(float *restrict y, const float *x, const float *w, const float *b, const conv2d_shape *s)
{
    conv2d_forward(y, x, w, b, s);
}

void depthwise_backward_weight(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s)
{
    conv2d_backward_weight(dw, dy, x, s);
}

void depthwise_backward_input(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s)
{
    conv2d_backward_input(dx, dy, w, s);
}
