/* Dropout: a mask of ones (kept) and zeros, drawn anew in each step, and x times mask / keep.
 * The mask is a function of seed, step and the mask's own number, so a step that is recomputed draws the same mask. */
#ifndef DROPOUT_H
#define DROPOUT_H

#include <stdint.h>

void dropout_mask(uint8_t *restrict mask, int n, float keep, uint32_t seed, uint32_t step, uint32_t number);
/* y may be x. Used for the gradient too. */
void dropout_apply(float *y, const float *x, const uint8_t *mask, int n, float keep);

#endif
