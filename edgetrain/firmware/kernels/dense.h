/* A dense layer: x [B, I], w [O, I], y [B, O]. */
#ifndef DENSE_H
#define DENSE_H

/* b: one number for each of the O results, or NULL. */
void dense_forward(float *restrict y, const float *x, const float *w, const float *b, int B, int I, int O);
void dense_backward_weight(float *restrict dw, const float *dy, const float *x, int B, int I, int O);
void dense_backward_input(float *restrict dx, const float *dy, const float *w, int B, int I, int O);

#endif
