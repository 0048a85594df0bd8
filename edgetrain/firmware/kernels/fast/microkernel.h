/* The gemm microkernel behind all layers with weights: a tile of up to MR x NR sums in registers, or twice as many rows
 * where one vector is wide enough.
 *
 *                        panel [k, NR]
 *                        ┌────────────┐
 *     a(m, k)            │            │       k is three nested loops, each with a stride in a and one in the panel.
 *     ┌──────────┐       └────────────┘       Rows of a lie `a_row` apart.
 *     │ m        │  ×   →  y[m][0 .. columns)
 *     └──────────┘
 */
#ifndef MICROKERNEL_H
#define MICROKERNEL_H

#include <stddef.h>

#include "vector.h"

/* The most products in one sum: longer ones are summed in blocks, against rounding. */
enum { KC = 256 };

typedef struct {
    int count, a, panel;
} loop;

typedef struct {
    float *y[2 * MR];
    const float *bias; /* NR floats, added last; or NULL */
    int add;           /* to what y holds */
    int rows, columns;
    const float *a, *panel;
    int a_row;
    loop outer, middle, inner;
} tile;

ALWAYS_INLINE int max_rows(int columns)
{
    return columns <= LANES ? 2 * MR : MR;
}

void microkernel(const tile *t);

#endif
