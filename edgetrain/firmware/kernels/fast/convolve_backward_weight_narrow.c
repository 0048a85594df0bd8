/* The transposed product: elements of a filter row by pixels, times pixels by filters, so that vectors hold filters.
 *
 *     a task     one row of NR filters
 *     a tile     elements of that row, which are contiguous in the image, over pixels of a few rows
 *
 * A column of pixels whose first or last taps lie in the padding is a tile of its own.
 */
#include "convolve_backward_weight_narrow.h"

#include <stddef.h>

#include "microkernel.h"
#include "parallel.h"

enum { MAX_ROW = 64 }; /* elements of a filter row */

typedef struct {
    weight_gradient c;
    int panels;
} tiling;

typedef struct {
    const weight_gradient *c;
    int r, k, columns; /* row r of filters [k, k + columns) */
    float sums[MAX_ROW][NR];
    float panel[KC * NR];
} row_gradient;

/* Pixels [q0, q1) of `rows` rows from (n, p) on, which are in the panel; taps [s0, s1). */
static void add_taps(row_gradient *d, int n, int p, int rows, int q0, int q1, int s0, int s1)
{
    const weight_gradient *c = d->c;
    const int h = p * c->stride_h - c->pad_h + d->r * c->dilation_h, v = q0 * c->stride_w - c->pad_w;
    tile t = {.add = 1, .columns = d->columns, .a_row = 1, .outer = {1, 0, 0}, .panel = d->panel + q0 * NR};
    t.middle = (loop){rows, c->stride_h * c->x_row, c->Q * NR};
    t.inner = (loop){q1 - q0, c->stride_w * c->x_pixel, NR};
    for (int j = s0 * c->C; j < s1 * c->C; j += t.rows) {
        t.rows = min_int(max_rows(t.columns), s1 * c->C - j);
        t.a = c->x + n * c->x_image + h * c->x_row + v * c->x_pixel + j;
        for (int i = 0; i < t.rows; i++) {
            t.y[i] = d->sums[j + i];
        }
        microkernel(&t);
    }
}

static void add_rows(row_gradient *d, int n, int p, int rows)
{
    const weight_gradient *c = d->c;
    const int room = c->W - (c->S - 1) + c->pad_w;
    const int first = min_int(c->Q, c->pad_w <= 0 ? 0 : ceil_div(c->pad_w, c->stride_w));
    const int end = max_int(first, room <= 0 ? 0 : min_int(c->Q, ceil_div(room, c->stride_w)));
    for (int row = 0; row < rows; row++) {
        for (int q = 0; q < c->Q; q++) {
            const float *from = c->dy + ((n * c->P + p + row) * c->Q + q) * c->dy_pixel + d->k;
            copy_run(d->panel + (row * c->Q + q) * NR, from, d->columns);
        }
    }
    for (int q = 0; q < c->Q; q++) {
        const int v = q * c->stride_w - c->pad_w, s0 = max_int(0, -v), s1 = min_int(c->S, c->W - v);
        if ((q < first || q >= end) && s1 > s0) {
            add_taps(d, n, p, rows, q, q + 1, s0, s1);
        }
    }
    if (end > first) {
        add_taps(d, n, p, rows, first, end, 0, c->S);
    }
}

static void backward_weight_row_task(const void *context, int task)
{
    const tiling *job = context;
    const weight_gradient *c = &job->c;
    row_gradient d = {.c = c, .r = task / job->panels, .k = task % job->panels * NR};
    const int start = d.r * c->dilation_h - c->pad_h, room = c->H - start, depth = c->R * c->S * c->C;
    const int p0 = start >= 0 ? 0 : ceil_div(-start, c->stride_h);
    const int p1 = room <= 0 ? 0 : min_int(c->P, ceil_div(room, c->stride_h));
    const int at_once = KC / c->Q;
    d.columns = min_int(c->K - d.k, NR);
    for (int n = 0; n < c->B; n++) {
        for (int p = p0; p < p1; p += at_once) {
            add_rows(&d, n, p, min_int(at_once, p1 - p));
        }
    }
    for (int j = 0; j < c->S * c->C; j++) {
        for (int i = 0; i < d.columns; i++) {
            c->dw[(d.k + i) * depth + d.r * c->S * c->C + j] = d.sums[j][i];
        }
    }
}

int convolve_backward_weight_narrow(const weight_gradient *g)
{
    const tiling job = {*g, ceil_div(g->K, NR)};
    const int row_is_contiguous = g->x_pixel == g->C && g->dilation_w == 1;
    if (!row_is_contiguous || g->S * g->C > MAX_ROW || g->Q > KC) {
        return 0;
    }
    const long work = (long)g->B * g->P * g->Q * g->R * g->S * g->C * job.panels;
    parallel_for(g->R * job.panels, work, backward_weight_row_task, &job);
    return 1;
}
