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

static void sum_task(const void *context, int part)
{
    const sum_job *job = context;
    const int first = part_start(job->rows, job->parts, part), end = part_start(job->rows, job->parts, part + 1);
    const float *dy = job->dy + first * job->C;
    const int room = job->room - first * job->C;
    int c = 0;
    for (; c + LANES <= job->channels; c += LANES) {
        store(sums[part] + c, sum_rows(dy + c, end - first, job->C, LANES, room - c));
    }
    if (c < job->channels) {
        const int lanes = job->channels - c;
        store_partial(sums[part] + c, sum_rows(dy + c, end - first, job->C, lanes, room - c), lanes);
    }
}

void bias_backward(float *restrict db, const float *dy, int rows, int C)
{
    for (int c0 = 0; c0 < C; c0 += CHANNELS_AT_ONCE) {
        const int channels = min_int(CHANNELS_AT_ONCE, C - c0);
        const sum_job job = {dy + c0, rows, C, channels, row_parts(rows, channels), rows * C - c0};
        parallel_for(job.parts, (long)rows * ceil_div(channels, LANES), sum_task, &job);
        for (int c = 0; c < channels; c++) {
            double sum = 0.0;
            for (int part = 0; part < job.parts; part++) {
                sum += (double)sums[part][c];
            }
            db[c0 + c] = (float)sum;
        }
    }
}
