#define A_M s->a_m
#define A_I 1
#define B_N s->b_n
#define B_I 1
#define RESULTS_OVERLAP 0
#include "tiles.h"

void products_of_runs(float *y, const float *a, const float *b, const products_shape *s)
{
    in_tiles(y, a, b, s);
}
