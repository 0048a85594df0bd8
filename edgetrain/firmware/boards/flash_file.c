/* Flash in a file, flash.bin: for Linux, and for emulated boards, whose own flash is ROM.
 *
 * It refuses what real NOR flash cannot do: setting a bit, or an offset that is not the start of a page or line. Where
 * the file does not exist or ends, flash was never written: ones.
 *
 * With FLASH_TRIALS defined the power is cut on purpose: trial.bin holds the number of the write (a page erased or a
 * word programmed) in the middle of which that happens, and a seed for the bits that it leaves. */
#include "flash.h"

#include <string.h>

#include "board.h"

static int file = -1;

#ifdef FLASH_TRIALS
static uint32_t writes_left, seed;

static void read_trial(void)
{
    uint32_t trial_data[2] = {0, 0};
    const int trial = board_open("trial.bin", OPEN_READ);
    if (trial >= 0 && board_read(trial, trial_data, sizeof trial_data)) {
        writes_left = trial_data[0];
        seed = trial_data[1];
    }
}

static uint32_t some_bits(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed ^ seed >> 15;
}

/* Cuts the power in the middle of this write: words get only some of their bits. */
static void maybe_lose_power(uint32_t at, uint32_t n_words, const uint32_t *wanted)
{
    if (writes_left == 0 || --writes_left != 0) {
        return;
    }
    for (uint32_t i = 0; i < n_words; i++, at += 4) {
        uint32_t word;
        (void)flash_read(at, &word, sizeof word);
        word = wanted == NULL ? word | some_bits() : word & (*wanted | some_bits());
        (void)(board_seek(file, at) && board_write(file, &word, sizeof word));
    }
    board_exit(EXIT_POWER_LOST);
}
#else
#define read_trial() ((void)0)
#define maybe_lose_power(at, n_words, wanted) ((void)0)
#endif

/* Fills with ones. */
static int write_ones(uint32_t at, uint32_t n_bytes)
{
    uint8_t ones[FLASH_LINE_BYTES];
    memset(ones, 0xff, sizeof ones);
    int done = board_seek(file, at);
    for (uint32_t i = 0; done && i < n_bytes; i += FLASH_LINE_BYTES) {
        done = board_write(file, ones, sizeof ones);
    }
    return done;
}

static int exists(uint32_t at)
{
    uint8_t line[FLASH_LINE_BYTES];
    return board_seek(file, at) && board_read(file, line, sizeof line);
}

static int open_file(void)
{
    if (file >= 0) {
        return 1;
    }
    file = board_open("flash.bin", OPEN_UPDATE);
    if (file < 0) {
        file = board_open("flash.bin", OPEN_NEW);
    }
    if (file < 0) {
        return 0;
    }
    read_trial();
    uint32_t end = FLASH_KEPT_BYTES;
    while (end > 0 && !exists(end - FLASH_LINE_BYTES)) {
        end -= FLASH_LINE_BYTES;
    }
    return write_ones(end, FLASH_KEPT_BYTES - end);
}

int flash_read(uint32_t at, void *data, uint32_t n_bytes)
{
    if (at > FLASH_KEPT_BYTES || n_bytes > FLASH_KEPT_BYTES - at) {
        return 0;
    }
    return open_file() && board_seek(file, at) && board_read(file, data, n_bytes);
}

int flash_erase_page(uint32_t at)
{
    if (at >= FLASH_KEPT_BYTES || at % FLASH_PAGE_BYTES != 0 || !open_file()) {
        return 0;
    }
    maybe_lose_power(at, FLASH_PAGE_BYTES / 4, NULL);
    return write_ones(at, FLASH_PAGE_BYTES);
}

int flash_program_line(uint32_t at, const uint32_t words[FLASH_LINE_WORDS])
{
    uint32_t before[FLASH_LINE_WORDS];
    if (at % FLASH_LINE_BYTES != 0 || !flash_read(at, before, sizeof before)) {
        return 0;
    }
    for (uint32_t i = 0; i < FLASH_LINE_WORDS; i++) {
        if ((before[i] & words[i]) != words[i]) {
            return 0; /* programming cannot set a bit */
        }
    }
    int done = board_seek(file, at);
    for (uint32_t i = 0; done && i < FLASH_LINE_WORDS; i++) {
        maybe_lose_power(at + 4 * i, 1, &words[i]);
        done = board_write(file, &words[i], sizeof words[i]);
    }
    return done;
}

int flash_flush(void)
{
    return open_file() && board_sync(file);
}
