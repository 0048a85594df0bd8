#include "../depthwise3x3.h"

#include "convolve_depthwise.h"

static depthwise_shape shape_of(const depthwise3x3_shape *s)
{
    return (depthwise_shape){
        s->B, s->H, s->W, s->C, s->P, s->Q, 3, 3, s->stride, s->stride, s->pad_h, s->pad_w, 1, 1,
    };
}

void depthwise3x3_forward(
    float *restrict y, const float *x, const float *w, const float *b, const depthwise3x3_shape *s)
{
    const depthwise_shape shape = shape_of(s);
    convolve_depthwise_forward(y, x, w, b, &shape);
}

void depthwise3x3_backward_weight(float *restrict dw, const float *dy, const float *x, const depthwise3x3_shape *s)
{
    const depthwise_shape shape = shape_of(s);
    convolve_depthwise_backward_weight(dw, dy, x, &shape);
}

void depthwise3x3_backward_input(float *restrict dx, const float *dy, const float *w, const depthwise3x3_shape *s)
{
    const depthwise_shape shape = shape_of(s);
    convolve_depthwise_backward_input(dx, dy, w, &shape);
}
