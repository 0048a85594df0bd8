/* A QEMU plugin that counts instructions exactly: by block of code, and by call of the training step.
 *
 *     out=FILE              the counts: lines "block ADDRESS COUNT" and "call ADDRESS COUNT"
 *     step=FIRST-END        the addresses of train_step, in hexadecimal
 *     outside=FIRST-END     the addresses of a function that train_step returns to; may be repeated
 *
 * A block of train_step ends with the call of a kernel. Instructions from its start to the start of the next block of
 * train_step, or to the return, count as that call's.
 *
 * Built for the machine that emulates. The declarations are those of QEMU's plugin interface, version 1. */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };

__attribute__((visibility("default"))) int qemu_plugin_version = 1;
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, void (*cb)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(
    struct qemu_plugin_tb *tb, void (*cb)(unsigned int, void *), enum qemu_plugin_cb_flags flags, void *data);
void qemu_plugin_register_vcpu_tb_exec_inline(
    struct qemu_plugin_tb *tb, enum qemu_plugin_op op, void *ptr, uint64_t imm);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t id, void (*cb)(qemu_plugin_id_t, void *), void *data);
__attribute__((visibility("default"))) int qemu_plugin_install(
    qemu_plugin_id_t id, const void *info, int argc, char **argv);

enum { MAX_BLOCKS = 1 << 20, MAX_RANGES = 32 };

typedef struct {
    uint64_t first, end;
} range;

static uint64_t executed[MAX_BLOCKS], address[MAX_BLOCKS], of_call[MAX_BLOCKS];
static size_t blocks;
static range step, outside[MAX_RANGES];
static int outsides;
static const char *out;

static uint64_t *running; /* the current call's count, or NULL */
static uint64_t counted;  /* instructions in total when it began */

static int in(range r, uint64_t at)
{
    return at >= r.first && at < r.end;
}

static void begin(unsigned int cpu, void *call)
{
    (void)cpu;
    uint64_t now = 0;
    for (size_t i = 0; i < blocks; i++) {
        now += executed[i];
    }
    if (running != NULL) {
        *running += now - counted;
    }
    counted = now;
    running = call;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
    (void)id;
    if (blocks == MAX_BLOCKS) {
        fprintf(stderr, "count: too many blocks of code\n");
        abort();
    }
    const size_t block = blocks++;
    const uint64_t at = address[block] = qemu_plugin_tb_vaddr(tb);
    int returned = 0;
    for (int i = 0; i < outsides; i++) {
        returned |= in(outside[i], at);
    }
    if (in(step, at) || returned) {
        qemu_plugin_register_vcpu_tb_exec_cb(tb, begin, QEMU_PLUGIN_CB_NO_REGS, returned ? NULL : &of_call[block]);
    }
    qemu_plugin_register_vcpu_tb_exec_inline(
        tb, QEMU_PLUGIN_INLINE_ADD_U64, &executed[block], qemu_plugin_tb_n_insns(tb));
}

static void finished(qemu_plugin_id_t id, void *data)
{
    (void)id;
    (void)data;
    FILE *file = fopen(out, "w");
    if (file == NULL) {
        return;
    }
    for (size_t i = 0; i < blocks; i++) {
        fprintf(file, "block %" PRIx64 " %" PRIu64 "\n", address[i], executed[i]);
        if (of_call[i] != 0) {
            fprintf(file, "call %" PRIx64 " %" PRIu64 "\n", address[i], of_call[i]);
        }
    }
    fclose(file);
}

static int read_range(const char *text, range *r)
{
    return sscanf(text, "%" SCNx64 "-%" SCNx64, &r->first, &r->end) == 2;
}

static int read_argument(const char *text)
{
    if (strncmp(text, "out=", 4) == 0) {
        out = strdup(text + 4);
        return out != NULL;
    }
    if (strncmp(text, "step=", 5) == 0) {
        return read_range(text + 5, &step);
    }
    if (strncmp(text, "outside=", 8) == 0 && outsides < MAX_RANGES) {
        return read_range(text + 8, &outside[outsides++]);
    }
    return 0;
}

int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv)
{
    (void)info;
    for (int i = 0; i < argc; i++) {
        if (!read_argument(argv[i])) {
            return 1;
        }
    }
    if (out == NULL) {
        return 1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, finished, NULL);
    return 0;
}
