/* Depthwise convolutions: vectors of channels, tap by tap.
 *
 * Filters lie channel by channel in memory; a task first transposes those of its channels, up to MAX_PANEL floats.
 *
 *     forward, backward_input   a task is some rows of the result
 *     backward_weight           a task is one tap of some channels, summed row by row
 */
#include "convolve_depthwise.h"

#include <stddef.h>

#include "parallel.h"
#include "vector.h"

enum { MAX_PANEL = 4096, BLOCK = 4 * LANES };

typedef struct {
    float *y;
    const float *x, *w, *b;
    const depthwise_shape *s;
    int rows, rows_of_task;
} row_job;

/* What one pixel of the result is summed from: image and transposed filters, from their first channels on. */
typedef struct {
    const float *image[MAX_DEPTHWISE_TAPS], *filter[MAX_DEPTHWISE_TAPS];
    int count;
} taps;

static void transpose(float *restrict panel, const float *w, int n_taps, int c0, int n)
{
    for (int tap = 0; tap < n_taps; tap++) {
        for (int i = 0; i < n; i++) {
            panel[tap * n + i] = w[(c0 + i) * n_taps + tap];
        }
    }
}

/* `vectors` vectors of channels of one pixel, with `lanes` lanes each. */
ALWAYS_INLINE void sum_taps(float *y, const taps *t, const float *b, int at, int vectors, int lanes)
{
    vec sums[4];
    for (int v = 0; v < vectors; v++) {
        sums[v] = splat(0.0f);
    }
    for (int i = 0; i < t->count; i++) {
        for (int v = 0; v < vectors; v++) {
            const vec image = load_partial(t->image[i] + at + v * LANES, lanes);
            sums[v] += image * load_partial(t->filter[i] + at + v * LANES, lanes);
        }
    }
    for (int v = 0; v < vectors; v++) {
        if (b != NULL) {
            sums[v] += load_partial(b + at + v * LANES, lanes);
        }
        store_partial(y + at + v * LANES, sums[v], lanes);
    }
}

static void sum_pixel(float *y, const taps *t, const float *b, int n)
{
    int at = 0;
    for (; at + BLOCK <= n; at += BLOCK) {
        sum_taps(y, t, b, at, 4, LANES);
    }
    for (; at + LANES <= n; at += LANES) {
        sum_taps(y, t, b, at, 1, LANES);
    }
    if (at < n) {
        sum_taps(y, t, b, at, 1, n - at);
    }
}

/* How many channels are transposed at once. */
static int channels_at_once(const depthwise_shape *s)
{
    return min_int(s->C, MAX_PANEL / (s->R * s->S));
}

static void taps_forward(taps *t, const float *x, const float *panel, const depthwise_shape *s, int p, int q, int n)
{
    t->count = 0;
    for (int r = 0; r < s->R; r++) {
        const int h = p * s->stride_h - s->pad_h + r * s->dilation_h;
        for (int i = 0; h >= 0 && h < s->H && i < s->S; i++) {
            const int v = q * s->stride_w - s->pad_w + i * s->dilation_w;
            if (v >= 0 && v < s->W) {
                t->image[t->count] = x + (h * s->W + v) * s->C;
                t->filter[t->count++] = panel + (r * s->S + i) * n;
            }
        }
    }
}

/* The pixel of y in which tap `tap` meets `pixel` of x, or -1; along one side. */
static int pixel_met(int pixel, int tap, int pad, int dilation, int stride, int side)
{
    const int at = pixel + pad - tap * dilation;
    if (stride == 1) {
        return at >= side ? -1 : at;
    }
    return at < 0 || at % stride != 0 || at / stride >= side ? -1 : at / stride;
}

static void taps_backward(taps *t, const float *dy, const float *panel, const depthwise_shape *s, int h, int v, int n)
{
    t->count = 0;
    for (int r = 0; r < s->R; r++) {
        const int p = pixel_met(h, r, s->pad_h, s->dilation_h, s->stride_h, s->P);
        for (int i = 0; p >= 0 && i < s->S; i++) {
            const int q = pixel_met(v, i, s->pad_w, s->dilation_w, s->stride_w, s->Q);
            if (q >= 0) {
                t->image[t->count] = dy + (p * s->Q + q) * s->C;
                t->filter[t->count++] = panel + (r * s->S + i) * n;
            }
        }
    }
}

/* Some rows of the result: of y, or backward of dx. */
ALWAYS_INLINE void convolve_rows(const row_job *job, int task, int backward)
{
    const depthwise_shape *s = job->s;
    const int first = task * job->rows_of_task, end = min_int(first + job->rows_of_task, job->rows);
    const int height = backward ? s->H : s->P, width = backward ? s->W : s->Q;
    const int pixels = backward ? s->P * s->Q : s->H * s->W;
    float panel[MAX_PANEL];
    taps t;
    for (int c = 0, n = channels_at_once(s); c < s->C; c += n) {
        n = min_int(n, s->C - c);
        transpose(panel, job->w, s->R * s->S, c, n);
        for (int row = first; row < end; row++) {
            const float *x = job->x + row / height * pixels * s->C + c;
            for (int column = 0; column < width; column++) {
                (backward ? taps_backward : taps_forward)(&t, x, panel, s, row % height, column, n);
                sum_pixel(job->y + (row * width + column) * s->C + c, &t, job->b == NULL ? NULL : job->b + c, n);
            }
        }
    }
}

static void forward_task(const void *context, int task)
{
    convolve_rows(context, task, 0);
}

static void backward_input_task(const void *context, int task)
{
    convolve_rows(context, task, 1);
}

static void run_rows(row_job *job, int row_length, task_function *body)
{
    const long work = (long)job->rows * row_length * job->s->R * job->s->S * ceil_div(job->s->C, LANES);
    job->rows_of_task = max_int(1, job->rows / 16);
    parallel_for(ceil_div(job->rows, job->rows_of_task), work, body, job);
}

void convolve_depthwise_forward(float *y, const float *x, const float *w, const float *b, const depthwise_shape *s)
{
    row_job job = {.y = y, .x = x, .w = w, .b = b, .s = s, .rows = s->B * s->P};
    run_rows(&job, s->Q, forward_task);
}

void convolve_depthwise_backward_input(float *dx, const float *dy, const float *w, const depthwise_shape *s)
{
    row_job job = {.y = dx, .x = dy, .w = w, .b = NULL, .s = s, .rows = s->B * s->H};
    run_rows(&job, s->W, backward_input_task);
}

typedef struct {
    float *dw;
    const float *dy, *x;
    const depthwise_shape *s;
    int blocks;
} tap_job;

/* A tap lies h, v from the pixels of y's, and in the image for columns [q0, q1). */
typedef struct {
    int h, v, q0, q1;
} offset;

static offset offset_of(const depthwise_shape *s, int r, int i)
{
    const int h = r * s->dilation_h - s->pad_h, v = i * s->dilation_w - s->pad_w;
    const int room = s->W - v, q0 = v >= 0 ? 0 : ceil_div(-v, s->stride_w);
    return (offset){h, v, q0, room <= 0 ? 0 : min_int(s->Q, ceil_div(room, s->stride_w))};
}

/* One tap of `vectors` vectors of channels from c on, with `lanes` lanes each: the sum over all pixels. */
ALWAYS_INLINE void sum_pixels(const tap_job *job, int tap, int c, int vectors, int lanes)
{
    const depthwise_shape *s = job->s;
    const offset at = offset_of(s, tap / s->S, tap % s->S);
    vec sums[4], of_row[4];
    float gradients[LANES];
    for (int v = 0; v < vectors; v++) {
        sums[v] = splat(0.0f);
    }
    for (int row = 0; row < s->B * s->P; row++) {
        const int n = row / s->P, h = row % s->P * s->stride_h + at.h;
        if (h < 0 || h >= s->H || at.q1 <= at.q0) {
            continue;
        }
        const float *dy = job->dy + (row * s->Q + at.q0) * s->C + c;
        const float *x = job->x + ((n * s->H + h) * s->W + at.v + at.q0 * s->stride_w) * s->C + c;
        for (int v = 0; v < vectors; v++) {
            of_row[v] = splat(0.0f);
        }
        for (int q = at.q0; q < at.q1; q++, dy += s->C, x += s->stride_w * s->C) {
            for (int v = 0; v < vectors; v++) {
                of_row[v] += load_partial(dy + v * LANES, lanes) * load_partial(x + v * LANES, lanes);
            }
        }
        for (int v = 0; v < vectors; v++) {
            sums[v] += of_row[v];
        }
    }
    for (int v = 0; v < vectors; v++) {
        store(gradients, sums[v]);
        for (int i = 0; i < lanes; i++) {
            job->dw[(c + v * LANES + i) * s->R * s->S + tap] = gradients[i];
        }
    }
}

static void backward_weight_task(const void *context, int task)
{
    const tap_job *job = context;
    const int tap = task / job->blocks, end = min_int((task % job->blocks + 1) * BLOCK, job->s->C);
    int c = task % job->blocks * BLOCK;
    for (; c + BLOCK <= end; c += BLOCK) {
        sum_pixels(job, tap, c, 4, LANES);
    }
    for (; c + LANES <= end; c += LANES) {
        sum_pixels(job, tap, c, 1, LANES);
    }
    if (c < end) {
        sum_pixels(job, tap, c, 1, end - c);
    }
}

void convolve_depthwise_backward_weight(float *dw, const float *dy, const float *x, const depthwise_shape *s)
{
    const tap_job job = {.dw = dw, .dy = dy, .x = x, .s = s, .blocks = ceil_div(s->C, BLOCK)};
    const long work = (long)s->B * s->P * s->Q * s->R * s->S * ceil_div(s->C, LANES);
    parallel_for(job.blocks * s->R * s->S, work, backward_weight_task, &job);
}
