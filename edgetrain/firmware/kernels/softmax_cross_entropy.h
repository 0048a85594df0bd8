/* Cross-entropy of logits [B, C] and labels [B], each in [0, C): the mean over the batch, or the sum.
 * The logarithms of the softmax are kept for the gradient, which may be written over them. */
#ifndef SOFTMAX_CROSS_ENTROPY_H
#define SOFTMAX_CROSS_ENTROPY_H

#include <stdint.h>

/* 1 if every label is a class. Checked before a step changes anything. */
int labels_in_range(const int32_t *labels, int B, int C);
void softmax_cross_entropy_forward(
    float *restrict loss, float *restrict log_softmax, const float *logits, const int32_t *labels, int B, int C,
    int mean);
void softmax_cross_entropy_backward(float *dx, const float *log_softmax, const int32_t *labels, int B, int C, int mean);

#endif
