#include "../global_avg_pool.h"

#include "parallel.h"
#include "vector.h"

typedef struct {
    float *to;
    const float *from;
    int places, C;
} pool_job;

ALWAYS_INLINE void mean_of(const pool_job *of, int n, int c, int lanes)
{
    const float *x = of->from + n * of->places * of->C + c;
    kahan_vec sum = {splat(0.0f), splat(0.0f)};
    for (int i = 0; i < of->places; i++) {
        kahan_add_vec(&sum, load_partial(x + i * of->C, lanes));
    }
    store_partial(of->to + n * of->C + c, sum.total / splat((float)of->places), lanes);
}

static void forward_task(const void *job, int n)
{
    const pool_job *of = job;
    int c = 0;
    for (; c + LANES <= of->C; c += LANES) {
        mean_of(of, n, c, LANES);
    }
    if (c < of->C) {
        mean_of(of, n, c, of->C - c);
    }
}

void global_avg_pool_forward(float *restrict y, const float *x, int B, int places, int C)
{
    const pool_job of = {y, x, places, C};
    parallel_for(B, (long)B * places * C, forward_task, &of);
}

static void backward_task(const void *job, int n)
{
    const pool_job *of = job;
    const float *dy = of->from + n * of->C;
    float *dx = of->to + n * of->places * of->C;
    for (int i = 0; i < of->places; i++) {
        for (int c = 0; c < of->C; c++) {
            dx[i * of->C + c] = dy[c] / (float)of->places;
        }
    }
}

void global_avg_pool_backward(float *restrict dx, const float *dy, int B, int places, int C)
{
    const pool_job of = {dx, dy, places, C};
    parallel_for(B, (long)B * places * C, backward_task, &of);
}
