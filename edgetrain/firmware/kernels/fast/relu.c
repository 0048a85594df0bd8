#include "../relu.h"

#include "numbers.h"

static void forward_piece(const void *job, int piece)
{
    const numbers of = piece_of(job, piece);
    for (int i = 0; i < of.n; i++) {
        of.to[i] = of.a[i] > 0.0f ? of.a[i] : 0.0f;
    }
}

void relu_forward(float *y, const float *x, int n)
{
    for_numbers(&(numbers){.to = y, .a = x, .n = n}, forward_piece);
}

static void backward_piece(const void *job, int piece)
{
    const numbers of = piece_of(job, piece);
    for (int i = 0; i < of.n; i++) {
        of.to[i] = of.b[i] > 0.0f ? of.a[i] : 0.0f;
    }
}

void relu_backward(float *dx, const float *dy, const float *y, int n)
{
    for_numbers(&(numbers){.to = dx, .a = dy, .b = y, .n = n}, backward_piece);
}
