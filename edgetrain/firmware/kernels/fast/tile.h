/* The product that all layers with weights are made of: up to ROWS x COLUMNS sums, held in registers, or twice as many
 * rows where one vector is wide enough.
 *
 *                        panel [depth, COLUMNS]
 *                        ┌────────────┐
 *     a(m, depth)        │            │       The depth is three loops, each with a step in a and one in the panel;
 *     ┌──────────┐       └────────────┘       the innermost is the last. Rows of a lie `row` apart.
 *     │ m        │  ×   →  out[m][0 .. width)
 *     └──────────┘
 */
#ifndef TILE_H
#define TILE_H

#include <stddef.h>

#include "vector.h"

/* The longest run of products in one sum: against rounding, longer ones are summed in parts. */
enum { DEPTH = 256 };

typedef struct {
    int count, step, panel_step;
} loop;

typedef struct {
    float *out[2 * ROWS];
    const float *bias; /* COLUMNS floats, added last; or NULL */
    int add;           /* to what out holds already */
    int rows, width;
    const float *a, *panel;
    int row;
    loop outer, middle, inner;
} tile;

INLINE int most_rows(int width)
{
    return width <= LANES ? 2 * ROWS : ROWS;
}

void multiply(const tile *t);

#endif
