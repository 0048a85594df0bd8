/* Linux: files are files, and main's result is the exit code. */
#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "board.h"

int board_open(const char *name, int write)
{
    return write ? open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644) : open(name, O_RDONLY);
}

int board_read(int file, void *data, uint32_t n)
{
    char *at = data;
    while (n > 0) {
        const ssize_t got = read(file, at, n);
        if (got <= 0) {
            return 0;
        }
        at += got;
        n -= (uint32_t)got;
    }
    return 1;
}

int board_write(int file, const void *data, uint32_t n)
{
    const char *at = data;
    while (n > 0) {
        const ssize_t put = write(file, at, n);
        if (put <= 0) {
            return 0;
        }
        at += put;
        n -= (uint32_t)put;
    }
    return 1;
}

void board_close(int file)
{
    close(file);
}

void board_print(const char *text)
{
    (void)board_write(STDOUT_FILENO, text, (uint32_t)strlen(text));
}

uint32_t board_stack_used(void)
{
    return 0;
}

_Noreturn void board_exit(int code)
{
    exit(code);
}
