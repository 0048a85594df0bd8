/* Vectors of the compiler: AVX, NEON and SSE from one source, and plain floats where a core has none.
 *
 *     LANES      floats in a vector
 *     MR x NR    the tile of sums that a core's registers hold beside the factors; NR is VECTORS vectors
 */
#ifndef VECTOR_H
#define VECTOR_H

#include <stdint.h>
#include <string.h>

/* Inlined before anything else, so that all sums of a tile stay in registers. */
__attribute__((always_inline)) static inline int min_int(int a, int b);
__attribute__((always_inline)) static inline int max_int(int a, int b);
__attribute__((always_inline)) static inline int ceil_div(int a, int b);

#include "../kernel.h"

#if defined(__AVX__)
#define LANES 8
#define MR 6
#define VECTORS 2
#elif defined(__ARM_NEON)
#define LANES 4
#define MR 8
#define VECTORS 2
#elif defined(__SSE2__)
#define LANES 4
#define MR 6
#define VECTORS 2
#else
#define LANES 1
#define MR 4
#define VECTORS 4
#endif

#define NR (VECTORS * LANES)

#if LANES > 1
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

/* x in all lanes. (x - 0 is x for every x, minus zero too.) */
ALWAYS_INLINE vec splat(float x)
{
    return x - (vec){0.0f};
}

ALWAYS_INLINE ivec splat_int(int x)
{
    return x - (ivec){0};
}

/* Lane by lane: a where the mask is set, b where it is not. */
ALWAYS_INLINE vec blend(ivec mask, vec a, vec b)
{
    return (vec)(((ivec)a & mask) | ((ivec)b & ~mask));
}

ALWAYS_INLINE ivec blend_int(ivec mask, ivec a, ivec b)
{
    return (a & mask) | (b & ~mask);
}
#else
typedef float vec;
typedef int32_t ivec;

ALWAYS_INLINE vec splat(float x)
{
    return x;
}

ALWAYS_INLINE ivec splat_int(int x)
{
    return x;
}

ALWAYS_INLINE vec blend(ivec mask, vec a, vec b)
{
    return mask != 0 ? a : b;
}

ALWAYS_INLINE ivec blend_int(ivec mask, ivec a, ivec b)
{
    return mask != 0 ? a : b;
}
#endif

ALWAYS_INLINE vec load(const float *from)
{
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

ALWAYS_INLINE void store(float *to, vec v)
{
    memcpy(to, &v, sizeof v);
}

/* n floats, fewer than LANES: by halves, as a loop would be compiled to a call. */
ALWAYS_INLINE void copy_partial(float *to, const float *from, int n)
{
    int at = 0;
    if (LANES > 4 && (n & 4) != 0) {
        memcpy(to, from, 4 * sizeof *to);
        at = 4;
    }
    if (LANES > 2 && (n & 2) != 0) {
        memcpy(to + at, from + at, 2 * sizeof *to);
        at += 2;
    }
    if (LANES > 1 && (n & 1) != 0) {
        to[at] = from[at];
    }
}

/* The first n lanes; zeros behind them. */
ALWAYS_INLINE vec load_partial(const float *from, int n)
{
    float some[LANES] = {0.0f};
    if (n == LANES) {
        return load(from);
    }
    copy_partial(some, from, n);
    return load(some);
}

ALWAYS_INLINE void store_partial(float *to, vec v, int n)
{
    float some[LANES];
    if (n == LANES) {
        store(to, v);
        return;
    }
    store(some, v);
    copy_partial(to, some, n);
}

/* The first n lanes of a tensor of which `room` floats are left. All lanes are loaded where there are so many, which is
 * faster; those after n may hold anything. For tensors that nobody writes meanwhile. */
ALWAYS_INLINE vec load_padded(const float *from, int n, int room)
{
    return room >= LANES ? load(from) : load_partial(from, n);
}

/* A short run of floats. */
ALWAYS_INLINE void copy_run(float *to, const float *from, int n)
{
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        store(to + i, load(from + i));
    }
    copy_partial(to + i, from + i, n - i);
}

/* Kahan summation, one sum in each lane. */
typedef struct {
    vec total, lost;
} kahan_vec;

ALWAYS_INLINE void kahan_add_vec(kahan_vec *sum, vec value)
{
    const vec corrected = value - sum->lost;
    const vec total = sum->total + corrected;
    sum->lost = (total - sum->total) - corrected;
    sum->total = total;
}

#endif
