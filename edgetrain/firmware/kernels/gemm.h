/* Matrix products, which dense layers and convolutions are made of:
 *
 *     y[m, n] += sum over k of a[m, k] b[n, k]
 *
 * k is three nested loops, such as images, rows and columns: a convolution reads its image in place, with the strides
 * that im2col would copy by. */
#ifndef GEMM_H
#define GEMM_H

/* A loop of the sum: its length, and the strides of a and b. */
typedef struct {
    int count, a, b;
} gemm_loop;

static const gemm_loop ONCE = {1, 0, 0};

typedef struct {
    int M, N;
    int y_m, a_m, b_n;              /* strides along m and n; y is contiguous along n */
    gemm_loop outer, middle, inner; /* each at least once */
    int overwrite;                  /* y has no value yet: set it instead of adding to it */
} gemm_shape;

/* Both contiguous along k: inner.a == inner.b == 1. */
void gemm_nt(float *y, const float *a, const float *b, const gemm_shape *s);
/* Contiguous along m and along n: a_m == b_n == 1. */
void gemm_tn(float *y, const float *a, const float *b, const gemm_shape *s);
/* a contiguous along k, b along n: inner.a == b_n == 1. Rows of y may overlap (y_m < N) where they are added to. */
void gemm_nn(float *y, const float *a, const float *b, const gemm_shape *s);

#endif
