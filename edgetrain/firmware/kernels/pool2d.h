/* The window of a pool: x [B, H, W, C], y [B, P, Q, C], R x S pixels. */
#ifndef POOL2D_H
#define POOL2D_H

typedef struct {
    int B, H, W, C;
    int P, Q;
    int R, S;
    int stride_h, stride_w, pad_h, pad_w;
} pool2d_shape;

#endif
