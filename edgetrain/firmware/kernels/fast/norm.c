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
    norm_channels norm;
    const float *dweight, *dbias; /* NULL where mean and invstd are constants */
    int rows, C, c0, channels, parts;
} norm_job;

/* The parameters of a vector of channels. */
typedef struct {
    vec mean, scale, bias, low, high;
} norm_vec;

ALWAYS_INLINE norm_vec norm_at(norm_channels norm, int c, int lanes)
{
    norm_vec n = {.mean = load_partial(norm.mean + c, lanes), .scale = load_partial(norm.invstd + c, lanes)};
    if (norm.weight != NULL) {
        n.scale *= load_partial(norm.weight + c, lanes);
    }
    n.bias = norm.bias == NULL ? splat(0.0f) : load_partial(norm.bias + c, lanes);
    n.low = splat(norm.low);
    n.high = splat(norm.high);
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

ALWAYS_INLINE void statistics_of(const norm_job *job, int part, int c, int lanes)
{
    const int first = part_start(job->rows, job->parts, part);
    const int rows = part_start(job->rows, job->parts, part + 1) - first;
    const float *x = job->x + first * job->C + job->c0 + c;
    kahan_vec sum = {splat(0.0f), splat(0.0f)}, squares = {splat(0.0f), splat(0.0f)};
    /* Kahan summation row by row: a constant channel has exactly its constant as mean. */
    for (int row = 0; row < rows; row++) {
        kahan_add_vec(&sum, load_partial(x + row * job->C, lanes));
    }
    const vec mean = sum.total / splat((float)rows);
    for (int row = 0; row < rows;) {
        vec plain = splat(0.0f);
        for (const int end = min_int(row + PLAIN_ROWS, rows); row < end; row++) {
            const vec deviation = load_partial(x + row * job->C, lanes) - mean;
            plain += deviation * deviation;
        }
        kahan_add_vec(&squares, plain);
    }
    store_partial(first_sums[part] + c, sum.total, lanes);
    store_partial(lost_sums[part] + c, sum.lost, lanes);
    store_partial(second_sums[part] + c, squares.total, lanes);
}

static void statistics_task(const void *context, int part)
{
    const norm_job *job = context;
    int c = 0;
    for (; c + LANES <= job->channels; c += LANES) {
        statistics_of(job, part, c, LANES);
    }
    if (c < job->channels) {
        statistics_of(job, part, c, job->channels - c);
    }
}

/* Combines means and squares of the parts. Returns the squares about the mean of all rows. */
static double squares_of_all(const norm_job *job, int c, double *mean)
{
    double sum = 0.0, squares = 0.0;
    for (int part = 0; part < job->parts; part++) {
        sum += (double)first_sums[part][c] - (double)lost_sums[part][c];
    }
    *mean = sum / (double)job->rows;
    for (int part = 0; part < job->parts; part++) {
        const int rows = part_start(job->rows, job->parts, part + 1) - part_start(job->rows, job->parts, part);
        const double off = ((double)first_sums[part][c] - (double)lost_sums[part][c]) / (double)rows - *mean;
        squares += (double)second_sums[part][c] + (double)rows * off * off;
    }
    return squares;
}

void norm_statistics(
    float *restrict mean, float *restrict invstd, const float *x, float *running_mean, float *running_var, int rows,
    int C, float momentum, float eps)
{
    norm_job job = {.x = x, .rows = rows, .C = C};
    for (; job.c0 < C; job.c0 += job.channels) {
        job.channels = min_int(CHANNELS_AT_ONCE, C - job.c0);
        job.parts = row_parts(rows, job.channels);
        parallel_for(job.parts, 2L * rows * ceil_div(job.channels, LANES), statistics_task, &job);
        for (int c = job.c0; c < job.c0 + job.channels; c++) {
            double exact_mean;
            const double squares = squares_of_all(&job, c - job.c0, &exact_mean);
            mean[c] = (float)exact_mean;
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

typedef void row_function(const norm_job *job, int first, int rows, int c, int lanes);

ALWAYS_INLINE void for_rows(const norm_job *job, int task, row_function *body)
{
    const int at_once = rows_at_once(job->rows, job->C);
    const int end = part_start(job->rows, job->parts, task + 1);
    for (int first = part_start(job->rows, job->parts, task); first < end; first += at_once) {
        const int rows = min_int(at_once, end - first);
        int c = 0;
        for (; c + LANES <= job->C; c += LANES) {
            body(job, first, rows, c, LANES);
        }
        if (c < job->C) {
            body(job, first, rows, c, job->C - c);
        }
    }
}

static void run_rows(norm_job *job, task_function *body)
{
    job->parts = min_int(job->rows, 16);
    parallel_for(job->parts, (long)job->rows * ceil_div(job->C, LANES), body, job);
}

ALWAYS_INLINE void apply_rows(const norm_job *job, int first, int rows, int c, int lanes)
{
    const norm_vec n = norm_at(job->norm, c, lanes);
    for (int at = first * job->C + c; rows > 0; rows--, at += job->C) {
        vec y = normed(&n, load_partial(job->x + at, lanes));
        y = blend(y < n.low, n.low, blend(y > n.high, n.high, y));
        store_partial(job->out + at, y, lanes);
    }
}

static void apply_task(const void *context, int task)
{
    for_rows(context, task, apply_rows);
}

void norm_apply(float *y, const float *x, norm_channels channels, int rows, int C)
{
    norm_job job = {.out = y, .x = x, .norm = channels, .rows = rows, .C = C};
    run_rows(&job, apply_task);
}

/* ---- gradients */

ALWAYS_INLINE void gradient_sums_of(const norm_job *job, int part, int c, int lanes)
{
    const norm_vec n = norm_at(job->norm, job->c0 + c, lanes);
    kahan_vec sum = {splat(0.0f), splat(0.0f)}, sum_normed = {splat(0.0f), splat(0.0f)};
    const int last = part_start(job->rows, job->parts, part + 1);
    for (int row = part_start(job->rows, job->parts, part); row < last;) {
        vec plain = splat(0.0f), plain_normed = splat(0.0f);
        for (const int end = min_int(row + PLAIN_ROWS, last); row < end; row++) {
            const int at = row * job->C + job->c0 + c;
            const vec x = load_partial(job->x + at, lanes);
            const vec gradient = masked(&n, x, load_partial(job->dy + at, lanes));
            plain += gradient;
            plain_normed += gradient * (x - n.mean);
        }
        kahan_add_vec(&sum, plain);
        kahan_add_vec(&sum_normed, plain_normed);
    }
    store_partial(first_sums[part] + c, sum.total, lanes);
    store_partial(second_sums[part] + c, sum_normed.total, lanes);
}

static void gradient_sums_task(const void *context, int part)
{
    const norm_job *job = context;
    int c = 0;
    for (; c + LANES <= job->channels; c += LANES) {
        gradient_sums_of(job, part, c, LANES);
    }
    if (c < job->channels) {
        gradient_sums_of(job, part, c, job->channels - c);
    }
}

static void sums_of_gradient(float *restrict dweight, float *restrict dbias, norm_job job)
{
    for (job.c0 = 0; job.c0 < job.C; job.c0 += job.channels) {
        job.channels = min_int(CHANNELS_AT_ONCE, job.C - job.c0);
        job.parts = row_parts(job.rows, job.channels);
        parallel_for(job.parts, 2L * job.rows * ceil_div(job.channels, LANES), gradient_sums_task, &job);
        for (int c = 0; c < job.channels; c++) {
            double sum = 0.0, sum_normed = 0.0;
            for (int part = 0; part < job.parts; part++) {
                sum += (double)first_sums[part][c];
                sum_normed += (double)second_sums[part][c];
            }
            dbias[job.c0 + c] = (float)sum;
            dweight[job.c0 + c] = (float)(sum_normed * (double)job.norm.invstd[job.c0 + c]);
        }
    }
}

ALWAYS_INLINE void backward_rows(const norm_job *job, int first, int rows, int c, int lanes)
{
    const norm_vec n = norm_at(job->norm, c, lanes);
    const vec count = splat((float)job->rows);
    const vec mean_gradient = load_partial(job->dbias + c, lanes) / count;
    const vec projection = load_partial(job->norm.invstd + c, lanes) * (load_partial(job->dweight + c, lanes) / count);
    for (int at = first * job->C + c; rows > 0; rows--, at += job->C) {
        const vec x = load_partial(job->x + at, lanes);
        const vec gradient = masked(&n, x, load_partial(job->dy + at, lanes));
        store_partial(job->out + at, (gradient - mean_gradient - (x - n.mean) * projection) * n.scale, lanes);
    }
}

static void backward_task(const void *context, int task)
{
    for_rows(context, task, backward_rows);
}

ALWAYS_INLINE void backward_frozen_rows(const norm_job *job, int first, int rows, int c, int lanes)
{
    const norm_vec n = norm_at(job->norm, c, lanes);
    for (int at = first * job->C + c; rows > 0; rows--, at += job->C) {
        const vec gradient = masked(&n, load_partial(job->x + at, lanes), load_partial(job->dy + at, lanes));
        store_partial(job->out + at, gradient * n.scale, lanes);
    }
}

static void backward_frozen_task(const void *context, int task)
{
    for_rows(context, task, backward_frozen_rows);
}

void norm_backward(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels,
    int rows, int C)
{
    norm_job job = {.out = dx, .dy = dy, .x = x, .norm = channels, .rows = rows, .C = C};
    sums_of_gradient(dweight, dbias, job);
    job.dweight = dweight;
    job.dbias = dbias;
    run_rows(&job, backward_task);
}

void norm_backward_frozen(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels,
    int rows, int C)
{
    norm_job job = {.out = dx, .dy = dy, .x = x, .norm = channels, .rows = rows, .C = C};
    sums_of_gradient(dweight, dbias, job);
    run_rows(&job, backward_frozen_task);
}
