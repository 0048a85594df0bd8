/* Two rows of results at a time, channel by channel. A window of the image slides along them in registers:
 *
 *     . a b c d . .      rows of the image: 4 for two rows of results at stride 1, 5 at stride 2
 *     . a b c d . .      stride 1: two columns of results, then a ← c, b ← d, and two columns are loaded
 *     . a b c d . .      stride 2: one column of results, then a ← c, and two columns are loaded
 *     . a b c d . .
 *
 * A row of the padding is one zero, read repeatedly. */
#include "depthwise3x3.h"

#include <stddef.h>

#include "kernel.h"

enum { MAX_ROWS = 5, MAX_COLUMNS = 4 };

/* H x W pixels are read, P x Q written. */
typedef struct {
    int H, W, P, Q, C;
    int pad_h, pad_w;
    int flipped; /* the filters, by 180 degrees */
} plane;

static const float ZERO = 0.0f;

/* A row of an image, with the strides of its columns and channels. */
typedef struct {
    const float *first;
    int column, channel;
} image_row;

typedef struct {
    image_row of[MAX_ROWS];
} image_rows;

static inline image_row row_at(const float *x, int h, int H, int W, int C)
{
    if (h < 0 || h >= H) {
        return (image_row){&ZERO, 0, 0};
    }
    return (image_row){x + h * W * C, C, 1};
}

/* The rows that rows p and p + 1 of the results are computed from. */
static image_rows rows_at(const float *x, const plane *s, int stride, int p)
{
    image_rows rows;
    for (int r = 0; r < MAX_ROWS; r++) {
        rows.of[r] = row_at(x, p * stride - s->pad_h + r, s->H, s->W, s->C);
    }
    return rows;
}

/* One channel of a row, column by column. */
typedef struct {
    const float *next;
    int stride;
} reader;

ALWAYS_INLINE reader channel_of(const image_row *row, int c)
{
    return (reader){row->first + c * row->channel, row->column};
}

ALWAYS_INLINE float read_next(reader *row)
{
    const float value = *row->next;
    row->next += row->stride;
    return value;
}

typedef struct {
    reader row[MAX_ROWS];
    float at[MAX_ROWS][MAX_COLUMNS];
} window;

/* The window has rows [TOP, END): those of its MAX_ROWS that can lie in the image. */
ALWAYS_INLINE void load_column(const int TOP, const int END, window *x, int column, int is_inside)
{
    if (is_inside) {
        UNROLL for (int r = TOP; r < END; r++) {
            x->at[r][column] = read_next(&x->row[r]);
        }
    } else {
        UNROLL for (int r = TOP; r < END; r++) {
            x->at[r][column] = 0.0f;
        }
    }
}

/* INSIDE: no row lies in the padding. */
ALWAYS_INLINE void begin_window(
    const int TOP, const int END, const int INSIDE, window *x, const image_rows *rows, int c, const plane *s)
{
    UNROLL for (int r = TOP; r < END; r++) {
        x->row[r] = INSIDE ? (reader){rows->of[r].first + c, s->C} : channel_of(&rows->of[r], c);
    }
}

/* The columns that come before those of the first step. */
ALWAYS_INLINE void load_first_columns(const int STRIDE, const int TOP, const int END, window *x, const plane *s)
{
    UNROLL for (int column = 0; column < 3 - STRIDE; column++) {
        const int v = column - s->pad_w;
        load_column(TOP, END, x, column, v >= 0 && v < s->W);
    }
}

/* New columns for RESULTS columns of results, from q on. interior: so many do not meet the padding at the right. */
ALWAYS_INLINE void load_columns(
    const int STRIDE, const int TOP, const int END, const int RESULTS, window *x, const plane *s, int q, int interior)
{
    const int inside = q + RESULTS <= interior;
    UNROLL for (int column = 3 - STRIDE; column < 3 + STRIDE * (RESULTS - 1); column++) {
        load_column(TOP, END, x, column, inside || q * STRIDE - s->pad_w + column < s->W);
    }
}

ALWAYS_INLINE void shift_columns(const int STRIDE, const int TOP, const int END, const int RESULTS, window *x)
{
    UNROLL for (int r = TOP; r < END; r++) {
        UNROLL for (int column = 0; column < 3 - STRIDE; column++) {
            x->at[r][column] = x->at[r][column + STRIDE * RESULTS];
        }
    }
}

/* How many columns of results do not meet the padding at the right. */
static inline int interior_columns(const plane *s, int stride)
{
    return min_int(s->Q, max_int(0, (s->W + s->pad_w - 2 + stride - 1) / stride));
}

/* Slides the window along the rows. COLUMN(i) computes results whose taps begin at column i of the window. */
#define SLIDE_WINDOW(STRIDE, TOP, END, x, s, interior, COLUMN) \
    do { \
        const int RESULTS = (STRIDE) == 1 ? 2 : 1; \
        load_first_columns(STRIDE, TOP, END, x, s); \
        int q = 0; \
        for (; q + RESULTS <= (s)->Q; q += RESULTS) { \
            load_columns(STRIDE, TOP, END, RESULTS, x, s, q, interior); \
            UNROLL for (int i = 0; i < RESULTS; i++) { \
                COLUMN(i * (STRIDE)); \
            } \
            shift_columns(STRIDE, TOP, END, RESULTS, x); \
        } \
        if (q < (s)->Q) { \
            load_columns(STRIDE, TOP, END, 1, x, s, q, interior); \
            COLUMN(0); \
        } \
    } while (0)

/* ---- forward, and backward to the input at stride 1 */

ALWAYS_INLINE float filter_pixel(const int TOP, const int END, const window *x, int row, int column, const float *k)
{
    float sum = 0.0f;
    UNROLL for (int r = 0; r < 3; r++) {
        if (row + r >= TOP && row + r < END) {
            const float *const at = x->at[row + r] + column;
            const float part = at[0] * k[3 * r] + at[1] * k[3 * r + 1] + at[2] * k[3 * r + 2];
            sum = row + r == max_int(row, TOP) ? part : sum + part;
        }
    }
    return sum;
}

/* A single row of results is the upper one. */
typedef struct {
    float *upper, *lower;
} result_rows;

ALWAYS_INLINE void filter_column(
    const int STRIDE, const int ROWS, const int TOP, const int END, result_rows *y, const window *x, int column,
    const float *k, const plane *s)
{
    if (ROWS == 2) {
        *y->lower = filter_pixel(TOP, END, x, STRIDE, column, k);
        y->lower += s->C;
    }
    *y->upper = filter_pixel(TOP, END, x, 0, column, k);
    y->upper += s->C;
}

ALWAYS_INLINE void filter_channel(
    const int STRIDE, const int ROWS, const int TOP, const int END, const int INSIDE, result_rows y,
    const image_rows *rows, const float *k, const plane *s, int c, int interior)
{
    window x;
    begin_window(TOP, END, INSIDE, &x, rows, c, s);
#define FILTER_COLUMN(column) filter_column(STRIDE, ROWS, TOP, END, &y, &x, column, k, s)
    SLIDE_WINDOW(STRIDE, TOP, END, &x, s, interior, FILTER_COLUMN);
}

ALWAYS_INLINE void filter_rows(
    const int STRIDE, const int ROWS, const int TOP, const int END, const int INSIDE, result_rows y,
    const image_rows *rows, const float *w, const plane *s)
{
    const int interior = interior_columns(s, STRIDE);
    for (int c = 0; c < s->C; c++) {
        float k[9];
        UNROLL for (int i = 0; i < 9; i++) {
            k[i] = s->flipped ? w[8 - i] : w[i];
        }
        filter_channel(STRIDE, ROWS, TOP, END, INSIDE, y, rows, k, s, c, interior);
        y.upper++;
        y.lower++;
        w += 9;
    }
}

/* Which edges of the image two rows of results meet, with one row of padding. In any other case the upper one is
 * computed on its own. */
typedef enum { NO_EDGE, TOP_EDGE, BOTTOM_EDGE, BOTH_EDGES, SINGLE } edges;

static edges edges_at(const plane *s, int stride, int p)
{
    const int first = p * stride - s->pad_h, end = first + stride + 3;
    if (first < -1 || end > s->H + 1 || p + 1 >= s->P || (stride == 2 && end > s->H)) {
        return SINGLE;
    }
    return first < 0 ? (end > s->H ? BOTH_EDGES : TOP_EDGE) : end > s->H ? BOTTOM_EDGE : NO_EDGE;
}

/* Each combination has a function of its own: stride, edges, ROWS, TOP, END, INSIDE. */
#define FOR_EACH_EDGES(DEFINE) \
    DEFINE(1, no_edge, 2, 0, 4, 1) \
    DEFINE(1, top_edge, 2, 1, 4, 1) \
    DEFINE(1, bottom_edge, 2, 0, 3, 1) \
    DEFINE(1, both_edges, 2, 1, 3, 1) \
    DEFINE(1, single, 1, 0, 3, 0) \
    DEFINE(2, no_edge, 2, 0, 5, 1) \
    DEFINE(2, top_edge, 2, 1, 5, 1) \
    DEFINE(2, single, 1, 0, 3, 0)
/* The functions of a kernel by stride - 1 and edges. */
#define BY_EDGES(name) \
    { \
        {name##_1_no_edge, name##_1_top_edge, name##_1_bottom_edge, name##_1_both_edges, name##_1_single}, \
        {name##_2_no_edge, name##_2_top_edge, name##_2_single, name##_2_single, name##_2_single}, \
    }

typedef void filter_function(result_rows y, const image_rows *rows, const float *w, const plane *s);

#define FILTER(stride, where, n_rows, top, end, inside) \
    NOINLINE void filter_##stride##_##where(result_rows y, const image_rows *rows, const float *w, const plane *s) \
    { \
        filter_rows(stride, n_rows, top, end, inside, y, rows, w, s); \
    }
FOR_EACH_EDGES(FILTER)

static void filter_images(int stride, float *y, const float *x, const float *w, const plane *s, int B)
{
    static filter_function *const filter[2][5] = BY_EDGES(filter);
    for (int n = 0; n < B; n++) {
        for (int p = 0; p < s->P;) {
            const edges at = edges_at(s, stride, p);
            const image_rows rows = rows_at(x, s, stride, p);
            float *const upper = y + p * s->Q * s->C;
            filter[stride - 1][at]((result_rows){upper, upper + s->Q * s->C}, &rows, w, s);
            p += at == SINGLE ? 1 : 2;
        }
        x += s->H * s->W * s->C;
        y += s->P * s->Q * s->C;
    }
}

static plane plane_of(const depthwise3x3_shape *s)
{
    return (plane){s->H, s->W, s->P, s->Q, s->C, s->pad_h, s->pad_w, 0};
}

void depthwise3x3_forward(
    float *restrict y, const float *x, const float *w, const float *b, const depthwise3x3_shape *s)
{
    const plane each = plane_of(s);
    filter_images(s->stride, y, x, w, &each, s->B);
    for (int place = 0; b != NULL && place < s->B * s->P * s->Q; place++) {
        for (int c = 0; c < s->C; c++) {
            *y++ += b[c];
        }
    }
}

/* ---- backward to the weights */

typedef struct {
    reader upper, lower;
} gradient_rows;

ALWAYS_INLINE void accumulate_column(
    const int STRIDE, const int ROWS, const int TOP, const int END, float *sum, const window *x, int column,
    gradient_rows *dy)
{
    const float upper = read_next(&dy->upper), lower = ROWS == 2 ? read_next(&dy->lower) : 0.0f;
    UNROLL for (int r = 0; r < 3; r++) {
        UNROLL for (int t = 0; t < 3; t++) {
            if (r >= TOP && ROWS == 2 && r + STRIDE < END) {
                sum[3 * r + t] += upper * x->at[r][column + t] + lower * x->at[r + STRIDE][column + t];
            } else if (r >= TOP) {
                sum[3 * r + t] += upper * x->at[r][column + t];
            } else {
                sum[3 * r + t] += lower * x->at[r + STRIDE][column + t];
            }
        }
    }
}

/* Adds the products of one or two rows of dy. */
ALWAYS_INLINE void accumulate_rows(
    const int STRIDE, const int ROWS, const int TOP, const int END, float *sum, gradient_rows *dy, window *x,
    const plane *s, int interior)
{
#define ACCUMULATE_COLUMN(column) accumulate_column(STRIDE, ROWS, TOP, END, sum, x, column, dy)
    SLIDE_WINDOW(STRIDE, TOP, END, x, s, interior, ACCUMULATE_COLUMN);
}

/* From the columns of two rows that were read to the next two rows. */
ALWAYS_INLINE void skip_rows(
    const int STRIDE, const int TOP, const int END, gradient_rows *dy, window *x, const plane *s)
{
    const int columns_read = min_int(s->W, (s->Q - 1) * STRIDE + 3 - s->pad_w);
    const int skipped = (2 * STRIDE * s->W - columns_read) * s->C;
    UNROLL for (int r = TOP; r < END; r++) {
        x->row[r].next += skipped;
    }
    dy->upper.next += s->Q * s->C;
    dy->lower.next += s->Q * s->C;
}

/* Adds to dw the products of `pairs` times two rows of dy, or of a single row. */
ALWAYS_INLINE void backward_weight_channel(
    const int STRIDE, const int ROWS, const int TOP, const int END, const int INSIDE, float *dw, const float *dy,
    const image_rows *rows, const plane *s, int c, int interior, int pairs)
{
    float sum[9];
    UNROLL for (int i = 0; i < 9; i++) {
        sum[i] = 0.0f;
    }
    gradient_rows pair = {{dy + c, s->C}, {dy + c + s->Q * s->C, s->C}};
    window x;
    begin_window(TOP, END, INSIDE, &x, rows, c, s);
    for (;;) {
        accumulate_rows(STRIDE, ROWS, TOP, END, sum, &pair, &x, s, interior);
        if (--pairs == 0) {
            break;
        }
        skip_rows(STRIDE, TOP, END, &pair, &x, s);
    }
    UNROLL for (int i = 0; i < 9; i++) {
        dw[i] += sum[i];
    }
}

typedef void weight_function(float *dw, const float *dy, const image_rows *rows, const plane *s, int pairs);

#define WEIGHT(stride, where, n_rows, top, end, inside) \
    NOINLINE void backward_weight_##stride##_##where( \
        float *dw, const float *dy, const image_rows *rows, const plane *s, int pairs) \
    { \
        const int interior = interior_columns(s, stride), times = (end) - (top) == (stride) + 3 ? pairs : 1; \
        for (int c = 0; c < s->C; c++) { \
            backward_weight_channel(stride, n_rows, top, end, inside, dw + 9 * c, dy, rows, s, c, interior, times); \
        } \
    }
FOR_EACH_EDGES(WEIGHT)

/* How many pairs of rows of dy, from p on, are one sum: at most 32 products, against rounding, or one pair. */
static int pairs_from(const plane *s, int stride, int p)
{
    int pairs = 1;
    while (edges_at(s, stride, p) == NO_EDGE && edges_at(s, stride, p + 2 * pairs) == NO_EDGE
           && 2 * s->Q * (pairs + 1) <= 32) {
        pairs++;
    }
    return pairs;
}

static void backward_weight_image(float *dw, const float *dy, const float *x, const plane *s, int stride)
{
    static weight_function *const backward_weight[2][5] = BY_EDGES(backward_weight);
    for (int p = 0; p < s->P;) {
        const edges at = edges_at(s, stride, p);
        const image_rows rows = rows_at(x, s, stride, p);
        const int pairs = pairs_from(s, stride, p);
        backward_weight[stride - 1][at](dw, dy + p * s->Q * s->C, &rows, s, pairs);
        p += at == SINGLE ? 1 : 2 * pairs;
    }
}

void depthwise3x3_backward_weight(float *restrict dw, const float *dy, const float *x, const depthwise3x3_shape *s)
{
    const plane each = plane_of(s);
    for (int i = 0; i < 9 * s->C; i++) {
        dw[i] = 0.0f;
    }
    for (int n = 0; n < s->B; n++) {
        backward_weight_image(dw, dy, x, &each, s->stride);
        dy += s->P * s->Q * s->C;
        x += s->H * s->W * s->C;
    }
}

/* ---- backward to the input at stride 2
 *
 * Two by two pixels of dx met the same four gradients:
 *
 *     above_left  above       pixel (2 p, 2 q) of the padded image met all four, by the corners of the filter,
 *     left        here        the one to its right two, the one below two, the one below and right `here` alone */

typedef struct {
    float above_left, above, left, here;
} gradients;

typedef struct {
    float *next;
    int stride;
} writer;

ALWAYS_INLINE void write_next(writer *to, float value)
{
    *to->next = value;
    to->next += to->stride;
}

/* Two rows of dx, and the rows of dy that they met. A row outside of dx is written to a place that nobody reads. */
typedef struct {
    writer upper, lower;
    reader above, here;
} row_pair;

ALWAYS_INLINE void shift_gradients(gradients *g, row_pair *rows)
{
    g->above_left = g->above;
    g->left = g->here;
    g->above = read_next(&rows->above);
    g->here = read_next(&rows->here);
}

ALWAYS_INLINE void write_even(row_pair *rows, const gradients *g, const float *k)
{
    write_next(&rows->upper, (g->here * k[0] + g->left * k[2]) + (g->above * k[6] + g->above_left * k[8]));
    write_next(&rows->lower, g->here * k[3] + g->left * k[5]);
}

ALWAYS_INLINE void write_odd(row_pair *rows, const gradients *g, const float *k)
{
    write_next(&rows->upper, g->here * k[1] + g->above * k[7]);
    write_next(&rows->lower, g->here * k[4]);
}

/* Columns 2 q and 2 q + 1, less the padding, at an edge: those that lie in the image. */
ALWAYS_INLINE void backward_input_edge(row_pair *rows, gradients *g, const float *k, const depthwise3x3_shape *s, int q)
{
    const int v = 2 * q - s->pad_w;
    if (q < s->Q) {
        shift_gradients(g, rows);
    } else {
        *g = (gradients){g->above, 0.0f, g->here, 0.0f};
    }
    if (v >= 0 && v < s->W) {
        write_even(rows, g, k);
    }
    if (v + 1 < s->W) {
        write_odd(rows, g, k);
    }
}

ALWAYS_INLINE void backward_input_channel(row_pair rows, const float *w, const depthwise3x3_shape *s)
{
    const int last = (s->W + s->pad_w - 1) / 2, interior = min_int(s->Q, (s->W + s->pad_w) / 2);
    gradients g = {0.0f, 0.0f, 0.0f, 0.0f};
    float k[9];
    UNROLL for (int i = 0; i < 9; i++) {
        k[i] = w[i];
    }
    int q = 0;
    for (; q < s->pad_w; q++) { /* at most once */
        backward_input_edge(&rows, &g, k, s, q);
    }
    for (; q < interior; q++) {
        shift_gradients(&g, &rows);
        write_even(&rows, &g, k);
        write_odd(&rows, &g, k);
    }
    for (; q <= last; q++) {
        backward_input_edge(&rows, &g, k, s, q);
    }
}

/* Rows 2 p and 2 p + 1, less the padding, of dx. */
NOINLINE void backward_input_rows(float *dx, const float *dy, const float *w, const depthwise3x3_shape *s, int p)
{
    float discarded;
    const int h = 2 * p - s->pad_h, has_upper = h >= 0 && h < s->H, has_lower = h + 1 < s->H;
    const image_row above = row_at(dy, p - 1, s->P, s->Q, s->C), here = row_at(dy, p, s->P, s->Q, s->C);
    for (int c = 0; c < s->C; c++) {
        row_pair rows = {
            {&discarded, 0}, {&discarded, 0}, channel_of(&above, c), channel_of(&here, c),
        };
        if (has_upper) {
            rows.upper = (writer){dx + h * s->W * s->C + c, s->C};
        }
        if (has_lower) {
            rows.lower = (writer){dx + (h + 1) * s->W * s->C + c, s->C};
        }
        backward_input_channel(rows, w + 9 * c, s);
    }
}

/* At stride 1 it is the convolution of the gradients with the flipped filter. */
void depthwise3x3_backward_input(float *restrict dx, const float *dy, const float *w, const depthwise3x3_shape *s)
{
    if (s->stride == 1) {
        const plane each = {s->P, s->Q, s->H, s->W, s->C, 2 - s->pad_h, 2 - s->pad_w, 1};
        filter_images(1, dx, dy, w, &each, s->B);
        return;
    }
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p <= (s->H + s->pad_h - 1) / 2; p++) {
            backward_input_rows(dx, dy, w, s, p);
        }
        dx += s->H * s->W * s->C;
        dy += s->P * s->Q * s->C;
    }
}
