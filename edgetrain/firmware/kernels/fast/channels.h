/* Rows of C channels, each channel summed or changed on its own.
 *
 * For sums the rows are divided into parts, whose sums are added up in double; within a part, plain sums of a few rows
 * are added up by Kahan summation.
 */
#ifndef CHANNELS_H
#define CHANNELS_H

#include "parallel.h"
#include "vector.h"

enum { MAX_PARTS = 8, CHANNELS_AT_ONCE = 1024, PLAIN_ROWS = 16 };

/* The number of parts; it depends on the shape alone. */
ALWAYS_INLINE int row_parts(int rows, int C)
{
    return max_int(1, min_int(MAX_PARTS, min_int(rows / PLAIN_ROWS, rows * ceil_div(C, LANES) / 1024)));
}

ALWAYS_INLINE int part_start(int rows, int parts, int part)
{
    return (int)((long)rows * part / parts);
}

/* Rows that a task changes at once: about as many elements as the L1 cache holds. */
ALWAYS_INLINE int rows_at_once(int rows, int C)
{
    return min_int(rows, max_int(1, 4096 / C));
}

#endif
