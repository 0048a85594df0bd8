/* A convolution as a matrix product, tile by tile: places of the image by taps and channels, times taps and channels by
 * filters. The image is read where it lies.
 *
 *     a piece    some rows of places of all images, COLUMNS results of each place; it copies its filters into a panel
 *     a part     of the filters: as many rows of taps as DEPTH has room for, or taps of a row, or channels of a tap
 *     a tile     ROWS places whose taps lie in the image alike: side by side in a row, or the same place of ROWS images
 */
#include "convolve.h"

#include <stddef.h>

#include "parallel.h"
#include "tile.h"

enum { FEWEST_PLACES = 96 };

typedef struct {
    convolution c;
    int columns, rows_of_piece, places_of_row;
} cut;

/* Half-open. */
typedef struct {
    int first, end;
} span;

typedef struct {
    const convolution *c;
    int k, width;
    span r, s, channels; /* of the filters: what the panel holds */
    int add;
    const float *panel, *bias;
} part;

static span common(span a, span b)
{
    const span both = {higher(a.first, b.first), lower(a.end, b.end)};
    return both.end > both.first ? both : (span){0, 0};
}

/* The taps that lie in the image when the first one lies at `start`. */
static span taps_inside(int start, int dilation, int taps, int side)
{
    const span found = {start < 0 ? parts_of(-start, dilation) : 0, start >= side ? 0 : parts_of(side - start, dilation)};
    return common(found, (span){0, taps});
}

/* The places of a row whose taps all lie in the image. */
static span places_inside(const convolution *c)
{
    const int room = c->W - (c->S - 1) * c->dilation_w + c->pad_w;
    const int first = c->pad_w <= 0 ? 0 : parts_of(c->pad_w, c->stride_w);
    return common((span){first, room <= 0 ? 0 : parts_of(room, c->stride_w)}, (span){0, c->Q});
}

/* COLUMNS filters, the part's taps and channels of each, as a panel. Filters that are not there are zeros. */
static void pack(float *restrict panel, const part *d)
{
    const convolution *c = d->c;
    for (int r = d->r.first; r < d->r.end; r++) {
        for (int s = d->s.first; s < d->s.end; s++) {
            const float *from = c->w + d->k * c->w_result + r * c->w_row + s * c->w_column;
            for (int i = d->channels.first; i < d->channels.end; i++, panel += COLUMNS) {
                for (int v = 0; v < VECTORS; v++) {
                    const int lanes = higher(0, lower(d->width - v * LANES, LANES));
                    store(panel + v * LANES, load_some(from + i * c->w_channel + v * LANES, lanes));
                }
            }
        }
    }
}

/* The same where a filter is one run in memory, from `first` on: number by number. */
static void pack_turned(float *restrict panel, const part *d, int first, int count)
{
    const int pitch = d->c->w_result;
    const float *from = d->c->w + d->k * pitch + first;
    if (d->width == COLUMNS) {
        for (int j = 0; j < count; j++) {
            for (int i = 0; i < COLUMNS; i++) {
                panel[j * COLUMNS + i] = from[i * pitch + j];
            }
        }
        return;
    }
    for (int j = 0; j < count; j++) {
        for (int i = 0; i < COLUMNS; i++) {
            panel[j * COLUMNS + i] = i < d->width ? from[i * pitch + j] : 0.0f;
        }
    }
}

static void pack_part(float *restrict panel, const part *d)
{
    const convolution *c = d->c;
    if (c->w_channel == 1 && c->w_column == c->C && c->w_row == c->S * c->C) {
        const int first = (d->r.first * c->S + d->s.first) * c->C + d->channels.first;
        const int taps = (d->r.end - d->r.first) * (d->s.end - d->s.first);
        pack_turned(panel, d, first, taps * (d->channels.end - d->channels.first));
    } else {
        pack(panel, d);
    }
}

/* The taps of the places (n, p, q) of a tile, and where they lie in image and panel. */
static void aim(tile *t, const part *d, int n, int p, int q)
{
    const convolution *c = d->c;
    const int h = p * c->stride_h - c->pad_h, v = q * c->stride_w - c->pad_w;
    const int channels = d->channels.end - d->channels.first, columns = d->s.end - d->s.first;
    const span r = common(d->r, taps_inside(h, c->dilation_h, c->R, c->H));
    const span s = common(d->s, taps_inside(v, c->dilation_w, c->S, c->W));
    t->a = c->x + n * c->x_image + (h + r.first * c->dilation_h) * c->x_row +
           (v + s.first * c->dilation_w) * c->x_pixel + d->channels.first;
    t->panel = d->panel;
    if (r.end > r.first && s.end > s.first) {
        t->panel += ((r.first - d->r.first) * columns + s.first - d->s.first) * channels * COLUMNS;
    } else {
        t->a = c->x; /* no tap is inside: nothing is read */
    }
    t->outer = (loop){r.end - r.first, c->dilation_h * c->x_row, columns * channels * COLUMNS};
    t->middle = (loop){s.end - s.first, c->dilation_w * c->x_pixel, channels * COLUMNS};
    t->inner = (loop){channels, 1, COLUMNS};
    if (c->dilation_w == 1 && channels == c->x_pixel) {
        t->inner.count *= t->middle.count; /* a row of taps is one run */
        t->middle.count = 1;
    }
}

/* Places (n, p, q0 .. q1), side by side. */
static void multiply_along(tile *t, const part *d, int n, int p, int q0, int q1)
{
    const convolution *c = d->c;
    t->row = c->stride_w * c->x_pixel;
    for (int q = q0; q < q1; q += t->rows) {
        float *y = c->y + n * c->y_image + p * c->y_row + q * c->y_pixel + d->k;
        t->rows = lower(most_rows(d->width), q1 - q);
        for (int i = 0; i < t->rows; i++) {
            t->out[i] = y + i * c->y_pixel;
        }
        aim(t, d, n, p, q);
        multiply(t);
    }
}

/* The place (p, q) of all images. */
static void multiply_across(tile *t, const part *d, int p, int q)
{
    const convolution *c = d->c;
    t->row = c->x_image;
    for (int n = 0; n < c->B; n += t->rows) {
        float *y = c->y + n * c->y_image + p * c->y_row + q * c->y_pixel + d->k;
        t->rows = lower(most_rows(d->width), c->B - n);
        for (int i = 0; i < t->rows; i++) {
            t->out[i] = y + i * c->y_image;
        }
        aim(t, d, n, p, q);
        multiply(t);
    }
}

/* One part for row p of all images, places [q0, q1). */
static void multiply_row(const part *d, int p, span places)
{
    const convolution *c = d->c;
    tile t = {.bias = d->bias, .add = d->add, .width = d->width};
    span along = common(places, places_inside(c));
    if (along.end - along.first < lower(most_rows(d->width), c->B)) {
        along = (span){places.end, places.end}; /* few: more images than places side by side */
    }
    for (int q = places.first; q < along.first; q++) {
        multiply_across(&t, d, p, q);
    }
    for (int n = 0; n < c->B && along.end > along.first; n++) {
        multiply_along(&t, d, n, p, along.first, along.end);
    }
    for (int q = along.end; q < places.end; q++) {
        multiply_across(&t, d, p, q);
    }
}

/* The part of the filters that comes after this one; 0 if it was the last. */
static int next_part(part *d)
{
    const convolution *c = d->c;
    const int rows = higher(1, DEPTH / (c->S * c->C)), columns = higher(1, DEPTH / c->C);
    if (d->channels.end < c->C) {
        d->channels = (span){d->channels.end, lower(c->C, d->channels.end + DEPTH)};
        return 1;
    }
    d->channels = (span){0, lower(c->C, DEPTH)};
    if (d->s.end < c->S) {
        d->s = (span){d->s.end, lower(c->S, d->s.end + columns)};
        return 1;
    }
    d->s = (span){0, lower(c->S, columns)};
    d->r = (span){d->r.end, lower(c->R, d->r.end + rows)};
    return d->r.first < d->r.end;
}

static int is_last(const part *d)
{
    return d->r.end == d->c->R && d->s.end == d->c->S && d->channels.end == d->c->C;
}

static void convolve_piece(const void *job, int piece)
{
    const cut *of = job;
    const convolution *c = &of->c;
    float panel[DEPTH * COLUMNS], bias[COLUMNS] = {0.0f};
    const int k = piece % of->columns * COLUMNS, at = piece / of->columns;
    const int across = parts_of(c->Q, of->places_of_row);
    const int p0 = at / across * of->rows_of_piece, q0 = at % across * of->places_of_row;
    part d = {.c = c, .k = k, .width = lower(c->K - k, COLUMNS), .panel = panel};
    d.s.end = c->S; /* as if all of a row before the first had been done */
    d.channels.end = c->C;
    for (int i = 0; c->b != NULL && i < d.width; i++) {
        bias[i] = c->b[k + i];
    }
    for (; next_part(&d); d.add = 1) {
        d.bias = c->b != NULL && is_last(&d) ? bias : NULL;
        pack_part(panel, &d);
        for (int p = p0; p < lower(p0 + of->rows_of_piece, c->P); p++) {
            multiply_row(&d, p, (span){q0, lower(q0 + of->places_of_row, c->Q)});
        }
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
    cut of = {.c = flat(*given), .columns = parts_of(given->K, COLUMNS)};
    const convolution *c = &of.c;
    const int places = c->B * c->P * c->Q, wanted = higher(places / 16, FEWEST_PLACES);
    of.rows_of_piece = c->P == 1 ? 1 : parts_of(wanted, c->B * c->Q);
    of.places_of_row = c->P == 1 ? parts_of(parts_of(wanted, c->B), ROWS) * ROWS : c->Q;
    const int pieces = of.columns * parts_of(c->P, of.rows_of_piece) * parts_of(c->Q, of.places_of_row);
    const long work = (long)places * c->R * c->S * c->C * of.columns;
    parallel_for(pieces, work, convolve_piece, &of);
}
