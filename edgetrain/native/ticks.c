/* A run of the sampler's ticks without waking Python: sleep until each is due, and read clocks and small files.
 *
 * In:  n ticks: when each is due and when its slot ends; m lanes, each a CPU clock or an open file with one number.
 * Out: for each tick when it woke; for each lane of it the number, and the time before and after the reading.
 *
 * Times are nanoseconds of CLOCK_MONOTONIC. A tick whose slot is over is not read. A number that is not there is
 * ET_NOTHING. Returns how many ticks it came to: fewer than n if it was told to stop.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define ET_NOTHING INT64_MIN

typedef struct {
    int32_t is_clock;
    int32_t handle; /* a clock's number, or an open file's */
    int64_t every;  /* read in slots that this divides */
} et_lane;

typedef struct {
    int64_t before_ns, after_ns, value;
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

/* The one whole number that a file holds. */
static int64_t number_in(int file)
{
    char text[32];
    const ssize_t size = pread(file, text, sizeof text - 1, 0);
    if (size <= 0 || size == (ssize_t)sizeof text - 1) {
        return ET_NOTHING;
    }
    text[size] = '\0';
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end == text || errno != 0) {
        return ET_NOTHING;
    }
    while (*end == '\n' || *end == ' ') {
        end++;
    }
    return end == text + size ? value : ET_NOTHING;
}

int et_ticks(
    int64_t first_slot, const int64_t *due_ns, const int64_t *end_ns, int n, const et_lane *lanes, int m,
    int64_t *woke_ns, et_reading *readings, const volatile int *stop)
{
    for (int i = 0; i < n; i++) {
        sleep_until(due_ns[i]);
        woke_ns[i] = now_ns(CLOCK_MONOTONIC);
        if (*stop) {
            return i;
        }
        for (int lane = 0; woke_ns[i] < end_ns[i] && lane < m; lane++) {
            if ((first_slot + i) % lanes[lane].every != 0) {
                continue;
            }
            et_reading *r = readings + i * m + lane;
            r->before_ns = now_ns(CLOCK_MONOTONIC);
            r->value = lanes[lane].is_clock ? now_ns((clockid_t)lanes[lane].handle) : number_in(lanes[lane].handle);
            r->after_ns = now_ns(CLOCK_MONOTONIC);
        }
    }
    return n;
}
