#include "../sgd.h"

#include <stddef.h>

#include "numbers.h"

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
    const float new_part = 1.0f - s.dampening;
    for (int i = start; i < end; i++) {
        const float g = (s.maximize ? -of->gradient[i] : of->gradient[i]) + s.weight_decay * of->w[i];
        const float moved = of->first ? g : s.momentum * of->buffer[i] + new_part * g;
        of->buffer[i] = moved;
        of->w[i] -= s.learning_rate * (s.nesterov ? g + s.momentum * moved : moved);
    }
}

static void update_piece(const void *job, int piece)
{
    const sgd_job *of = job;
    const int start = piece * PIECE, end = lower(start + PIECE, of->n);
    if (of->buffer == NULL) {
        update_plain(of, start, end);
    } else {
        update_with_momentum(of, start, end);
    }
}

void sgd_update(float *w, const float *gradient, float *buffer, int n, const sgd_settings *s, int first)
{
    const sgd_job of = {w, buffer, gradient, s, n, first};
    parallel_for(parts_of(n, PIECE), n / LANES, update_piece, &of);
}
