/* One channel at a time, two rows of results at a time. What three columns of the image hold moves along in registers:
 *
 *     . . . . . . .      rows of the image: 4 for two rows of results at stride 1, 5 at stride 2
 *     . a b c . . .      next step: a ← b, b ← c, c is loaded
 *     . a b c . . .
 *     . . . . . . .
 *
 * Outside of the image are zeros: a row there is read as one zero over and over, and written to a number that nobody
 * reads. */
#include "depthwise3x3.h"

#include <stddef.h>

#include "sums.h"

enum { MOST_ROWS = 5 };

/* The image that is read and the one that is made, of one channel. */
typedef struct {
    int H, W, P, Q, C;
    int pad_h, pad_w;
} plane;

static const float ZERO = 0.0f;

/* Numbers of a row, one after the other. */
typedef struct {
    const float *next;
    int step;
} reader;

typedef struct {
    float *next;
    int step;
} writer;

static inline reader row_of(const float *x, int h, int H, int W, int C)
{
    const int there = h >= 0 && h < H;
    return (reader){there ? x + h * W * C : &ZERO, there ? C : 0};
}

static inline writer row_to(float *y, int p, int P, int Q, int C, float *nowhere)
{
    const int there = p >= 0 && p < P;
    return (writer){there ? y + p * Q * C : nowhere, there ? C : 0};
}

FOR_EACH_CALL float take(reader *row)
{
    const float value = *row->next;
    row->next += row->step;
    return value;
}

FOR_EACH_CALL void put(writer *row, float value)
{
    *row->next = value;
    row->next += row->step;
}

/* Three columns of some rows of an image. */
typedef struct {
    reader row[MOST_ROWS];
    float at[MOST_ROWS][3];
} window;

FOR_EACH_CALL void load_column(const int ROWS, window *x, int column)
{
    UNROLLED for (int r = 0; r < ROWS; r++) {
        x->at[r][column] = take(&x->row[r]);
    }
}

FOR_EACH_CALL void load_column_if(const int ROWS, window *x, int column, int there)
{
    if (there) {
        load_column(ROWS, x, column);
    } else {
        UNROLLED for (int r = 0; r < ROWS; r++) {
            x->at[r][column] = 0.0f;
        }
    }
}

/* Before the first step: the columns that stay when the window moves for the first time. */
FOR_EACH_CALL void open_window(const int STRIDE, window *x, const float *image, const plane *s, int p)
{
    const int ROWS = STRIDE + 3;
    UNROLLED for (int r = 0; r < ROWS; r++) {
        x->row[r] = row_of(image, p * STRIDE - s->pad_h + r, s->H, s->W, s->C);
    }
    UNROLLED for (int column = STRIDE; column < 3; column++) {
        const int v = column - STRIDE - s->pad_w;
        load_column_if(ROWS, x, column, v >= 0 && v < s->W);
    }
}

FOR_EACH_CALL void move_window(const int STRIDE, window *x)
{
    UNROLLED for (int r = 0; r < STRIDE + 3; r++) {
        UNROLLED for (int column = STRIDE; column < 3; column++) {
            x->at[r][column - STRIDE] = x->at[r][column];
        }
    }
}

/* The window for the next column of results, whose last columns lie in the image. */
FOR_EACH_CALL void step_window(const int STRIDE, window *x)
{
    move_window(STRIDE, x);
    UNROLLED for (int column = 3 - STRIDE; column < 3; column++) {
        load_column(STRIDE + 3, x, column);
    }
}

/* The same at the right edge. */
FOR_EACH_CALL void step_window_at_edge(const int STRIDE, window *x, const plane *s, int q)
{
    move_window(STRIDE, x);
    UNROLLED for (int column = 3 - STRIDE; column < 3; column++) {
        load_column_if(STRIDE + 3, x, column, q * STRIDE - s->pad_w + column < s->W);
    }
}

/* How many columns of results have all they need to their right. */
static inline int columns_before_edge(const plane *s, int stride)
{
    return at_most(s->Q, at_least(0, (s->W + s->pad_w - 2 + stride - 1) / stride));
}

FOR_EACH_CALL float filtered(const window *x, int top, const float *k, float bias)
{
    float sum[3];
    UNROLLED for (int r = 0; r < 3; r++) {
        const float *const at = x->at[top + r];
        sum[r] = at[0] * k[3 * r] + at[1] * k[3 * r + 1] + at[2] * k[3 * r + 2];
    }
    return bias + (sum[0] + sum[1] + sum[2]);
}

/* Rows p and p + 1 of y. */
FOR_EACH_CALL void filter_two_rows(
    const int STRIDE, float *y, const float *image, const float *k, float bias, const plane *s, int p)
{
    float nowhere;
    window x;
    open_window(STRIDE, &x, image, s, p);
    writer upper = row_to(y, p, s->P, s->Q, s->C, &nowhere), lower = row_to(y, p + 1, s->P, s->Q, s->C, &nowhere);
    const int whole = columns_before_edge(s, STRIDE);
    for (int q = 0; q < whole; q++) {
        step_window(STRIDE, &x);
        put(&upper, filtered(&x, 0, k, bias));
        put(&lower, filtered(&x, STRIDE, k, bias));
    }
    for (int q = whole; q < s->Q; q++) {
        step_window_at_edge(STRIDE, &x, s, q);
        put(&upper, filtered(&x, 0, k, bias));
        put(&lower, filtered(&x, STRIDE, k, bias));
    }
}

static void filter_plane(float *y, const float *x, const float *filter, float bias, const plane *s, int stride, int turned)
{
    float k[9];
    UNROLLED for (int i = 0; i < 9; i++) {
        k[i] = filter[turned ? 8 - i : i];
    }
    for (int p = 0; p < s->P; p += 2) {
        if (stride == 1) {
            filter_two_rows(1, y, x, k, bias, s, p);
        } else {
            filter_two_rows(2, y, x, k, bias, s, p);
        }
    }
}

static plane plane_of(const depthwise3x3_shape *s)
{
    return (plane){s->H, s->W, s->P, s->Q, s->C, s->pad_h, s->pad_w};
}

void depthwise3x3_forward(float *restrict y, const float *x, const float *w, const float *b, const depthwise3x3_shape *s)
{
    const plane each = plane_of(s);
    for (int n = 0; n < s->B; n++) {
        for (int c = 0; c < s->C; c++) {
            filter_plane(y + c, x + c, w + 9 * c, b == NULL ? 0.0f : b[c], &each, s->stride, 0);
        }
        x += s->H * s->W * s->C;
        y += s->P * s->Q * s->C;
    }
}

FOR_EACH_CALL void add_gradients(float *sum, const window *x, const int STRIDE, float upper, float lower)
{
    UNROLLED for (int r = 0; r < 3; r++) {
        UNROLLED for (int t = 0; t < 3; t++) {
            sum[3 * r + t] += upper * x->at[r][t] + lower * x->at[r + STRIDE][t];
        }
    }
}

/* Adds to dw what rows p and p + 1 of dy bring. */
FOR_EACH_CALL void weight_of_two_rows(
    const int STRIDE, float *dw, const float *dy, const float *image, const plane *s, int p)
{
    float sum[9];
    UNROLLED for (int i = 0; i < 9; i++) {
        sum[i] = 0.0f;
    }
    window x;
    open_window(STRIDE, &x, image, s, p);
    reader upper = row_of(dy, p, s->P, s->Q, s->C), lower = row_of(dy, p + 1, s->P, s->Q, s->C);
    const int whole = columns_before_edge(s, STRIDE);
    for (int q = 0; q < whole; q++) {
        step_window(STRIDE, &x);
        add_gradients(sum, &x, STRIDE, take(&upper), take(&lower));
    }
    for (int q = whole; q < s->Q; q++) {
        step_window_at_edge(STRIDE, &x, s, q);
        add_gradients(sum, &x, STRIDE, take(&upper), take(&lower));
    }
    UNROLLED for (int i = 0; i < 9; i++) {
        dw[i] += sum[i];
    }
}

void depthwise3x3_backward_weight(float *restrict dw, const float *dy, const float *x, const depthwise3x3_shape *s)
{
    const plane each = plane_of(s);
    for (int c = 0; c < s->C; c++) {
        for (int i = 0; i < 9; i++) {
            dw[i] = 0.0f;
        }
        for (int n = 0; n < s->B; n++) {
            const float *const gradient = dy + n * s->P * s->Q * s->C + c, *const image = x + n * s->H * s->W * s->C + c;
            for (int p = 0; p < s->P; p += 2) {
                if (s->stride == 1) {
                    weight_of_two_rows(1, dw, gradient, image, &each, p);
                } else {
                    weight_of_two_rows(2, dw, gradient, image, &each, p);
                }
            }
        }
        dw += 9;
    }
}

/* At stride 2 four places of dx, two by two, have met the gradients above and at them:
 *
 *     corner above          the place (2 p, 2 q) of the padded image met all four, by the corners of the filter,
 *     left   here           the one to its right two, the one below two, the one below and right `here` alone */
typedef struct {
    float corner, above, left, here;
} gradients;

FOR_EACH_CALL void spread(float *of, const gradients *g, const float *k)
{
    of[0] = (g->here * k[0] + g->left * k[2]) + (g->above * k[6] + g->corner * k[8]);
    of[1] = g->here * k[1] + g->above * k[7];
    of[2] = g->here * k[3] + g->left * k[5];
    of[3] = g->here * k[4];
}

/* Places 2 q and 2 q + 1, less the padding, of two rows of dx: those that are in the image. */
FOR_EACH_CALL void put_if(writer *upper, writer *lower, const float *of, int v, int W)
{
    UNROLLED for (int i = 0; i < 2; i++) {
        if (v + i >= 0 && v + i < W) {
            put(upper, of[i]);
            put(lower, of[2 + i]);
        }
    }
}

/* Rows 2 p and 2 p + 1, less the padding, of dx. */
static void spread_two_rows(float *dx, const float *dy, const float *k, const depthwise3x3_shape *s, int p)
{
    float nowhere, of[4];
    const int h = 2 * p - s->pad_h, last = (s->W + s->pad_w - 1) / 2;
    writer upper = row_to(dx, h, s->H, s->W, s->C, &nowhere), lower = row_to(dx, h + 1, s->H, s->W, s->C, &nowhere);
    reader above = row_of(dy, p - 1, s->P, s->Q, s->C), here = row_of(dy, p, s->P, s->Q, s->C);
    gradients g = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int q = 0; q <= last; q++) {
        g.corner = g.above;
        g.left = g.here;
        g.above = q < s->Q ? take(&above) : 0.0f;
        g.here = q < s->Q ? take(&here) : 0.0f;
        spread(of, &g, k);
        put_if(&upper, &lower, of, 2 * q - s->pad_w, s->W);
    }
}

static void spread_plane(float *dx, const float *dy, const float *k, const depthwise3x3_shape *s)
{
    for (int p = 0; p <= (s->H + s->pad_h - 1) / 2; p++) {
        spread_two_rows(dx, dy, k, s, p);
    }
}

/* At stride 1 it is the convolution of the gradients with the filter turned by 180 degrees. */
void depthwise3x3_backward_input(float *restrict dx, const float *dy, const float *w, const depthwise3x3_shape *s)
{
    const plane each = {s->P, s->Q, s->H, s->W, s->C, 2 - s->pad_h, 2 - s->pad_w};
    for (int n = 0; n < s->B; n++) {
        for (int c = 0; c < s->C; c++) {
            if (s->stride == 1) {
                filter_plane(dx + c, dy + c, w + 9 * c, 0.0f, &each, 1, 1);
            } else {
                spread_plane(dx + c, dy + c, w + 9 * c, s);
            }
        }
        dx += s->H * s->W * s->C;
        dy += s->P * s->Q * s->C;
    }
}
