/* The gradient of weights as a matrix product: filters by places, times places by taps and channels.
 *
 *     a piece     COLUMNS numbers of some filters; it copies what its taps saw into a panel, DEPTH places at a time
 */
#include <stddef.h>

#include "convolve.h"
#include "correlate_narrow.h"
#include "parallel.h"
#include "tile.h"

enum { ROWS_OF_PIECE = 4 * ROWS, MANY_PIECES = 16 };

typedef struct {
    correlation c;
    int places, columns, rows_of_piece;
} cut;

/* Numbers side by side in the panel that lie so in the image: `n` of them, for the taps from `tap` on. */
typedef struct {
    int to, n, tap, channel;
} segment;

/* The numbers [j, j + width) of a filter as segments. joined: taps of one row lie side by side in the image. */
static int segments_of(segment *restrict found, const correlation *c, int j, int width, int joined)
{
    int count = 0;
    const int unit = joined ? c->S * c->C : c->C;
    for (int i = 0; i < width; count++) {
        const int n = lower(unit - (j + i) % unit, width - i);
        found[count] = (segment){i, n, (j + i) / c->C, (j + i) % c->C};
        i += n;
    }
    return count;
}

static int is_inside(const correlation *c, int h, int v)
{
    return h >= 0 && h < c->H && v >= 0 && v < c->W;
}

/* One segment of the places (n, p, q0 .. q1): number by number, zeros outside of the image. */
static void copy_at_border(float *restrict panel, const correlation *c, segment s, int n, int p, int q0, int q1)
{
    for (int q = q0; q < q1; q++, panel += COLUMNS) {
        for (int i = 0; i < s.n; i++) {
            const int tap = s.tap + (s.channel + i) / c->C, channel = (s.channel + i) % c->C;
            const int h = p * c->stride_h - c->pad_h + tap / c->S * c->dilation_h;
            const int v = q * c->stride_w - c->pad_w + tap % c->S * c->dilation_w;
            const float *from = c->x + n * c->x_image + h * c->x_row + v * c->x_pixel + channel;
            panel[s.to + i] = is_inside(c, h, v) ? *from : 0.0f;
        }
    }
}

/* The same where all of it is inside. */
static void copy_inside(float *restrict panel, const correlation *c, segment s, int n, int p, int q0, int q1)
{
    const int h = p * c->stride_h - c->pad_h + s.tap / c->S * c->dilation_h;
    const int v = q0 * c->stride_w - c->pad_w + s.tap % c->S * c->dilation_w;
    const float *from = c->x + n * c->x_image + h * c->x_row + v * c->x_pixel + s.channel;
    float *to = panel + s.to;
    for (int q = q0; q < q1; q++, to += COLUMNS, from += c->stride_w * c->x_pixel) {
        copy_run(to, from, s.n);
    }
}

/* What one segment saw of the row of places (n, p, q0 .. q1). */
static void copy_row(float *restrict panel, const correlation *c, segment s, int n, int p, int q0, int q1)
{
    const int last = s.tap + (s.channel + s.n - 1) / c->C;
    const int left = c->pad_w - s.tap % c->S * c->dilation_w;
    const int right = c->W + c->pad_w - last % c->S * c->dilation_w;
    const int h = p * c->stride_h - c->pad_h + s.tap / c->S * c->dilation_h;
    int first = left <= 0 ? 0 : parts_of(left, c->stride_w), end = right <= 0 ? 0 : parts_of(right, c->stride_w);
    if (h < 0 || h >= c->H) {
        first = end = q1;
    }
    first = higher(q0, lower(first, q1));
    end = higher(first, lower(end, q1));
    copy_at_border(panel, c, s, n, p, q0, first);
    copy_inside(panel + (first - q0) * COLUMNS, c, s, n, p, first, end);
    copy_at_border(panel + (end - q0) * COLUMNS, c, s, n, p, end, q1);
}

/* What the numbers [j, j + width) of a filter saw, for the places [m0, m1). */
static void see(float *restrict panel, const correlation *c, int j, int width, int m0, int m1)
{
    segment segments[COLUMNS];
    const int joined = c->x_pixel == c->C && c->dilation_w == 1;
    const int count = segments_of(segments, c, j, width, joined);
    for (int m = m0; m < m1;) {
        const int n = m / (c->P * c->Q), p = m / c->Q % c->P, q0 = m % c->Q, q1 = lower(c->Q, q0 + m1 - m);
        for (int i = 0; i < count; i++) {
            copy_row(panel + (m - m0) * COLUMNS, c, segments[i], n, p, q0, q1);
        }
        m += q1 - q0;
    }
}

static void correlate_piece(const void *job, int piece)
{
    const cut *of = job;
    const correlation *c = &of->c;
    float panel[DEPTH * COLUMNS];
    const int depth = c->R * c->S * c->C, j = piece % of->columns * COLUMNS;
    const int k0 = piece / of->columns * of->rows_of_piece, k1 = lower(k0 + of->rows_of_piece, c->K);
    const int one_tap = c->R == 1 && c->S == 1 && c->stride_h == 1 && c->stride_w == 1 && c->pad_h == 0 && c->pad_w == 0;
    tile t = {.width = lower(depth - j, COLUMNS), .row = 1, .outer = {1, 0, 0}, .middle = {1, 0, 0}};
    const int in_place = one_tap && t.width == COLUMNS && c->x_image == c->P * c->Q * c->x_pixel;
    if (t.width < COLUMNS) {
        memset(panel, 0, sizeof panel);
    }
    for (int m = 0; m < of->places; m += DEPTH) {
        t.inner = (loop){lower(DEPTH, of->places - m), c->dy_pixel, in_place ? c->x_pixel : COLUMNS};
        t.add = m > 0;
        t.panel = in_place ? c->x + m * c->x_pixel + j : panel;
        if (!in_place) {
            see(panel, c, j, t.width, m, m + t.inner.count);
        }
        for (int k = k0; k < k1; k += t.rows) {
            t.rows = lower(most_rows(t.width), k1 - k);
            t.a = c->dy + m * c->dy_pixel + k;
            for (int i = 0; i < t.rows; i++) {
                t.out[i] = c->dw + (k + i) * depth + j;
            }
            multiply(&t);
        }
    }
}

void correlate(const correlation *given)
{
    if (given->C < LANES && correlate_narrow(given)) {
        return;
    }
    cut of = {.c = *given, .places = given->B * given->P * given->Q};
    of.columns = parts_of(given->R * given->S * given->C, COLUMNS);
    of.rows_of_piece = of.columns < MANY_PIECES ? ROWS_OF_PIECE : given->K;
    const long work = (long)of.places * of.columns * given->K;
    parallel_for(of.columns * parts_of(given->K, of.rows_of_piece), work, correlate_piece, &of);
}
