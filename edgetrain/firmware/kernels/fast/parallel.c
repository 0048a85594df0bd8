/* A thread pool whose threads take the tasks of a job from one counter.
 *
 *     ticket    | job number: 32 bits | tasks: 16 | next: 16 |
 *
 * A thread takes a task by adding one to `next` with compare-and-swap. That succeeds only while the same job still has
 * tasks, so a late thread never confuses two jobs. Ops are short: a thread spins for a while before it sleeps.
 */
#define _GNU_SOURCE

#include "parallel.h"

/* ARMv6 boards have one core, and their C library may have no threads. */
#if defined(__arm__) && __ARM_ARCH < 7
#define ONE_CORE 1
#else
#define ONE_CORE 0
#endif

static void run_all(int tasks, task_function *body, const void *job)
{
    for (int task = 0; task < tasks; task++) {
        body(job, task);
    }
}

#if ONE_CORE

void parallel_for(int tasks, long work, task_function *body, const void *job)
{
    (void)work;
    run_all(tasks, body, job);
}

void parallel_threads(int threads)
{
    (void)threads;
}

#else

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    SPINS = 20000,          /* before an idle thread sleeps: about a tenth of a millisecond */
    SPINS_OF_CALLER = 4000, /* before the caller, waiting for others, yields its core */
    MAX_TASKS = 32768,
    STACK_BYTES = 256 * 1024
};

static struct {
    _Atomic uint64_t ticket;
    _Atomic int done, sleeping;
    task_function *_Atomic body;
    const void *_Atomic job;
    pthread_mutex_t lock;
    pthread_cond_t work;
    int threads; /* 0: not started */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER};

static void pause_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint32_t job_of(uint64_t ticket)
{
    return (uint32_t)(ticket >> 32);
}

/* Runs one task of the current job; 0 if none is left. */
static int run_one(void)
{
    uint64_t ticket = atomic_load(&pool.ticket);
    const unsigned next = (unsigned)(ticket & 0xffff), tasks = (unsigned)(ticket >> 16 & 0xffff);
    if (next >= tasks) {
        return 0;
    }
    task_function *const body = atomic_load_explicit(&pool.body, memory_order_relaxed);
    const void *const job = atomic_load_explicit(&pool.job, memory_order_relaxed);
    if (atomic_compare_exchange_strong(&pool.ticket, &ticket, ticket + 1)) {
        body(job, (int)next);
        atomic_fetch_add(&pool.done, 1);
    }
    return 1;
}

static void sleep_until_next(uint32_t job)
{
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (job_of(atomic_load(&pool.ticket)) == job) {
        pthread_cond_wait(&pool.work, &pool.lock);
    }
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
}

static void *worker(void *unused)
{
    (void)unused;
    for (;;) {
        const uint32_t job = job_of(atomic_load(&pool.ticket));
        while (run_one()) {
        }
        int spins = 0;
        while (job_of(atomic_load(&pool.ticket)) == job && ++spins < SPINS) {
            pause_core();
        }
        if (spins == SPINS) {
            sleep_until_next(job);
        }
    }
    return NULL;
}

/* Kernels may be built for newer processors than the rest of the program: checked before main, without vectors. */
#if defined(__AVX2__) && defined(__FMA__)
__attribute__((constructor, target("no-avx"))) static void require_vectors(void)
{
    static const char why[] = "this processor has no AVX2; body fast VECTORS= builds a program without\n";
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        const ssize_t ignored = write(STDOUT_FILENO, why, sizeof why - 1);
        (void)ignored;
        _exit(EXIT_NO_VECTORS);
    }
}
#endif

static int cores(void)
{
    cpu_set_t allowed;
    const char *wanted = getenv("FIRMWARE_THREADS");
    if (wanted != NULL && atoi(wanted) > 0) {
        return atoi(wanted);
    }
    return sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
}

void parallel_threads(int threads)
{
    pthread_attr_t small;
    if (pool.threads != 0 || pthread_attr_init(&small) != 0) {
        return;
    }
    pthread_attr_setstacksize(&small, STACK_BYTES);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    pool.threads = 1;
    for (; pool.threads < threads && pool.threads < MAX_THREADS; pool.threads++) {
        pthread_t thread;
        if (pthread_create(&thread, &small, worker, NULL) != 0) {
            break; /* fewer threads body the same elements */
        }
    }
    pthread_attr_destroy(&small);
}

static void wait_for_others(int tasks)
{
    for (int spins = 0; atomic_load(&pool.done) != tasks; spins++) {
        if (spins < SPINS_OF_CALLER) {
            pause_core();
        } else {
            sched_yield(); /* they may be waiting for a core */
        }
    }
}

static void run_on_threads(int tasks, task_function *body, const void *job)
{
    const uint32_t number = job_of(atomic_load(&pool.ticket)) + 1;
    atomic_store_explicit(&pool.body, body, memory_order_relaxed);
    atomic_store_explicit(&pool.job, job, memory_order_relaxed);
    atomic_store(&pool.done, 0);
    atomic_store(&pool.ticket, (uint64_t)number << 32 | (uint64_t)tasks << 16);
    if (atomic_load(&pool.sleeping) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.work);
        pthread_mutex_unlock(&pool.lock);
    }
    while (run_one()) {
    }
    wait_for_others(tasks);
}

void parallel_for(int tasks, long work, task_function *body, const void *job)
{
    if (pool.threads == 0) {
        parallel_threads(cores());
    }
    if (pool.threads == 1 || tasks < 2 || tasks > MAX_TASKS || work < SMALL_WORK) {
        run_all(tasks, body, job);
    } else {
        run_on_threads(tasks, body, job);
    }
}

#endif
