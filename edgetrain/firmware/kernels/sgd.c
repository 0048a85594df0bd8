#include "sgd.h"

#include <stddef.h>

void sgd_update(float *w, const float *gradient, float *buffer, int n, const sgd_settings *s, int first)
{
    for (int i = 0; i < n; i++) {
        float g = s->maximize ? -gradient[i] : gradient[i];
        g = g + s->weight_decay * w[i];
        if (buffer != NULL) {
            buffer[i] = first ? g : s->momentum * buffer[i] + (1.0f - s->dampening) * g;
            g = s->nesterov ? g + s->momentum * buffer[i] : buffer[i];
        }
        w[i] = w[i] - s->learning_rate * g;
    }
}
