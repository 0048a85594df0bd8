/* Adam and AdamW for one parameter of n numbers, as torch.optim does them. */
#ifndef ADAM_H
#define ADAM_H

typedef struct {
    double learning_rate, beta1, beta2; /* double: 1 - beta2 and its like are small differences */
    float eps, weight_decay;
    int decoupled, maximize; /* decoupled: the weight decay of AdamW */
} adam_settings;

/* mean, square: moving averages of the gradient and of its square. largest: the maximum of `square` (amsgrad), or NULL.
 * step: the number of updates so far, incremented here. */
void adam_update(
    float *w, const float *gradient, float *mean, float *square, float *largest, float *step, int n,
    const adam_settings *s);

#endif
