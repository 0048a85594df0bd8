/* Rows of C channels, of which each channel is summed or changed by itself.
 *
 * For sums the rows are cut into parts, and the sums of the parts are put together in double; within a part a few rows are
 * summed plainly, and these sums carry along what rounding loses.
 */
#ifndef COLUMNS_H
#define COLUMNS_H

#include "parallel.h"
#include "vector.h"

enum { MOST_PARTS = 8, CHANNELS_AT_ONCE = 1024, PLAIN_ROWS = 16 };

/* How many parts; it depends on the shape alone. */
INLINE int row_parts(int rows, int C)
{
    return higher(1, lower(MOST_PARTS, lower(rows / PLAIN_ROWS, rows * parts_of(C, LANES) / 1024)));
}

INLINE int part_start(int rows, int parts, int part)
{
    return (int)((long)rows * part / parts);
}

/* Rows that are changed by a piece at once: about as many numbers as the first cache holds. */
INLINE int rows_at_once(int rows, int C)
{
    return lower(rows, higher(1, 4096 / C));
}

#endif
