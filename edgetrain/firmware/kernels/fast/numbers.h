/* Numbers that are changed one by one: pieces of PIECE of them. */
#ifndef NUMBERS_H
#define NUMBERS_H

#include "parallel.h"
#include "vector.h"

enum { PIECE = 8192 };

typedef struct {
    float *to;
    const float *a, *b;
    int n;
    float low, high;
} numbers;

/* The numbers of one piece. */
INLINE numbers piece_of(const void *job, int piece)
{
    numbers of = *(const numbers *)job;
    const int start = piece * PIECE;
    of.to += start;
    of.a += start;
    of.b = of.b == 0 ? 0 : of.b + start;
    of.n = lower(PIECE, of.n - start);
    return of;
}

INLINE void for_numbers(const numbers *of, piece_function *make)
{
    parallel_for(parts_of(of->n, PIECE), of->n / LANES, make, of);
}

#endif
