#include "../bias.h"

#include "channels.h"

static float sums[MAX_PARTS][CHANNELS_AT_ONCE];

typedef struct {
    const float *dy;
    int rows, C, channels, parts, room;
} sum_job;

/* room: floats from dy to the end of the tensor. */
ALWAYS_INLINE vec sum_rows(const float *dy, int rows, int C, int lanes, int room)
{
    kahan_vec sum = {splat(0.0f), splat(0.0f)};
    for (int row = 0; row < rows;) {
        vec plain = splat(0.0f);
        for (const int end = min_int(row + PLAIN_ROWS, rows); row < end; row++) {
            plain += load_padded(dy + row * C, lanes, room - row * C);
        }
        kahan_add_vec(&sum, plain);
    }
    return sum.total;
}

static void sum_task(const void *job, int part)
{
    const sum_job *of = job;
    const int first = part_start(of->rows, of->parts, part), end = part_start(of->rows, of->parts, part + 1);
    const float *dy = of->dy + first * of->C;
    const int room = of->room - first * of->C;
    int c = 0;
    for (; c + LANES <= of->channels; c += LANES) {
        store(sums[part] + c, sum_rows(dy + c, end - first, of->C, LANES, room - c));
    }
    if (c < of->channels) {
        const int lanes = of->channels - c;
        store_partial(sums[part] + c, sum_rows(dy + c, end - first, of->C, lanes, room - c), lanes);
    }
}

void bias_backward(float *restrict db, const float *dy, int rows, int C)
{
    for (int c0 = 0; c0 < C; c0 += CHANNELS_AT_ONCE) {
        const int channels = min_int(CHANNELS_AT_ONCE, C - c0);
        const sum_job of = {dy + c0, rows, C, channels, row_parts(rows, channels), rows * C - c0};
        parallel_for(of.parts, (long)rows * ceil_div(channels, LANES), sum_task, &of);
        for (int c = 0; c < channels; c++) {
            double sum = 0.0;
            for (int part = 0; part < of.parts; part++) {
                sum += (double)sums[part][c];
            }
            db[c0 + c] = (float)sum;
        }
    }
}
