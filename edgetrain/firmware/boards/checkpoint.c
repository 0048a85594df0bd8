/* Checkpoints that survive a loss of power: two slots in flash, of which one is always complete.
 *
 *     slot 0   commit | head | data …          a save overwrites the older slot:
 *     slot 1   commit | head | data …              erase its pages, the one with the commit word first
 *                                                  program head and data, and read them back
 *                                                  program the commit word last
 *
 * A slot is complete if it has the commit word, belongs to this model, and its checksum matches its data. Whenever the
 * power fails, the slot that is not being written is complete; the next start loads the newest complete slot. Against a
 * loss of power either commit word or checksum would do; the checksum also detects flash that loses a bit years later.
 *
 * A slot is erased at each save even if it reads as erased: an interrupted erase can leave such pages. */
#include "checkpoint.h"

#include <stddef.h>
#include <string.h>

#include "board/flash.h"
#include "model.h"

enum { COMMIT_AT = 0, HEAD_AT = FLASH_LINE_BYTES, DATA_AT = 2 * FLASH_LINE_BYTES, SLOTS = 2 };
static const uint32_t COMMIT = 0x20c0de01u; /* few ones: it does not survive half an erase */

typedef struct {
    uint32_t model_key, sequence, n_bytes, checksum;
} head;

typedef struct {
    void *data;
    uint32_t n_bytes;
} piece;

enum { PIECES = MODEL_TENSORS + 3 };

static int newest_slot = -1;
static uint32_t newest_sequence = 0;

/* All state: the tensors, and what the program may have set since it started. */
static piece piece_at(int i)
{
    switch (i - MODEL_TENSORS) {
    case 0:
        return (piece){&step_number, sizeof step_number};
    case 1:
        return (piece){&model_seed, sizeof model_seed};
    case 2:
        return (piece){settings, sizeof settings};
    default:
        return (piece){model_tensors[i].data, model_tensors[i].n_bytes};
    }
}

/* CRC-32 (IEEE 802.3), half a byte at a time. */
static uint32_t crc32(uint32_t crc, const void *data, uint32_t n_bytes)
{
    static const uint32_t table[16] = {
        0x00000000u, 0x1db71064u, 0x3b6e20c8u, 0x26d930acu, 0x76dc4190u, 0x6b6b51f4u, 0x4db26158u, 0x5005713cu,
        0xedb88320u, 0xf00f9344u, 0xd6d6a3e8u, 0xcb61b38cu, 0x9b64c2b0u, 0x86d3d2d4u, 0xa00ae278u, 0xbdbdf21cu,
    };
    const uint8_t *byte = data;
    crc = ~crc;
    for (uint32_t i = 0; i < n_bytes; i++) {
        crc = crc >> 4 ^ table[(crc ^ byte[i]) & 15u];
        crc = crc >> 4 ^ table[(crc ^ (uint32_t)byte[i] >> 4) & 15u];
    }
    return ~crc;
}

/* Of the head and the state in RAM. */
static uint32_t checksum_of(const head *h)
{
    uint32_t crc = crc32(0, h, offsetof(head, checksum));
    for (int i = 0; i < PIECES; i++) {
        const piece p = piece_at(i);
        crc = crc32(crc, p.data, p.n_bytes);
    }
    return crc;
}

static uint32_t data_bytes(void)
{
    uint32_t n_bytes = 0;
    for (int i = 0; i < PIECES; i++) {
        n_bytes += piece_at(i).n_bytes;
    }
    return n_bytes;
}

/* ---- load */

/* 1 if this model committed the slot; its data may be corrupt all the same. */
static int read_head(int slot, head *h)
{
    const uint32_t at = (uint32_t)slot * FLASH_SLOT_BYTES;
    uint32_t commit;
    return flash_read(at + COMMIT_AT, &commit, sizeof commit) && commit == COMMIT &&
           flash_read(at + HEAD_AT, h, sizeof *h) && h->model_key == MODEL_KEY && h->n_bytes == data_bytes();
}

static int load_slot(int slot, const head *h)
{
    uint32_t at = (uint32_t)slot * FLASH_SLOT_BYTES + DATA_AT;
    for (int i = 0; i < PIECES; i++) {
        const piece p = piece_at(i);
        if (!flash_read(at, p.data, p.n_bytes)) {
            return 0;
        }
        at += p.n_bytes;
    }
    return checksum_of(h) == h->checksum;
}

int checkpoint_load(void)
{
    head heads[SLOTS];
    const int committed[SLOTS] = {read_head(0, &heads[0]), read_head(1, &heads[1])};
    const int newest = committed[1] && (!committed[0] || heads[1].sequence > heads[0].sequence);
    for (int turn = 0; turn < SLOTS; turn++) {
        const int slot = turn == 0 ? newest : !newest;
        if (committed[slot] && load_slot(slot, &heads[slot])) {
            newest_slot = slot;
            newest_sequence = heads[slot].sequence;
            return 1;
        }
    }
    model_init(); /* part of a corrupt slot may have been loaded */
    return 0;
}

/* ---- save */

/* Writes bytes to flash, a line at a time. */
typedef struct {
    uint32_t at, used;
    uint32_t line[FLASH_LINE_WORDS];
} stream;

static int program(uint32_t at, const uint32_t line[FLASH_LINE_WORDS])
{
    uint32_t written[FLASH_LINE_WORDS];
    return flash_program_line(at, line) && flash_read(at, written, sizeof written) &&
           memcmp(written, line, sizeof written) == 0;
}

/* Programs an incomplete line, padded with ones. */
static int end_line(stream *s)
{
    if (s->used == 0) {
        return 1;
    }
    memset((uint8_t *)s->line + s->used, 0xff, FLASH_LINE_BYTES - s->used);
    s->used = 0;
    s->at += FLASH_LINE_BYTES;
    return program(s->at - FLASH_LINE_BYTES, s->line);
}

static int put(stream *s, const void *data, uint32_t n_bytes)
{
    const uint8_t *from = data;
    while (n_bytes > 0) {
        const uint32_t room = FLASH_LINE_BYTES - s->used;
        const uint32_t n = n_bytes < room ? n_bytes : room;
        memcpy((uint8_t *)s->line + s->used, from, n);
        s->used += n;
        from += n;
        n_bytes -= n;
        if (s->used == FLASH_LINE_BYTES && !end_line(s)) {
            return 0;
        }
    }
    return 1;
}

static int erase_slot(uint32_t start)
{
    for (uint32_t at = 0; at < FLASH_SLOT_BYTES; at += FLASH_PAGE_BYTES) {
        if (!flash_erase_page(start + at)) {
            return 0;
        }
    }
    return 1;
}

static int write_data(uint32_t start, const head *h)
{
    stream s = {.at = start + HEAD_AT};
    if (!put(&s, h, sizeof *h) || !end_line(&s)) {
        return 0;
    }
    for (int i = 0; i < PIECES; i++) {
        const piece p = piece_at(i);
        if (!put(&s, p.data, p.n_bytes)) {
            return 0;
        }
    }
    return end_line(&s) && flash_flush();
}

static int write_commit(uint32_t start)
{
    uint32_t line[FLASH_LINE_WORDS];
    memset(line, 0xff, sizeof line);
    line[0] = COMMIT;
    return program(start + COMMIT_AT, line) && flash_flush();
}

int checkpoint_save(void)
{
    const int slot = newest_slot == 0 ? 1 : 0;
    const uint32_t start = (uint32_t)slot * FLASH_SLOT_BYTES;
    head h = {.model_key = MODEL_KEY, .sequence = newest_sequence + 1, .n_bytes = data_bytes()};
    h.checksum = checksum_of(&h);
    if (h.n_bytes > FLASH_SLOT_BYTES - DATA_AT || !erase_slot(start) ||
        !write_data(start, &h) || !write_commit(start)) {
        return 0;
    }
    newest_slot = slot;
    newest_sequence = h.sequence;
    return 1;
}
