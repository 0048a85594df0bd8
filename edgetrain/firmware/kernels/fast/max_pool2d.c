#include "../max_pool2d.h"

#include <math.h>

#include "parallel.h"
#include "vector.h"

enum { MOST_PLACES = 256 }; /* of a window: `where` is a byte */

typedef struct {
    float *to;
    uint8_t *where;
    const float *from;
    const uint8_t *was;
    const pool2d_shape *s;
} pool_job;

/* The places [r0, r1) x [t0, t1) of a window that lie in the image, which begins at row h, column v. */
typedef struct {
    int h, v, r0, r1, t0, t1;
} window;

static window window_at(const pool2d_shape *s, int p, int q)
{
    const int h = p * s->stride_h - s->pad_h, v = q * s->stride_w - s->pad_w;
    return (window){h, v, higher(-h, 0), lower(s->R, s->H - h), higher(-v, 0), lower(s->S, s->W - v)};
}

/* `lanes` channels of one window. The first place counts where several are as large; what is not a number wins.
 * room: floats from `image` on to the end of the tensor. */
INLINE void largest(
    float *y, uint8_t *where, const float *image, const pool2d_shape *s, window w, int lanes, int room)
{
    vec most = splat(-INFINITY);
    ivec found = splat_int(w.r0 * s->S + w.t0);
    int32_t places[LANES];
    for (int r = w.r0; r < w.r1; r++) {
        for (int t = w.t0; t < w.t1; t++) {
            const int at = ((w.h + r) * s->W + w.v + t) * s->C;
            const vec value = load_at_least(image + at, lanes, room - at);
            const ivec wins = (value > most) | (value != value);
            most = choose(wins, value, most);
            found = choose_int(wins, splat_int(r * s->S + t), found);
        }
    }
    store_some(y, most, lanes);
    memcpy(places, &found, sizeof places);
    for (int i = 0; i < lanes; i++) {
        where[i] = (uint8_t)places[i];
    }
}

static void forward_piece(const void *job, int row)
{
    const pool_job *of = job;
    const pool2d_shape *s = of->s;
    const float *image = of->from + row / s->P * s->H * s->W * s->C;
    const int room = (s->B - row / s->P) * s->H * s->W * s->C;
    for (int q = 0; q < s->Q; q++) {
        const window w = window_at(s, row % s->P, q);
        const int at = (row * s->Q + q) * s->C;
        int c = 0;
        for (; c + LANES <= s->C; c += LANES) {
            largest(of->to + at + c, of->where + at + c, image + c, s, w, LANES, room - c);
        }
        if (c < s->C) {
            largest(of->to + at + c, of->where + at + c, image + c, s, w, s->C - c, room - c);
        }
    }
}

void max_pool2d_forward(float *restrict y, uint8_t *restrict where, const float *x, const pool2d_shape *s)
{
    const pool_job of = {.to = y, .where = where, .from = x, .s = s};
    const long work = (long)s->B * s->P * s->Q * s->R * s->S * parts_of(s->C, LANES);
    parallel_for(s->B * s->P, work, forward_piece, &of);
}

/* One image: windows of other rows may overlap. */
static void backward_piece(const void *job, int n)
{
    const pool_job *of = job;
    const pool2d_shape *s = of->s;
    const int numbers = s->H * s->W * s->C;
    float *dx = of->to + n * numbers;
    int offsets[MOST_PLACES];
    for (int i = 0; i < s->R * s->S && i < MOST_PLACES; i++) {
        offsets[i] = (i / s->S * s->W + i % s->S) * s->C;
    }
    memset(dx, 0, (size_t)numbers * sizeof *dx);
    for (int p = 0; p < s->P; p++) {
        for (int q = 0; q < s->Q; q++) {
            const int at = ((n * s->P + p) * s->Q + q) * s->C;
            const int corner = ((p * s->stride_h - s->pad_h) * s->W + q * s->stride_w - s->pad_w) * s->C;
            for (int c = 0; c < s->C; c++) {
                dx[corner + offsets[of->was[at + c]] + c] += of->from[at + c];
            }
        }
    }
}

void max_pool2d_backward(float *restrict dx, const float *dy, const uint8_t *where, const pool2d_shape *s)
{
    const pool_job of = {.to = dx, .from = dy, .was = where, .s = s};
    parallel_for(s->B, (long)s->B * (s->P * s->Q + s->H * s->W / 4) * s->C, backward_piece, &of);
}
