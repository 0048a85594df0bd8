/* What the kernels share. The letters of their shapes:
 *
 *     B  samples of a batch        C  channels of an image, columns of a matrix
 *     H, W  an image's sides       K  filters, or the length of a sum in a gemm
 *     P, Q  its result's sides     R, S  a filter's or a window's sides
 *     I, O  inputs and outputs of a dense layer
 *
 * Images are [B, H, W, C], filters [K, R, S, C]; h runs over H and so on, but v over W: w is a weight. dx is the
 * gradient of x. Additions have a fixed order, so that results are the same bits on every core. */
#ifndef KERNEL_H
#define KERNEL_H

#include <stddef.h>

/* Unrolls a loop whose length the compiler knows: its arrays become registers. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
/* Compiled anew for each call, with its constant arguments; parameters in capitals are constants. */
#define ALWAYS_INLINE static inline __attribute__((always_inline))
/* Registers are few: the loop of such a function has them all. */
#define NOINLINE static __attribute__((noinline))

static inline int max_int(int a, int b)
{
    return a > b ? a : b;
}

static inline int min_int(int a, int b)
{
    return a < b ? a : b;
}

/* a / b, rounded up. */
static inline int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
}

/* Repeats `value`, K numbers or NULL for zeros, in each row of y. */
static inline void fill(float *y, const float *value, int rows, int K)
{
    for (int k = 0; k < K; k++) {
        y[k] = value == NULL ? 0.0f : value[k];
    }
    const float *from = y;
    for (float *to = y + K, *const end = y + rows * K; to < end; to++) {
        *to = *from++;
    }
}

/* Kahan summation: carries along what rounding loses, for sums of many numbers. */
typedef struct {
    float total, lost;
} kahan_sum;

static inline void kahan_add(kahan_sum *sum, float value)
{
    const float corrected = value - sum->lost;
    const float total = sum->total + corrected;
    sum->lost = (total - sum->total) - corrected;
    sum->total = total;
}

#endif
