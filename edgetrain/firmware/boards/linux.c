/* Linux: files are files, and main's result is the exit code.
 *
 *     resident.txt   out:  the peak resident memory, as the kernel counted it
 */
#define _GNU_SOURCE

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "board.h"

int board_open(const char *name, int how)
{
    static const int flags[] = {
        [OPEN_READ] = O_RDONLY, [OPEN_NEW] = O_RDWR | O_CREAT | O_TRUNC, [OPEN_UPDATE] = O_RDWR,
    };
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

/* The initial values are part of the program's file. Their pages are freed; frozen weights are read from the file again
 * when they are needed. */
void board_values_copied(void)
{
    extern unsigned char model_weights[], model_weights_end[];
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t start = ((uintptr_t)model_weights + page - 1) / page * page;
    const uintptr_t end = (uintptr_t)model_weights_end / page * page;
    if (end > start) {
        (void)madvise(model_weights + (start - (uintptr_t)model_weights), end - start, MADV_DONTNEED);
    }
}

/* The line of /proc/self/status with the peak resident memory. */
static void write_resident(void)
{
    char text[4096];
    const int file = open("/proc/self/status", O_RDONLY);
    const ssize_t n = file < 0 ? -1 : read(file, text, sizeof text - 1);
    close(file);
    text[n < 0 ? 0 : n] = 0;
    const char *line = strstr(text, "VmHWM:");
    const int out = line == NULL ? -1 : board_open("resident.txt", OPEN_NEW);
    if (out >= 0) {
        (void)board_write(out, line, (uint32_t)strcspn(line, "\n"));
        board_close(out);
    }
}

_Noreturn void board_exit(int code)
{
    if (code == EXIT_DONE) {
        write_resident();
    }
    exit(code);
}
