/* Batch norm, vectors of channels at a time: see columns.h for how sums are made. */
#include "../norm.h"

#include <math.h>
#include <stddef.h>

#include "columns.h"

/* Of each part and channel: the sum (with what rounding lost) and squares about its mean, or the two sums of a gradient. */
static float first_sums[MOST_PARTS][CHANNELS_AT_ONCE], second_sums[MOST_PARTS][CHANNELS_AT_ONCE];
static float lost_sums[MOST_PARTS][CHANNELS_AT_ONCE];

typedef struct {
    float *out;
    const float *dy, *x;
    norm_channels given;
    const float *dweight, *dbias; /* NULL where mean and invstd are constants */
    int rows, C, c0, channels, parts;
} norm_job;

/* What a vector of channels is normed with. */
typedef struct {
    vec mean, scale, bias, low, high;
} norm_vec;

INLINE norm_vec norm_at(norm_channels given, int c, int lanes)
{
    norm_vec n = {.mean = load_some(given.mean + c, lanes), .scale = load_some(given.invstd + c, lanes)};
    if (given.weight != NULL) {
        n.scale *= load_some(given.weight + c, lanes);
    }
    n.bias = given.bias == NULL ? splat(0.0f) : load_some(given.bias + c, lanes);
    n.low = splat(given.low);
    n.high = splat(given.high);
    return n;
}

INLINE vec normed(const norm_vec *n, vec x)
{
    return (x - n->mean) * n->scale + n->bias;
}

/* The gradient before the clamp: none flows where the clamp holds. */
INLINE vec flowing(const norm_vec *n, vec x, vec dy)
{
    const vec y = normed(n, x);
    return choose((y > n->low) & (y < n->high), dy, splat(0.0f));
}

/* ---- statistics */

INLINE void statistics_of(const norm_job *of, int part, int c, int lanes)
{
    const int first = part_start(of->rows, of->parts, part);
    const int rows = part_start(of->rows, of->parts, part + 1) - first;
    const float *x = of->x + first * of->C + of->c0 + c;
    exact_vec sum = {splat(0.0f), splat(0.0f)}, squares = {splat(0.0f), splat(0.0f)};
    /* Row by row, and with what is lost: a channel that is the same everywhere has exactly that as its mean. */
    for (int row = 0; row < rows; row++) {
        exact_add_vec(&sum, load_some(x + row * of->C, lanes));
    }
    const vec mean = sum.total / splat((float)rows);
    for (int row = 0; row < rows;) {
        vec plain = splat(0.0f);
        for (const int end = lower(row + PLAIN_ROWS, rows); row < end; row++) {
            const vec from_mean = load_some(x + row * of->C, lanes) - mean;
            plain += from_mean * from_mean;
        }
        exact_add_vec(&squares, plain);
    }
    store_some(first_sums[part] + c, sum.total, lanes);
    store_some(lost_sums[part] + c, sum.lost, lanes);
    store_some(second_sums[part] + c, squares.total, lanes);
}

static void statistics_piece(const void *job, int part)
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

/* Means and squares of the parts put together. Returns the squares about the mean of all rows. */
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
        of.channels = lower(CHANNELS_AT_ONCE, C - of.c0);
        of.parts = row_parts(rows, of.channels);
        parallel_for(of.parts, 2L * rows * parts_of(of.channels, LANES), statistics_piece, &of);
        for (int c = of.c0; c < of.c0 + of.channels; c++) {
            double middle;
            const double squares = squares_of_all(&of, c - of.c0, &middle);
            mean[c] = (float)middle;
            invstd[c] = (float)(1.0 / sqrt(squares / (double)rows + (double)eps));
            if (running_mean != NULL && running_var != NULL) {
                const float unbiased = (float)(squares / (double)higher(rows - 1, 1));
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

/* ---- a few rows at a time, all of their channels */

typedef void change_rows(const norm_job *of, int first, int rows, int c, int lanes);

INLINE void change_piece(const norm_job *of, int piece, change_rows *change)
{
    const int at_once = rows_at_once(of->rows, of->C);
    const int end = part_start(of->rows, of->parts, piece + 1);
    for (int first = part_start(of->rows, of->parts, piece); first < end; first += at_once) {
        const int rows = lower(at_once, end - first);
        int c = 0;
        for (; c + LANES <= of->C; c += LANES) {
            change(of, first, rows, c, LANES);
        }
        if (c < of->C) {
            change(of, first, rows, c, of->C - c);
        }
    }
}

static void change_all(norm_job *of, piece_function *make)
{
    of->parts = lower(of->rows, 16);
    parallel_for(of->parts, (long)of->rows * parts_of(of->C, LANES), make, of);
}

INLINE void apply_rows(const norm_job *of, int first, int rows, int c, int lanes)
{
    const norm_vec n = norm_at(of->given, c, lanes);
    for (int at = first * of->C + c; rows > 0; rows--, at += of->C) {
        vec y = normed(&n, load_some(of->x + at, lanes));
        y = choose(y < n.low, n.low, choose(y > n.high, n.high, y));
        store_some(of->out + at, y, lanes);
    }
}

static void apply_piece(const void *job, int piece)
{
    change_piece(job, piece, apply_rows);
}

void norm_apply(float *y, const float *x, norm_channels channels, int rows, int C)
{
    norm_job of = {.out = y, .x = x, .given = channels, .rows = rows, .C = C};
    change_all(&of, apply_piece);
}

/* ---- gradients */

INLINE void gradient_sums_of(const norm_job *of, int part, int c, int lanes)
{
    const norm_vec n = norm_at(of->given, of->c0 + c, lanes);
    exact_vec sum = {splat(0.0f), splat(0.0f)}, sum_normed = {splat(0.0f), splat(0.0f)};
    const int last = part_start(of->rows, of->parts, part + 1);
    for (int row = part_start(of->rows, of->parts, part); row < last;) {
        vec plain = splat(0.0f), plain_normed = splat(0.0f);
        for (const int end = lower(row + PLAIN_ROWS, last); row < end; row++) {
            const int at = row * of->C + of->c0 + c;
            const vec x = load_some(of->x + at, lanes);
            const vec flows = flowing(&n, x, load_some(of->dy + at, lanes));
            plain += flows;
            plain_normed += flows * (x - n.mean);
        }
        exact_add_vec(&sum, plain);
        exact_add_vec(&sum_normed, plain_normed);
    }
    store_some(first_sums[part] + c, sum.total, lanes);
    store_some(second_sums[part] + c, sum_normed.total, lanes);
}

static void gradient_sums_piece(const void *job, int part)
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
        of.channels = lower(CHANNELS_AT_ONCE, of.C - of.c0);
        of.parts = row_parts(of.rows, of.channels);
        parallel_for(of.parts, 2L * of.rows * parts_of(of.channels, LANES), gradient_sums_piece, &of);
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

INLINE void backward_rows(const norm_job *of, int first, int rows, int c, int lanes)
{
    const norm_vec n = norm_at(of->given, c, lanes);
    const vec count = splat((float)of->rows);
    const vec level = load_some(of->dbias + c, lanes) / count;
    const vec along = load_some(of->given.invstd + c, lanes) * (load_some(of->dweight + c, lanes) / count);
    for (int at = first * of->C + c; rows > 0; rows--, at += of->C) {
        const vec x = load_some(of->x + at, lanes);
        const vec flows = flowing(&n, x, load_some(of->dy + at, lanes));
        store_some(of->out + at, (flows - level - (x - n.mean) * along) * n.scale, lanes);
    }
}

static void backward_piece(const void *job, int piece)
{
    change_piece(job, piece, backward_rows);
}

INLINE void backward_frozen_rows(const norm_job *of, int first, int rows, int c, int lanes)
{
    const norm_vec n = norm_at(of->given, c, lanes);
    for (int at = first * of->C + c; rows > 0; rows--, at += of->C) {
        const vec flows = flowing(&n, load_some(of->x + at, lanes), load_some(of->dy + at, lanes));
        store_some(of->out + at, flows * n.scale, lanes);
    }
}

static void backward_frozen_piece(const void *job, int piece)
{
    change_piece(job, piece, backward_frozen_rows);
}

void norm_backward(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels,
    int rows, int C)
{
    norm_job of = {.out = dx, .dy = dy, .x = x, .given = channels, .rows = rows, .C = C};
    sums_of_gradient(dweight, dbias, of);
    of.dweight = dweight;
    of.dbias = dbias;
    change_all(&of, backward_piece);
}

void norm_backward_frozen(
    float *dx, float *restrict dweight, float *restrict dbias, const float *dy, const float *x, norm_channels channels,
    int rows, int C)
{
    norm_job of = {.out = dx, .dy = dy, .x = x, .given = channels, .rows = rows, .C = C};
    sums_of_gradient(dweight, dbias, of);
    change_all(&of, backward_frozen_piece);
}
