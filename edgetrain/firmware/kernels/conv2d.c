#include "conv2d.h"

#include <stddef.h>

#include "products.h"
#include "sums.h"

static const products_loop ONCE = {1, 0, 0};

/* Half-open. */
typedef struct {
    int first, end;
} range;

static int quotient_up(int a, int b)
{
    return (a + b - 1) / b;
}

/* Which of `count` places start, start + step, ... lie in [0, side). */
static range inside(int start, int step, int count, int side)
{
    const int first = start < 0 ? quotient_up(-start, step) : 0;
    const int end = start < side ? at_most(count, quotient_up(side - start, step)) : 0;
    return (range){first, at_least(first, end)};
}

/* The filters of a layer that are alike for all its groups: C and K of one group, and the taps of a row that are taken
 * together, which is all of them where they are one run of numbers in image and filter. */
typedef struct {
    int C, K, taps;
} filters;

static filters filters_of(const conv2d_shape *s)
{
    const int together = s->groups == 1 && s->dilation_w == 1;
    return (filters){s->C / s->groups, s->K / s->groups, together ? s->S : 1};
}

/* The places of y whose taps [first, first + taps) all lie in the image; along rows or along columns. */
static range whole_places(int first, int taps, int stride, int pad, int dilation, int places, int side)
{
    const int start = first * dilation - pad, last = start + (taps - 1) * dilation;
    const range a = inside(start, stride, places, side), b = inside(last, stride, places, side);
    const int from = at_least(a.first, b.first);
    return (range){from, at_least(from, at_most(a.end, b.end))};
}

/* Some places of y, rows and columns, which all meet the same rows and taps of the filters. */
typedef struct {
    range p, q, rows, taps;
} part;

static int length(range r)
{
    return r.end - r.first;
}

static void forward_part(float *restrict y, const float *x, const float *w, const conv2d_shape *s, part at)
{
    const filters f = filters_of(s);
    if (length(at.p) <= 0 || length(at.q) <= 0 || length(at.rows) <= 0 || length(at.taps) <= 0) {
        return;
    }
    /* Along the longer side: more places share what is loaded of the filters. */
    const int down = length(at.p) > length(at.q), lines = length(down ? at.q : at.p);
    const int x_q = s->stride_w * s->C, x_p = s->stride_h * s->W * s->C, y_p = s->Q * s->K;
    const products_shape product = {
        .M = length(down ? at.p : at.q), .N = f.K, .y_m = down ? y_p : s->K, .a_m = down ? x_p : x_q,
        .b_n = s->R * s->S * f.C, .outer = {length(at.rows), s->dilation_h * s->W * s->C, s->S * f.C},
        .middle = {f.taps > 1 ? 1 : length(at.taps), s->dilation_w * s->C, f.C},
        .inner = {f.taps > 1 ? length(at.taps) * f.C : f.C, 1, 1},
    };
    const int h = at.p.first * s->stride_h - s->pad_h + at.rows.first * s->dilation_h;
    const int v = at.q.first * s->stride_w - s->pad_w + at.taps.first * s->dilation_w;
    x += (h * s->W + v) * s->C;
    w += (at.rows.first * s->S + at.taps.first) * f.C;
    y += at.p.first * y_p + at.q.first * s->K;
    for (int line = 0; line < lines; line++) {
        for (int g = 0; g < s->groups; g++) {
            products_of_runs(y + g * f.K, x + g * f.C, w + g * f.K * product.b_n, &product);
        }
        y += down ? s->K : y_p;
        x += down ? x_q : x_p;
    }
}

/* Some rows of y: the columns that meet all taps together, those at the edges one by one. */
static void forward_rows(
    float *restrict y, const float *x, const float *w, const conv2d_shape *s, range p, range rows)
{
    const range whole = whole_places(0, s->S, s->stride_w, s->pad_w, s->dilation_w, s->Q, s->W);
    forward_part(y, x, w, s, (part){p, whole, rows, {0, s->S}});
    for (int q = 0; q < s->Q; q++) {
        if (q < whole.first || q >= whole.end) {
            const range taps = inside(q * s->stride_w - s->pad_w, s->dilation_w, s->S, s->W);
            forward_part(y, x, w, s, (part){p, {q, q + 1}, rows, taps});
        }
    }
}

static void forward_image(float *restrict y, const float *x, const float *w, const conv2d_shape *s)
{
    const range whole = whole_places(0, s->R, s->stride_h, s->pad_h, s->dilation_h, s->P, s->H);
    forward_rows(y, x, w, s, whole, (range){0, s->R});
    for (int p = 0; p < s->P; p++) {
        if (p < whole.first || p >= whole.end) {
            const range rows = inside(p * s->stride_h - s->pad_h, s->dilation_h, s->R, s->H);
            forward_rows(y, x, w, s, (range){p, p + 1}, rows);
        }
    }
}

void conv2d_forward(float *restrict y, const float *x, const float *w, const float *b, const conv2d_shape *s)
{
    fill(y, b, s->B * s->P * s->Q, s->K);
    for (int n = 0; n < s->B; n++) {
        forward_image(y, x, w, s);
        x += s->H * s->W * s->C;
        y += s->P * s->Q * s->K;
    }
}

/* Adds to the gradient of taps of row r what columns [q, q + count) of y bring, which all meet them. */
static void weight_columns(
    float *restrict dw, const float *dy, const float *x, const conv2d_shape *s, int r, range taps, int q, int count)
{
    const filters f = filters_of(s);
    const range rows = inside(r * s->dilation_h - s->pad_h, s->stride_h, s->P, s->H);
    if (rows.end <= rows.first || taps.end <= taps.first || count <= 0) {
        return;
    }
    const products_loop images = {s->B, s->P * s->Q * s->K, s->H * s->W * s->C};
    const products_loop down = {rows.end - rows.first, s->Q * s->K, s->stride_h * s->W * s->C};
    const products_loop along = {count, s->K, s->stride_w * s->C};
    const products_shape p = {
        .M = f.K, .N = (taps.end - taps.first) * f.C, .y_m = s->R * s->S * f.C, .a_m = 1, .b_n = 1,
        .outer = count > 1 ? images : ONCE, .middle = count > 1 ? down : images, .inner = count > 1 ? along : down,
    };
    const int h = rows.first * s->stride_h - s->pad_h + r * s->dilation_h;
    const int v = q * s->stride_w - s->pad_w + taps.first * s->dilation_w;
    dw += (r * s->S + taps.first) * f.C;
    dy += (rows.first * s->Q + q) * s->K;
    x += (h * s->W + v) * s->C;
    for (int g = 0; g < s->groups; g++) {
        products_of_columns(dw + g * f.K * p.y_m, dy + g * f.K, x + g * f.C, &p);
    }
}

/* The taps from t on that are taken together. */
static void weight_taps(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s, int r, int t)
{
    const int together = filters_of(s).taps;
    const range whole = whole_places(t, together, s->stride_w, s->pad_w, s->dilation_w, s->Q, s->W);
    weight_columns(dw, dy, x, s, r, (range){t, t + together}, whole.first, whole.end - whole.first);
    for (int q = 0; together > 1 && q < s->Q; q++) {
        if (q < whole.first || q >= whole.end) {
            const int start = q * s->stride_w - s->pad_w + t * s->dilation_w;
            const range some = inside(start, s->dilation_w, together, s->W);
            weight_columns(dw, dy, x, s, r, (range){t + some.first, t + some.end}, q, 1);
        }
    }
}

void conv2d_backward_weight(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s)
{
    fill(dw, NULL, s->K, s->R * s->S * (s->C / s->groups));
    for (int r = 0; r < s->R; r++) {
        for (int t = 0; t < s->S; t += filters_of(s).taps) {
            weight_taps(dw, dy, x, s, r, t);
        }
    }
}

/* Rows of the filters and of dy that met a row of dx: every stride_h-th of the filters from row r on, and p, which falls
 * as r rises. */
typedef struct {
    int r, p, count;
} met;

static met rows_met(const conv2d_shape *s, int h, int r)
{
    const int p = (h + s->pad_h - r * s->dilation_h) / s->stride_h, count = quotient_up(s->R - r, s->stride_h);
    const range rows = inside(s->P - 1 - p, s->dilation_h, count, s->P); /* upside down */
    return (met){r + rows.first * s->stride_h, p - rows.first * s->dilation_h, length(rows)};
}

/* Adds to a row of dx what columns q of dy bring by taps that all of them meet. Taps of neighbours fall on the same
 * places: the results of a product overlap. */
static void input_columns(
    float *restrict dx, const float *dy, const float *w, const conv2d_shape *s, met rows, range taps, range q)
{
    const filters f = filters_of(s);
    if (rows.count <= 0 || length(taps) <= 0 || length(q) <= 0) {
        return;
    }
    const products_shape product = {
        .M = length(q), .N = length(taps) * f.C, .y_m = s->stride_w * s->C, .a_m = s->K, .b_n = 1, .outer = ONCE,
        .middle = {rows.count, -s->dilation_h * s->Q * s->K, s->stride_h * s->S * f.C},
        .inner = {f.K, 1, s->R * s->S * f.C},
    };
    dx += (q.first * s->stride_w - s->pad_w + taps.first * s->dilation_w) * s->C;
    dy += (rows.p * s->Q + q.first) * s->K;
    w += (rows.r * s->S + taps.first) * f.C;
    for (int g = 0; g < s->groups; g++) {
        products_of_run_and_columns(dx + g * f.C, dy + g * f.K, w + g * f.K * s->R * s->S * f.C, &product);
    }
}

/* Adds to a row of dx what taps [t, t + together) of these rows bring. whole: the columns that meet all of them. */
static void input_row(
    float *restrict dx, const float *dy, const float *w, const conv2d_shape *s, met rows, int t, int together, range whole)
{
    input_columns(dx, dy, w, s, rows, (range){t, t + together}, whole);
    for (int q = 0; together > 1 && q < s->Q; q++) {
        if (q < whole.first || q >= whole.end) {
            const int start = q * s->stride_w - s->pad_w + t * s->dilation_w;
            const range some = inside(start, s->dilation_w, together, s->W);
            input_columns(dx, dy, w, s, rows, (range){t + some.first, t + some.end}, (range){q, q + 1});
        }
    }
}

static void input_taps(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s, int t, int together)
{
    const range whole = whole_places(t, together, s->stride_w, s->pad_w, s->dilation_w, s->Q, s->W);
    for (int h = 0; h < s->H; h++) {
        for (int r = 0; r < at_most(s->stride_h, s->R); r++) {
            if ((h + s->pad_h - r * s->dilation_h) % s->stride_h == 0) {
                input_row(dx, dy, w, s, rows_met(s, h, r), t, together, whole);
            }
        }
        dx += s->W * s->C;
    }
}

void conv2d_backward_input(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s)
{
    const int together = s->C < 4 ? filters_of(s).taps : 1; /* where the channels alone would leave tiles half empty */
    fill(dx, NULL, s->B * s->H * s->W, s->C);
    for (int n = 0; n < s->B; n++) {
        for (int t = 0; t < s->S; t += together) {
            input_taps(dx, dy, w, s, t, together);
        }
        dx += s->H * s->W * s->C;
        dy += s->P * s->Q * s->K;
    }
}
