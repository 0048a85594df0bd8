#include "../sgd.h"

#include <stddef.h>

#include "elementwise.h"

typedef struct {
    float *w, *buffer;
    const float *gradient;
    const sgd_settings *s;
    int n, first;
} sgd_job;

static void update_plain(const sgd_job *of, int start, int end)
{
    const sgd_settings s = *of->s;
    for (int i = start; i < end; i++) {
        const float g = (s.maximize ? -of->gradient[i] : of->gradient[i]) + s.weight_decay * of->w[i];
        of->w[i] -= s.learning_rate * g;
    }
}

static void update_with_momentum(const sgd_job *of, int start, int end)
{
    const sgd_settings s = *of->s;
    const float gradient_share = 1.0f - s.dampening;
    for (int i = start; i < end; i++) {
        const float g = (s.maximize ? -of->gradient[i] : of->gradient[i]) + s.weight_decay * of->w[i];
        const float momentum = of->first ? g : s.momentum * of->buffer[i] + gradient_share * g;
        of->buffer[i] = momentum;
        of->w[i] -= s.learning_rate * (s.nesterov ? g + s.momentum * momentum : momentum);
    }
}

static void update_task(const void *job, int task)
{
    const sgd_job *of = job;
    const int start = task * TASK_ELEMENTS, end = min_int(start + TASK_ELEMENTS, of->n);
    if (of->buffer == NULL) {
        update_plain(of, start, end);
    } else {
        update_with_momentum(of, start, end);
    }
}

void sgd_update(float *w, const float *gradient, float *buffer, int n, const sgd_settings *s, int first)
{
    const sgd_job of = {w, buffer, gradient, s, n, first};
    parallel_for(ceil_div(n, TASK_ELEMENTS), n / LANES, update_task, &of);
}
