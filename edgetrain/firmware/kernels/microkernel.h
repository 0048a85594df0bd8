/* The body of gemm_nt.c, gemm_tn.c and gemm_nn.c: y in tiles of up to 4 x 4 results, whose sums stay in registers:
 * eight loads for sixteen multiply-adds.
 *
 *     4x4 4x4 4x3      y of 10 x 11: the panels of four columns first, each from top to bottom,
 *     4x4 4x4 4x3      then the remainder at the right and in the corner
 *     2x4 2x4 2x3
 *
 * A file that includes this defines the strides of a and b along m, n and k, constant where the compiler can know them:
 * A_M, A_K, B_N and B_K; and ROWS_OVERLAP: rows of y may share places. */
#ifndef MICROKERNEL_H
#define MICROKERNEL_H

#include "gemm.h"
#include "kernel.h"

/* K_BLOCK products, or up to twice as many, are summed before they are added to y: less rounding than one long sum. */
enum { K_BLOCK = 20, TILE = 4 };

/* What a and b move by at the end of the inner and of the middle loop, to where the next pass starts. */
typedef struct {
    int inner_a, inner_b, middle_a, middle_b;
    int is_short; /* k is one short loop */
} wraps;

static inline wraps wraps_of(const gemm_shape *s)
{
    return (wraps){
        s->middle.a - s->inner.count * s->inner.a, s->middle.b - s->inner.count * s->inner.b,
        s->outer.a - s->middle.count * s->middle.a, s->outer.b - s->middle.count * s->middle.b,
        s->outer.count == 1 && s->middle.count == 1 && s->inner.count <= 2 * K_BLOCK,
    };
}

ALWAYS_INLINE void multiply_add(
    const int M, const int N, float sum[TILE][TILE], const float *a, const float *b, const gemm_shape *s)
{
    (void)s;
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int n = 0; n < N; n++) {
            sum[m][n] += a[m * A_M] * b[n * B_N];
        }
    }
}

ALWAYS_INLINE void multiply(
    const int M, const int N, float sum[TILE][TILE], const float *a, const float *b, const gemm_shape *s)
{
    (void)s;
    UNROLL for (int m = 0; m < M; m++) {
        UNROLL for (int n = 0; n < N; n++) {
            sum[m][n] = a[m * A_M] * b[n * B_N];
        }
    }
}

ALWAYS_INLINE void add_row(const int N, float *sum, const float *y)
{
    UNROLL for (int n = 0; n < N; n++) {
        sum[n] += y[n];
    }
}

ALWAYS_INLINE void store_tile(
    const int M, const int N, float *y, float sum[TILE][TILE], const gemm_shape *s, int overwrite)
{
    const int y_m = s->y_m;
    if (!overwrite && !ROWS_OVERLAP) {
        UNROLL for (int m = 0; m < M; m++) {
            add_row(N, sum[m], y + m * y_m);
        }
    }
    UNROLL for (int m = 0; m < M; m++) {
        if (!overwrite && ROWS_OVERLAP) { /* only now: the row before may have written here */
            add_row(N, sum[m], y + m * y_m);
        }
        UNROLL for (int n = 0; n < N; n++) {
            y[m * y_m + n] = sum[m][n];
        }
    }
}

/* A tile of M x N results: M + N loads for M N multiply-adds. */
ALWAYS_INLINE void microkernel(
    const int M, const int N, float *y, const float *a, const float *b, const gemm_shape *s, const wraps *w)
{
    int outer_left = s->outer.count, middle_left = s->middle.count, inner_left = s->inner.count;
    int overwrite = s->overwrite;
    while (outer_left > 0) {
        float sum[TILE][TILE] = {{0.0f}};
        int block_left = K_BLOCK;
        while (block_left > 0 && outer_left > 0) {
            const int count = min_int(inner_left, K_BLOCK);
            block_left -= count;
            inner_left -= count;
            int k = count;
            do {
                multiply_add(M, N, sum, a, b, s);
                a += A_K;
                b += B_K;
            } while (--k > 0);
            if (inner_left == 0) {
                inner_left = s->inner.count;
                a += w->inner_a;
                b += w->inner_b;
                if (--middle_left == 0) {
                    middle_left = s->middle.count;
                    a += w->middle_a;
                    b += w->middle_b;
                    outer_left--;
                }
            }
        }
        store_tile(M, N, y, sum, s, overwrite);
        overwrite = 0;
    }
}

/* The same where k is one short loop. */
ALWAYS_INLINE void short_microkernel(
    const int M, const int N, float *y, const float *a, const float *b, const gemm_shape *s)
{
    float sum[TILE][TILE];
    multiply(M, N, sum, a, b, s);
    for (int k = 1; k < s->inner.count; k++) {
        a += A_K;
        b += B_K;
        multiply_add(M, N, sum, a, b, s);
    }
    store_tile(M, N, y, sum, s, s->overwrite);
}

/* A panel of four columns: tiles of four rows. */
NOINLINE void short_panel(float *y, const float *a, const float *b, const gemm_shape *s)
{
    for (int left = s->M; left >= 4; left -= 4) {
        short_microkernel(4, 4, y, a, b, s);
        y += 4 * s->y_m;
        a += 4 * A_M;
    }
}

NOINLINE void panel(float *y, const float *a, const float *b, const gemm_shape *s, const wraps *w)
{
    for (int left = s->M; left >= 4; left -= 4) {
        microkernel(4, 4, y, a, b, s, w);
        y += 4 * s->y_m;
        a += 4 * A_M;
    }
}

/* The last M rows: tiles of four columns. */
ALWAYS_INLINE void short_row_panel(const int M, float *y, const float *a, const float *b, const gemm_shape *s)
{
    for (int left = s->N; left >= 4; left -= 4) {
        short_microkernel(M, 4, y, a, b, s);
        y += 4;
        b += 4 * B_N;
    }
}

ALWAYS_INLINE void row_panel(
    const int M, float *y, const float *a, const float *b, const gemm_shape *s, const wraps *w)
{
    for (int left = s->N; left >= 4; left -= 4) {
        microkernel(M, 4, y, a, b, s, w);
        y += 4;
        b += 4 * B_N;
    }
}

NOINLINE void short_last_rows(int M, float *y, const float *a, const float *b, const gemm_shape *s)
{
    if (M == 3) {
        short_row_panel(3, y, a, b, s);
    } else if (M == 2) {
        short_row_panel(2, y, a, b, s);
    } else {
        short_row_panel(1, y, a, b, s);
    }
}

NOINLINE void last_rows(int M, float *y, const float *a, const float *b, const gemm_shape *s, const wraps *w)
{
    if (M == 3) {
        row_panel(3, y, a, b, s, w);
    } else if (M == 2) {
        row_panel(2, y, a, b, s, w);
    } else {
        row_panel(1, y, a, b, s, w);
    }
}

/* The last N columns: tiles of four rows. */
ALWAYS_INLINE void narrow_panel(
    const int N, float *y, const float *a, const float *b, const gemm_shape *s, const wraps *w)
{
    for (int left = s->M; left >= 4; left -= 4) {
        microkernel(4, N, y, a, b, s, w);
        y += 4 * s->y_m;
        a += 4 * A_M;
    }
}

NOINLINE void last_columns(int N, float *y, const float *a, const float *b, const gemm_shape *s, const wraps *w)
{
    if (N == 3) {
        narrow_panel(3, y, a, b, s, w);
    } else if (N == 2) {
        narrow_panel(2, y, a, b, s, w);
    } else {
        narrow_panel(1, y, a, b, s, w);
    }
}

/* The last rows of the last columns. */
NOINLINE void corner(int M, int N, float *y, const float *a, const float *b, const gemm_shape *s, const wraps *w)
{
    if (M == 3 && N == 3) {
        microkernel(3, 3, y, a, b, s, w);
    } else if (M == 3 && N == 2) {
        microkernel(3, 2, y, a, b, s, w);
    } else if (M == 3) {
        microkernel(3, 1, y, a, b, s, w);
    } else if (M == 2 && N == 3) {
        microkernel(2, 3, y, a, b, s, w);
    } else if (M == 2 && N == 2) {
        microkernel(2, 2, y, a, b, s, w);
    } else if (M == 2) {
        microkernel(2, 1, y, a, b, s, w);
    } else if (N == 3) {
        microkernel(1, 3, y, a, b, s, w);
    } else if (N == 2) {
        microkernel(1, 2, y, a, b, s, w);
    } else {
        microkernel(1, 1, y, a, b, s, w);
    }
}

static void gemm(float *y, const float *a, const float *b, const gemm_shape *s)
{
    const wraps w = wraps_of(s);
    const int rows = s->M % 4, columns = s->N % 4;
    float *const last_y = y + (s->M - rows) * s->y_m;
    const float *const last_a = a + (s->M - rows) * A_M;
    if (rows > 0 && w.is_short) {
        short_last_rows(rows, last_y, last_a, b, s);
    } else if (rows > 0) {
        last_rows(rows, last_y, last_a, b, s, &w);
    }
    for (int n = 0; n + 4 <= s->N; n += 4) {
        if (w.is_short) {
            short_panel(y + n, a, b + n * B_N, s);
        } else {
            panel(y + n, a, b + n * B_N, s, &w);
        }
    }
    if (columns > 0) {
        const int n = s->N - columns;
        last_columns(columns, y + n, a, b + n * B_N, s, &w);
        if (rows > 0) {
            corner(rows, columns, last_y + n, last_a, b + n * B_N, s, &w);
        }
    }
}

#endif
