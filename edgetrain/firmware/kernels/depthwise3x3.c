/* Two rows of results at a time, channel by channel. What some columns of the image hold moves along in registers:
 *
 *     . a b c d . .      rows of the image: 4 for two rows of results at stride 1, 5 at stride 2
 *     . a b c d . .      stride 1: two columns of results, then a ← c, b ← d, and two columns are loaded
 *     . a b c d . .      stride 2: one column of results, then a ← c, and two columns are loaded
 *     . a b c d . .
 *
 * Outside of the image are zeros: a row there is read as one zero over and over. */
#include "depthwise3x3.h"

#include <stddef.h>

#include "sums.h"

enum { MOST_ROWS = 5, MOST_COLUMNS = 4 };

/* The image that is read, and the one that is made. */
typedef struct {
    int H, W, P, Q, C;
    int pad_h, pad_w;
    int turned; /* the filters, by 180 degrees */
} plane;

static const float ZERO = 0.0f;

/* A row of an image: its first number, and how far it is to the next column and to the next channel. */
typedef struct {
    const float *first;
    int column, channel;
} source;

typedef struct {
    source of[MOST_ROWS];
} sources;

static inline source row_of(const float *x, int h, int H, int W, int C)
{
    if (h < 0 || h >= H) {
        return (source){&ZERO, 0, 0};
    }
    return (source){x + h * W * C, C, 1};
}

/* The rows that rows p and p + 1 of the results are made from. */
static sources rows_of(const float *x, const plane *s, int stride, int p)
{
    sources rows;
    for (int r = 0; r < MOST_ROWS; r++) {
        rows.of[r] = row_of(x, p * stride - s->pad_h + r, s->H, s->W, s->C);
    }
    return rows;
}

/* Numbers of one channel of a row, one after the other. */
typedef struct {
    const float *next;
    int step;
} reader;

FOR_EACH_CALL reader channel_of(const source *row, int c)
{
    return (reader){row->first + c * row->channel, row->column};
}

FOR_EACH_CALL float take(reader *row)
{
    const float value = *row->next;
    row->next += row->step;
    return value;
}

typedef struct {
    reader row[MOST_ROWS];
    float at[MOST_ROWS][MOST_COLUMNS];
} window;

/* Which rows of the window are there: [TOP, END). Known when the program is built, as the stride is. */
FOR_EACH_CALL void load_column_if(const int TOP, const int END, window *x, int column, int there)
{
    if (there) {
        UNROLLED for (int r = TOP; r < END; r++) {
            x->at[r][column] = take(&x->row[r]);
        }
    } else {
        UNROLLED for (int r = TOP; r < END; r++) {
            x->at[r][column] = 0.0f;
        }
    }
}

/* ALIKE: no row lies outside of the image. */
FOR_EACH_CALL void open_window(
    const int TOP, const int END, const int ALIKE, window *x, const sources *rows, int c, const plane *s)
{
    UNROLLED for (int r = TOP; r < END; r++) {
        x->row[r] = ALIKE ? (reader){rows->of[r].first + c, s->C} : channel_of(&rows->of[r], c);
    }
}

/* Before the first step: the columns that are not new then. */
FOR_EACH_CALL void start_window(const int STRIDE, const int TOP, const int END, window *x, const plane *s)
{
    UNROLLED for (int column = 0; column < 3 - STRIDE; column++) {
        const int v = column - s->pad_w;
        load_column_if(TOP, END, x, column, v >= 0 && v < s->W);
    }
}

/* New columns for `RESULTS` columns of results, from q on. whole: how many have all they need in the image. */
FOR_EACH_CALL void load_window(
    const int STRIDE, const int TOP, const int END, const int RESULTS, window *x, const plane *s, int q, int whole)
{
    const int inside = q + RESULTS <= whole;
    UNROLLED for (int column = 3 - STRIDE; column < 3 + STRIDE * (RESULTS - 1); column++) {
        load_column_if(TOP, END, x, column, inside || q * STRIDE - s->pad_w + column < s->W);
    }
}

FOR_EACH_CALL void move_window(const int STRIDE, const int TOP, const int END, const int RESULTS, window *x)
{
    UNROLLED for (int r = TOP; r < END; r++) {
        UNROLLED for (int column = 0; column < 3 - STRIDE; column++) {
            x->at[r][column] = x->at[r][column + STRIDE * RESULTS];
        }
    }
}

/* How many columns of results have all they need to their right. */
static inline int columns_before_edge(const plane *s, int stride)
{
    return at_most(s->Q, at_least(0, (s->W + s->pad_w - 2 + stride - 1) / stride));
}

/* ---- forward, and backward to the input at stride 1 */

FOR_EACH_CALL float filtered(const int TOP, const int END, const window *x, int row, int column, const float *k)
{
    float sum = 0.0f;
    UNROLLED for (int r = 0; r < 3; r++) {
        if (row + r >= TOP && row + r < END) {
            const float *const at = x->at[row + r] + column;
            const float part = at[0] * k[3 * r] + at[1] * k[3 * r + 1] + at[2] * k[3 * r + 2];
            sum = row + r == at_least(row, TOP) ? part : sum + part;
        }
    }
    return sum;
}

/* Where the results go; a single row of them is the upper one. */
typedef struct {
    float *upper, *lower;
} results;

FOR_EACH_CALL void filter_column(
    const int STRIDE, const int ROWS, const int TOP, const int END, results *y, const window *x, int column,
    const float *k, const plane *s)
{
    if (ROWS == 2) {
        *y->lower = filtered(TOP, END, x, STRIDE, column, k);
        y->lower += s->C;
    }
    *y->upper = filtered(TOP, END, x, 0, column, k);
    y->upper += s->C;
}

FOR_EACH_CALL void filter_channel(
    const int STRIDE, const int ROWS, const int TOP, const int END, const int ALIKE, results y, const sources *rows,
    const float *k, const plane *s, int c, int whole)
{
    const int RESULTS = STRIDE == 1 ? 2 : 1;
    window x;
    open_window(TOP, END, ALIKE, &x, rows, c, s);
    start_window(STRIDE, TOP, END, &x, s);
    int q = 0;
    for (; q + RESULTS <= s->Q; q += RESULTS) {
        load_window(STRIDE, TOP, END, RESULTS, &x, s, q, whole);
        UNROLLED for (int i = 0; i < RESULTS; i++) {
            filter_column(STRIDE, ROWS, TOP, END, &y, &x, i * STRIDE, k, s);
        }
        move_window(STRIDE, TOP, END, RESULTS, &x);
    }
    if (q < s->Q) {
        load_window(STRIDE, TOP, END, 1, &x, s, q, whole);
        filter_column(STRIDE, ROWS, TOP, END, &y, &x, 0, k, s);
    }
}

FOR_EACH_CALL void filter_rows(
    const int STRIDE, const int ROWS, const int TOP, const int END, const int ALIKE, results y, const sources *rows,
    const float *w, const plane *s)
{
    const int whole = columns_before_edge(s, STRIDE);
    for (int c = 0; c < s->C; c++) {
        float k[9];
        UNROLLED for (int i = 0; i < 9; i++) {
            k[i] = s->turned ? w[8 - i] : w[i];
        }
        filter_channel(STRIDE, ROWS, TOP, END, ALIKE, y, rows, k, s, c, whole);
        y.upper++;
        y.lower++;
        w += 9;
    }
}

/* Where two rows of results lie in the image: which of the rows that they need are outside. Where that is none of these,
 * the upper one is made by itself. */
typedef enum { WITHIN, AT_TOP, AT_BOTTOM, AT_BOTH, SINGLE } position;

static position position_of(const plane *s, int stride, int p)
{
    const int first = p * stride - s->pad_h, end = first + stride + 3;
    if (first < -1 || end > s->H + 1 || p + 1 >= s->P || (stride == 2 && end > s->H)) {
        return SINGLE;
    }
    return first < 0 ? (end > s->H ? AT_BOTH : AT_TOP) : end > s->H ? AT_BOTTOM : WITHIN;
}

/* What is built for each stride and position, for so many rows of results, with these rows of the window,
 * alike or not. */
#define FOR_EACH_POSITION(MAKE) \
    MAKE(1, within, 2, 0, 4, 1) \
    MAKE(1, at_top, 2, 1, 4, 1) \
    MAKE(1, at_bottom, 2, 0, 3, 1) \
    MAKE(1, at_both, 2, 1, 3, 1) \
    MAKE(1, single, 1, 0, 3, 0) \
    MAKE(2, within, 2, 0, 5, 1) \
    MAKE(2, at_top, 2, 1, 5, 1) \
    MAKE(2, single, 1, 0, 3, 0)
/* The functions of a kernel by stride - 1 and position. */
#define BY_POSITION(name) \
    { \
        {name##_1_within, name##_1_at_top, name##_1_at_bottom, name##_1_at_both, name##_1_single}, \
        {name##_2_within, name##_2_at_top, name##_2_single, name##_2_single, name##_2_single}, \
    }

typedef void filter_function(results y, const sources *rows, const float *w, const plane *s);

#define FILTER(stride, where, n_rows, top, end, alike) \
    BY_ITSELF void filter_##stride##_##where(results y, const sources *rows, const float *w, const plane *s) \
    { \
        filter_rows(stride, n_rows, top, end, alike, y, rows, w, s); \
    }
FOR_EACH_POSITION(FILTER)

static void filter_images(int stride, float *y, const float *x, const float *w, const plane *s, int B)
{
    static filter_function *const filter[2][5] = BY_POSITION(filter);
    for (int n = 0; n < B; n++) {
        for (int p = 0; p < s->P;) {
            const position at = position_of(s, stride, p);
            const sources rows = rows_of(x, s, stride, p);
            float *const upper = y + p * s->Q * s->C;
            filter[stride - 1][at]((results){upper, upper + s->Q * s->C}, &rows, w, s);
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

/* The rows of dy that are read. */
typedef struct {
    reader upper, lower;
} two_readers;

FOR_EACH_CALL void add_gradients(
    const int STRIDE, const int ROWS, const int TOP, const int END, float *sum, const window *x, int column,
    two_readers *dy)
{
    const float upper = take(&dy->upper), lower = ROWS == 2 ? take(&dy->lower) : 0.0f;
    UNROLLED for (int r = 0; r < 3; r++) {
        UNROLLED for (int t = 0; t < 3; t++) {
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

/* Adds to sum what one or two rows of dy bring. */
FOR_EACH_CALL void weight_of_rows(
    const int STRIDE, const int ROWS, const int TOP, const int END, float *sum, two_readers *dy, window *x,
    const plane *s, int whole)
{
    const int RESULTS = STRIDE == 1 ? 2 : 1;
    start_window(STRIDE, TOP, END, x, s);
    int q = 0;
    for (; q + RESULTS <= s->Q; q += RESULTS) {
        load_window(STRIDE, TOP, END, RESULTS, x, s, q, whole);
        UNROLLED for (int i = 0; i < RESULTS; i++) {
            add_gradients(STRIDE, ROWS, TOP, END, sum, x, i * STRIDE, dy);
        }
        move_window(STRIDE, TOP, END, RESULTS, x);
    }
    if (q < s->Q) {
        load_window(STRIDE, TOP, END, 1, x, s, q, whole);
        add_gradients(STRIDE, ROWS, TOP, END, sum, x, 0, dy);
    }
}

/* From what was read of two rows to the next two. */
FOR_EACH_CALL void skip_rows(const int STRIDE, const int TOP, const int END, two_readers *dy, window *x, const plane *s)
{
    const int read = at_most(s->W, (s->Q - 1) * STRIDE + 3 - s->pad_w), skipped = (2 * STRIDE * s->W - read) * s->C;
    UNROLLED for (int r = TOP; r < END; r++) {
        x->row[r].next += skipped;
    }
    dy->upper.next += s->Q * s->C;
    dy->lower.next += s->Q * s->C;
}

/* Adds to dw what `pairs` times two rows of dy bring, or a single one. */
FOR_EACH_CALL void weight_of_channel(
    const int STRIDE, const int ROWS, const int TOP, const int END, const int ALIKE, float *dw, const float *dy,
    const sources *rows, const plane *s, int c, int whole, int pairs)
{
    float sum[9];
    UNROLLED for (int i = 0; i < 9; i++) {
        sum[i] = 0.0f;
    }
    two_readers two = {{dy + c, s->C}, {dy + c + s->Q * s->C, s->C}};
    window x;
    open_window(TOP, END, ALIKE, &x, rows, c, s);
    for (;;) {
        weight_of_rows(STRIDE, ROWS, TOP, END, sum, &two, &x, s, whole);
        if (--pairs == 0) {
            break;
        }
        skip_rows(STRIDE, TOP, END, &two, &x, s);
    }
    UNROLLED for (int i = 0; i < 9; i++) {
        dw[i] += sum[i];
    }
}

typedef void weight_function(float *dw, const float *dy, const sources *rows, const plane *s, int pairs);

#define WEIGHT(stride, where, n_rows, top, end, alike) \
    BY_ITSELF void weight_##stride##_##where(float *dw, const float *dy, const sources *rows, const plane *s, int pairs) \
    { \
        const int whole = columns_before_edge(s, stride), times = (end) - (top) == (stride) + 3 ? pairs : 1; \
        for (int c = 0; c < s->C; c++) { \
            weight_of_channel(stride, n_rows, top, end, alike, dw + 9 * c, dy, rows, s, c, whole, times); \
        } \
    }
FOR_EACH_POSITION(WEIGHT)

/* So many pairs of rows of dy from p on are summed at once: not more than 32 products, or one
 * pair of rows, against rounding. */
static int pairs_from(const plane *s, int stride, int p)
{
    int pairs = 1;
    while (position_of(s, stride, p) == WITHIN && position_of(s, stride, p + 2 * pairs) == WITHIN
           && 2 * s->Q * (pairs + 1) <= 32) {
        pairs++;
    }
    return pairs;
}

static void weight_of_image(float *dw, const float *dy, const float *x, const plane *s, int stride)
{
    static weight_function *const weight[2][5] = BY_POSITION(weight);
    for (int p = 0; p < s->P;) {
        const position at = position_of(s, stride, p);
        const sources rows = rows_of(x, s, stride, p);
        const int pairs = pairs_from(s, stride, p);
        weight[stride - 1][at](dw, dy + p * s->Q * s->C, &rows, s, pairs);
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
        weight_of_image(dw, dy, x, &each, s->stride);
        dy += s->P * s->Q * s->C;
        x += s->H * s->W * s->C;
    }
}

/* ---- backward to the input at stride 2
 *
 * Four places of dx, two by two, have met the gradients above and at them:
 *
 *     corner above          the place (2 p, 2 q) of the padded image met all four, by the corners of the filter,
 *     left   here           the one to its right two, the one below two, the one below and right `here` alone */

typedef struct {
    float corner, above, left, here;
} gradients;

typedef struct {
    float *next;
    int step;
} writer;

FOR_EACH_CALL void put_next(writer *to, float value)
{
    *to->next = value;
    to->next += to->step;
}

/* Two rows of dx, and the rows of dy that they have met. A row outside of dx is written to where nobody reads. */
typedef struct {
    writer upper, lower;
    reader above, here;
} two_rows;

FOR_EACH_CALL void take_gradients(gradients *g, two_rows *rows)
{
    g->corner = g->above;
    g->left = g->here;
    g->above = take(&rows->above);
    g->here = take(&rows->here);
}

FOR_EACH_CALL void write_even(two_rows *rows, const gradients *g, const float *k)
{
    put_next(&rows->upper, (g->here * k[0] + g->left * k[2]) + (g->above * k[6] + g->corner * k[8]));
    put_next(&rows->lower, g->here * k[3] + g->left * k[5]);
}

FOR_EACH_CALL void write_odd(two_rows *rows, const gradients *g, const float *k)
{
    put_next(&rows->upper, g->here * k[1] + g->above * k[7]);
    put_next(&rows->lower, g->here * k[4]);
}

/* Places 2 q and 2 q + 1, less the padding, at an edge: those that are in the image. */
FOR_EACH_CALL void spread_at_edge(two_rows *rows, gradients *g, const float *k, const depthwise3x3_shape *s, int q)
{
    const int v = 2 * q - s->pad_w;
    if (q < s->Q) {
        take_gradients(g, rows);
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

FOR_EACH_CALL void spread_channel(two_rows rows, const float *w, const depthwise3x3_shape *s)
{
    const int last = (s->W + s->pad_w - 1) / 2, whole = at_most(s->Q, (s->W + s->pad_w) / 2);
    gradients g = {0.0f, 0.0f, 0.0f, 0.0f};
    float k[9];
    UNROLLED for (int i = 0; i < 9; i++) {
        k[i] = w[i];
    }
    int q = 0;
    for (; q < s->pad_w; q++) { /* at most once */
        spread_at_edge(&rows, &g, k, s, q);
    }
    for (; q < whole; q++) {
        take_gradients(&g, &rows);
        write_even(&rows, &g, k);
        write_odd(&rows, &g, k);
    }
    for (; q <= last; q++) {
        spread_at_edge(&rows, &g, k, s, q);
    }
}

/* Rows 2 p and 2 p + 1, less the padding, of dx. */
BY_ITSELF void spread_two_rows(float *dx, const float *dy, const float *w, const depthwise3x3_shape *s, int p)
{
    float nowhere;
    const int h = 2 * p - s->pad_h, has_upper = h >= 0 && h < s->H, has_lower = h + 1 < s->H;
    const source above = row_of(dy, p - 1, s->P, s->Q, s->C), here = row_of(dy, p, s->P, s->Q, s->C);
    for (int c = 0; c < s->C; c++) {
        two_rows rows = {
            {&nowhere, 0}, {&nowhere, 0}, channel_of(&above, c), channel_of(&here, c),
        };
        if (has_upper) {
            rows.upper = (writer){dx + h * s->W * s->C + c, s->C};
        }
        if (has_lower) {
            rows.lower = (writer){dx + (h + 1) * s->W * s->C + c, s->C};
        }
        spread_channel(rows, w + 9 * c, s);
    }
}

/* At stride 1 it is the convolution of the gradients with the filter turned by 180 degrees. */
void depthwise3x3_backward_input(float *restrict dx, const float *dy, const float *w, const depthwise3x3_shape *s)
{
    if (s->stride == 1) {
        const plane each = {s->P, s->Q, s->H, s->W, s->C, 2 - s->pad_h, 2 - s->pad_w, 1};
        filter_images(1, dx, dy, w, &each, s->B);
        return;
    }
    for (int n = 0; n < s->B; n++) {
        for (int p = 0; p <= (s->H + s->pad_h - 1) / 2; p++) {
            spread_two_rows(dx, dy, w, s, p);
        }
        dx += s->H * s->W * s->C;
        dy += s->P * s->Q * s->C;
    }
}
