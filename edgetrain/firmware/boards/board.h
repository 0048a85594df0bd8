/* What main.c and flash_file.c need of a machine: files, a console, an exit. Each kind of board implements it. */
#ifndef BOARD_H
#define BOARD_H

#include <stdint.h>

enum {
    EXIT_DONE = 0,
    EXIT_NO_FILE = 2,   /* a file cannot be opened, or is not for this model */
    EXIT_SHORT = 3,     /* a batch ends before it is complete, or a result cannot be written */
    EXIT_BAD_LABEL = 4, /* a label is no class */
    EXIT_FAULT = 5,     /* an access that the board does not allow: a stray write, a stack overflow */
    EXIT_STACK = 6,     /* the stack was used to its end */
    EXIT_FLASH = 7,     /* the flash does not keep what is written to it */
    EXIT_POWER_LOST = 9 /* in tests: the power was cut in the middle of a write to flash */
};

/* A file in the working directory; -1 if it cannot be opened. */
enum { OPEN_READ, OPEN_NEW, OPEN_UPDATE };
int board_open(const char *name, int how);
/* 1 if all n bytes were read or written, 0 if not. */
int board_read(int file, void *data, uint32_t n);
int board_write(int file, const void *data, uint32_t n);
int board_seek(int file, uint32_t at);
/* Returns when what was written survives a loss of power, as far as the machine can tell. */
int board_sync(int file);
void board_close(int file);
void board_print(const char *text);
/* The peak bytes of stack so far; 0 if unknown. */
uint32_t board_stack_used(void);
/* Called when the initial values have been copied to RAM. */
void board_values_copied(void);
_Noreturn void board_exit(int code);

#endif
