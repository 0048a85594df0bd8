/* A row of results of a channel at a time, from two or three rows of the input. Columns are loaded once, in order, and
 * added to the partial sums of all results that they belong to, which stay in registers; a complete sum is stored:
 *
 *     columns  a b c d …        three taps, stride 1: c completes a result (tap 2), is added to the next one (tap 1)
 *     results  0 1 2 …          and starts one (tap 0). Sums that are partial after the last column end in the padding
 *
 * At stride 2 every second column completes a result; backward, each column completes two. Backward to the weights, the
 * sums of all taps stay in registers, and a window of gradients. */
#include "depthwise.h"

#include "kernel.h"

enum { MAX_ROWS = 3, MAX_TAPS = 5 };

/* Forward and backward at stride 1; forward at stride 2; backward at stride 2. */
typedef enum { STRIDE_1, STRIDE_2, TRANSPOSED_2 } pass;

/* Input rows and filter rows of one row of results, with their strides. */
typedef struct {
    const float *x, *w;
    int x_row, x_column, x_channel;
    int w_row, w_tap, w_channel;
    int single;  /* there is one row; the second one is multiplied by zeros */
    int columns; /* of the input */
    int first;   /* the result that the first column completes; negative where that lies before the row */
    int odd;     /* STRIDE_2: the first column is the second one of its pair */
} input_rows;

typedef struct {
    float *y;
    const float *bias; /* of each channel, or NULL */
    int results, y_column, y_channel, channels;
} result_row;

/* Results are stored in order; those before the first and after the last of the row are dropped. */
typedef struct {
    float *next;
    int at, results, stride;
    float bias;
} writer;

static inline float bias_of(const result_row *to, int c)
{
    return to->bias == NULL ? 0.0f : to->bias[c * to->y_channel];
}

ALWAYS_INLINE void write_next(const int OVERWRITE, writer *y, float value)
{
    if ((unsigned)y->at < (unsigned)y->results) {
        *y->next = value + (OVERWRITE ? y->bias : *y->next);
        y->next += y->stride;
    }
    y->at++;
}

/* One channel of the input rows: its filter rows, and the column that was loaded last. */
typedef struct {
    const float *next[MAX_ROWS];
    float k[MAX_ROWS][MAX_TAPS], value[MAX_ROWS];
} reader;

ALWAYS_INLINE reader begin_channel(
    const int ROWS, const int TAPS, const input_rows *r, const float *first, const float *w, int w_tap)
{
    reader x;
    UNROLL for (int row = 0; row < ROWS; row++) {
        x.next[row] = first + row * r->x_row;
        const float *k = w + row * r->w_row;
        UNROLL for (int t = 0; t < TAPS; t++) {
            x.k[row][t] = *k;
            k += w_tap;
        }
    }
    if (ROWS == 2 && r->single) {
        UNROLL for (int t = 0; t < TAPS; t++) {
            x.k[1][t] = 0.0f;
        }
    }
    return x;
}

ALWAYS_INLINE void load_column(const int ROWS, reader *x, const input_rows *r)
{
    UNROLL for (int row = 0; row < ROWS; row++) {
        x->value[row] = *x->next[row];
        x->next[row] += r->x_column;
    }
}

/* `sum` and the products of the loaded column with a tap. */
ALWAYS_INLINE float add_tap(const int ROWS, float sum, const reader *x, int tap)
{
    UNROLL for (int row = 0; row < ROWS; row++) {
        sum += x->value[row] * x->k[row][tap];
    }
    return sum;
}

ALWAYS_INLINE float start_tap(const int ROWS, const reader *x, int tap)
{
    float sum = x->value[0] * x->k[0][tap];
    UNROLL for (int row = 1; row < ROWS; row++) {
        sum += x->value[row] * x->k[row][tap];
    }
    return sum;
}

ALWAYS_INLINE void row_stride_1(
    const int OVERWRITE, const int ROWS, const int TAPS, writer *y, const float *first, const float *w,
    const input_rows *r)
{
    reader x = begin_channel(ROWS, TAPS, r, first, w, r->w_tap);
    float partial[MAX_TAPS] = {0.0f}; /* sums, the oldest first */
    for (int left = r->columns; left > 0; left--) {
        load_column(ROWS, &x, r);
        write_next(OVERWRITE, y, add_tap(ROWS, partial[0], &x, TAPS - 1));
        UNROLL for (int i = 0; i < TAPS - 2; i++) {
            partial[i] = add_tap(ROWS, partial[i + 1], &x, TAPS - 2 - i);
        }
        partial[TAPS - 2] = start_tap(ROWS, &x, 0);
    }
    UNROLL for (int i = 0; i < TAPS - 1; i++) {
        write_next(OVERWRITE, y, partial[i]);
    }
}

/* Pairs of columns: the first of them meets even taps and starts a result; the second meets odd taps. */
ALWAYS_INLINE void add_first(const int ROWS, const int PARTIAL, float *partial, const reader *x)
{
    UNROLL for (int i = 0; i < PARTIAL - 1; i++) {
        partial[i] = add_tap(ROWS, partial[i + 1], x, 2 * (PARTIAL - 1 - i));
    }
    partial[PARTIAL - 1] = start_tap(ROWS, x, 0);
}

ALWAYS_INLINE void add_second(const int ROWS, const int TAPS, const int PARTIAL, float *partial, const reader *x)
{
    UNROLL for (int i = 0; i < PARTIAL; i++) {
        const int t = 2 * (PARTIAL - 1 - i) + 1;
        partial[i] = t < TAPS ? add_tap(ROWS, partial[i], x, t) : partial[i];
    }
}

ALWAYS_INLINE void row_stride_2(
    const int OVERWRITE, const int ROWS, const int TAPS, writer *y, const float *first, const float *w,
    const input_rows *r)
{
    const int PARTIAL = (TAPS + 1) / 2;
    reader x = begin_channel(ROWS, TAPS, r, first, w, 1);
    float partial[MAX_TAPS] = {0.0f};
    int left = r->columns;
    if (r->odd && left > 0) {
        load_column(ROWS, &x, r);
        add_second(ROWS, TAPS, PARTIAL, partial, &x);
        write_next(OVERWRITE, y, partial[0]);
        left--;
    }
    for (; left > 1; left -= 2) {
        load_column(ROWS, &x, r);
        add_first(ROWS, PARTIAL, partial, &x);
        load_column(ROWS, &x, r);
        add_second(ROWS, TAPS, PARTIAL, partial, &x);
        write_next(OVERWRITE, y, partial[0]);
    }
    if (left > 0) {
        load_column(ROWS, &x, r);
        add_first(ROWS, PARTIAL, partial, &x);
        write_next(OVERWRITE, y, partial[0]);
    }
    UNROLL for (int i = 1; i < PARTIAL; i++) {
        write_next(OVERWRITE, y, partial[i]);
    }
}

ALWAYS_INLINE void row_transposed_2(
    const int OVERWRITE, const int ROWS, const int TAPS, writer *y, const float *first, const float *w,
    const input_rows *r)
{
    reader x = begin_channel(ROWS, TAPS, r, first, w, 1);
    float partial[MAX_TAPS] = {0.0f};
    for (int left = r->columns; left > 0; left--) {
        load_column(ROWS, &x, r);
        write_next(OVERWRITE, y, add_tap(ROWS, partial[0], &x, 0));
        write_next(OVERWRITE, y, add_tap(ROWS, partial[1], &x, 1));
        UNROLL for (int i = 0; i < TAPS - 2; i++) {
            partial[i] = i + 2 < TAPS - 2 ? add_tap(ROWS, partial[i + 2], &x, i + 2) : start_tap(ROWS, &x, i + 2);
        }
    }
    UNROLL for (int i = 0; i < TAPS - 2; i++) {
        write_next(OVERWRITE, y, partial[i]);
    }
}

#define ROW(pass, set, rows, taps) \
    NOINLINE void pass##_##set##_##rows##_##taps(const result_row *to, const input_rows *r) \
    { \
        const float *x = r->x, *w = r->w; \
        float *first = to->y + max_int(r->first, 0) * to->y_column; \
        for (int c = 0; c < to->channels; c++) { \
            writer y = {first, r->first, to->results, to->y_column, bias_of(to, c)}; \
            pass(set, rows, taps, &y, x, w, r); \
            x += r->x_channel; \
            w += r->w_channel; \
            first += to->y_channel; \
        } \
    }
/* By OVERWRITE, rows and taps. The taps that overwrite a row of results, its first, are 3 or 5. */
#define DEFINE_ROWS(pass) \
    ROW(pass, 1, 2, 3) ROW(pass, 1, 2, 5) ROW(pass, 1, 3, 3) ROW(pass, 1, 3, 5) \
    ROW(pass, 0, 2, 2) ROW(pass, 0, 2, 3) ROW(pass, 0, 2, 5) ROW(pass, 0, 3, 2) ROW(pass, 0, 3, 3) ROW(pass, 0, 3, 5)
#define TABLE_OF(pass) \
    { \
        {{pass##_0_2_2, pass##_0_2_3, pass##_0_2_5}, {pass##_0_3_2, pass##_0_3_3, pass##_0_3_5}}, \
        {{NULL, pass##_1_2_3, pass##_1_2_5}, {NULL, pass##_1_3_3, pass##_1_3_5}}, \
    }
DEFINE_ROWS(row_stride_1)
DEFINE_ROWS(row_stride_2)
DEFINE_ROWS(row_transposed_2)

typedef void row_function(const result_row *to, const input_rows *r);
typedef row_function *const row_functions[2][2][3];

static row_functions STRIDE_1_ROWS = TABLE_OF(row_stride_1), STRIDE_2_ROWS = TABLE_OF(row_stride_2);
static row_functions TRANSPOSED_2_ROWS = TABLE_OF(row_transposed_2);

/* ---- which rows and columns meet */

/* A convolution from its input, H x W, to its results, P x Q. Forward: from x to y; backward: from dy to dx. */
typedef struct {
    pass kind;
    int backward;
    int H, W, P, Q;
    int x_pixel, y_pixel, x_channel, y_channel; /* strides */
    int channels, w_channel;
    const conv2d_shape *s;
    row_functions *rows;
} geometry;

/* The filter rows and input rows that meet in a row of results: the first of each, and the steps between them. */
typedef struct {
    int count, r, r_step, h, h_step;
} met_rows;

/* The input row that filter row r meets in a row of results, or -1. */
static int input_row(const geometry *conv, int row, int r)
{
    const conv2d_shape *const s = conv->s;
    const int h = conv->backward ? row + s->pad_h - r * s->dilation_h
                                 : row * s->stride_h - s->pad_h + r * s->dilation_h;
    if (h < 0 || (conv->backward && h % s->stride_h != 0)) {
        return -1;
    }
    const int pixel = conv->backward ? h / s->stride_h : h;
    return pixel < conv->H ? pixel : -1;
}

static met_rows rows_met(const geometry *conv, int row)
{
    met_rows met = {0, 0, 1, 0, 0};
    for (int r = 0; r < conv->s->R; r++) {
        const int h = input_row(conv, row, r);
        if (h >= 0 && met.count == 0) {
            met = (met_rows){1, r, 1, h, 0};
        } else if (h >= 0) {
            met.r_step = (r - met.r) / met.count;
            met.h_step = (h - met.h) / met.count;
            met.count++;
        }
    }
    return met;
}

/* How many of the taps (2, 3 or 5) and of the filter rows (2 or 3) that are left are multiplied at once. */
static int next_taps(int left)
{
    return left == 3 || left == 6 ? 3 : left >= 5 ? 5 : 2;
}

static int next_rows(int left)
{
    return left == 2 || left == 4 ? 2 : min_int(left, 3);
}

/* Every `dilation`-th input column, from `phase` on, meets every `dilation`-th result, from `start` on. */
typedef struct {
    int start, results;
} phase_results;

/* Sets how taps [tap, tap + taps) read the columns of a phase; returns the results that these belong to. */
static phase_results set_columns(const geometry *conv, input_rows *r, int phase, int tap, int taps)
{
    const conv2d_shape *const s = conv->s;
    const int d = s->dilation_w;
    int skipped = 0, start = 0;
    if (conv->kind == STRIDE_2) {
        skipped = max_int(tap - s->pad_w, 0);
        const int u = s->pad_w - tap + skipped;
        r->odd = u % 2;
        r->first = u / 2 - ((taps + 1) / 2 - 1);
    } else if (conv->kind == TRANSPOSED_2) {
        r->first = tap - s->pad_w;
    } else {
        const int at = conv->backward ? phase + tap * d - s->pad_w : phase + s->pad_w - (tap + taps - 1) * d;
        start = (at % d + d) % d;
        r->first = (at - start) / d;
    }
    r->columns = max_int(0, (conv->W - phase - skipped + d - 1) / d);
    r->x += (phase + skipped) * conv->x_pixel;
    return (phase_results){start, max_int(0, (conv->Q - start + d - 1) / d)};
}

/* Whether there are results that no column belongs to. */
static int misses_results(const geometry *conv, const input_rows *r, const result_row *to, int taps)
{
    const int met = conv->kind == STRIDE_1       ? r->columns + taps - 1
                    : conv->kind == TRANSPOSED_2 ? 2 * r->columns + taps - 2
                                                 : (r->odd + r->columns + 1) / 2 + (taps + 1) / 2 - 1;
    return r->first > 0 || r->first + met < to->results || r->columns == 0;
}

static void set_to_bias(const result_row *to)
{
    for (int i = 0; i < to->results; i++) {
        for (int c = 0; c < to->channels; c++) {
            to->y[i * to->y_column + c * to->y_channel] = bias_of(to, c);
        }
    }
}

/* The products of up to three filter rows, all taps. overwrite: the results have no values yet. */
static void convolve_rows(
    const geometry *conv, const input_rows *rows, const result_row *row, int n_rows, int overwrite)
{
    for (int tap = 0, taps; tap < conv->s->S; tap += taps) {
        taps = next_taps(conv->s->S - tap);
        for (int phase = 0; phase < conv->s->dilation_w; phase++) {
            input_rows r = *rows;
            result_row to = *row;
            const phase_results results = set_columns(conv, &r, phase, tap, taps);
            r.w += conv->backward && conv->kind == STRIDE_1 ? tap + taps - 1 : tap;
            to.y += results.start * conv->y_pixel;
            to.results = results.results;
            if (overwrite && tap == 0 && misses_results(conv, &r, &to, taps)) {
                set_to_bias(&to);
            }
            (*conv->rows)[overwrite && tap == 0][n_rows == 3][taps == 5 ? 2 : taps - 2](&to, &r);
        }
    }
}

/* Row h of the results. */
static void convolve_row(
    const geometry *conv, float *y, const float *x, const float *w, const float *b, int h, int overwrite)
{
    const conv2d_shape *const s = conv->s;
    const met_rows m = rows_met(conv, h);
    const result_row to = {
        y + h * conv->Q * conv->y_pixel, b, conv->Q, s->dilation_w * conv->y_pixel, conv->y_channel, conv->channels,
    };
    const int x_row = conv->W * conv->x_pixel;
    for (int at = 0, n; at < m.count; at += n) {
        n = next_rows(m.count - at);
        const input_rows r = {
            .x = x + (m.h + at * m.h_step) * x_row, .w = w + (m.r + at * m.r_step) * s->S,
            .x_row = n == 1 ? 0 : m.h_step * x_row, .x_column = s->dilation_w * conv->x_pixel,
            .x_channel = conv->x_channel, .w_row = n == 1 ? 0 : m.r_step * s->S, .w_tap = conv->backward ? -1 : 1,
            .w_channel = conv->w_channel, .single = n == 1,
        };
        convolve_rows(conv, &r, &to, max_int(n, 2), overwrite && at == 0);
    }
    if (m.count == 0 && overwrite) {
        set_to_bias(&(result_row){to.y, b, conv->Q, conv->y_pixel, to.y_channel, to.channels});
    }
}

void depthwise_forward(float *restrict y, const float *x, const float *w, const float *b, const conv2d_shape *s)
{
    const int multiplier = s->K / s->C, taps = s->R * s->S;
    const geometry conv = {
        .kind = s->stride_w == 2 ? STRIDE_2 : STRIDE_1, .backward = 0, .H = s->H, .W = s->W, .P = s->P, .Q = s->Q,
        .x_pixel = s->C, .y_pixel = s->K, .x_channel = 1, .y_channel = multiplier, .channels = s->C,
        .w_channel = multiplier * taps, .s = s, .rows = s->stride_w == 2 ? &STRIDE_2_ROWS : &STRIDE_1_ROWS,
    };
    for (int n = 0; n < s->B * multiplier; n++) {
        const int image = n / multiplier, filter = n % multiplier;
        for (int h = 0; h < s->P; h++) {
            convolve_row(
                &conv, y + image * s->P * s->Q * s->K + filter, x + image * s->H * s->W * s->C, w + filter * taps,
                b == NULL ? NULL : b + filter, h, 1);
        }
    }
}

void depthwise_backward_input(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s)
{
    const int multiplier = s->K / s->C, taps = s->R * s->S;
    const geometry conv = {
        .kind = s->stride_w == 2 ? TRANSPOSED_2 : STRIDE_1, .backward = 1, .H = s->P, .W = s->Q, .P = s->H, .Q = s->W,
        .x_pixel = s->K, .y_pixel = s->C, .x_channel = multiplier, .y_channel = 1, .channels = s->C,
        .w_channel = multiplier * taps, .s = s, .rows = s->stride_w == 2 ? &TRANSPOSED_2_ROWS : &STRIDE_1_ROWS,
    };
    for (int n = 0; n < s->B * multiplier; n++) {
        const int image = n / multiplier, filter = n % multiplier;
        for (int h = 0; h < s->H; h++) {
            convolve_row(
                &conv, dx + image * s->H * s->W * s->C, dy + image * s->P * s->Q * s->K + filter, w + filter * taps,
                NULL, h, filter == 0);
        }
    }
}

/* ---- backward to the weights */

/* Rows of dy, with the strides from one to the next in dy and in x. */
typedef struct {
    const float *dy;
    float *dw;
    int results, y_column, y_channel, channels;
    int rows, y_row, x_row;
} gradient_rows;

/* The last gradients of a row, the newest first; outside of the image they are zero. */
typedef struct {
    const float *next;
    int at;
    float value[MAX_TAPS];
} gradient_window;

ALWAYS_INLINE float gradient_at(const gradient_rows *g, const float *dy, int at)
{
    return (unsigned)at < (unsigned)g->results ? dy[at * g->y_column] : 0.0f;
}

/* With the first column, gradient `first` enters the window of SIZE gradients. */
ALWAYS_INLINE gradient_window begin_gradients(const int SIZE, const gradient_rows *g, const float *dy, int first)
{
    gradient_window y = {dy + max_int(first, 0) * g->y_column, first, {0.0f}};
    UNROLL for (int i = 0; i < SIZE - 1; i++) {
        y.value[i] = gradient_at(g, dy, first - 1 - i);
    }
    return y;
}

ALWAYS_INLINE void next_gradient(const int SIZE, gradient_window *y, const gradient_rows *g)
{
    UNROLL for (int i = SIZE - 1; i > 0; i--) {
        y->value[i] = y->value[i - 1];
    }
    y->value[0] = 0.0f;
    if ((unsigned)y->at < (unsigned)g->results) {
        y->value[0] = *y->next;
        y->next += g->y_column;
    }
    y->at++;
}

/* Adds the products of the loaded column with the gradients, to the taps PHASE, PHASE + STEP, … */
ALWAYS_INLINE void add_products(
    const int ROWS, const int TAPS, const int PHASE, const int STEP, float sum[MAX_ROWS][MAX_TAPS], const reader *x,
    const gradient_window *y)
{
    UNROLL for (int row = 0; row < ROWS; row++) {
        UNROLL for (int t = PHASE; t < TAPS; t += STEP) {
            sum[row][t] += x->value[row] * y->value[t / STEP];
        }
    }
}

ALWAYS_INLINE void weight_stride_1(
    const int ROWS, const int TAPS, float sum[MAX_ROWS][MAX_TAPS], gradient_window *y, reader *x,
    const gradient_rows *g, const input_rows *r)
{
    for (int left = r->columns; left > 0; left--) {
        next_gradient(TAPS, y, g);
        load_column(ROWS, x, r);
        add_products(ROWS, TAPS, 0, 1, sum, x, y);
    }
}

ALWAYS_INLINE void weight_stride_2(
    const int ROWS, const int TAPS, float sum[MAX_ROWS][MAX_TAPS], gradient_window *y, reader *x,
    const gradient_rows *g, const input_rows *r)
{
    const int SIZE = (TAPS + 1) / 2;
    int left = r->columns;
    if (r->odd && left > 0) {
        next_gradient(SIZE, y, g);
        load_column(ROWS, x, r);
        add_products(ROWS, TAPS, 1, 2, sum, x, y);
        left--;
    }
    for (; left > 1; left -= 2) {
        next_gradient(SIZE, y, g);
        load_column(ROWS, x, r);
        add_products(ROWS, TAPS, 0, 2, sum, x, y);
        load_column(ROWS, x, r);
        add_products(ROWS, TAPS, 1, 2, sum, x, y);
    }
    if (left > 0) {
        next_gradient(SIZE, y, g);
        load_column(ROWS, x, r);
        add_products(ROWS, TAPS, 0, 2, sum, x, y);
    }
}

#define WEIGHT(pass, size, rows_, taps) \
    NOINLINE void pass##_##rows_##_##taps(const gradient_rows *g, const input_rows *r) \
    { \
        for (int c = 0; c < g->channels; c++) { \
            float sum[MAX_ROWS][MAX_TAPS] = {{0.0f}}; \
            const float *dy = g->dy + c * g->y_channel, *first = r->x + c * r->x_channel; \
            for (int left = g->rows; left > 0; left--) { \
                gradient_window y = begin_gradients(size, g, dy, r->first + (size) - 1); \
                reader x; \
                UNROLL for (int row = 0; row < rows_; row++) { \
                    x.next[row] = first + row * r->x_row; \
                } \
                pass(rows_, taps, sum, &y, &x, g, r); \
                dy += g->y_row; \
                first += g->x_row; \
            } \
            float *dw = g->dw + c * r->w_channel; \
            UNROLL for (int row = 0; row < rows_; row++) { \
                if (row != 1 || !r->single) { \
                    UNROLL for (int t = 0; t < (taps); t++) { \
                        dw[t] += sum[row][t]; \
                    } \
                } \
                dw += r->w_row; \
            } \
        } \
    }
#define WEIGHTS(rows) \
    WEIGHT(weight_stride_1, 2, rows, 2) WEIGHT(weight_stride_1, 3, rows, 3) WEIGHT(weight_stride_1, 5, rows, 5) \
    WEIGHT(weight_stride_2, 1, rows, 2) WEIGHT(weight_stride_2, 2, rows, 3) WEIGHT(weight_stride_2, 3, rows, 5)
WEIGHTS(2)
WEIGHTS(3)

/* How many rows of dy, from `row` on, meet the same filter rows and are one sum: at most 64 products, against rounding,
 * or one row. */
static int rows_of_sum(const geometry *conv, int row)
{
    const met_rows m = rows_met(conv, row);
    int rows = 1;
    for (; row + rows < conv->P && conv->Q * (rows + 1) <= 64; rows++) {
        const met_rows next = rows_met(conv, row + rows);
        if (next.count != m.count || next.r != m.r) {
            break;
        }
    }
    return rows;
}

static void accumulate_rows(const geometry *conv, const gradient_rows *rows, const input_rows *from, int n_rows)
{
    typedef void weight_function(const gradient_rows *g, const input_rows *r);
    static weight_function *const weights[2][2][3] = {
        {
            {weight_stride_1_2_2, weight_stride_1_2_3, weight_stride_1_2_5},
            {weight_stride_1_3_2, weight_stride_1_3_3, weight_stride_1_3_5},
        },
        {
            {weight_stride_2_2_2, weight_stride_2_2_3, weight_stride_2_2_5},
            {weight_stride_2_3_2, weight_stride_2_3_3, weight_stride_2_3_5},
        },
    };
    for (int tap = 0, taps; tap < conv->s->S; tap += taps) {
        taps = next_taps(conv->s->S - tap);
        for (int phase = 0; phase < conv->s->dilation_w; phase++) {
            input_rows r = *from;
            gradient_rows g = *rows;
            const phase_results results = set_columns(conv, &r, phase, tap, taps);
            g.dw += tap;
            g.dy += results.start * conv->y_pixel;
            g.results = results.results;
            weights[conv->kind == STRIDE_2][n_rows == 3][taps == 5 ? 2 : taps - 2](&g, &r);
        }
    }
}

void depthwise_backward_weight(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s)
{
    const int multiplier = s->K / s->C, taps = s->R * s->S, x_row = s->W * s->C, y_row = s->Q * s->K;
    const geometry conv = {
        .kind = s->stride_w == 2 ? STRIDE_2 : STRIDE_1, .backward = 0, .H = s->H, .W = s->W, .P = s->P, .Q = s->Q,
        .x_pixel = s->C, .y_pixel = s->K, .x_channel = 1, .y_channel = multiplier, .channels = s->C,
        .w_channel = multiplier * taps, .s = s, .rows = NULL,
    };
    fill(dw, NULL, s->K, taps);
    for (int n = 0; n < s->B * multiplier; n++) {
        const int image = n / multiplier, filter = n % multiplier;
        for (int h = 0, rows; h < s->P; h += rows) {
            rows = rows_of_sum(&conv, h);
            const met_rows m = rows_met(&conv, h);
            for (int at = 0, n_rows; at < m.count; at += n_rows) {
                n_rows = next_rows(m.count - at);
                const input_rows r = {
                    .x = x + image * s->H * x_row + (m.h + at * m.h_step) * x_row,
                    .x_row = n_rows == 1 ? 0 : m.h_step * x_row, .single = n_rows == 1,
                    .x_column = s->dilation_w * s->C, .x_channel = 1, .w_row = s->S, .w_channel = multiplier * taps,
                };
                const gradient_rows g = {
                    .dy = dy + (image * s->P + h) * y_row + filter, .dw = dw + filter * taps + (m.r + at) * s->S,
                    .y_column = s->dilation_w * s->K, .y_channel = multiplier, .channels = s->C, .rows = rows,
                    .y_row = y_row, .x_row = s->stride_h * x_row,
                };
                accumulate_rows(&conv, &g, &r, n_rows);
            }
        }
    }
}
