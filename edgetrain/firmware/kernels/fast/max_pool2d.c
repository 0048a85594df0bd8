#include "../max_pool2d.h"

#include <math.h>

#include "parallel.h"
#include "vector.h"

enum { MAX_WINDOW = 256 }; /* `argmax` is a byte */

typedef struct {
    float *to;
    uint8_t *argmax;
    const float *from;
    const uint8_t *saved_argmax;
    const pool2d_shape *s;
} pool_job;

/* The positions [r0, r1) x [t0, t1) of a window at (h, v) that lie in the image. */
typedef struct {
    int h, v, r0, r1, t0, t1;
} window;

static window window_at(const pool2d_shape *s, int p, int q)
{
    const int h = p * s->stride_h - s->pad_h, v = q * s->stride_w - s->pad_w;
    return (window){h, v, max_int(-h, 0), min_int(s->R, s->H - h), max_int(-v, 0), min_int(s->S, s->W - v)};
}

/* `lanes` channels of one window. The first of equal maxima counts; NaN wins. room: floats from `image` to the end of
 * the tensor. */
ALWAYS_INLINE void max_of_window(
    float *y, uint8_t *argmax, const float *image, const pool2d_shape *s, window w, int lanes, int room)
{
    vec max = splat(-INFINITY);
    ivec position = splat_int(w.r0 * s->S + w.t0);
    int32_t positions[LANES];
    for (int r = w.r0; r < w.r1; r++) {
        for (int t = w.t0; t < w.t1; t++) {
            const int at = ((w.h + r) * s->W + w.v + t) * s->C;
            const vec value = load_padded(image + at, lanes, room - at);
            const ivec wins = (value > max) | (value != value);
            max = blend(wins, value, max);
            position = blend_int(wins, splat_int(r * s->S + t), position);
        }
    }
    store_partial(y, max, lanes);
    memcpy(positions, &position, sizeof positions);
    for (int i = 0; i < lanes; i++) {
        argmax[i] = (uint8_t)positions[i];
    }
}

static void forward_task(const void *context, int row)
{
    const pool_job *job = context;
    const pool2d_shape *s = job->s;
    const float *image = job->from + row / s->P * s->H * s->W * s->C;
    const int room = (s->B - row / s->P) * s->H * s->W * s->C;
    for (int q = 0; q < s->Q; q++) {
        const window w = window_at(s, row % s->P, q);
        const int at = (row * s->Q + q) * s->C;
        int c = 0;
        for (; c + LANES <= s->C; c += LANES) {
            max_of_window(job->to + at + c, job->argmax + at + c, image + c, s, w, LANES, room - c);
        }
        if (c < s->C) {
            max_of_window(job->to + at + c, job->argmax + at + c, image + c, s, w, s->C - c, room - c);
        }
    }
}

void max_pool2d_forward(float *restrict y, uint8_t *restrict argmax, const float *x, const pool2d_shape *s)
{
    const pool_job job = {.to = y, .argmax = argmax, .from = x, .s = s};
    const long work = (long)s->B * s->P * s->Q * s->R * s->S * ceil_div(s->C, LANES);
    parallel_for(s->B * s->P, work, forward_task, &job);
}

/* One image: its windows may overlap. */
static void backward_task(const void *context, int n)
{
    const pool_job *job = context;
    const pool2d_shape *s = job->s;
    const int numbers = s->H * s->W * s->C;
    float *dx = job->to + n * numbers;
    int offsets[MAX_WINDOW];
    for (int i = 0; i < s->R * s->S && i < MAX_WINDOW; i++) {
        offsets[i] = (i / s->S * s->W + i % s->S) * s->C;
    }
    memset(dx, 0, (size_t)numbers * sizeof *dx);
    for (int p = 0; p < s->P; p++) {
        for (int q = 0; q < s->Q; q++) {
            const int at = ((n * s->P + p) * s->Q + q) * s->C;
            const int corner = ((p * s->stride_h - s->pad_h) * s->W + q * s->stride_w - s->pad_w) * s->C;
            for (int c = 0; c < s->C; c++) {
                dx[corner + offsets[job->saved_argmax[at + c]] + c] += job->from[at + c];
            }
        }
    }
}

void max_pool2d_backward(float *restrict dx, const float *dy, const uint8_t *argmax, const pool2d_shape *s)
{
    const pool_job job = {.to = dx, .from = dy, .saved_argmax = argmax, .s = s};
    parallel_for(s->B, (long)s->B * (s->P * s->Q + s->H * s->W / 4) * s->C, backward_task, &job);
}
