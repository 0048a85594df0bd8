/* A Cortex-M without an operating system: startup, memory protection, faults and semihosting.
 *
 *     RAM     stack of main, grows down | stack of handlers | .data | .bss | arena
 *             ^ no RAM below: an overflow faults, and handlers report it from a stack of their own
 *
 * The MPU allows flash (read, execute) and the RAM that the board really has (read, write), and nothing else: emulated
 * boards have more RAM than real ones, and would accept a stray write. */
#include <stdint.h>

#include "board.h"

enum { HANDLER_STACK_BYTES = 512 };

/* From link.ld. */
extern uint32_t __stack_start[], __stack_end[], __data_start[], __data_end[], __data_load[], __bss_start[], __bss_end[];
extern uint32_t __flash_start[], __flash_bytes[], __ram_start[], __ram_bytes[];
extern uint32_t __arena_ram_start[], __arena_ram_bytes[];

int main(void);
_Noreturn void reset(void);
static _Noreturn void start(void);

static const uint32_t PAINT = 0x5ac3f01eu;

#define REGISTER(address) (*(volatile uint32_t *)(address))
#define CPACR REGISTER(0xe000ed88u)
#define SHCSR REGISTER(0xe000ed24u)
#define MPU_TYPE REGISTER(0xe000ed90u)
#define MPU_CTRL REGISTER(0xe000ed94u)
#define MPU_RNR REGISTER(0xe000ed98u)
#define MPU_RBAR REGISTER(0xe000ed9cu)
#define MPU_RASR REGISTER(0xe000eda0u) /* MPU_RLAR on ARMv8-M */
#define MPU_MAIR0 REGISTER(0xe000edc0u)

#define BARRIER() __asm volatile("dsb\n\tisb" ::: "memory")

static void fault(void)
{
    board_print("fault: an access that this board does not allow, or an overflow of the stack\n");
    board_exit(EXIT_FAULT);
}

__attribute__((section(".vectors"), used)) static const void *const vectors[16] = {
    __stack_end, reset, fault, fault, fault, fault, fault, fault, 0, 0, 0, fault, fault, 0, fault, fault,
};

/* main runs on the process stack, so that its overflow leaves the handlers' stack intact. */
__attribute__((naked, noreturn)) void reset(void)
{
    __asm volatile(
        "ldr r0, =__stack_end\n\t"
        "mov sp, r0\n\t"
        "ldr r1, =%0\n\t"
        "sub r0, r0, r1\n\t"
        "msr psp, r0\n\t"
        "movs r0, #2\n\t"
        "msr control, r0\n\t"
        "isb\n\t"
        "ldr r0, =%1\n\t"
        "bx r0\n\t"
        ".ltorg\n"
        :
        : "i"(HANDLER_STACK_BYTES), "i"(start));
}

#if __ARM_ARCH < 7

static void protect_memory(void)
{
    /* These ARMv6-M boards have no MPU; outside of RAM there is nothing, so an access faults. */
}

#else

#if __ARM_ARCH >= 8

/* ARMv8-M: a region is a range in steps of 32 bytes. */
static void allow(uint32_t region, uint32_t start_address, uint32_t n_bytes, int writable)
{
    const uint32_t access = writable ? 1u : 3u; /* for all code: read and write is 01, read 11 */
    MPU_RNR = region;
    MPU_RBAR = start_address | access << 1 | (writable ? 1u : 0u); /* never both writable and executable */
    MPU_RASR = ((start_address + n_bytes - 1u) & ~31u) | 1u;
}

#else

/* ARMv7-M: a region is a power of two in size and alignment; eighths of it can be disabled. */
static void allow(uint32_t region, uint32_t start_address, uint32_t n_bytes, int writable)
{
    uint32_t log2 = 5;
    while ((1u << log2) < n_bytes) {
        log2++;
    }
    const uint32_t eighth = (1u << log2) / 8u;
    uint32_t disabled = 0;
    for (uint32_t i = 0; log2 >= 8 && i < 8; i++) {
        disabled |= i * eighth >= n_bytes ? 1u << i : 0u;
    }
    const uint32_t access = writable ? 3u : 6u;
    MPU_RNR = region;
    MPU_RBAR = start_address;
    MPU_RASR = (writable ? 1u : 0u) << 28 | access << 24 | 1u << 17 | disabled << 8 | (log2 - 1u) << 1 | 1u;
}

#endif

static void protect_memory(void)
{
    if (MPU_TYPE == 0) {
        return; /* this core has no MPU */
    }
#if __ARM_ARCH >= 8
    MPU_MAIR0 = 0x44u; /* normal memory, not cached */
#endif
    allow(0, (uint32_t)(uintptr_t)__flash_start, (uint32_t)(uintptr_t)__flash_bytes, 0);
    allow(1, (uint32_t)(uintptr_t)__ram_start, (uint32_t)(uintptr_t)__ram_bytes, 1);
    if (&__arena_ram_start[0] != &__ram_start[0]) {
        allow(2, (uint32_t)(uintptr_t)__arena_ram_start, (uint32_t)(uintptr_t)__arena_ram_bytes, 1);
    }
    SHCSR |= 1u << 16; /* enables the handler of MPU faults */
    MPU_CTRL = 1u;
    BARRIER();
}

#endif

static _Noreturn void start(void)
{
#ifdef __ARM_FP
    CPACR |= 0xfu << 20; /* enables the float unit */
    BARRIER();
#endif
    uint32_t *from = __data_load;
    for (uint32_t *to = __data_start; to < __data_end; to++) {
        *to = *from++;
    }
    for (uint32_t *to = __bss_start; to < __bss_end; to++) {
        *to = 0;
    }
    uint32_t *stack_top = (uint32_t *)__builtin_frame_address(0) - 16;
    for (uint32_t *to = __stack_start; to < stack_top; to++) {
        *to = PAINT;
    }
    protect_memory();
    board_exit(main());
}

uint32_t board_stack_used(void)
{
    const uint32_t *first = __stack_start;
    while (first < __stack_end && *first == PAINT) {
        first++;
    }
    return (uint32_t)(__stack_end - first) * 4u - HANDLER_STACK_BYTES;
}

/* Semihosting: the debugger or the emulator opens and reads files for the program. */

enum {
    SYS_OPEN = 0x01,
    SYS_CLOSE = 0x02,
    SYS_WRITE0 = 0x04,
    SYS_WRITE = 0x05,
    SYS_READ = 0x06,
    SYS_SEEK = 0x0a,
    SYS_EXIT_EXTENDED = 0x20,
    APPLICATION_EXIT = 0x20026
};

static int32_t semihost(uint32_t operation, const void *block)
{
    register uint32_t r0 __asm("r0") = operation;
    register const void *r1 __asm("r1") = block;
    __asm volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return (int32_t)r0;
}

static uint32_t length(const char *text)
{
    uint32_t n = 0;
    while (text[n] != 0) {
        n++;
    }
    return n;
}

int board_open(const char *name, int how)
{
    static const uint8_t modes[] = {[OPEN_READ] = 1, [OPEN_NEW] = 7, [OPEN_UPDATE] = 3}; /* "rb", "w+b", "r+b" */
    const uintptr_t block[3] = {(uintptr_t)name, modes[how], length(name)};
    return (int)semihost(SYS_OPEN, block);
}

int board_read(int file, void *data, uint32_t n)
{
    const uintptr_t block[3] = {(uintptr_t)file, (uintptr_t)data, n};
    return semihost(SYS_READ, block) == 0;
}

int board_write(int file, const void *data, uint32_t n)
{
    const uintptr_t block[3] = {(uintptr_t)file, (uintptr_t)data, n};
    return semihost(SYS_WRITE, block) == 0;
}

int board_seek(int file, uint32_t at)
{
    const uintptr_t block[2] = {(uintptr_t)file, at};
    return semihost(SYS_SEEK, block) == 0;
}

int board_sync(int file)
{
    (void)file; /* the debugger's host decides */
    return 1;
}

void board_close(int file)
{
    const uintptr_t block[1] = {(uintptr_t)file};
    (void)semihost(SYS_CLOSE, block);
}

void board_print(const char *text)
{
    (void)semihost(SYS_WRITE0, text);
}

_Noreturn void board_exit(int code)
{
    const uintptr_t block[2] = {APPLICATION_EXIT, (uintptr_t)code};
    for (;;) {
        (void)semihost(SYS_EXIT_EXTENDED, block);
    }
}
