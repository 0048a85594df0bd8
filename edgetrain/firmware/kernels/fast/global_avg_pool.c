#include "../global_avg_pool.h"

#include "parallel.h"
#include "vector.h"

typedef struct {
    float *to;
    const float *from;
    int places, C;
} pool_job;

ALWAYS_INLINE void mean_of(const pool_job *job, int n, int c, int lanes)
{
    const float *x = job->from + n * job->places * job->C + c;
    kahan_vec sum = {splat(0.0f), splat(0.0f)};
    for (int i = 0; i < job->places; i++) {
        kahan_add_vec(&sum, load_partial(x + i * job->C, lanes));
    }
    store_partial(job->to + n * job->C + c, sum.total / splat((float)job->places), lanes);
}

static void forward_task(const void *context, int n)
{
    const pool_job *job = context;
    int c = 0;
    for (; c + LANES <= job->C; c += LANES) {
        mean_of(job, n, c, LANES);
    }
    if (c < job->C) {
        mean_of(job, n, c, job->C - c);
    }
}

void global_avg_pool_forward(float *restrict y, const float *x, int B, int places, int C)
{
    const pool_job job = {y, x, places, C};
    parallel_for(B, (long)B * places * C, forward_task, &job);
}

static void backward_task(const void *context, int n)
{
    const pool_job *job = context;
    const float *dy = job->from + n * job->C;
    float *dx = job->to + n * job->places * job->C;
    for (int i = 0; i < job->places; i++) {
        for (int c = 0; c < job->C; c++) {
            dx[i * job->C + c] = dy[c] / (float)job->places;
        }
    }
}

void global_avg_pool_backward(float *restrict dx, const float *dy, int B, int places, int C)
{
    const pool_job job = {dx, dy, places, C};
    parallel_for(B, (long)B * places * C, backward_task, &job);
}
