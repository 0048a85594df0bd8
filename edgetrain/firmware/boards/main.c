/* Trains on batches from a file and writes the results.
 *
 *     batches.bin   in:   "ETB1", what to do (0: train, 1: predict), number of batches, bytes of a batch; the batches
 *     losses.bin    out:  the loss of each step, as soon as it is computed
 *     results.bin   out:  when predicting, the outputs of each batch
 *     trained.bin   out:  everything that a step changes, in the order of model_tensors
 *     shown.bin     out:  by a debug build: each gradient of each step, after the number of its bytes
 *     sides.bin     out:  by a debug build: for each ReLU and other clamp, one byte an element: 0 at or below the lower
 *                         bound, 2 at or above the upper one, else 1; for a max pool, the argmax of each window
 *     report.bin    out:  steps done in all, bytes of arena and stack used, steps done before this run
 *
 * A model with checkpoints in flash starts from the newest complete one and skips the batches of the steps before. */
#include <stdint.h>
#include <string.h>

#include "board/board.h"
#include "model.h"
#if MODEL_KEEPS_EVERY
#include "checkpoint.h"
#endif

enum { TRAIN = 0, PREDICT = 1 };

typedef struct {
    char magic[4];
    uint32_t what, batches, batch_bytes;
} header;

static const uint32_t PAINT = 0xa5c3f01eu; /* overwritten by a step wherever it uses the arena */

static int open_or_end(const char *name, int how)
{
    const int file = board_open(name, how);
    if (file < 0) {
        board_print("cannot open ");
        board_print(name);
        board_print("\n");
        board_exit(EXIT_NO_FILE);
    }
    return file;
}

static void write_or_end(int file, const void *data, uint32_t n)
{
    if (!board_write(file, data, n)) {
        board_print("a result cannot be written\n");
        board_exit(EXIT_SHORT);
    }
}

static void read_batch_or_end(int file)
{
    for (int i = 0; i < MODEL_INPUTS; i++) {
        if (!board_read(file, model_inputs[i].data, model_inputs[i].n_bytes)) {
            board_print("a batch is too short\n");
            board_exit(EXIT_SHORT);
        }
    }
}

#ifdef DEBUG_TENSORS
static int shown = -1, sides = -1;

void show_tensor(const char *name, const void *data, uint32_t n_bytes)
{
    (void)name;
    write_or_end(shown, &n_bytes, sizeof n_bytes);
    write_or_end(shown, data, n_bytes);
}

void show_sides(const float *y, uint32_t n, float low, float high)
{
    uint8_t buffer[64];
    uint32_t filled = 0;
    for (uint32_t i = 0; i < n; i++) {
        buffer[filled++] = y[i] >= high ? 2 : y[i] > low ? 1 : 0;
        if (filled == sizeof buffer || i + 1 == n) {
            write_or_end(sides, buffer, filled);
            filled = 0;
        }
    }
}

void show_places(const uint8_t *argmax, uint32_t n)
{
    write_or_end(sides, argmax, n);
}
#endif

/* A board that can free the memory of the initial values does so here. */
__attribute__((weak)) void board_values_copied(void)
{
}

static void paint_arena(void)
{
    void *data;
    uint32_t n_bytes;
    model_arena(&data, &n_bytes);
    for (uint32_t at = 0; at + 4 <= n_bytes; at += 4) {
        memcpy((char *)data + at, &PAINT, 4);
    }
}

/* The arena's bytes up to the last one written. */
static uint32_t arena_used(void)
{
    void *data;
    uint32_t n_bytes;
    model_arena(&data, &n_bytes);
    while (n_bytes >= 4 && memcmp((char *)data + n_bytes - 4, &PAINT, 4) == 0) {
        n_bytes -= 4;
    }
    return n_bytes;
}

static void train_on_batch(int losses)
{
    float loss;
    if (train_step(&loss) != MODEL_OK) {
        board_print("a label is no class\n");
        board_exit(EXIT_BAD_LABEL);
    }
    write_or_end(losses, &loss, sizeof loss);
}

static void write_trained(void)
{
    const int file = open_or_end("trained.bin", OPEN_NEW);
    for (int i = 0; i < MODEL_TENSORS; i++) {
        write_or_end(file, model_tensors[i].data, model_tensors[i].n_bytes);
    }
    board_close(file);
}

#if MODEL_KEEPS_EVERY
static void save_or_end(void)
{
    if (!checkpoint_save()) {
        board_print("the flash does not keep what is written to it\n");
        board_exit(EXIT_FLASH);
    }
}
#endif

/* Skips the batches of steps that were done before the checkpoint. */
static void train_on_batches(int batches, uint32_t n_batches, int losses)
{
    const uint32_t before = step_number;
    for (uint32_t n = 0; n < n_batches; n++) {
        read_batch_or_end(batches);
        if (n < before) {
            continue;
        }
        train_on_batch(losses);
#if MODEL_KEEPS_EVERY
        if (step_number % MODEL_KEEPS_EVERY == 0 || n + 1 == n_batches) {
            save_or_end();
        }
#endif
    }
}

#if MODEL_PREDICTS
static void predict_batches(int batches, uint32_t n_batches, int results)
{
    for (uint32_t n = 0; n < n_batches; n++) {
        read_batch_or_end(batches);
        write_or_end(results, predict(), MODEL_RESULTS * sizeof(float));
    }
}
#else
#define predict_batches(batches, n_batches, results) ((void)0)
#endif

int main(void)
{
    header h;
    const int batches = open_or_end("batches.bin", OPEN_READ);
    if (!board_read(batches, &h, sizeof h) || memcmp(h.magic, "ETB1", 4) != 0 ||
        h.batch_bytes != MODEL_BATCH_BYTES || h.what > (MODEL_PREDICTS ? PREDICT : TRAIN)) {
        board_print("batches.bin is not for this model\n");
        board_exit(EXIT_NO_FILE);
    }
    const int out = open_or_end(h.what == TRAIN ? "losses.bin" : "results.bin", OPEN_NEW);
#ifdef DEBUG_TENSORS
    shown = open_or_end("shown.bin", OPEN_NEW);
    sides = open_or_end("sides.bin", OPEN_NEW);
#endif
    model_init();
    board_values_copied();
#if MODEL_KEEPS_EVERY
    (void)checkpoint_load();
#endif
    const uint32_t before = step_number;
    paint_arena();
    if (h.what == TRAIN) {
        train_on_batches(batches, h.batches, out);
    } else {
        predict_batches(batches, h.batches, out);
    }
    board_close(out);
#ifdef DEBUG_TENSORS
    board_close(shown);
    board_close(sides);
#endif
    const uint32_t report[4] = {step_number, arena_used(), board_stack_used(), before};
    write_trained();
    const int file = open_or_end("report.bin", OPEN_NEW);
    write_or_end(file, report, sizeof report);
    board_close(file);
    board_exit(EXIT_DONE);
}
