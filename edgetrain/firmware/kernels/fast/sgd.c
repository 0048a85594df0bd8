#include "../sgd.h"

#include <stddef.h>

#include "elementwise.h"

typedef struct {
    float *w, *buffer;
    const float *gradient;
    const sgd_settings *s;
    int n, first;
} sgd_job;

static void update_plain(const sgd_job *job, int start, int end)
{
    const sgd_settings s = *job->s;
    for (int i = start; i < end; i++) {
        const float g = (s.maximize ? -job->gradient[i] : job->gradient[i]) + s.weight_decay * job->w[i];
        job->w[i] -= s.learning_rate * g;
    }
}

static void update_with_momentum(const sgd_job *job, int start, int end)
{
    const sgd_settings s = *job->s;
    const float gradient_share = 1.0f - s.dampening;
    for (int i = start; i < end; i++) {
        const float g = (s.maximize ? -job->gradient[i] : job->gradient[i]) + s.weight_decay * job->w[i];
        const float momentum = job->first ? g : s.momentum * job->buffer[i] + gradient_share * g;
        job->buffer[i] = momentum;
        job->w[i] -= s.learning_rate * (s.nesterov ? g + s.momentum * momentum : momentum);
    }
}

static void update_task(const void *context, int task)
{
    const sgd_job *job = context;
    const int start = task * TASK_ELEMENTS, end = min_int(start + TASK_ELEMENTS, job->n);
    if (job->buffer == NULL) {
        update_plain(job, start, end);
    } else {
        update_with_momentum(job, start, end);
    }
}

void sgd_update(float *w, const float *gradient, float *buffer, int n, const sgd_settings *s, int first)
{
    const sgd_job job = {w, buffer, gradient, s, n, first};
    parallel_for(ceil_div(n, TASK_ELEMENTS), n / LANES, update_task, &job);
}
