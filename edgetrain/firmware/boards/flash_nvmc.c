/* The flash of Nordic's nRF51 and nRF52 chips, through their non-volatile memory controller. The core stalls, with its
 * interrupts, while a page is erased (85 ms on an nRF52840) or a word programmed (41 µs). */
#include "flash.h"

#include <string.h>

#define REGISTER(address) (*(volatile uint32_t *)(address))
#define NVMC_READY REGISTER(0x4001e400u)
#define NVMC_CONFIG REGISTER(0x4001e504u)
#define NVMC_ERASEPAGE REGISTER(0x4001e508u)
#define MPU_CTRL REGISTER(0xe000ed94u)
#define BARRIER() __asm volatile("dsb\n\tisb" ::: "memory")

enum { READ_ONLY = 0, WRITE = 1, ERASE = 2 };

/* The MPU of cortex_m.c allows writes to RAM alone: it is off while flash is written. */
static void allow(uint32_t what)
{
#if __ARM_ARCH >= 7
    static uint32_t mpu;
    if (what != READ_ONLY) {
        mpu = MPU_CTRL;
        MPU_CTRL = 0;
        BARRIER();
    }
#endif
    while (NVMC_READY == 0) {
    }
    NVMC_CONFIG = what;
#if __ARM_ARCH >= 7
    if (what == READ_ONLY) {
        MPU_CTRL = mpu;
    }
#endif
    BARRIER();
}

static void wait(void)
{
    while (NVMC_READY == 0) {
    }
}

int flash_read(uint32_t at, void *data, uint32_t n_bytes)
{
    if (at > FLASH_KEPT_BYTES || n_bytes > FLASH_KEPT_BYTES - at) {
        return 0;
    }
    memcpy(data, (const void *)(uintptr_t)(FLASH_START + at), n_bytes);
    return 1;
}

int flash_erase_page(uint32_t at)
{
    if (at >= FLASH_KEPT_BYTES || at % FLASH_PAGE_BYTES != 0) {
        return 0;
    }
    allow(ERASE);
    NVMC_ERASEPAGE = FLASH_START + at;
    wait();
    allow(READ_ONLY);
    return 1;
}

int flash_program_line(uint32_t at, const uint32_t words[FLASH_LINE_WORDS])
{
    if (at >= FLASH_KEPT_BYTES || at % FLASH_LINE_BYTES != 0) {
        return 0;
    }
    allow(WRITE);
    for (uint32_t i = 0; i < FLASH_LINE_WORDS; i++) {
        REGISTER(FLASH_START + at + 4u * i) = words[i];
        wait();
    }
    allow(READ_ONLY);
    return 1;
}

int flash_flush(void)
{
    return 1; /* each write has waited already */
}
