/* The product that all layers with weights are made of: up to ROWS x COLUMNS sums, held in registers.
 *
 *                        panel [depth, COLUMNS]: `pitch` floats from row to row
 *                        ┌────────────┐
 *     a(m, j)            │ j          │       depth: `runs` runs of `run` numbers; in memory one run starts
 *     ┌──────────┐       └────────────┘       `run_step` after the other, numbers of a run lie `step` apart,
 *     │ m        │  ×   →  out[m][0 .. width)  and rows of a lie `row` apart
 *     └──────────┘
 */
#ifndef TILE_H
#define TILE_H

#include <stddef.h>

#include "vector.h"

/* The longest run of products in one sum: against rounding, longer ones are summed in parts. */
enum { DEPTH = 256 };

typedef struct {
    float *out[ROWS];
    const float *bias; /* COLUMNS floats, added last; or NULL */
    int add;           /* to what out holds already */
    int rows, width;
    const float *a;
    int row, step, runs, run_step, run;
    const float *panel;
    int pitch;
} tile;

INLINE void multiply_sized(const tile *t, int step, int row, int rows, int vectors)
{
    vec sums[ROWS][VECTORS];
    const float *panel = t->panel;
    const int run = t->run, pitch = t->pitch;
    for (int m = 0; m < rows; m++) {
        for (int v = 0; v < vectors; v++) {
            sums[m][v] = splat(0.0f);
        }
    }
    for (int i = 0; i < t->runs; i++) {
        const float *a = t->a + i * t->run_step;
        for (int j = 0; j < run; j++) {
            vec right[VECTORS];
            for (int v = 0; v < vectors; v++) {
                right[v] = load(panel + v * LANES);
            }
            for (int m = 0; m < rows; m++) {
                const vec left = splat(a[m * row]);
                for (int v = 0; v < vectors; v++) {
                    sums[m][v] += left * right[v];
                }
            }
            a += step;
            panel += pitch;
        }
    }
    for (int m = 0; m < rows; m++) {
        for (int v = 0; v < vectors; v++) {
            const int lanes = lower(t->width - v * LANES, LANES);
            vec sum = sums[m][v];
            if (lanes <= 0) {
                continue;
            }
            sum = t->add ? sum + load_some(t->out[m] + v * LANES, lanes) : sum;
            sum = t->bias != NULL ? sum + load(t->bias + v * LANES) : sum;
            store_some(t->out[m] + v * LANES, sum, lanes);
        }
    }
}

/* Each number of rows and of vectors has code of its own, so that all sums stay in registers. */
INLINE void multiply_any(const tile *t, int step, int row)
{
#define SIZED(n) \
    case n: \
        if (t->width <= LANES) { \
            multiply_sized(t, step, row, n, 1); \
        } else { \
            multiply_sized(t, step, row, n, VECTORS); \
        } \
        break;
    switch (t->rows) {
        SIZED(1)
        SIZED(2)
        SIZED(3)
        SIZED(4)
#if ROWS > 4
        SIZED(5)
        SIZED(6)
#endif
#if ROWS > 6
        SIZED(7)
        SIZED(8)
#endif
    default:
        break;
    }
#undef SIZED
}

#endif
