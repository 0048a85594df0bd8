/* The gradient of weights as gemm: filters by pixels, times pixels by taps and channels.
 *
 *     a task     NR elements of some filters; im2col copies what their taps meet into a panel, KC pixels at a time
 */
#include <stddef.h>

#include "convolve.h"
#include "convolve_backward_weight_narrow.h"
#include "microkernel.h"
#include "parallel.h"

enum { FILTERS_OF_TASK = 4 * MR, MANY_TASKS = 16 };

typedef struct {
    weight_gradient c;
    int pixels, panels, filters_of_task;
} tiling;

/* `n` elements of a panel's row, from `to` on, which are contiguous in the image, from this tap and channel on. */
typedef struct {
    int to, n, tap, channel;
} segment;

/* The elements [j, j + width) of a filter as segments. joined: the taps of a row are contiguous in the image. */
static int segments_of(segment *restrict segments, const weight_gradient *c, int j, int width, int joined)
{
    int count = 0;
    const int unit = joined ? c->S * c->C : c->C;
    for (int i = 0; i < width; count++) {
        const int n = min_int(unit - (j + i) % unit, width - i);
        segments[count] = (segment){i, n, (j + i) / c->C, (j + i) % c->C};
        i += n;
    }
    return count;
}

static int is_inside(const weight_gradient *c, int h, int v)
{
    return h >= 0 && h < c->H && v >= 0 && v < c->W;
}

/* One segment of the pixels (n, p, q0 .. q1): element by element, zeros in the padding. */
static void copy_at_border(float *restrict panel, const weight_gradient *c, segment s, int n, int p, int q0, int q1)
{
    for (int q = q0; q < q1; q++, panel += NR) {
        for (int i = 0; i < s.n; i++) {
            const int tap = s.tap + (s.channel + i) / c->C, channel = (s.channel + i) % c->C;
            const int h = p * c->stride_h - c->pad_h + tap / c->S * c->dilation_h;
            const int v = q * c->stride_w - c->pad_w + tap % c->S * c->dilation_w;
            const float *from = c->x + n * c->x_image + h * c->x_row + v * c->x_pixel + channel;
            panel[s.to + i] = is_inside(c, h, v) ? *from : 0.0f;
        }
    }
}

/* The same where all of it lies in the image. */
static void copy_inside(float *restrict panel, const weight_gradient *c, segment s, int n, int p, int q0, int q1)
{
    const int h = p * c->stride_h - c->pad_h + s.tap / c->S * c->dilation_h;
    const int v = q0 * c->stride_w - c->pad_w + s.tap % c->S * c->dilation_w;
    const float *from = c->x + n * c->x_image + h * c->x_row + v * c->x_pixel + s.channel;
    float *to = panel + s.to;
    for (int q = q0; q < q1; q++, to += NR, from += c->stride_w * c->x_pixel) {
        copy_run(to, from, s.n);
    }
}

/* One segment of the row of pixels (n, p, q0 .. q1). */
static void copy_row(float *restrict panel, const weight_gradient *c, segment s, int n, int p, int q0, int q1)
{
    const int last = s.tap + (s.channel + s.n - 1) / c->C;
    const int left = c->pad_w - s.tap % c->S * c->dilation_w;
    const int right = c->W + c->pad_w - last % c->S * c->dilation_w;
    const int h = p * c->stride_h - c->pad_h + s.tap / c->S * c->dilation_h;
    int first = left <= 0 ? 0 : ceil_div(left, c->stride_w), end = right <= 0 ? 0 : ceil_div(right, c->stride_w);
    if (h < 0 || h >= c->H) {
        first = end = q1;
    }
    first = max_int(q0, min_int(first, q1));
    end = max_int(first, min_int(end, q1));
    copy_at_border(panel, c, s, n, p, q0, first);
    copy_inside(panel + (first - q0) * NR, c, s, n, p, first, end);
    copy_at_border(panel + (end - q0) * NR, c, s, n, p, end, q1);
}

/* What the elements [j, j + width) of a filter meet at the pixels [m0, m1). */
static void im2col(float *restrict panel, const weight_gradient *c, int j, int width, int m0, int m1)
{
    segment segments[NR];
    const int joined = c->x_pixel == c->C && c->dilation_w == 1;
    const int count = segments_of(segments, c, j, width, joined);
    for (int m = m0; m < m1;) {
        const int n = m / (c->P * c->Q), p = m / c->Q % c->P, q0 = m % c->Q, q1 = min_int(c->Q, q0 + m1 - m);
        for (int i = 0; i < count; i++) {
            copy_row(panel + (m - m0) * NR, c, segments[i], n, p, q0, q1);
        }
        m += q1 - q0;
    }
}

static void backward_weight_task(const void *context, int task)
{
    const tiling *job = context;
    const weight_gradient *c = &job->c;
    float panel[KC * NR];
    const int depth = c->R * c->S * c->C, j = task % job->panels * NR;
    const int k0 = task / job->panels * job->filters_of_task, k1 = min_int(k0 + job->filters_of_task, c->K);
    const int pointwise =
        c->R == 1 && c->S == 1 && c->stride_h == 1 && c->stride_w == 1 && c->pad_h == 0 && c->pad_w == 0;
    tile t = {.columns = min_int(depth - j, NR), .a_row = 1, .outer = {1, 0, 0}, .middle = {1, 0, 0}};
    const int in_place = pointwise && t.columns == NR && c->x_image == c->P * c->Q * c->x_pixel;
    if (t.columns < NR) {
        memset(panel, 0, sizeof panel);
    }
    for (int m = 0; m < job->pixels; m += KC) {
        t.inner = (loop){min_int(KC, job->pixels - m), c->dy_pixel, in_place ? c->x_pixel : NR};
        t.add = m > 0;
        t.panel = in_place ? c->x + m * c->x_pixel + j : panel;
        if (!in_place) {
            im2col(panel, c, j, t.columns, m, m + t.inner.count);
        }
        for (int k = k0; k < k1; k += t.rows) {
            t.rows = min_int(max_rows(t.columns), k1 - k);
            t.a = c->dy + m * c->dy_pixel + k;
            for (int i = 0; i < t.rows; i++) {
                t.y[i] = c->dw + (k + i) * depth + j;
            }
            microkernel(&t);
        }
    }
}

void convolve_backward_weight(const weight_gradient *g)
{
    if (g->C < LANES && convolve_backward_weight_narrow(g)) {
        return;
    }
    tiling job = {.c = *g, .pixels = g->B * g->P * g->Q};
    job.panels = ceil_div(g->R * g->S * g->C, NR);
    job.filters_of_task = job.panels < MANY_TASKS ? FILTERS_OF_TASK : g->K;
    const long work = (long)job.pixels * job.panels * g->K;
    parallel_for(job.panels * ceil_div(g->K, job.filters_of_task), work, backward_weight_task, &job);
}
