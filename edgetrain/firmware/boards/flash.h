/* The flash that checkpoint.c needs. One driver a kind of flash.
 *
 * It is NOR flash: a page is erased as a whole, to ones; programming clears bits and never sets one. Offsets are bytes
 * from the start of the part that flash_layout.h reserves. Every function returns 1, or 0 if the flash failed. Power
 * may be lost within any of them: a page that was being erased and a line that was being programmed may then hold
 * anything. */
#ifndef FLASH_H
#define FLASH_H

#include <stdint.h>

#include "flash_layout.h"

/* The unit of programming. Each line is programmed once after an erase: flash with error correction allows no more. */
enum { FLASH_LINE_BYTES = 64, FLASH_LINE_WORDS = FLASH_LINE_BYTES / 4 };

int flash_read(uint32_t at, void *data, uint32_t n_bytes);
/* at: the start of a page. */
int flash_erase_page(uint32_t at);
/* at: the start of a line. */
int flash_program_line(uint32_t at, const uint32_t words[FLASH_LINE_WORDS]);
/* Returns when all that was programmed and erased survives a loss of power. */
int flash_flush(void);

#endif
