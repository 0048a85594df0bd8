#include "../bias.h"

#include "columns.h"

static float sums[MOST_PARTS][CHANNELS_AT_ONCE];

typedef struct {
    const float *dy;
    int rows, C, channels, parts, room;
} job_of_sums;

/* room: floats from dy on to the end of the tensor. */
INLINE vec sum_rows(const float *dy, int rows, int C, int lanes, int room)
{
    exact_vec sum = {splat(0.0f), splat(0.0f)};
    for (int row = 0; row < rows;) {
        vec plain = splat(0.0f);
        for (const int end = lower(row + PLAIN_ROWS, rows); row < end; row++) {
            plain += load_at_least(dy + row * C, lanes, room - row * C);
        }
        exact_add_vec(&sum, plain);
    }
    return sum.total;
}

static void sum_piece(const void *job, int part)
{
    const job_of_sums *of = job;
    const int first = part_start(of->rows, of->parts, part), end = part_start(of->rows, of->parts, part + 1);
    const float *dy = of->dy + first * of->C;
    const int room = of->room - first * of->C;
    int c = 0;
    for (; c + LANES <= of->channels; c += LANES) {
        store(sums[part] + c, sum_rows(dy + c, end - first, of->C, LANES, room - c));
    }
    if (c < of->channels) {
        const int lanes = of->channels - c;
        store_some(sums[part] + c, sum_rows(dy + c, end - first, of->C, lanes, room - c), lanes);
    }
}

void bias_backward(float *restrict db, const float *dy, int rows, int C)
{
    for (int c0 = 0; c0 < C; c0 += CHANNELS_AT_ONCE) {
        const int channels = lower(CHANNELS_AT_ONCE, C - c0);
        const job_of_sums of = {dy + c0, rows, C, channels, row_parts(rows, channels), rows * C - c0};
        parallel_for(of.parts, (long)rows * parts_of(channels, LANES), sum_piece, &of);
        for (int c = 0; c < channels; c++) {
            double sum = 0.0;
            for (int part = 0; part < of.parts; part++) {
                sum += (double)sums[part][c];
            }
            db[c0 + c] = (float)sum;
        }
    }
}
