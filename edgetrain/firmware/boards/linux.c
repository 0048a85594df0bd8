/* Linux: files are files, and main's result is the exit code. */
#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "board.h"

int board_open(const char *name, int how)
{
    static const int flags[] = {[OPEN_READ] = O_RDONLY, [OPEN_NEW] = O_RDWR | O_CREAT | O_TRUNC, [OPEN_UPDATE] = O_RDWR};
    return open(name, flags[how], 0644);
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

int board_seek(int file, uint32_t at)
{
    return lseek(file, (off_t)at, SEEK_SET) >= 0;
}

int board_sync(int file)
{
    return fdatasync(file) == 0;
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
