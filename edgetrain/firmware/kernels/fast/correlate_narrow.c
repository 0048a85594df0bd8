/* The gradient of weights the other way round: vectors of filters, times the numbers of a row of taps one by one.
 *
 *     a piece    one row of taps of COLUMNS filters
 *     a tile     numbers of that row, which lie side by side in the image, over places of a few rows
 *
 * Where the first or last taps of a row lie outside of the image, a column of places is a tile of its own.
 */
#include "correlate_narrow.h"

#include <stddef.h>

#include "parallel.h"
#include "tile.h"

enum { LONGEST = 64 }; /* numbers of a row of taps */

typedef struct {
    correlation c;
    int columns;
} cut;

typedef struct {
    const correlation *c;
    int r, k, width, first_row, rows; /* rows of places, of all images, that row r of the taps meets */
    float sums[LONGEST][COLUMNS];
    float panel[DEPTH * COLUMNS];
} narrow;

/* Places [q0, q1) of `rows` rows from (n, p) on, in the panel; taps [s0, s1). */
static void add_taps(narrow *d, int n, int p, int rows, int q0, int q1, int s0, int s1)
{
    const correlation *c = d->c;
    const int h = p * c->stride_h - c->pad_h + d->r * c->dilation_h, v = q0 * c->stride_w - c->pad_w;
    tile t = {.add = 1, .width = d->width, .row = 1, .outer = {1, 0, 0}, .panel = d->panel + q0 * COLUMNS};
    t.middle = (loop){rows, c->stride_h * c->x_row, c->Q * COLUMNS};
    t.inner = (loop){q1 - q0, c->stride_w * c->x_pixel, COLUMNS};
    for (int j = s0 * c->C; j < s1 * c->C; j += t.rows) {
        t.rows = lower(most_rows(t.width), s1 * c->C - j);
        t.a = c->x + n * c->x_image + h * c->x_row + v * c->x_pixel + j;
        for (int i = 0; i < t.rows; i++) {
            t.out[i] = d->sums[j + i];
        }
        multiply(&t);
    }
}

static void add_rows(narrow *d, int n, int p, int rows)
{
    const correlation *c = d->c;
    const int room = c->W - (c->S - 1) + c->pad_w;
    const int first = lower(c->Q, c->pad_w <= 0 ? 0 : parts_of(c->pad_w, c->stride_w));
    const int end = higher(first, room <= 0 ? 0 : lower(c->Q, parts_of(room, c->stride_w)));
    for (int row = 0; row < rows; row++) {
        for (int q = 0; q < c->Q; q++) {
            const float *from = c->dy + ((n * c->P + p + row) * c->Q + q) * c->dy_pixel + d->k;
            copy_run(d->panel + (row * c->Q + q) * COLUMNS, from, d->width);
        }
    }
    for (int q = 0; q < c->Q; q++) {
        const int v = q * c->stride_w - c->pad_w, s0 = higher(0, -v), s1 = lower(c->S, c->W - v);
        if ((q < first || q >= end) && s1 > s0) {
            add_taps(d, n, p, rows, q, q + 1, s0, s1);
        }
    }
    if (end > first) {
        add_taps(d, n, p, rows, first, end, 0, c->S);
    }
}

static void narrow_piece(const void *job, int piece)
{
    const cut *of = job;
    const correlation *c = &of->c;
    narrow d = {.c = c, .r = piece / of->columns, .k = piece % of->columns * COLUMNS};
    const int start = d.r * c->dilation_h - c->pad_h, room = c->H - start, depth = c->R * c->S * c->C;
    const int p0 = start >= 0 ? 0 : parts_of(-start, c->stride_h);
    const int p1 = room <= 0 ? 0 : lower(c->P, parts_of(room, c->stride_h));
    const int at_once = DEPTH / c->Q;
    d.width = lower(c->K - d.k, COLUMNS);
    for (int n = 0; n < c->B; n++) {
        for (int p = p0; p < p1; p += at_once) {
            add_rows(&d, n, p, lower(at_once, p1 - p));
        }
    }
    for (int j = 0; j < c->S * c->C; j++) {
        for (int i = 0; i < d.width; i++) {
            c->dw[(d.k + i) * depth + d.r * c->S * c->C + j] = d.sums[j][i];
        }
    }
}

int correlate_narrow(const correlation *given)
{
    const cut of = {*given, parts_of(given->K, COLUMNS)};
    const int row_is_one_run = given->x_pixel == given->C && given->dilation_w == 1;
    if (!row_is_one_run || given->S * given->C > LONGEST || given->Q > DEPTH) {
        return 0;
    }
    const long work = (long)given->B * given->P * given->Q * given->R * given->S * given->C * of.columns;
    parallel_for(given->R * of.columns, work, narrow_piece, &of);
    return 1;
}
