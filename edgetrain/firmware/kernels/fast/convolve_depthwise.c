/* Depthwise convolutions: vectors of channels, tap by tap.
 *
 * The filters lie channel by channel; a piece first turns those of its channels, up to SLAB floats, tap by tap.
 *
 *     forward, backward_input   a piece: some rows of the result
 *     backward_weight           a piece: one tap of some channels, summed row by row
 */
#include "convolve_depthwise.h"

#include <stddef.h>

#include "parallel.h"
#include "vector.h"

enum { SLAB = 4096, BLOCK = 4 * LANES };

typedef struct {
    float *y;
    const float *x, *w, *b;
    const depthwise_shape *s;
    int rows, rows_of_piece;
} job_of_rows;

/* What one place of the result is summed from: where its channels begin in the image, and in the turned filters. */
typedef struct {
    const float *image[MOST_DEPTHWISE_TAPS], *filter[MOST_DEPTHWISE_TAPS];
    int count;
} taps;

static void turn(float *restrict turned, const float *w, int n_taps, int c0, int n)
{
    for (int tap = 0; tap < n_taps; tap++) {
        for (int i = 0; i < n; i++) {
            turned[tap * n + i] = w[(c0 + i) * n_taps + tap];
        }
    }
}

/* `vectors` vectors of channels of one place, the last of them with `lanes` lanes. */
INLINE void sum_taps(float *y, const taps *t, const float *b, int at, int vectors, int lanes)
{
    vec sums[4];
    for (int v = 0; v < vectors; v++) {
        sums[v] = splat(0.0f);
    }
    for (int i = 0; i < t->count; i++) {
        for (int v = 0; v < vectors; v++) {
            const vec image = load_some(t->image[i] + at + v * LANES, lanes);
            sums[v] += image * load_some(t->filter[i] + at + v * LANES, lanes);
        }
    }
    for (int v = 0; v < vectors; v++) {
        if (b != NULL) {
            sums[v] += load_some(b + at + v * LANES, lanes);
        }
        store_some(y + at + v * LANES, sums[v], lanes);
    }
}

static void sum_place(float *y, const taps *t, const float *b, int n)
{
    int at = 0;
    for (; at + BLOCK <= n; at += BLOCK) {
        sum_taps(y, t, b, at, 4, LANES);
    }
    for (; at + LANES <= n; at += LANES) {
        sum_taps(y, t, b, at, 1, LANES);
    }
    if (at < n) {
        sum_taps(y, t, b, at, 1, n - at);
    }
}

/* How many channels are turned at once. */
static int channels_of(const depthwise_shape *s)
{
    return lower(s->C, SLAB / (s->R * s->S));
}

static void taps_forward(taps *t, const float *x, const float *turned, const depthwise_shape *s, int p, int q, int n)
{
    t->count = 0;
    for (int r = 0; r < s->R; r++) {
        const int h = p * s->stride_h - s->pad_h + r * s->dilation_h;
        for (int i = 0; h >= 0 && h < s->H && i < s->S; i++) {
            const int v = q * s->stride_w - s->pad_w + i * s->dilation_w;
            if (v >= 0 && v < s->W) {
                t->image[t->count] = x + (h * s->W + v) * s->C;
                t->filter[t->count++] = turned + (r * s->S + i) * n;
            }
        }
    }
}

/* The place of y that tap `tap` met when it lay on `place` of x, or -1. */
static int met_at(int place, int tap, int pad, int dilation, int stride, int side)
{
    const int at = place + pad - tap * dilation;
    if (stride == 1) {
        return at >= side ? -1 : at;
    }
    return at < 0 || at % stride != 0 || at / stride >= side ? -1 : at / stride;
}

static void taps_backward(taps *t, const float *dy, const float *turned, const depthwise_shape *s, int h, int v, int n)
{
    t->count = 0;
    for (int r = 0; r < s->R; r++) {
        const int p = met_at(h, r, s->pad_h, s->dilation_h, s->stride_h, s->P);
        for (int i = 0; p >= 0 && i < s->S; i++) {
            const int q = met_at(v, i, s->pad_w, s->dilation_w, s->stride_w, s->Q);
            if (q >= 0) {
                t->image[t->count] = dy + (p * s->Q + q) * s->C;
                t->filter[t->count++] = turned + (r * s->S + i) * n;
            }
        }
    }
}

/* Some rows of the result: of y, or back of dx. */
INLINE void make_piece(const job_of_rows *of, int piece, int back)
{
    const depthwise_shape *s = of->s;
    const int first = piece * of->rows_of_piece, end = lower(first + of->rows_of_piece, of->rows);
    const int height = back ? s->H : s->P, width = back ? s->W : s->Q, read = back ? s->P * s->Q : s->H * s->W;
    float turned[SLAB];
    taps t;
    for (int c = 0, n = channels_of(s); c < s->C; c += n) {
        n = lower(n, s->C - c);
        turn(turned, of->w, s->R * s->S, c, n);
        for (int row = first; row < end; row++) {
            const float *x = of->x + row / height * read * s->C + c;
            for (int column = 0; column < width; column++) {
                (back ? taps_backward : taps_forward)(&t, x, turned, s, row % height, column, n);
                sum_place(of->y + (row * width + column) * s->C + c, &t, of->b == NULL ? NULL : of->b + c, n);
            }
        }
    }
}

static void forward_piece(const void *job, int piece)
{
    make_piece(job, piece, 0);
}

static void backward_input_piece(const void *job, int piece)
{
    make_piece(job, piece, 1);
}

static void by_rows(job_of_rows *of, int row_length, piece_function *make)
{
    const long work = (long)of->rows * row_length * of->s->R * of->s->S * parts_of(of->s->C, LANES);
    of->rows_of_piece = higher(1, of->rows / 16);
    parallel_for(parts_of(of->rows, of->rows_of_piece), work, make, of);
}

void convolve_depthwise_forward(float *y, const float *x, const float *w, const float *b, const depthwise_shape *s)
{
    job_of_rows of = {.y = y, .x = x, .w = w, .b = b, .s = s, .rows = s->B * s->P};
    by_rows(&of, s->Q, forward_piece);
}

void convolve_depthwise_backward_input(float *dx, const float *dy, const float *w, const depthwise_shape *s)
{
    job_of_rows of = {.y = dx, .x = dy, .w = w, .b = NULL, .s = s, .rows = s->B * s->H};
    by_rows(&of, s->W, backward_input_piece);
}

typedef struct {
    float *dw;
    const float *dy, *x;
    const depthwise_shape *s;
    int blocks;
} job_of_taps;

/* Where a tap of column i meets the image: columns [q0, q1) of y. */
typedef struct {
    int h, v, q0, q1;
} met;

static met where_met(const depthwise_shape *s, int r, int i)
{
    const int h = r * s->dilation_h - s->pad_h, v = i * s->dilation_w - s->pad_w;
    const int room = s->W - v;
    return (met){h, v, v >= 0 ? 0 : parts_of(-v, s->stride_w), room <= 0 ? 0 : lower(s->Q, parts_of(room, s->stride_w))};
}

/* One tap of channels [c, c + vectors LANES), the last vector with `lanes` lanes: the sum over all places. */
INLINE void sum_places(const job_of_taps *of, int tap, int c, int vectors, int lanes)
{
    const depthwise_shape *s = of->s;
    const met at = where_met(s, tap / s->S, tap % s->S);
    vec sums[4], of_row[4];
    float found[LANES];
    for (int v = 0; v < vectors; v++) {
        sums[v] = splat(0.0f);
    }
    for (int row = 0; row < s->B * s->P; row++) {
        const int n = row / s->P, h = row % s->P * s->stride_h + at.h;
        if (h < 0 || h >= s->H || at.q1 <= at.q0) {
            continue;
        }
        const float *dy = of->dy + (row * s->Q + at.q0) * s->C + c;
        const float *x = of->x + ((n * s->H + h) * s->W + at.v + at.q0 * s->stride_w) * s->C + c;
        for (int v = 0; v < vectors; v++) {
            of_row[v] = splat(0.0f);
        }
        for (int q = at.q0; q < at.q1; q++, dy += s->C, x += s->stride_w * s->C) {
            for (int v = 0; v < vectors; v++) {
                of_row[v] += load_some(dy + v * LANES, lanes) * load_some(x + v * LANES, lanes);
            }
        }
        for (int v = 0; v < vectors; v++) {
            sums[v] += of_row[v];
        }
    }
    for (int v = 0; v < vectors; v++) {
        store(found, sums[v]);
        for (int i = 0; i < lanes; i++) {
            of->dw[(c + v * LANES + i) * s->R * s->S + tap] = found[i];
        }
    }
}

static void backward_weight_piece(const void *job, int piece)
{
    const job_of_taps *of = job;
    const int tap = piece / of->blocks, end = lower((piece % of->blocks + 1) * BLOCK, of->s->C);
    int c = piece % of->blocks * BLOCK;
    for (; c + BLOCK <= end; c += BLOCK) {
        sum_places(of, tap, c, 4, LANES);
    }
    for (; c + LANES <= end; c += LANES) {
        sum_places(of, tap, c, 1, LANES);
    }
    if (c < end) {
        sum_places(of, tap, c, 1, end - c);
    }
}

void convolve_depthwise_backward_weight(float *dw, const float *dy, const float *x, const depthwise_shape *s)
{
    const job_of_taps of = {.dw = dw, .dy = dy, .x = x, .s = s, .blocks = parts_of(s->C, BLOCK)};
    const long work = (long)s->B * s->P * s->Q * s->R * s->S * parts_of(s->C, LANES);
    parallel_for(of.blocks * s->R * s->S, work, backward_weight_piece, &of);
}
