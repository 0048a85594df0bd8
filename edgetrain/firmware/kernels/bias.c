#include "bias.h"

#include "kernel.h"

void bias_backward(float *restrict db, const float *dy, int rows, int C)
{
    for (int c = 0; c < C; c++) {
        kahan_sum sum = {0.0f, 0.0f};
        for (int row = 0; row < rows; row++) {
            kahan_add(&sum, dy[row * C + c]);
        }
        db[c] = sum.total;
    }
}
