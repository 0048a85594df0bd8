#include "products.h"

#include "sums.h"

/* So many products are summed by themselves before they are added to y, against rounding. */
enum { RUN = 16, TILE = 4 };

/* Where the sum stands: what is left of each loop, and where a and b are. */
typedef struct {
    const float *a, *b;
    int outer, middle, inner;
} place;

static inline int next_row(place *at, const products_shape *s)
{
    at->inner = s->inner.count;
    at->a += s->middle.a - s->inner.count * s->inner.a;
    at->b += s->middle.b - s->inner.count * s->inner.b;
    if (--at->middle > 0) {
        return 1;
    }
    at->middle = s->middle.count;
    at->a += s->outer.a - s->middle.count * s->middle.a;
    at->b += s->outer.b - s->middle.count * s->middle.b;
    return --at->outer > 0;
}

/* A tile of M x N results, whose sums stay in registers: M + N loads for M N multiply-adds. The steps a_m .. b_i are given
 * apart from the shape because a caller knows some of them when the program is built; so are M and N. */
FOR_EACH_CALL void tile(
    const int M, const int N, float *y, const float *a, const float *b, const products_shape *s, const int a_m,
    const int a_i, const int b_n, const int b_i)
{
    place at = {a, b, s->outer.count, s->middle.count, s->inner.count};
    int fresh = s->fresh, more = 1;
    while (more) {
        float sum[TILE][TILE];
        UNROLLED for (int m = 0; m < M; m++) {
            UNROLLED for (int n = 0; n < N; n++) {
                sum[m][n] = 0.0f;
            }
        }
        int room = RUN;
        while (more && room > 0) {
            const int count = at_most(room, at.inner);
            for (int i = 0; i < count; i++) {
                UNROLLED for (int m = 0; m < M; m++) {
                    UNROLLED for (int n = 0; n < N; n++) {
                        sum[m][n] += at.a[m * a_m] * at.b[n * b_n];
                    }
                }
                at.a += a_i;
                at.b += b_i;
            }
            room -= count;
            at.inner -= count;
            more = at.inner > 0 || next_row(&at, s);
        }
        UNROLLED for (int m = 0; m < M; m++) {
            UNROLLED for (int n = 0; n < N; n++) {
                float *const result = y + m * s->y_m + n * s->y_n;
                *result = fresh ? sum[m][n] : *result + sum[m][n];
            }
        }
        fresh = 0;
    }
}

/* Results one by one: what is left in a corner. */
static void single_results(int M, int N, float *y, const float *a, const float *b, const products_shape *s)
{
    for (int m = 0; m < M; m++) {
        for (int n = 0; n < N; n++) {
            float *const result = y + m * s->y_m + n * s->y_n;
            tile(1, 1, result, a + m * s->a_m, b + n * s->b_n, s, 0, s->inner.a, 0, s->inner.b);
        }
    }
}

FOR_EACH_CALL void any_tile(
    int M, int N, float *y, const float *a, const float *b, const products_shape *s, const int a_m, const int a_i,
    const int b_n, const int b_i)
{
    if (M == 4 && N == 4) {
        tile(4, 4, y, a, b, s, a_m, a_i, b_n, b_i);
    } else if (M == 2 && N == 4) {
        tile(2, 4, y, a, b, s, a_m, a_i, b_n, b_i);
    } else if (M == 1 && N == 4) {
        tile(1, 4, y, a, b, s, a_m, a_i, b_n, b_i);
    } else if (M == 4 && N == 2) {
        tile(4, 2, y, a, b, s, a_m, a_i, b_n, b_i);
    } else if (M == 4 && N == 1) {
        tile(4, 1, y, a, b, s, a_m, a_i, b_n, b_i);
    } else {
        single_results(M, N, y, a, b, s);
    }
}

static void tile_of_runs(int M, int N, float *y, const float *a, const float *b, const products_shape *s)
{
    any_tile(M, N, y, a, b, s, s->a_m, 1, s->b_n, 1);
}

static void tile_of_columns(int M, int N, float *y, const float *a, const float *b, const products_shape *s)
{
    any_tile(M, N, y, a, b, s, 1, s->inner.a, 1, s->inner.b);
}

static void tile_of_run_and_columns(int M, int N, float *y, const float *a, const float *b, const products_shape *s)
{
    any_tile(M, N, y, a, b, s, s->a_m, 1, 1, s->inner.b);
}

typedef void tile_function(int M, int N, float *y, const float *a, const float *b, const products_shape *s);

static int side(int left)
{
    return left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* y in tiles: as many of four by four as there are, then narrower ones. */
static void in_tiles(tile_function *of, float *y, const float *a, const float *b, const products_shape *s)
{
    for (int n = 0; n < s->N;) {
        const int N = side(s->N - n);
        for (int m = 0; m < s->M;) {
            const int M = side(s->M - m);
            of(M, N, y + m * s->y_m + n * s->y_n, a + m * s->a_m, b + n * s->b_n, s);
            m += M;
        }
        n += N;
    }
}

void products_of_runs(float *y, const float *a, const float *b, const products_shape *s)
{
    in_tiles(tile_of_runs, y, a, b, s);
}

void products_of_columns(float *y, const float *a, const float *b, const products_shape *s)
{
    in_tiles(tile_of_columns, y, a, b, s);
}

void products_of_run_and_columns(float *y, const float *a, const float *b, const products_shape *s)
{
    in_tiles(tile_of_run_and_columns, y, a, b, s);
}
