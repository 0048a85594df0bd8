/* A convolution as gemm: pixels by taps and channels, times taps and channels by filters. The image is read in place,
 * as by an implicit im2col; filters are packed into panels.
 *
 *     a task     some rows of pixels of all images, NR filters
 *     a block    of these filters, in a panel: as many filter rows as KC allows, or taps of a row, or channels of a tap
 *     a tile     MR pixels whose taps have the same strides: side by side in a row, or the same pixel of MR images
 */
#include "convolve.h"

#include <stddef.h>

#include "microkernel.h"
#include "parallel.h"

enum { MIN_PIXELS = 96 };

typedef struct {
    convolution c;
    int panels, rows_of_task, pixels_of_row;
} tiling;

/* Half-open. */
typedef struct {
    int first, end;
} range;

typedef struct {
    const convolution *c;
    int k, columns;       /* filters [k, k + columns) */
    range r, s, channels; /* of them: what the panel holds */
    int add;
    const float *panel, *bias;
} block;

static range intersection(range a, range b)
{
    const range both = {max_int(a.first, b.first), min_int(a.end, b.end)};
    return both.end > both.first ? both : (range){0, 0};
}

/* The taps that lie in the image when the first one lies at `start`. */
static range taps_inside(int start, int dilation, int taps, int side)
{
    const int first = start < 0 ? ceil_div(-start, dilation) : 0;
    return intersection((range){first, start >= side ? 0 : ceil_div(side - start, dilation)}, (range){0, taps});
}

/* The pixels of a row whose taps all lie in the image. */
static range interior(const convolution *c)
{
    const int room = c->W - (c->S - 1) * c->dilation_w + c->pad_w;
    const int first = c->pad_w <= 0 ? 0 : ceil_div(c->pad_w, c->stride_w);
    return intersection((range){first, room <= 0 ? 0 : ceil_div(room, c->stride_w)}, (range){0, c->Q});
}

/* Packs the block's taps and channels of NR filters; zeros where there are fewer filters. */
static void pack(float *restrict panel, const block *d)
{
    const convolution *c = d->c;
    for (int r = d->r.first; r < d->r.end; r++) {
        for (int s = d->s.first; s < d->s.end; s++) {
            const float *from = c->w + d->k * c->w_filter + r * c->w_row + s * c->w_column;
            for (int i = d->channels.first; i < d->channels.end; i++, panel += NR) {
                for (int v = 0; v < VECTORS; v++) {
                    const int lanes = max_int(0, min_int(d->columns - v * LANES, LANES));
                    store(panel + v * LANES, load_partial(from + i * c->w_channel + v * LANES, lanes));
                }
            }
        }
    }
}

/* The same where each filter's block is contiguous, from `first` on. */
static void pack_transposed(float *restrict panel, const block *d, int first, int count)
{
    const int pitch = d->c->w_filter;
    const float *from = d->c->w + d->k * pitch + first;
    if (d->columns == NR) {
        for (int j = 0; j < count; j++) {
            for (int i = 0; i < NR; i++) {
                panel[j * NR + i] = from[i * pitch + j];
            }
        }
        return;
    }
    for (int j = 0; j < count; j++) {
        for (int i = 0; i < NR; i++) {
            panel[j * NR + i] = i < d->columns ? from[i * pitch + j] : 0.0f;
        }
    }
}

static void pack_block(float *restrict panel, const block *d)
{
    const convolution *c = d->c;
    if (c->w_channel == 1 && c->w_column == c->C && c->w_row == c->S * c->C) {
        const int first = (d->r.first * c->S + d->s.first) * c->C + d->channels.first;
        const int taps = (d->r.end - d->r.first) * (d->s.end - d->s.first);
        pack_transposed(panel, d, first, taps * (d->channels.end - d->channels.first));
    } else {
        pack(panel, d);
    }
}

/* Sets the loops of a tile from pixel (n, p, q) on, over the taps that lie in the image. */
static void set_loops(tile *t, const block *d, int n, int p, int q)
{
    const convolution *c = d->c;
    const int h = p * c->stride_h - c->pad_h, v = q * c->stride_w - c->pad_w;
    const int channels = d->channels.end - d->channels.first, taps = d->s.end - d->s.first;
    const range r = intersection(d->r, taps_inside(h, c->dilation_h, c->R, c->H));
    const range s = intersection(d->s, taps_inside(v, c->dilation_w, c->S, c->W));
    t->a = c->x + n * c->x_image + (h + r.first * c->dilation_h) * c->x_row +
           (v + s.first * c->dilation_w) * c->x_pixel + d->channels.first;
    t->panel = d->panel;
    if (r.end > r.first && s.end > s.first) {
        t->panel += ((r.first - d->r.first) * taps + s.first - d->s.first) * channels * NR;
    } else {
        t->a = c->x; /* no tap lies in the image: nothing is read */
    }
    t->outer = (loop){r.end - r.first, c->dilation_h * c->x_row, taps * channels * NR};
    t->middle = (loop){s.end - s.first, c->dilation_w * c->x_pixel, channels * NR};
    t->inner = (loop){channels, 1, NR};
    if (c->dilation_w == 1 && channels == c->x_pixel) {
        t->inner.count *= t->middle.count; /* a row of taps is contiguous */
        t->middle.count = 1;
    }
}

/* Pixels (n, p, q0 .. q1), side by side. */
static void tiles_of_row(tile *t, const block *d, int n, int p, int q0, int q1)
{
    const convolution *c = d->c;
    t->a_row = c->stride_w * c->x_pixel;
    for (int q = q0; q < q1; q += t->rows) {
        float *y = c->y + n * c->y_image + p * c->y_row + q * c->y_pixel + d->k;
        t->rows = min_int(max_rows(d->columns), q1 - q);
        for (int i = 0; i < t->rows; i++) {
            t->y[i] = y + i * c->y_pixel;
        }
        set_loops(t, d, n, p, q);
        microkernel(t);
    }
}

/* The pixel (p, q) of all images. */
static void tiles_of_images(tile *t, const block *d, int p, int q)
{
    const convolution *c = d->c;
    t->a_row = c->x_image;
    for (int n = 0; n < c->B; n += t->rows) {
        float *y = c->y + n * c->y_image + p * c->y_row + q * c->y_pixel + d->k;
        t->rows = min_int(max_rows(d->columns), c->B - n);
        for (int i = 0; i < t->rows; i++) {
            t->y[i] = y + i * c->y_image;
        }
        set_loops(t, d, n, p, q);
        microkernel(t);
    }
}

/* One block for pixels of row p of all images. */
static void convolve_row(const block *d, int p, range pixels)
{
    const convolution *c = d->c;
    tile t = {.bias = d->bias, .add = d->add, .columns = d->columns};
    range along = intersection(pixels, interior(c));
    if (along.end - along.first < min_int(max_rows(d->columns), c->B)) {
        along = (range){pixels.end, pixels.end}; /* few: there are more images than pixels side by side */
    }
    for (int q = pixels.first; q < along.first; q++) {
        tiles_of_images(&t, d, p, q);
    }
    for (int n = 0; n < c->B && along.end > along.first; n++) {
        tiles_of_row(&t, d, n, p, along.first, along.end);
    }
    for (int q = along.end; q < pixels.end; q++) {
        tiles_of_images(&t, d, p, q);
    }
}

/* Goes on to the next block of the filters; 0 after the last one. */
static int next_block(block *d)
{
    const convolution *c = d->c;
    const int rows = max_int(1, KC / (c->S * c->C)), taps = max_int(1, KC / c->C);
    if (d->channels.end < c->C) {
        d->channels = (range){d->channels.end, min_int(c->C, d->channels.end + KC)};
        return 1;
    }
    d->channels = (range){0, min_int(c->C, KC)};
    if (d->s.end < c->S) {
        d->s = (range){d->s.end, min_int(c->S, d->s.end + taps)};
        return 1;
    }
    d->s = (range){0, min_int(c->S, taps)};
    d->r = (range){d->r.end, min_int(c->R, d->r.end + rows)};
    return d->r.first < d->r.end;
}

static int is_last(const block *d)
{
    return d->r.end == d->c->R && d->s.end == d->c->S && d->channels.end == d->c->C;
}

static void convolve_task(const void *context, int task)
{
    const tiling *job = context;
    const convolution *c = &job->c;
    float panel[KC * NR], bias[NR] = {0.0f};
    const int k = task % job->panels * NR, at = task / job->panels;
    const int across = ceil_div(c->Q, job->pixels_of_row);
    const int p0 = at / across * job->rows_of_task, q0 = at % across * job->pixels_of_row;
    block d = {.c = c, .k = k, .columns = min_int(c->K - k, NR), .panel = panel};
    d.s.end = c->S; /* as if a block before the first had ended here */
    d.channels.end = c->C;
    for (int i = 0; c->b != NULL && i < d.columns; i++) {
        bias[i] = c->b[k + i];
    }
    for (; next_block(&d); d.add = 1) {
        d.bias = c->b != NULL && is_last(&d) ? bias : NULL;
        pack_block(panel, &d);
        for (int p = p0; p < min_int(p0 + job->rows_of_task, c->P); p++) {
            convolve_row(&d, p, (range){q0, min_int(q0 + job->pixels_of_row, c->Q)});
        }
    }
}

/* A 1 x 1 filter over whole images sees one long row of pixels. */
static convolution flat(convolution c)
{
    const int pointwise = c.R == 1 && c.S == 1 && c.stride_h == 1 && c.stride_w == 1 && c.pad_h == 0 && c.pad_w == 0;
    const int whole = c.x_row == c.W * c.x_pixel && c.x_image == c.H * c.x_row && c.y_row == c.Q * c.y_pixel &&
                      c.y_image == c.P * c.y_row && c.P == c.H && c.Q == c.W;
    if (pointwise && whole) {
        c.W = c.Q = c.B * c.P * c.Q;
        c.B = c.H = c.P = 1;
        c.x_row = c.x_image = c.W * c.x_pixel;
        c.y_row = c.y_image = c.Q * c.y_pixel;
    }
    return c;
}

void convolve(const convolution *conv)
{
    tiling job = {.c = flat(*conv), .panels = ceil_div(conv->K, NR)};
    const convolution *c = &job.c;
    const int pixels = c->B * c->P * c->Q, wanted = max_int(pixels / 16, MIN_PIXELS);
    job.rows_of_task = c->P == 1 ? 1 : ceil_div(wanted, c->B * c->Q);
    job.pixels_of_row = c->P == 1 ? ceil_div(ceil_div(wanted, c->B), MR) * MR : c->Q;
    const int tasks = job.panels * ceil_div(c->P, job.rows_of_task) * ceil_div(c->Q, job.pixels_of_row);
    const long work = (long)pixels * c->R * c->S * c->C * job.panels;
    parallel_for(tasks, work, convolve_task, &job);
}
