/* A convolution as a matrix product, tile by tile: places of the image by taps and channels, times taps and channels by
 * filters. Where the numbers of several places lie in the image as the product needs them, they are read there; at the
 * borders of an image they are copied first, a few places at a time.
 *
 *     a piece     some places, COLUMNS results of each; it copies its filters into a panel, part by part
 */
#include "convolve.h"

#include <stddef.h>

#include "parallel.h"
#include "tile.h"

enum { FEWEST_PLACES = 96 };

typedef struct {
    convolution c;
    int places, columns, places_of_piece;
} cut;

/* Places are counted over all images. */
typedef struct {
    int n, p, q;
} place;

static place place_at(const convolution *c, int m)
{
    return (place){m / (c->P * c->Q), m / c->Q % c->P, m % c->Q};
}

static void step_on(const convolution *c, place *at)
{
    at->q += 1;
    if (at->q == c->Q) {
        at->q = 0;
        at->p += 1;
    }
    if (at->p == c->P) {
        at->p = 0;
        at->n += 1;
    }
}

/* The numbers [j0, j1) of one place, in the order of the filters, copied; zeros outside of the image. */
static void gather(float *restrict to, const convolution *c, place at, int j0, int j1)
{
    int channel = j0 % c->C, s = j0 / c->C % c->S;
    int h = at.p * c->stride_h - c->pad_h + j0 / c->C / c->S * c->dilation_h;
    for (int j = j0; j < j1;) {
        const int v = at.q * c->stride_w - c->pad_w + s * c->dilation_w, n = lower(c->C - channel, j1 - j);
        const int inside = h >= 0 && h < c->H && v >= 0 && v < c->W;
        const float *from = inside ? c->x + at.n * c->x_image + h * c->x_row + v * c->x_pixel + channel : NULL;
        for (int i = 0; i < n; i++) {
            to[i] = inside ? from[i] : 0.0f;
        }
        to += n;
        j += n;
        channel = 0;
        s = s + 1 < c->S ? s + 1 : 0;
        h += s == 0 ? c->dilation_h : 0;
    }
}

/* COLUMNS filters from k on, numbers [j0, j1) of each, as a panel. Those that are not there are zeros. */
static void pack(float *restrict panel, const convolution *c, int k, int j0, int j1)
{
    const int width = lower(c->K - k, COLUMNS);
    int channel = j0 % c->C, tap = j0 / c->C;
    for (int j = j0; j < j1; tap++, channel = 0) {
        const float *from = c->w + k * c->w_result + tap / c->S * c->w_row + tap % c->S * c->w_column;
        for (; channel < c->C && j < j1; channel++, j++, panel += COLUMNS) {
            for (int v = 0; v < VECTORS; v++) {
                const int lanes = higher(0, lower(width - v * LANES, LANES));
                store(panel + v * LANES, load_some(from + channel * c->w_channel + v * LANES, lanes));
            }
        }
    }
}

/* The same where the numbers of a filter lie in one run: filter by filter. */
static void pack_runs(float *restrict panel, const convolution *c, int k, int j0, int j1)
{
    const int width = lower(c->K - k, COLUMNS);
    const float *from = c->w + k * c->w_result + j0;
    for (int j = 0; j < j1 - j0; j++) {
        for (int i = 0; i < COLUMNS; i++) {
            panel[j * COLUMNS + i] = i < width ? from[i * c->w_result + j] : 0.0f;
        }
    }
}

/* Which part of the depth comes after j0: rows of taps in full, or a piece of one. */
static int part_end(int j0, int depth, int row)
{
    if (row <= DEPTH) {
        return lower(depth, j0 + DEPTH / row * row);
    }
    return lower(j0 + DEPTH, (j0 / row + 1) * row);
}

typedef struct {
    const convolution *c;
    int k, width, j0, j1;
    int row;            /* numbers of a row of taps: one run in the image, at the places [p0, p1) x [q0, q1) */
    int p0, p1, q0, q1; /* empty where it is not one run */
    const float *panel, *bias;
} part;

static void multiply(const tile *t)
{
    multiply_any(t, 1, t->row);
}

/* All taps of this place lie inside of the image, so that rows of them can be read there. */
static int is_direct(const part *d, place at)
{
    return at.p >= d->p0 && at.p < d->p1 && at.q >= d->q0 && at.q < d->q1;
}

/* How many places from `at` on, up to ROWS, can be read side by side, or cannot. */
static int places_alike(const part *d, place at, int left)
{
    const int most = lower(ROWS, left);
    int n = 1;
    if (is_direct(d, at)) {
        return lower(most, d->q1 - at.q);
    }
    for (step_on(d->c, &at); n < most && !is_direct(d, at); n++) {
        step_on(d->c, &at);
    }
    return n;
}

/* One part of the depth for the places [m0, m1). */
static void multiply_part(const part *d, int m0, int m1)
{
    const convolution *c = d->c;
    float copied[ROWS * DEPTH];
    tile t = {.bias = d->bias, .add = d->j0 > 0, .width = d->width, .panel = d->panel, .pitch = COLUMNS};
    place at = place_at(c, m0);
    for (int m = m0; m < m1; m += t.rows) {
        const int direct = is_direct(d, at);
        t.rows = places_alike(d, at, m1 - m);
        t.a = copied;
        t.row = DEPTH;
        t.run = d->j1 - d->j0;
        if (direct) {
            const int h = at.p * c->stride_h - c->pad_h + d->j0 / d->row * c->dilation_h;
            t.a = c->x + at.n * c->x_image + h * c->x_row + (at.q * c->stride_w - c->pad_w) * c->x_pixel +
                  d->j0 % d->row;
            t.row = c->stride_w * c->x_pixel;
            t.run = lower(d->row, t.run);
        }
        t.runs = (d->j1 - d->j0) / t.run;
        t.run_step = c->x_row * c->dilation_h;
        for (int i = 0; i < t.rows; i++, step_on(c, &at)) {
            t.out[i] = c->y + at.n * c->y_image + at.p * c->y_row + at.q * c->y_pixel + d->k;
            if (!direct) {
                gather(copied + i * DEPTH, c, at, d->j0, d->j1);
            }
        }
        multiply(&t);
    }
}

/* The first place whose taps are all inside of a side of the image, and the one behind the last. */
static int first_inside(int pad, int stride)
{
    return pad <= 0 ? 0 : parts_of(pad, stride);
}

static int end_inside(int side, int taps, int dilation, int pad, int stride, int places)
{
    const int room = side - (taps - 1) * dilation + pad;
    return room <= 0 ? 0 : lower(places, parts_of(room, stride));
}

static void convolve_piece(const void *job, int piece)
{
    const cut *of = job;
    const convolution *c = &of->c;
    float panel[DEPTH * COLUMNS], bias[COLUMNS] = {0.0f};
    const int k = piece % of->columns * COLUMNS, m0 = piece / of->columns * of->places_of_piece;
    const int m1 = lower(m0 + of->places_of_piece, of->places), depth = c->R * c->S * c->C;
    part d = {.c = c, .k = k, .width = lower(c->K - k, COLUMNS), .row = c->S * c->C, .panel = panel};
    if (c->S == 1 || (c->x_pixel == c->C && c->dilation_w == 1)) {
        d.p0 = first_inside(c->pad_h, c->stride_h);
        d.p1 = end_inside(c->H, c->R, c->dilation_h, c->pad_h, c->stride_h, c->P);
        d.q0 = first_inside(c->pad_w, c->stride_w);
        d.q1 = end_inside(c->W, c->S, c->dilation_w, c->pad_w, c->stride_w, c->Q);
    }
    for (int i = 0; c->b != NULL && i < d.width; i++) {
        bias[i] = c->b[k + i];
    }
    for (d.j0 = 0; d.j0 < depth; d.j0 = d.j1) {
        d.j1 = part_end(d.j0, depth, d.row);
        d.bias = c->b != NULL && d.j1 == depth ? bias : NULL;
        if (c->w_channel == 1 && c->w_column == c->C && c->w_row == c->S * c->C) {
            pack_runs(panel, c, k, d.j0, d.j1);
        } else {
            pack(panel, c, k, d.j0, d.j1);
        }
        multiply_part(&d, m0, m1);
    }
}

/* A filter of one tap over whole images is one long row of places. */
static convolution flat(convolution c)
{
    const int one_tap = c.R == 1 && c.S == 1 && c.stride_h == 1 && c.stride_w == 1 && c.pad_h == 0 && c.pad_w == 0;
    const int whole = c.x_row == c.W * c.x_pixel && c.x_image == c.H * c.x_row && c.y_row == c.Q * c.y_pixel &&
                      c.y_image == c.P * c.y_row && c.P == c.H && c.Q == c.W;
    if (one_tap && whole) {
        c.W = c.Q = c.B * c.P * c.Q;
        c.B = c.H = c.P = 1;
        c.x_row = c.x_image = c.W * c.x_pixel;
        c.y_row = c.y_image = c.Q * c.y_pixel;
    }
    return c;
}

void convolve(const convolution *given)
{
    cut of = {.c = flat(*given)};
    of.places = given->B * given->P * given->Q;
    of.columns = parts_of(given->K, COLUMNS);
    of.places_of_piece = parts_of(higher(of.places / 16, FEWEST_PLACES), ROWS) * ROWS;
    const long work = (long)of.places * given->R * given->S * given->C * of.columns;
    parallel_for(of.columns * parts_of(of.places, of.places_of_piece), work, convolve_piece, &of);
}
