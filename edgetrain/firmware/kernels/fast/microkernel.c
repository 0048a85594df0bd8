#include "microkernel.h"

ALWAYS_INLINE void microkernel_sized(const tile *t, int rows, int vectors)
{
    vec sums[2 * MR][VECTORS];
    const int count = t->inner.count, step = t->inner.a, pitch = t->inner.panel, row = t->a_row;
    for (int m = 0; m < rows; m++) {
        for (int v = 0; v < vectors; v++) {
            sums[m][v] = splat(0.0f);
        }
    }
    for (int o = 0; o < t->outer.count; o++) {
        for (int i = 0; i < t->middle.count; i++) {
            const float *a = t->a + o * t->outer.a + i * t->middle.a;
            const float *panel = t->panel + o * t->outer.panel + i * t->middle.panel;
            for (int j = 0; j < count; j++) {
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
    }
    for (int m = 0; m < rows; m++) {
        for (int v = 0; v < vectors; v++) {
            const int lanes = min_int(t->columns - v * LANES, LANES);
            vec sum = sums[m][v];
            if (lanes <= 0) {
                continue;
            }
            sum = t->add ? sum + load_partial(t->y[m] + v * LANES, lanes) : sum;
            sum = t->bias != NULL ? sum + load(t->bias + v * LANES) : sum;
            store_partial(t->y[m] + v * LANES, sum, lanes);
        }
    }
}

/* Each number of rows and vectors has code of its own, so that all sums stay in registers. SMALL_CODE: loops instead,
 * for builds with sanitizers. */
void microkernel(const tile *t)
{
#ifdef SMALL_CODE
    microkernel_sized(t, t->rows, t->columns <= LANES ? 1 : VECTORS);
#else
#define NARROW(n) \
    case n: \
        microkernel_sized(t, n, 1); \
        break;
#define SIZED(n) \
    case n: \
        if (t->columns <= LANES) { \
            microkernel_sized(t, n, 1); \
        } else { \
            microkernel_sized(t, n, VECTORS); \
        } \
        break;
    switch (t->rows) {
        SIZED(1)
        SIZED(2)
        SIZED(3)
        SIZED(4)
#if MR == 4
        NARROW(5)
        NARROW(6)
        NARROW(7)
        NARROW(8)
#elif MR == 6
        SIZED(5)
        SIZED(6)
        NARROW(7)
        NARROW(8)
        NARROW(9)
        NARROW(10)
        NARROW(11)
        NARROW(12)
#else
        SIZED(5)
        SIZED(6)
        SIZED(7)
        SIZED(8)
        NARROW(9)
        NARROW(10)
        NARROW(11)
        NARROW(12)
        NARROW(13)
        NARROW(14)
        NARROW(15)
        NARROW(16)
#endif
    default:
        break;
    }
#undef NARROW
#undef SIZED
#endif
}
