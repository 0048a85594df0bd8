#include "concat.h"

void concat_forward(float *restrict y, const float *x, int rows, int C, int start, int width)
{
    for (int row = 0; row < rows; row++) {
        for (int c = 0; c < width; c++) {
            y[row * C + start + c] = x[row * width + c];
        }
    }
}

void concat_backward(float *restrict dx, const float *dy, int rows, int C, int start, int width)
{
    for (int row = 0; row < rows; row++) {
        for (int c = 0; c < width; c++) {
            dx[row * width + c] = dy[row * C + start + c];
        }
    }
}
