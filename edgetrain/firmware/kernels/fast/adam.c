#include "../adam.h"

#include <math.h>
#include <stddef.h>

#include "elementwise.h"

typedef struct {
    float *w, *mean, *square, *largest;
    const float *gradient;
    int n, decoupled, maximize;
    float rate, root_correction, shrink, new_mean, old_square, new_square, weight_decay, eps;
} adam_job;

/* x to the power n, by squaring. */
static double power(double x, int n)
{
    double y = 1.0;
    for (; n > 0; n /= 2) {
        y = n % 2 != 0 ? y * x : y;
        x = x * x;
    }
    return y;
}

/* With keeps_largest, `largest` takes the place of `square`. */
ALWAYS_INLINE void update(const adam_job *job, int start, int end, int keeps_largest)
{
    const adam_job s = *job;
    for (int i = start; i < end; i++) {
        const float sign = s.maximize ? -s.gradient[i] : s.gradient[i];
        const float w = s.w[i] * s.shrink, g = s.decoupled ? sign : sign + s.weight_decay * w;
        const float mean = s.mean[i] + s.new_mean * (g - s.mean[i]);
        const float square = s.old_square * s.square[i] + s.new_square * g * g;
        float denominator = square;
        s.mean[i] = mean;
        s.square[i] = square;
        if (keeps_largest) {
            denominator = denominator > s.largest[i] ? denominator : s.largest[i];
            s.largest[i] = denominator;
        }
        s.w[i] = w - s.rate * (mean / (sqrtf(denominator) / s.root_correction + s.eps));
    }
}

static void update_task(const void *context, int task)
{
    const adam_job *job = context;
    const int start = task * TASK_ELEMENTS, end = min_int(start + TASK_ELEMENTS, job->n);
    if (job->largest == NULL) {
        update(job, start, end, 0);
    } else {
        update(job, start, end, 1);
    }
}

void adam_update(
    float *w, const float *gradient, float *mean, float *square, float *largest, float *step, int n,
    const adam_settings *s)
{
    *step += 1.0f;
    const int count = (int)*step;
    const adam_job job = {
        .w = w, .mean = mean, .square = square, .largest = largest, .gradient = gradient, .n = n,
        .decoupled = s->decoupled, .maximize = s->maximize,
        .rate = (float)(s->learning_rate / (1.0 - power(s->beta1, count))),
        .root_correction = (float)sqrt(1.0 - power(s->beta2, count)),
        .shrink = s->decoupled ? (float)(1.0 - s->learning_rate * (double)s->weight_decay) : 1.0f,
        .new_mean = (float)(1.0 - s->beta1), .old_square = (float)s->beta2, .new_square = (float)(1.0 - s->beta2),
        .weight_decay = s->weight_decay, .eps = s->eps,
    };
    parallel_for(ceil_div(n, TASK_ELEMENTS), n / LANES * 4, update_task, &job);
}
