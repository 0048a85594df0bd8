/* Stochastic gradient descent for one parameter of n numbers, as torch.optim.SGD does it. */
#ifndef SGD_H
#define SGD_H

typedef struct {
    float learning_rate, momentum, dampening, weight_decay;
    int nesterov, maximize;
} sgd_settings;

/* buffer: the momentum, or NULL without one. first: this is the first step, which initialises it. */
void sgd_update(float *w, const float *gradient, float *buffer, int n, const sgd_settings *s, int first);

#endif
