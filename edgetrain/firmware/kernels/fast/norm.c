/* Batch norm, vectors of channels at a time; channels.h says how they are summed. */
#include "../norm.h"

#include <math.h>
#include <stddef.h>

#include "channels.h"

/* Of each part and channel: the sum, what rounding lost of it, and the squares about its mean; or a gradient's sums. */
static float first_sums[MAX_PARTS][CHANNELS_AT_ONCE], second_sums[MAX_PARTS][CHANNELS_AT_ONCE];
static float lost_sums[MAX_PARTS][CHANNELS_AT_ONCE];

typedef struct {
    float *out;
    const float *dy, *x;
    norm_channels given;
    const float *dweight, *dbias; /* NULL where mean and invstd are constants */
    int rows, C, c0, channels, parts;
} norm_job;

/* The parameters of a vector of channels. */
typedef struct {
    vec mean, scale, bias, low, high;
} norm_vec;

ALWAYS_INLINE norm_vec norm_at(norm_channels given, int c, int lanes)
{
    norm_vec n = {.mean = load_partial(given.mean + c, lanes), .scale = load_partial(given.invstd + c, lanes)};
    if (given.weight != NULL) {
        n.scale *= load_partial(given.weight + c, lanes);
    }
    n.bias = given.bias == NULL ? splat(0.0f) : load_partial(given.bias + c, lanes);
    n.low = splat(given.low);
    n.high = splat(given.high);
    return n;
}

ALWAYS_INLINE vec normed(const norm_vec *n, vec x)
{
    return (x - n->mean) * n->scale + n->bias;
}

/* The gradient before the clamp: zero where y was clamped. */
ALWAYS_INLINE vec masked(const norm_vec *n, vec x, vec dy)
{
    const vec y = normed(n, x);
    return blend((y > n->low) & (y < n->high), dy, splat(0.0f));
}

/* ---- statistics */

ALWAYS_INLINE void statistics_of(const norm_job *of, int part, int c, int lanes)
{
    const int first = part_start(of->rows, of->parts, part);
    const int rows = part_start(of->rows, of->parts, part + 1) - first;
    const float *x = of->x + first * of->C + of->c0 + c;
    kahan_vec sum = {splat(0.0f), splat(0.0f)}, squares = {splat(0.0f), splat(0.0f)};
    /* Kahan summation row by row: a constant channel has exactly its constant as mean. */
    for (int row = 0; row < rows; row++) {
        kahan_add_vec(&sum, load_partial(x + row * of->C, lanes));
    }
    const vec mean = sum.total / splat((float)rows);
    for (int row = 0; row < rows;) {
        vec plain = splat(0.0f);
        for (const int end = min_int(row + PLAIN_ROWS, rows); row < end; row++) {
            const vec deviation = load_partial(x + row * of->C, lanes) - mean;
            plain += deviation * deviation;
        }
        kahan_add_vec(&squares, plain);
    }
    store_partial(first_sums[part] + c, sum.total, lanes);
    store_partial(lost_sums[part] + c, sum.lost, lanes);
    store_partial(second_sums[part] + c, squares.total, lanes);
}

static void statistics_task(const void *job, int part)
{
    const norm_job *of = job;
    int c = 0;
    for (; c + LANES <= of->channels; c += LANES) {
        statistics_of(of, part, c, LANES);
    }
    if (c < of->channels) {
        statistics_of(of, part, c, of->channels - c);
    }
}

/* Combines means and squares of the parts. Returns the squares about the mean of all rows. */
static double squares_of_all(const norm_job *of, int c, double *mean)
{
    double sum = 0.0, squares = 0.0;
    for (int part = 0; part < of->parts; part++) {
        sum += (double)first_sums[part][c] - (double)lost_sums[part][c];
    }
    *mean = sum / (double)of->rows;
    for (int part = 0; part < of->parts; part++) {
        const int rows = part_start(of->rows, of->parts, part + 1) - part_start(of->rows, of->parts, part);
        const double off = ((double)first_sums[part][c] - (double)lost_sums[part][c]) / (double)rows - *mean;
        squares += (double)second_sums[part][c] + (double)rows * off * off;
    }
    return squares;
}

void norm_statistics(
    float *restrict mean, float *restrict invstd, const float *x, float *running_mean, float *running_var, int rows,
    int C, float momentum, float eps)
{
    norm_job of = {.x = x, .rows = rows, .C = C};
    for (; of.c0 < C; of.c0 += of.channels) {
        of.channels = min_int(CHANNELS_AT_ONCE, C - of.c0);
        of.parts = row_parts(rows, of.channels);
        parallel_for(of.parts, 2L * rows * ceil_div(of.channels, LANES), statistics_task, &of);
        for (int c = of.c0; c < of.c0 + of.channels; c++) {
            double middle;
            const double squares = squares_of_all(&of, c - of.c0, &middle);
            mean[c] = (float)middle;
            invstd[c] = (float)(1.0 / sqrt(squares / (double)rows + (double)eps));
            if (running_mean != NULL && running_var != NULL) {
                const float unbiased = (float)(squares / (double)max_int(rows - 1, 1));
                running_mean[c] = momentum * mean[c] + (1.0f - momentum) * running_mean[c];
                running_var[c] = momentum * unbiased + (1.0f - momentum) * running_var[c];
            }
        }
    }
}

void norm_invstd(float *restrict invstd, const float *variance, int C, float eps)
{
    for (int c = 0; c < C; c++) {
        invstd[c] = 1.0f / sqrtf(variance[c] + eps);
    }
}

/* ---- a few rows at a time, all channels */

typedef void row_function(const norm_job *of, int first, int rows, int c, int lanes);

ALWAYS_INLINE void for_rows(const norm_job *of, int task, row_function *body)
{
    const int at_once = rows_at_once(of->rows, of->C);
    const int end = part_start(of->rows, of->parts, task + 1);
    for (int first = part_start(of->rows, of->parts, task); first < end; first += at_once) {
        const int rows = min_int(at_once, end - first);
        int c = 0;
        for (; c + LANES <= of->C; c += LANES) {
            body(of, first, rows, c, LANES);
        }
        if (c < of->C) {
            body(of, first, rows, c, of->C - c);
        }
    }
}

static void run_rows(norm_job *of, task_function *body)
{
    of->parts = min_int(of->rows, 16);
    parallel_for(of->parts, (long)of->rows * ceil_div(of->C, LANES), body, of);
}

ALWAYS_INLINE void apply_rows(const norm_job *of, int first, int rows, int c, int lanes)
{
    const norm_vec n = norm_at(of->given, c, lanes);
    for (int at = first * of->C + c; rows > 0; rows--, at += of->C) {
        vec y = normed(&n, load_partial(of->x + at, lanes));
        y = blend(y < n.low, n.low, blend(y > n.high, n.high, y));
        store_partial(of->out + at, y, lanes);
    }
}

static void apply_task(const void *job, int task)
{
    for_rows(job, task, apply_rows);
}

void norm_apply(float *y, const float *x, norm_channels channels, int rows, int C)
{
    norm_job of = {.out = y, .x = x, .given = channels, .rows = rows, .C = C};
    run_rows(&of, apply_task);
}

/* ---- gradients */

ALWAYS_INLINE void gradient_sums_of(const norm_job *of, int part, int c, int lanes)
{
    const norm_vec n = norm_at(of->given, of->c0 + c, lanes);
    kahan_vec sum = {splat(0.0f), splat(0.0f)}, sum_normed = {splat(0.0f), splat(0.0f)};
    const int last = part_start(of->rows, of->parts, part + 1);
    for (int row = part_start(of->rows, of->parts, part); row < last;) {
        vec plain = splat(0.0f), plain_normed = splat(0.0f);
        for (const int end = min_int(row + PLAIN_ROWS, last); row < end; row++) {
            const int at = row * of->C + of->c0 + c;
            const vec x = load_partial(of->x + at, lanes);
            const vec gradient = masked(&n, x, load_partial(of->dy + at, lanes));
            plain += gradient;
            plain_normed += gradient * (x - n.mean);
        }
        kahan_add_vec(&sum, plain);
        kahan_add_vec(&sum_normed, plain_normed);
    }
    store_partial(first_sums[part] + c, sum.total, lanes);
    store_partial(second_sums[part] + c, sum_normed.total, lanes);
}

static void gradient_sums_task(const void *job, int part)
{
    const norm_job *of = job;
    int c = 0;
    for (; c + LANES <= of->channels; c += LANES) {
        gradient_sums_of(of, part, c, LANES);
    }
    if (c < of->channels) {
        gradient_sums_of(of, part, c, of->channels - c);
    }
}

static void sums_of_gradient(float *restrict dweight, float *restrict dbias, norm_job of)
{
    for (of.c0 = 0; of.c0 < of.C; of.c0 += of.channels) {
        of.channels = min_int(CHANNELS_AT_ONCE, of.C - of.c0);
        of.parts = row_parts(of.rows, of.channels);
        parallel_for(of.parts, 2L * of.rows * ceil_div(of.channels, LANES), gradient_sums_task, &of);
        for (int c = 0; c < of.channels; c++) {
            double sum = 0.0, sum_normed = 0.0;
            for (int part = 0; part < of.parts; part++) {
                sum += (double)first_sums[part][c];
                sum_normed += (double)second_sums[part][c];
            }
            dbias[of.c0 + c] = (float)sum;
            dweight[of.c0 + c] = (float)(sum_normed * (double)of.given.invstd[of.c0 + c]);
        }
    }
}

ALWAYS_INLINE void backward_rows(const norm_job *of, int first, int rows, int c, int lanes)
{
    const norm_vec n = norm_at(of->given, c, lanes);
    const vec count = splat((float)of->rows);
    const vec mean_gradient = load_partial(of->dbias + c, lanes) / count;
    const vec projection = load_partial(of->given.invstd + c, lanes) * (load_partial(of->dweight + c, lanes) / count);
    for (int at = first * of->C + c; rows > 0; rows--, at += of->C) {
        const vec x = load_partial(of->x + at, lanes);
        const vec gradient = masked(&n, x, load_partial(of->dy + at, lanes));
        store_partial(of->out + at, (gradient - mean_gradient - (x - n.mean) * projection) * n.scale, lanes);
    }
}

static void backward_task(const void *job, int task)
{
    for_rows(job, task, backward_rows);
}

ALWAYS_INLINE void backward_frozen_rows(const norm_job *of, int first, int rows, int c, int lanes)
{
    const norm_vec n = norm_at(of->given, c, lanes);
    for (int at = first * of->C + c; rows > 0; rows--, at += of->C) {
        const vec gradient = masked(&n, load_partial(of->x + at, lanes), load_partial(of->dy + at, lanes));
        store_partial(of->out + at, gradient * n.scale, lanes);
    }
}

static void backward_frozen_task(const void *job, int task)
{
    for_rows(job, task, backward_frozen_rows);
}

void norm_backward(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels,
    int rows, int C)
{
    norm_job of = {.out = dx, .dy = dy, .x = x, .given = channels, .rows = rows, .C = C};
    sums_of_gradient(dweight, dbias, of);
    of.dweight = dweight;
    of.dbias = dbias;
    run_rows(&of, backward_task);
}

void norm_backward_frozen(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels,
    int rows, int C)
{
    norm_job of = {.out = dx, .dy = dy, .x = x, .given = channels, .rows = rows, .C = C};
    sums_of_gradient(dweight, dbias, of);
    run_rows(&of, backward_frozen_task);
}
