/* Ticks of the sampler without waking Python: sleep until each is due, then read clocks and small files.
 *
 * In:  n ticks: when each is due and when its slot ends; m lanes, each a clock or an open file; room for their content.
 * Out: for each tick when it woke; for each of its lanes the time before and after the reading, and
 *        of a clock:  its nanoseconds
 *        of a file:   the offset of its content in `text`, and its bytes
 *      ET_NOTHING if there is none.
 *
 * Times are nanoseconds of CLOCK_MONOTONIC. A tick whose slot is over is not read. Returns the number of ticks: fewer
 * than n if `stop` was set or the text is full.
 */
#include <errno.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#define ET_NOTHING INT64_MIN
#define ET_MAX_BYTES 65536 /* of one file, from its beginning */

typedef struct {
    int32_t is_clock;
    int32_t handle; /* a clock's number, or an open file's */
    int64_t every;  /* read in each slot for which (slot + shift) is a multiple of it */
    int64_t shift;
} et_lane;

typedef struct {
    int64_t before_ns, after_ns, value, start;
} et_reading;

static int64_t now_ns(clockid_t clock)
{
    struct timespec t;
    if (clock_gettime(clock, &t) != 0) {
        return ET_NOTHING;
    }
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void sleep_until(int64_t due_ns)
{
    const struct timespec t = {due_ns / 1000000000, due_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {
    }
}

typedef struct {
    char *bytes;
    int64_t size, used;
} et_text;

/* Appends a file's content to the text; its bytes. */
static int64_t append_content(int file, et_text *text)
{
    const int64_t left = text->size - text->used;
    const int64_t room = left < ET_MAX_BYTES ? left : ET_MAX_BYTES;
    const ssize_t size = pread(file, text->bytes + text->used, (size_t)room, 0);
    if (size <= 0 || (size == room && room < ET_MAX_BYTES)) {
        return ET_NOTHING;
    }
    text->used += size;
    return size;
}

static et_reading reading(const et_lane *lane, et_text *text)
{
    et_reading r = {.before_ns = now_ns(CLOCK_MONOTONIC), .start = text->used};
    r.value = lane->is_clock ? now_ns((clockid_t)lane->handle) : append_content(lane->handle, text);
    r.after_ns = now_ns(CLOCK_MONOTONIC);
    return r;
}

int et_sample_ticks(
    int64_t first_slot, const int64_t *due_ns, const int64_t *end_ns, int n, const et_lane *lanes, int m,
    int64_t *woke_ns, et_reading *readings, char *bytes, int64_t size, const volatile int *stop)
{
    et_text text = {bytes, size, 0};
    for (int i = 0; i < n; i++) {
        if (i > 0 && 2 * text.used > size) {
            return i;
        }
        sleep_until(due_ns[i]);
        woke_ns[i] = now_ns(CLOCK_MONOTONIC);
        if (*stop) {
            return i;
        }
        for (int lane = 0; woke_ns[i] < end_ns[i] && lane < m; lane++) {
            if ((first_slot + i + lanes[lane].shift) % lanes[lane].every == 0) {
                readings[i * m + lane] = reading(lanes + lane, &text);
            }
        }
    }
    return n;
}
