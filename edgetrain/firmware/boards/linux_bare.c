/* Linux on ARMv6, without the system's C library: Debian's cross compiler has one for ARMv7 alone, which the core of a
 * Raspberry Pi 1 cannot run. The program makes its few system calls itself; memcpy and the like come from newlib, built
 * for ARMv5. */
#include <stddef.h>
#include <string.h>

#include "board.h"

enum { READ = 3, WRITE = 4, OPEN = 5, CLOSE = 6, SEEK = 19, SYNC_DATA = 148, EXIT_GROUP = 248 };
enum { READ_WRITE = 02, CREATE = 0100, TRUNCATE = 01000 };

int main(void);

/* A system call: number in r7, arguments from r0 on. */
static int syscall3(int number, intptr_t a, intptr_t b, intptr_t c)
{
    register intptr_t r0 __asm__("r0") = a;
    register intptr_t r1 __asm__("r1") = b;
    register intptr_t r2 __asm__("r2") = c;
    register intptr_t r7 __asm__("r7") = number;
    __asm__ volatile("svc 0" : "+r"(r0) : "r"(r1), "r"(r2), "r"(r7) : "memory");
    return (int)r0;
}

int board_open(const char *name, int how)
{
    static const int flags[] = {
        [OPEN_READ] = 0, [OPEN_NEW] = READ_WRITE | CREATE | TRUNCATE, [OPEN_UPDATE] = READ_WRITE,
    };
    const int file = syscall3(OPEN, (intptr_t)name, flags[how], 0644);
    return file < 0 ? -1 : file;
}

/* Reads or writes all n bytes, in as many calls as it takes. */
static int transfer(int number, int file, uintptr_t at, uint32_t n)
{
    while (n > 0) {
        const int done = syscall3(number, file, (intptr_t)at, (intptr_t)n);
        if (done <= 0) {
            return 0;
        }
        at += (uint32_t)done;
        n -= (uint32_t)done;
    }
    return 1;
}

int board_read(int file, void *data, uint32_t n)
{
    return transfer(READ, file, (uintptr_t)data, n);
}

int board_write(int file, const void *data, uint32_t n)
{
    return transfer(WRITE, file, (uintptr_t)data, n);
}

int board_seek(int file, uint32_t at)
{
    return syscall3(SEEK, file, (intptr_t)at, 0) >= 0;
}

int board_sync(int file)
{
    return syscall3(SYNC_DATA, file, 0, 0) == 0;
}

void board_close(int file)
{
    (void)syscall3(CLOSE, file, 0, 0);
}

void board_print(const char *text)
{
    (void)board_write(1, text, (uint32_t)strlen(text));
}

uint32_t board_stack_used(void)
{
    return 0;
}

_Noreturn void board_exit(int code)
{
    for (;;) {
        (void)syscall3(EXIT_GROUP, code, 0, 0);
    }
}

_Noreturn void _start(void);

_Noreturn void _start(void)
{
    board_exit(main());
}
