/* A row of results of a channel at a time, from two or three rows of what is read. Columns are read once, in order, and
 * each goes to the sums of all results that it belongs to; a sum that is complete leaves:
 *
 *     read     a b c d …        three taps, stride 1: c completes a result (by tap 2), goes to the next one (tap 1)
 *     results  0 1 2 …          and begins one (tap 0). What stays open when no column is left ends at the padding
 *
 * At stride 2 every second column completes a result; backward, each column that is read completes two.
 * Backward to the weights, the last gradients stay in registers instead, and the sums of all taps. */
#include "depthwise.h"

#include "sums.h"

enum { MOST_ROWS = 3, MOST_TAPS = 5 };

/* Forward and backward at stride 1; forward at stride 2; backward at stride 2. */
typedef enum { SAME, DOWN, UP } way;

/* Rows of what is read that go to one row of results, by some taps of rows of the filters: from one to the next. */
typedef struct {
    const float *x, *w;
    int x_row, x_column, x_channel;
    int w_row, w_tap, w_channel;
    int single;  /* there is one row, and the second one is nothing */
    int columns; /* that are read */
    int first;   /* the result that the first column completes, or would if it were there; may be negative */
    int odd;     /* DOWN: the first column is the second one of its pair */
} readings;

typedef struct {
    float *y;
    const float *start; /* what is added to new results, of each channel, or NULL */
    int results, y_column, y_channel, channels;
} writings;

/* Results leave in order. Those that are none, before the first and after the last one, are dropped. */
typedef struct {
    float *next;
    int at, results, step;
    float start;
} leaving;

static inline float start_of(const writings *to, int c)
{
    return to->start == NULL ? 0.0f : to->start[c * to->y_channel];
}

FOR_EACH_CALL void leave(const int SET, leaving *y, float value)
{
    if ((unsigned)y->at < (unsigned)y->results) {
        *y->next = value + (SET ? y->start : *y->next);
        y->next += y->step;
    }
    y->at++;
}

/* What a channel of some rows reads. */
typedef struct {
    const float *next[MOST_ROWS];
    float k[MOST_ROWS][MOST_TAPS], now[MOST_ROWS];
} reading;

FOR_EACH_CALL reading begin_reading(
    const int ROWS, const int TAPS, const readings *r, const float *first, const float *w, int w_tap)
{
    reading x;
    UNROLLED for (int row = 0; row < ROWS; row++) {
        x.next[row] = first + row * r->x_row;
        const float *k = w + row * r->w_row;
        UNROLLED for (int t = 0; t < TAPS; t++) {
            x.k[row][t] = *k;
            k += w_tap;
        }
    }
    if (ROWS == 2 && r->single) {
        UNROLLED for (int t = 0; t < TAPS; t++) {
            x.k[1][t] = 0.0f;
        }
    }
    return x;
}

FOR_EACH_CALL void read_column(const int ROWS, reading *x, const readings *r)
{
    UNROLLED for (int row = 0; row < ROWS; row++) {
        x->now[row] = *x->next[row];
        x->next[row] += r->x_column;
    }
}

/* What the column that was read brings by a tap, and `sum`. */
FOR_EACH_CALL float with_tap(const int ROWS, float sum, const reading *x, int tap)
{
    UNROLLED for (int row = 0; row < ROWS; row++) {
        sum += x->now[row] * x->k[row][tap];
    }
    return sum;
}

FOR_EACH_CALL float only_tap(const int ROWS, const reading *x, int tap)
{
    float sum = x->now[0] * x->k[0][tap];
    UNROLLED for (int row = 1; row < ROWS; row++) {
        sum += x->now[row] * x->k[row][tap];
    }
    return sum;
}

FOR_EACH_CALL void row_same(
    const int SET, const int ROWS, const int TAPS, leaving *y, const float *first, const float *w, const readings *r)
{
    reading x = begin_reading(ROWS, TAPS, r, first, w, r->w_tap);
    float open[MOST_TAPS] = {0.0f}; /* the oldest first */
    for (int left = r->columns; left > 0; left--) {
        read_column(ROWS, &x, r);
        leave(SET, y, with_tap(ROWS, open[0], &x, TAPS - 1));
        UNROLLED for (int i = 0; i < TAPS - 2; i++) {
            open[i] = with_tap(ROWS, open[i + 1], &x, TAPS - 2 - i);
        }
        open[TAPS - 2] = only_tap(ROWS, &x, 0);
    }
    UNROLLED for (int i = 0; i < TAPS - 1; i++) {
        leave(SET, y, open[i]);
    }
}

/* Pairs of columns: the first of them goes to results by even taps, and begins one; the second by odd taps. */
FOR_EACH_CALL void add_first(const int ROWS, const int OPEN, float *open, const reading *x)
{
    UNROLLED for (int i = 0; i < OPEN - 1; i++) {
        open[i] = with_tap(ROWS, open[i + 1], x, 2 * (OPEN - 1 - i));
    }
    open[OPEN - 1] = only_tap(ROWS, x, 0);
}

FOR_EACH_CALL void add_second(const int ROWS, const int TAPS, const int OPEN, float *open, const reading *x)
{
    UNROLLED for (int i = 0; i < OPEN; i++) {
        const int t = 2 * (OPEN - 1 - i) + 1;
        open[i] = t < TAPS ? with_tap(ROWS, open[i], x, t) : open[i];
    }
}

FOR_EACH_CALL void row_down(
    const int SET, const int ROWS, const int TAPS, leaving *y, const float *first, const float *w, const readings *r)
{
    const int OPEN = (TAPS + 1) / 2;
    reading x = begin_reading(ROWS, TAPS, r, first, w, 1);
    float open[MOST_TAPS] = {0.0f};
    int left = r->columns;
    if (r->odd && left > 0) {
        read_column(ROWS, &x, r);
        add_second(ROWS, TAPS, OPEN, open, &x);
        leave(SET, y, open[0]);
        left--;
    }
    for (; left > 1; left -= 2) {
        read_column(ROWS, &x, r);
        add_first(ROWS, OPEN, open, &x);
        read_column(ROWS, &x, r);
        add_second(ROWS, TAPS, OPEN, open, &x);
        leave(SET, y, open[0]);
    }
    if (left > 0) {
        read_column(ROWS, &x, r);
        add_first(ROWS, OPEN, open, &x);
        leave(SET, y, open[0]);
    }
    UNROLLED for (int i = 1; i < OPEN; i++) {
        leave(SET, y, open[i]);
    }
}

FOR_EACH_CALL void row_up(
    const int SET, const int ROWS, const int TAPS, leaving *y, const float *first, const float *w, const readings *r)
{
    reading x = begin_reading(ROWS, TAPS, r, first, w, 1);
    float open[MOST_TAPS] = {0.0f};
    for (int left = r->columns; left > 0; left--) {
        read_column(ROWS, &x, r);
        leave(SET, y, with_tap(ROWS, open[0], &x, 0));
        leave(SET, y, with_tap(ROWS, open[1], &x, 1));
        UNROLLED for (int i = 0; i < TAPS - 2; i++) {
            open[i] = i + 2 < TAPS - 2 ? with_tap(ROWS, open[i + 2], &x, i + 2) : only_tap(ROWS, &x, i + 2);
        }
    }
    UNROLLED for (int i = 0; i < TAPS - 2; i++) {
        leave(SET, y, open[i]);
    }
}

#define ROW(go, set, rows, taps) \
    BY_ITSELF void go##_##set##_##rows##_##taps(const writings *to, const readings *r) \
    { \
        const float *x = r->x, *w = r->w; \
        float *first = to->y + at_least(r->first, 0) * to->y_column; \
        for (int c = 0; c < to->channels; c++) { \
            leaving y = {first, r->first, to->results, to->y_column, start_of(to, c)}; \
            go(set, rows, taps, &y, x, w, r); \
            x += r->x_channel; \
            w += r->w_channel; \
            first += to->y_channel; \
        } \
    }
/* By what is done to the results (set, or added to), rows and taps. A row of results is begun by 3 or 5 taps. */
#define ROWS_OF(go) \
    ROW(go, 1, 2, 3) ROW(go, 1, 2, 5) ROW(go, 1, 3, 3) ROW(go, 1, 3, 5) \
    ROW(go, 0, 2, 2) ROW(go, 0, 2, 3) ROW(go, 0, 2, 5) ROW(go, 0, 3, 2) ROW(go, 0, 3, 3) ROW(go, 0, 3, 5)
#define NAMES_OF(go) \
    { \
        {{go##_0_2_2, go##_0_2_3, go##_0_2_5}, {go##_0_3_2, go##_0_3_3, go##_0_3_5}}, \
        {{NULL, go##_1_2_3, go##_1_2_5}, {NULL, go##_1_3_3, go##_1_3_5}}, \
    }
ROWS_OF(row_same)
ROWS_OF(row_down)
ROWS_OF(row_up)

typedef void row_function(const writings *to, const readings *r);
typedef row_function *const row_functions[2][2][3];

static row_functions SAME_ROWS = NAMES_OF(row_same), DOWN_ROWS = NAMES_OF(row_down), UP_ROWS = NAMES_OF(row_up);

/* ---- which rows and columns belong together */

/* A convolution as it reads and writes. Forward: from x to y; back: from dy to dx. */
typedef struct {
    way go;
    int back;
    int H, W, P, Q;       /* of what is read, and of results */
    int x_place, y_place; /* from one place to the next */
    int x_channel, y_channel;
    int channels, w_channel;
    const conv2d_shape *s;
    row_functions *rows;
} plan;

/* The rows that a row of results is made from: rows of the filters, and of what is read, both step by step. */
typedef struct {
    int count, r, r_step, h, h_step;
} met;

/* The row that row r of the filters reads for a row of results, or -1. */
static int row_read(const plan *p, int row, int r)
{
    const conv2d_shape *const s = p->s;
    const int h = p->back ? row + s->pad_h - r * s->dilation_h : row * s->stride_h - s->pad_h + r * s->dilation_h;
    if (h < 0 || (p->back && h % s->stride_h != 0)) {
        return -1;
    }
    const int place = p->back ? h / s->stride_h : h;
    return place < p->H ? place : -1;
}

static met rows_met(const plan *p, int row)
{
    met found = {0, 0, 1, 0, 0};
    for (int r = 0; r < p->s->R; r++) {
        const int h = row_read(p, row, r);
        if (h >= 0 && found.count == 0) {
            found = (met){1, r, 1, h, 0};
        } else if (h >= 0) {
            found.r_step = (r - found.r) / found.count;
            found.h_step = (h - found.h) / found.count;
            found.count++;
        }
    }
    return found;
}

/* Taps, or rows of filters, that are taken at once of those that are left: 2, 3 or 5, and 2 or 3. */
static int next_taps(int left)
{
    return left == 3 || left == 6 ? 3 : left >= 5 ? 5 : 2;
}

static int next_rows(int left)
{
    return left == 2 || left == 4 ? 2 : at_most(left, 3);
}

/* Every `dilation`-th column of what is read, from `phase` on, goes to every `dilation`-th result, from `begun` on. */
typedef struct {
    int begun, results;
} lane;

/* How these columns are read by taps [tap, tap + taps), and which results they go to. */
static lane set_columns(const plan *p, readings *r, int phase, int tap, int taps)
{
    const conv2d_shape *const s = p->s;
    const int d = s->dilation_w;
    int skipped = 0, begun = 0;
    if (p->go == DOWN) {
        skipped = at_least(tap - s->pad_w, 0);
        const int u = s->pad_w - tap + skipped;
        r->odd = u % 2;
        r->first = u / 2 - ((taps + 1) / 2 - 1);
    } else if (p->go == UP) {
        r->first = tap - s->pad_w;
    } else {
        const int at = p->back ? phase + tap * d - s->pad_w : phase + s->pad_w - (tap + taps - 1) * d;
        begun = (at % d + d) % d;
        r->first = (at - begun) / d;
    }
    r->columns = at_least(0, (p->W - phase - skipped + d - 1) / d);
    r->x += (phase + skipped) * p->x_place;
    return (lane){begun, at_least(0, (p->Q - begun + d - 1) / d)};
}

/* Whether there are results that none of the columns goes to. */
static int leaves_out(const plan *p, const readings *r, const writings *to, int taps)
{
    const int left = p->go == SAME ? r->columns + taps - 1
        : p->go == UP              ? 2 * r->columns + taps - 2
                                   : (r->odd + r->columns + 1) / 2 + (taps + 1) / 2 - 1;
    return r->first > 0 || r->first + left < to->results || r->columns == 0;
}

static void set_starts(const writings *to)
{
    for (int i = 0; i < to->results; i++) {
        for (int c = 0; c < to->channels; c++) {
            to->y[i * to->y_column + c * to->y_channel] = start_of(to, c);
        }
    }
}

/* What all taps of up to three rows bring. fresh: the results have no values yet. */
static void make_rows(const plan *p, const readings *rows, const writings *row, int n_rows, int fresh)
{
    for (int tap = 0, taps; tap < p->s->S; tap += taps) {
        taps = next_taps(p->s->S - tap);
        for (int phase = 0; phase < p->s->dilation_w; phase++) {
            readings r = *rows;
            writings to = *row;
            const lane results = set_columns(p, &r, phase, tap, taps);
            r.w += p->back && p->go == SAME ? tap + taps - 1 : tap;
            to.y += results.begun * p->y_place;
            to.results = results.results;
            if (fresh && tap == 0 && leaves_out(p, &r, &to, taps)) {
                set_starts(&to);
            }
            (*p->rows)[fresh && tap == 0][n_rows == 3][taps == 5 ? 2 : taps - 2](&to, &r);
        }
    }
}

/* Row h of the results. b: as `start`. */
static void make_row(
    const plan *p, float *y, const float *x, const float *w, const float *b, int h, int fresh)
{
    const conv2d_shape *const s = p->s;
    const met m = rows_met(p, h);
    const writings to = {
        y + h * p->Q * p->y_place, b, p->Q, s->dilation_w * p->y_place, p->y_channel, p->channels,
    };
    const int x_row = p->W * p->x_place;
    for (int at = 0, n; at < m.count; at += n) {
        n = next_rows(m.count - at);
        const readings r = {
            .x = x + (m.h + at * m.h_step) * x_row, .w = w + (m.r + at * m.r_step) * s->S,
            .x_row = n == 1 ? 0 : m.h_step * x_row, .x_column = s->dilation_w * p->x_place, .x_channel = p->x_channel,
            .w_row = n == 1 ? 0 : m.r_step * s->S, .w_tap = p->back ? -1 : 1, .w_channel = p->w_channel,
            .single = n == 1,
        };
        make_rows(p, &r, &to, at_least(n, 2), fresh && at == 0);
    }
    if (m.count == 0 && fresh) {
        set_starts(&(writings){to.y, b, p->Q, p->y_place, to.y_channel, to.channels});
    }
}

void depthwise_forward(float *restrict y, const float *x, const float *w, const float *b, const conv2d_shape *s)
{
    const int times = s->K / s->C, taps = s->R * s->S;
    const plan p = {
        s->stride_w == 2 ? DOWN : SAME, 0, s->H, s->W, s->P, s->Q, s->C, s->K, 1, times, s->C, times * taps, s,
        s->stride_w == 2 ? &DOWN_ROWS : &SAME_ROWS,
    };
    for (int n = 0; n < s->B * times; n++) {
        const int image = n / times, filter = n % times;
        for (int h = 0; h < s->P; h++) {
            make_row(
                &p, y + image * s->P * s->Q * s->K + filter, x + image * s->H * s->W * s->C, w + filter * taps,
                b == NULL ? NULL : b + filter, h, 1);
        }
    }
}

void depthwise_backward_input(float *restrict dx, const float *dy, const float *w, const conv2d_shape *s)
{
    const int times = s->K / s->C, taps = s->R * s->S;
    const plan p = {
        s->stride_w == 2 ? UP : SAME, 1, s->P, s->Q, s->H, s->W, s->K, s->C, times, 1, s->C, times * taps, s,
        s->stride_w == 2 ? &UP_ROWS : &SAME_ROWS,
    };
    for (int n = 0; n < s->B * times; n++) {
        const int image = n / times, filter = n % times;
        for (int h = 0; h < s->H; h++) {
            make_row(
                &p, dx + image * s->H * s->W * s->C, dy + image * s->P * s->Q * s->K + filter, w + filter * taps,
                NULL, h, filter == 0);
        }
    }
}

/* ---- backward to the weights */

/* Rows of dy, and how far it is in dy and in x to the next of them. */
typedef struct {
    const float *dy;
    float *dw;
    int results, y_column, y_channel, channels;
    int rows, y_row, x_row;
} gradients;

/* The gradients of a row come in order, and those of the last columns are at hand; outside of the image they are zero. */
typedef struct {
    const float *next;
    int at;
    float last[MOST_TAPS]; /* the newest first */
} coming;

FOR_EACH_CALL float gradient_at(const gradients *g, const float *dy, int at)
{
    return (unsigned)at < (unsigned)g->results ? dy[at * g->y_column] : 0.0f;
}

/* With the first column comes gradient `first`. */
FOR_EACH_CALL coming begin_coming(const int KEPT, const gradients *g, const float *dy, int first)
{
    coming y = {dy + at_least(first, 0) * g->y_column, first, {0.0f}};
    UNROLLED for (int i = 0; i < KEPT - 1; i++) {
        y.last[i] = gradient_at(g, dy, first - 1 - i);
    }
    return y;
}

FOR_EACH_CALL void come(const int KEPT, coming *y, const gradients *g)
{
    UNROLLED for (int i = KEPT - 1; i > 0; i--) {
        y->last[i] = y->last[i - 1];
    }
    y->last[0] = 0.0f;
    if ((unsigned)y->at < (unsigned)g->results) {
        y->last[0] = *y->next;
        y->next += g->y_column;
    }
    y->at++;
}

/* Adds what the column that was read brings to the taps PHASE, PHASE + STEP, … */
FOR_EACH_CALL void add_products(
    const int ROWS, const int TAPS, const int PHASE, const int STEP, float sum[MOST_ROWS][MOST_TAPS], const reading *x,
    const coming *y)
{
    UNROLLED for (int row = 0; row < ROWS; row++) {
        UNROLLED for (int t = PHASE; t < TAPS; t += STEP) {
            sum[row][t] += x->now[row] * y->last[t / STEP];
        }
    }
}

FOR_EACH_CALL void weight_same(
    const int ROWS, const int TAPS, float sum[MOST_ROWS][MOST_TAPS], coming *y, reading *x, const gradients *g,
    const readings *r)
{
    for (int left = r->columns; left > 0; left--) {
        come(TAPS, y, g);
        read_column(ROWS, x, r);
        add_products(ROWS, TAPS, 0, 1, sum, x, y);
    }
}

FOR_EACH_CALL void weight_down(
    const int ROWS, const int TAPS, float sum[MOST_ROWS][MOST_TAPS], coming *y, reading *x, const gradients *g,
    const readings *r)
{
    const int KEPT = (TAPS + 1) / 2;
    int left = r->columns;
    if (r->odd && left > 0) {
        come(KEPT, y, g);
        read_column(ROWS, x, r);
        add_products(ROWS, TAPS, 1, 2, sum, x, y);
        left--;
    }
    for (; left > 1; left -= 2) {
        come(KEPT, y, g);
        read_column(ROWS, x, r);
        add_products(ROWS, TAPS, 0, 2, sum, x, y);
        read_column(ROWS, x, r);
        add_products(ROWS, TAPS, 1, 2, sum, x, y);
    }
    if (left > 0) {
        come(KEPT, y, g);
        read_column(ROWS, x, r);
        add_products(ROWS, TAPS, 0, 2, sum, x, y);
    }
}

#define WEIGHT(go, kept, rows_, taps) \
    BY_ITSELF void go##_##rows_##_##taps(const gradients *g, const readings *r) \
    { \
        for (int c = 0; c < g->channels; c++) { \
            float sum[MOST_ROWS][MOST_TAPS] = {{0.0f}}; \
            const float *dy = g->dy + c * g->y_channel, *first = r->x + c * r->x_channel; \
            for (int left = g->rows; left > 0; left--) { \
                coming y = begin_coming(kept, g, dy, r->first + (kept) - 1); \
                reading x; \
                UNROLLED for (int row = 0; row < rows_; row++) { \
                    x.next[row] = first + row * r->x_row; \
                } \
                go(rows_, taps, sum, &y, &x, g, r); \
                dy += g->y_row; \
                first += g->x_row; \
            } \
            float *dw = g->dw + c * r->w_channel; \
            UNROLLED for (int row = 0; row < rows_; row++) { \
                if (row != 1 || !r->single) { \
                    UNROLLED for (int t = 0; t < (taps); t++) { \
                        dw[t] += sum[row][t]; \
                    } \
                } \
                dw += r->w_row; \
            } \
        } \
    }
#define WEIGHTS(rows) \
    WEIGHT(weight_same, 2, rows, 2) WEIGHT(weight_same, 3, rows, 3) WEIGHT(weight_same, 5, rows, 5) \
    WEIGHT(weight_down, 1, rows, 2) WEIGHT(weight_down, 2, rows, 3) WEIGHT(weight_down, 3, rows, 5)
WEIGHTS(2)
WEIGHTS(3)

/* The products of so many rows of dy from row p on are summed by themselves: not more than 64,
 * or one row, against rounding. */
static int rows_alike(const plan *p, int row)
{
    const met m = rows_met(p, row);
    int rows = 1;
    for (; row + rows < p->P && p->Q * (rows + 1) <= 64; rows++) {
        const met next = rows_met(p, row + rows);
        if (next.count != m.count || next.r != m.r) {
            break;
        }
    }
    return rows;
}

static void weight_rows(const plan *p, const gradients *rows, const readings *from, int n_rows)
{
    typedef void function(const gradients *g, const readings *r);
    static function *const weights[2][2][3] = {
        {
            {weight_same_2_2, weight_same_2_3, weight_same_2_5},
            {weight_same_3_2, weight_same_3_3, weight_same_3_5},
        },
        {
            {weight_down_2_2, weight_down_2_3, weight_down_2_5},
            {weight_down_3_2, weight_down_3_3, weight_down_3_5},
        },
    };
    for (int tap = 0, taps; tap < p->s->S; tap += taps) {
        taps = next_taps(p->s->S - tap);
        for (int phase = 0; phase < p->s->dilation_w; phase++) {
            readings r = *from;
            gradients g = *rows;
            const lane results = set_columns(p, &r, phase, tap, taps);
            g.dw += tap;
            g.dy += results.begun * p->y_place;
            g.results = results.results;
            weights[p->go == DOWN][n_rows == 3][taps == 5 ? 2 : taps - 2](&g, &r);
        }
    }
}

void depthwise_backward_weight(float *restrict dw, const float *dy, const float *x, const conv2d_shape *s)
{
    const int times = s->K / s->C, taps = s->R * s->S, x_row = s->W * s->C, y_row = s->Q * s->K;
    const plan p = {
        s->stride_w == 2 ? DOWN : SAME, 0, s->H, s->W, s->P, s->Q, s->C, s->K, 1, times, s->C, times * taps, s, NULL,
    };
    fill(dw, NULL, s->K, taps);
    for (int n = 0; n < s->B * times; n++) {
        const int image = n / times, filter = n % times;
        for (int h = 0, rows; h < s->P; h += rows) {
            rows = rows_alike(&p, h);
            const met m = rows_met(&p, h);
            for (int at = 0, n_rows; at < m.count; at += n_rows) {
                n_rows = next_rows(m.count - at);
                const readings r = {
                    .x = x + image * s->H * x_row + (m.h + at * m.h_step) * x_row, .x_row = n_rows == 1 ? 0 : m.h_step * x_row,
                    .single = n_rows == 1, .x_column = s->dilation_w * s->C, .x_channel = 1, .w_row = s->S, .w_channel = times * taps,
                };
                const gradients g = {
                    .dy = dy + (image * s->P + h) * y_row + filter, .dw = dw + filter * taps + (m.r + at) * s->S,
                    .y_column = s->dilation_w * s->K, .y_channel = times, .channels = s->C, .rows = rows,
                    .y_row = y_row, .x_row = s->stride_h * x_row,
                };
                weight_rows(&p, &g, &r, n_rows);
            }
        }
    }
}
