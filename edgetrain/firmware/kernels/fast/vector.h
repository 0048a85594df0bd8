/* Vectors as the compiler has them: AVX, NEON and SSE from one source, and plain floats where a core has none.
 *
 *     LANES      floats in a vector
 *     ROWS       x VECTORS vectors are the sums that a core can hold in its registers, beside what it multiplies
 */
#ifndef VECTOR_H
#define VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#define LANES 8
#define ROWS 6
#define VECTORS 2
#elif defined(__ARM_NEON)
#define LANES 4
#define ROWS 8
#define VECTORS 2
#elif defined(__SSE2__)
#define LANES 4
#define ROWS 6
#define VECTORS 2
#else
#define LANES 1
#define ROWS 4
#define VECTORS 4
#endif

#define COLUMNS (VECTORS * LANES)
#define INLINE static inline __attribute__((always_inline))

#if LANES > 1
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

/* All lanes x. (x - 0 is x for every x, minus zero too.) */
INLINE vec splat(float x)
{
    return x - (vec){0.0f};
}

INLINE ivec splat_int(int x)
{
    return x - (ivec){0};
}

/* Lane by lane: a where the mask is set, b where it is not. */
INLINE vec choose(ivec mask, vec a, vec b)
{
    return (vec)(((ivec)a & mask) | ((ivec)b & ~mask));
}

INLINE ivec choose_int(ivec mask, ivec a, ivec b)
{
    return (a & mask) | (b & ~mask);
}
#else
typedef float vec;
typedef int32_t ivec;

INLINE vec splat(float x)
{
    return x;
}

INLINE ivec splat_int(int x)
{
    return x;
}

INLINE vec choose(ivec mask, vec a, vec b)
{
    return mask != 0 ? a : b;
}

INLINE ivec choose_int(ivec mask, ivec a, ivec b)
{
    return mask != 0 ? a : b;
}
#endif

INLINE vec load(const float *from)
{
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vec v)
{
    memcpy(to, &v, sizeof v);
}

/* n floats, fewer than LANES: by halves, as a loop would become a call. */
INLINE void copy_few(float *to, const float *from, int n)
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
INLINE vec load_some(const float *from, int n)
{
    float some[LANES] = {0.0f};
    if (n == LANES) {
        return load(from);
    }
    copy_few(some, from, n);
    return load(some);
}

INLINE void store_some(float *to, vec v, int n)
{
    float some[LANES];
    if (n == LANES) {
        store(to, v);
        return;
    }
    store(some, v);
    copy_few(to, some, n);
}

/* n lanes that count, of a tensor that has `room` floats from here on: more are read where they are there, as that is
 * quicker. For what nobody writes meanwhile. */
INLINE vec load_at_least(const float *from, int n, int room)
{
    return room >= LANES ? load(from) : load_some(from, n);
}

/* A short run of floats. */
INLINE void copy_run(float *to, const float *from, int n)
{
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        store(to + i, load(from + i));
    }
    copy_few(to + i, from + i, n - i);
}

/* Sums that carry along what rounding loses (Kahan), one in each lane. */
typedef struct {
    vec total, lost;
} exact_vec;

INLINE void exact_add_vec(exact_vec *sum, vec value)
{
    const vec corrected = value - sum->lost;
    const vec total = sum->total + corrected;
    sum->lost = (total - sum->total) - corrected;
    sum->total = total;
}

INLINE int lower(int a, int b)
{
    return a < b ? a : b;
}

INLINE int higher(int a, int b)
{
    return a > b ? a : b;
}

/* a / b, rounded up. */
INLINE int parts_of(int a, int b)
{
    return (a + b - 1) / b;
}

#endif
