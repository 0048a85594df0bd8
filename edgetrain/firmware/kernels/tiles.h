/* The body of the three products_of_*.c: y in tiles of up to 4 x 4 results, whose sums stay in registers, so that four and
 * four loads serve sixteen multiply-adds.
 *
 *     4x4 4x4 4x3      y of 10 x 11: the strips of four columns first, each from top to bottom,
 *     4x4 4x4 4x3      then what is left at the right and in the corner
 *     2x4 2x4 2x3
 *
 * A file that includes this says how a and b lie in memory, where it is known when the program is built:
 * A_M, A_I, B_N and B_I, the steps from one m, n and i to the next; and RESULTS_OVERLAP: rows of y may share places. */
#ifndef TILES_H
#define TILES_H

#include "products.h"
#include "sums.h"

/* So many products are summed by themselves, or up to twice as many, before they are added to y: against rounding. */
enum { RUN = 20, TILE = 4 };

/* How far a and b move from the end of the inner loop to its next start, and from the end of the middle one. */
typedef struct {
    int row_a, row_b, plane_a, plane_b;
    int brief; /* the sum is one short run */
} jumps;

static inline jumps jumps_of(const products_shape *s)
{
    return (jumps){
        s->middle.a - s->inner.count * s->inner.a, s->middle.b - s->inner.count * s->inner.b,
        s->outer.a - s->middle.count * s->middle.a, s->outer.b - s->middle.count * s->middle.b,
        s->outer.count == 1 && s->middle.count == 1 && s->inner.count <= 2 * RUN,
    };
}

FOR_EACH_CALL void add_products(
    const int M, const int N, float sum[TILE][TILE], const float *a, const float *b, const products_shape *s)
{
    (void)s;
    UNROLLED for (int m = 0; m < M; m++) {
        UNROLLED for (int n = 0; n < N; n++) {
            sum[m][n] += a[m * A_M] * b[n * B_N];
        }
    }
}

FOR_EACH_CALL void set_products(
    const int M, const int N, float sum[TILE][TILE], const float *a, const float *b, const products_shape *s)
{
    (void)s;
    UNROLLED for (int m = 0; m < M; m++) {
        UNROLLED for (int n = 0; n < N; n++) {
            sum[m][n] = a[m * A_M] * b[n * B_N];
        }
    }
}

FOR_EACH_CALL void add_row(const int N, float *sum, const float *y)
{
    UNROLLED for (int n = 0; n < N; n++) {
        sum[n] += y[n];
    }
}

FOR_EACH_CALL void put_results(
    const int M, const int N, float *y, float sum[TILE][TILE], const products_shape *s, int fresh)
{
    const int y_m = s->y_m;
    if (!fresh && !RESULTS_OVERLAP) {
        UNROLLED for (int m = 0; m < M; m++) {
            add_row(N, sum[m], y + m * y_m);
        }
    }
    UNROLLED for (int m = 0; m < M; m++) {
        if (!fresh && RESULTS_OVERLAP) { /* with what the row before has put there */
            add_row(N, sum[m], y + m * y_m);
        }
        UNROLLED for (int n = 0; n < N; n++) {
            y[m * y_m + n] = sum[m][n];
        }
    }
}

/* A tile of M x N results, whose sums stay in registers: M + N loads for M N multiply-adds. */
FOR_EACH_CALL void tile(
    const int M, const int N, float *y, const float *a, const float *b, const products_shape *s, const jumps *j)
{
    int planes = s->outer.count, rows = s->middle.count, left = s->inner.count, fresh = s->fresh;
    while (planes > 0) {
        float sum[TILE][TILE] = {{0.0f}};
        int room = RUN;
        while (room > 0 && planes > 0) {
            const int count = at_most(left, RUN);
            room -= count;
            left -= count;
            int i = count;
            do {
                add_products(M, N, sum, a, b, s);
                a += A_I;
                b += B_I;
            } while (--i > 0);
            if (left == 0) {
                left = s->inner.count;
                a += j->row_a;
                b += j->row_b;
                if (--rows == 0) {
                    rows = s->middle.count;
                    a += j->plane_a;
                    b += j->plane_b;
                    planes--;
                }
            }
        }
        put_results(M, N, y, sum, s, fresh);
        fresh = 0;
    }
}

/* The same for a sum of one short run. */
FOR_EACH_CALL void short_tile(
    const int M, const int N, float *y, const float *a, const float *b, const products_shape *s)
{
    float sum[TILE][TILE];
    set_products(M, N, sum, a, b, s);
    for (int i = 1; i < s->inner.count; i++) {
        a += A_I;
        b += B_I;
        add_products(M, N, sum, a, b, s);
    }
    put_results(M, N, y, sum, s, s->fresh);
}

/* Four columns, from the top: tiles of four rows. */
BY_ITSELF void short_strip(float *y, const float *a, const float *b, const products_shape *s)
{
    for (int left = s->M; left >= 4; left -= 4) {
        short_tile(4, 4, y, a, b, s);
        y += 4 * s->y_m;
        a += 4 * A_M;
    }
}

BY_ITSELF void long_strip(float *y, const float *a, const float *b, const products_shape *s, const jumps *j)
{
    for (int left = s->M; left >= 4; left -= 4) {
        tile(4, 4, y, a, b, s, j);
        y += 4 * s->y_m;
        a += 4 * A_M;
    }
}

/* The last M rows, from left to right: tiles of four columns. */
FOR_EACH_CALL void along_short(const int M, float *y, const float *a, const float *b, const products_shape *s)
{
    for (int left = s->N; left >= 4; left -= 4) {
        short_tile(M, 4, y, a, b, s);
        y += 4;
        b += 4 * B_N;
    }
}

FOR_EACH_CALL void along(
    const int M, float *y, const float *a, const float *b, const products_shape *s, const jumps *j)
{
    for (int left = s->N; left >= 4; left -= 4) {
        tile(M, 4, y, a, b, s, j);
        y += 4;
        b += 4 * B_N;
    }
}

BY_ITSELF void last_short_rows(int M, float *y, const float *a, const float *b, const products_shape *s)
{
    if (M == 3) {
        along_short(3, y, a, b, s);
    } else if (M == 2) {
        along_short(2, y, a, b, s);
    } else {
        along_short(1, y, a, b, s);
    }
}

BY_ITSELF void last_rows(int M, float *y, const float *a, const float *b, const products_shape *s, const jumps *j)
{
    if (M == 3) {
        along(3, y, a, b, s, j);
    } else if (M == 2) {
        along(2, y, a, b, s, j);
    } else {
        along(1, y, a, b, s, j);
    }
}

/* The last N columns, from the top: tiles of four rows. */
FOR_EACH_CALL void down(
    const int N, float *y, const float *a, const float *b, const products_shape *s, const jumps *j)
{
    for (int left = s->M; left >= 4; left -= 4) {
        tile(4, N, y, a, b, s, j);
        y += 4 * s->y_m;
        a += 4 * A_M;
    }
}

BY_ITSELF void last_columns(int N, float *y, const float *a, const float *b, const products_shape *s, const jumps *j)
{
    if (N == 3) {
        down(3, y, a, b, s, j);
    } else if (N == 2) {
        down(2, y, a, b, s, j);
    } else {
        down(1, y, a, b, s, j);
    }
}

/* The last rows of the last columns. */
BY_ITSELF void corner(int M, int N, float *y, const float *a, const float *b, const products_shape *s, const jumps *j)
{
    if (M == 3 && N == 3) {
        tile(3, 3, y, a, b, s, j);
    } else if (M == 3 && N == 2) {
        tile(3, 2, y, a, b, s, j);
    } else if (M == 3) {
        tile(3, 1, y, a, b, s, j);
    } else if (M == 2 && N == 3) {
        tile(2, 3, y, a, b, s, j);
    } else if (M == 2 && N == 2) {
        tile(2, 2, y, a, b, s, j);
    } else if (M == 2) {
        tile(2, 1, y, a, b, s, j);
    } else if (N == 3) {
        tile(1, 3, y, a, b, s, j);
    } else if (N == 2) {
        tile(1, 2, y, a, b, s, j);
    } else {
        tile(1, 1, y, a, b, s, j);
    }
}

static void in_tiles(float *y, const float *a, const float *b, const products_shape *s)
{
    const jumps j = jumps_of(s);
    const int rows = s->M % 4, columns = s->N % 4;
    float *const last_y = y + (s->M - rows) * s->y_m;
    const float *const last_a = a + (s->M - rows) * A_M;
    if (rows > 0 && j.brief) {
        last_short_rows(rows, last_y, last_a, b, s);
    } else if (rows > 0) {
        last_rows(rows, last_y, last_a, b, s, &j);
    }
    for (int n = 0; n + 4 <= s->N; n += 4) {
        if (j.brief) {
            short_strip(y + n, a, b + n * B_N, s);
        } else {
            long_strip(y + n, a, b + n * B_N, s, &j);
        }
    }
    if (columns > 0) {
        const int n = s->N - columns;
        last_columns(columns, y + n, a, b + n * B_N, s, &j);
        if (rows > 0) {
            corner(rows, columns, last_y + n, last_a, b + n * B_N, s, &j);
        }
    }
}

#endif
