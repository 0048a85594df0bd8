#define A_M s->a_m
#define A_I 1
#define B_N 1
#define B_I s->inner.b
#define RESULTS_OVERLAP 1
#include "tiles.h"

void products_of_run_and_columns(float *y, const float *a, const float *b, const products_shape *s)
{
    in_tiles(y, a, b, s);
}
