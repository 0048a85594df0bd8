/* Sums of products, which is what dense layers and convolutions are made of:
 *
 *     y[m, n] += sum over i of a[m, i] b[n, i]
 *
 * i walks over three nested loops, such as images, rows and columns. y, a and b lie in memory as their steps say. */
#ifndef PRODUCTS_H
#define PRODUCTS_H

/* A loop of the sum: how many, and how far a and b move from one to the next. */
typedef struct {
    int count, a, b;
} products_loop;

typedef struct {
    int M, N;
    int y_m, a_m, b_n;                  /* from one m, or n, to the next; n of y lie side by side */
    products_loop outer, middle, inner; /* each at least once */
    int fresh;                          /* y has no value yet: it is set, not added to */
} products_shape;

/* Both lie in the order of the inner loop: inner.a == inner.b == 1. */
void products_of_runs(float *y, const float *a, const float *b, const products_shape *s);
/* Both have what the results are made of side by side: a_m == b_n == 1. */
void products_of_columns(float *y, const float *a, const float *b, const products_shape *s);
/* a lies in the order of the inner loop, b has it side by side: inner.a == b_n == 1. Rows of y may overlap (y_m < N) where
 * they are added to. */
void products_of_run_and_columns(float *y, const float *a, const float *b, const products_shape *s);

#endif
