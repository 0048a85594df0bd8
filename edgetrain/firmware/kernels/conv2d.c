/* A convolution is a gemm whose sum runs over filter rows, taps (columns of a filter row) and channels. The image is
 * read in place: there is no im2col buffer. Pixels at its edges meet fewer taps, and are products of their own. */
#include "conv2d.h"

#include "gemm.h"
#include "kernel.h"

/* Half-open. */
typedef struct {
    int first, end;
} range;

/* Which of the `count` positions start, start + step, … lie in [0, side). */
static range inside(int start, int step, int count, int side)
{
    const int first = start < 0 ? ceil_div(-start, step) : 0;
    const int end = start < side ? min_int(count, ceil_div(side - start, step)) : 0;
    return (range){first, max_int(first, end)};
}

/* C and K of one group, and how many taps are one product: a filter row where it is contiguous in image and filter. */
typedef struct {
    int C, K, taps;
} group_shape;

static group_shape group_of(const conv2d_shape *s)
{
    const int is_contiguous = s->groups == 1 && s->dilation_w == 1;
    return (group_shape){s->C / s->groups, s->K / s->groups, is_contiguous ? s->S : 1};
}

/* The pixels of y whose taps [first, first + taps) all lie in the image; along rows or along columns. */
static range interior(int first, int taps, int stride, int pad, int dilation, int pixels, int side)
{
    const int start = first * dilation - pad, last = start + (taps - 1) * dilation;
    const range a = inside(start, stride, pixels, side), b = inside(last, stride, pixels, side);
    const int from = max_int(a.first, b.first);
    return (range){from, max_int(from, min_int(a.end, b.end))};
}

/* Pixels p x q of y, which all meet the same rows and taps of the filters. */
typedef struct {
    range p, q, rows, taps;
} region;

static int length(range r)
{
    return r.end - r.first;
}

static void forward_region(float *restrict y, const float *x, const float *w, const conv2d_shape *s, region at)
{
    const group_shape group = group_of(s);
    if (length(at.p) <= 0 || length(at.q) <= 0 || length(at.rows) <= 0 || length(at.taps) <= 0) {
        return;
    }
    /* Along the longer side: more pixels share each load of a filter. */
    const int down = length(at.p) > length(at.q), lines = length(down ? at.q : at.p);
    const int x_q = s->stride_w * s->C, x_p = s->stride_h * s->W * s->C, y_p = s->Q * s->K;
    const gemm_shape product = {
        .M = length(down ? at.p : at.q), .N = group.K, .y_m = down ? y_p : s->K, .a_m = down ? x_p : x_q,
        .b_n = s->R * s->S * group.C, .outer = {length(at.rows), s->dilation_h * s->W * s->C, s->S * group.C},
        .middle = {group.taps > 1 ? 1 : length(at.taps), s->dilation_w * s->C, group.C},
        .inner = {group.taps > 1 ? length(at.taps) * group.C : group.C, 1, 1},
    };
    const int h = at.p.first * s->stride_h - s->pad_h + at.rows.first * s->dilation_h;
    const int v = at.q.first * s->stride_w - s->pad_w + at.taps.first * s->dilation_w;
    x += (h * s->W + v) * s->C;
    w += (at.rows.first * s->S + at.taps.first) * group.C;
    y += at.p.first * y_p + at.q.first * s->K;
    for (int line = 0; line < lines; line++) {
        for (int g = 0; g < s->groups; g++) {
            gemm_nt(y + g * group.K, x + g * group.C, w + g * group.K * product.b_n, &product);
        }
        y += down ? s->K : y_p;
        x += down ? x_q : x_p;
    }
}

/* Rows p of y: the pixels that meet all taps as one region, those at the edges one by one. */
static void forward_rows(
    float *restrict y, const float *x, const float *w, const conv2d_shape *s, range p, range rows)
{
    const range whole = interior(0, s->S, s->stride_w, s->pad_w, s->dilation_w, s->Q, s->W);
    forward_region(y, x, w, s, (region){p, whole, rows, {0, s->S}});
    for (int q = 0; q < s->Q; q++) {
        if (q < whole.first || q >= whole.end) {
            const range taps = inside(q * s->stride_w - s->pad_w, s->dilation_w, s->S, s->W);
            forward_region(y, x, w, s, (region){p, {q, q + 1}, rows, taps});
        }
    }
}

static void forward_image(float *restrict y, const float *x, const float *w, const conv2d_shape *s)
{
    const range whole = interior(0, s->R, s->stride_h, s->pad_h, s->dilation_h, s->P, s->H);
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

/* Adds the products of columns [q, q + count) of dy to the gradient of taps of filter row r, which all of them meet. */
static void backward_weight_columns(
    float *restrict dw, const float *dy, const float *x, const conv2d_shape *s, int r, range taps, int q, int count)
{
    const group_shape group = group_of(s);
    const range rows = inside(r * s->dilation_h - s->pad_h, s->stride_h, s->P, s->H);
    if (rows.end <= rows.first || taps.end <= taps.first || count <= 0) {
        return;
    }
    const gemm_loop images = {s->B, s->P * s->Q * s->K, s->H * s->W * s->C};
    const gemm_loop down = {rows.end - rows.first, s->Q * s->K, s->stride_h * s->W * s->C};
    const gemm_loop along = {count, s->K, s->stride_w * s->C};
    const gemm_shape p = {
        .M = group.K, .N = (taps.end - taps.first) * group.C, .y_m = s->R * s->S * group.C, .a_m = 1, .b_n = 1,
        .outer = count > 1 ? images : ONCE, .middle = count > 1 ? down : images, .inner = count > 1 ? along : down,
    };
    const int h = rows.first * s->stride_h - s->pad_h + r * s->dilation_h;
    const int v = q * s->stride_w - s->pad_w + taps.first * s->dilation_w;
    dw += (r * s->S + taps.first) * group.C;
    dy += (rows.first * s->Q + q) * s->K;
    x += (h * s->W + v) * s->C;
    for (int g = 0; g < s->groups; g++) {
        gemm_tn(dw + g * group.K * p.y_m, dy + g * group.K, x + g * group.C, &p);
    }
}

/* Taps t and on that are one product. */
static void backward_weight_taps(
    float *restrict dw, const float *dy, const float *x, const conv2d_shape *s, int r, int t)
{
    const int n_taps = group_of(s).taps;
    const range whole = interior(t, n_taps, s->stride_w, s->pad_w, s->dilation_w, s->Q, s->W);
    backward_weight_columns(dw, dy, x, s, r, (range){t, t + n_taps}, whole.first, whole.end - whole.first);
    for (int q = 0; n_taps > 1 && q < s->Q; q++) {
        if (q < whole.first || q >= whole.end) {
            const int start = q * s->stride_w - s->pad_w + t * s->dilation_w;
            const range some = inside(start, s->dilation_w, n_taps, s->W);
            backward_weight_columns(dw, dy, x, s, r, (range){t + some.first, t + some.end}, q, 1);
        }
    }
}

void conv2d_backward_weight(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s)
{
    fill(dw, NULL, s->K, s->R * s->S * (s->C / s->groups));
    for (int r = 0; r < s->R; r++) {
        for (int t = 0; t < s->S; t += group_of(s).taps) {
            backward_weight_taps(dw, dy, x, s, r, t);
        }
    }
}

/* Filter rows that meet a row of dx, r and every stride_h-th after it, and rows of dy, p and lower. */
typedef struct {
    int r, p, count;
} row_pairs;

static row_pairs row_pairs_of(const conv2d_shape *s, int h, int r)
{
    const int p = (h + s->pad_h - r * s->dilation_h) / s->stride_h, count = ceil_div(s->R - r, s->stride_h);
    const range rows = inside(s->P - 1 - p, s->dilation_h, count, s->P); /* counted from the last row of dy down */
    return (row_pairs){r + rows.first * s->stride_h, p - rows.first * s->dilation_h, length(rows)};
}

/* Adds to a row of dx the products of columns q of dy with taps that all of them meet. Neighbours share pixels of dx:
 * rows of the product overlap. */
static void backward_input_columns(
    float *restrict dx, const float *dy, const float *w, const conv2d_shape *s, row_pairs rows, range taps, range q)
{
    const group_shape group = group_of(s);
    if (rows.count <= 0 || length(taps) <= 0 || length(q) <= 0) {
        return;
    }
    const gemm_shape product = {
        .M = length(q), .N = length(taps) * group.C, .y_m = s->stride_w * s->C, .a_m = s->K, .b_n = 1, .outer = ONCE,
        .middle = {rows.count, -s->dilation_h * s->Q * s->K, s->stride_h * s->S * group.C},
        .inner = {group.K, 1, s->R * s->S * group.C},
    };
    dx += (q.first * s->stride_w - s->pad_w + taps.first * s->dilation_w) * s->C;
    dy += (rows.p * s->Q + q.first) * s->K;
    w += (rows.r * s->S + taps.first) * group.C;
    for (int g = 0; g < s->groups; g++) {
        gemm_nn(dx + g * group.C, dy + g * group.K, w + g * group.K * s->R * s->S * group.C, &product);
    }
}

/* Adds to a row of dx the products with taps [t, t + n_taps). whole: the columns of dy that meet all of them. */
static void backward_input_row(
    float *restrict dx, const float *dy, const float *w, const conv2d_shape *s, row_pairs rows, int t, int n_taps,
    range whole)
{
    backward_input_columns(dx, dy, w, s, rows, (range){t, t + n_taps}, whole);
    for (int q = 0; n_taps > 1 && q < s->Q; q++) {
        if (q < whole.first || q >= whole.end) {
            const int start = q * s->stride_w - s->pad_w + t * s->dilation_w;
            const range some = inside(start, s->dilation_w, n_taps, s->W);
            backward_input_columns(dx, dy, w, s, rows, (range){t + some.first, t + some.end}, (range){q, q + 1});
        }
    }
}

static void backward_input_taps(
    float *restrict dx, const float *dy, const float *w, const conv2d_shape *s, int t, int n_taps)
{
    const range whole = interior(t, n_taps, s->stride_w, s->pad_w, s->dilation_w, s->Q, s->W);
    for (int h = 0; h < s->H; h++) {
        for (int r = 0; r < min_int(s->stride_h, s->R); r++) {
            if ((h + s->pad_h - r * s->dilation_h) % s->stride_h == 0) {
                backward_input_row(dx, dy, w, s, row_pairs_of(s, h, r), t, n_taps, whole);
            }
        }
        dx += s->W * s->C;
    }
}

void conv2d_backward_input(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s)
{
    const int n_taps = s->C < 4 ? group_of(s).taps : 1; /* else tiles would be half empty */
    fill(dx, NULL, s->B * s->H * s->W, s->C);
    for (int n = 0; n < s->B; n++) {
        for (int t = 0; t < s->S; t += n_taps) {
            backward_input_taps(dx, dy, w, s, t, n_taps);
        }
        dx += s->H * s->W * s->C;
        dy += s->P * s->Q * s->K;
    }
}
