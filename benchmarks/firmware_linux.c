/* A contender of firmware_linux.py, in place of a project's main.c: trains on one batch, over and over.
 *
 *     (start)   reads batch.bin, answers ready
 *     step      the seconds of one step
 *     quit      ends
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "board/board.h"
#include "model.h"

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(void)
{
    char word[64];
    const int batch = board_open("batch.bin", OPEN_READ);
    model_init();
    for (int i = 0; i < MODEL_INPUTS; i++) {
        if (batch < 0 || !board_read(batch, model_inputs[i].data, model_inputs[i].n_bytes)) {
            return EXIT_SHORT;
        }
    }
    printf("{\"ready\": true}\n");
    while (fflush(stdout) == 0 && fgets(word, sizeof word, stdin) != NULL && strncmp(word, "step", 4) == 0) {
        float loss;
        const double began_s = now_s();
        if (train_step(&loss) != MODEL_OK) {
            return EXIT_BAD_LABEL;
        }
        printf("%.9f\n", now_s() - began_s);
    }
    return 0;
}
