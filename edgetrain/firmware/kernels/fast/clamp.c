#include "../clamp.h"

#include "numbers.h"

static void forward_piece(const void *job, int piece)
{
    const numbers of = piece_of(job, piece);
    for (int i = 0; i < of.n; i++) {
        of.to[i] = of.a[i] < of.low ? of.low : of.a[i] > of.high ? of.high : of.a[i];
    }
}

void clamp_forward(float *y, const float *x, int n, float low, float high)
{
    for_numbers(&(numbers){.to = y, .a = x, .n = n, .low = low, .high = high}, forward_piece);
}

static void backward_piece(const void *job, int piece)
{
    const numbers of = piece_of(job, piece);
    for (int i = 0; i < of.n; i++) {
        of.to[i] = of.b[i] > of.low && of.b[i] < of.high ? of.a[i] : 0.0f;
    }
}

void clamp_backward(float *dx, const float *dy, const float *y, int n, float low, float high)
{
    for_numbers(&(numbers){.to = dx, .a = dy, .b = y, .n = n, .low = low, .high = high}, backward_piece);
}
