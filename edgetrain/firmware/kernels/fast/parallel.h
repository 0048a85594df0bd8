/* Tasks on all cores.
 *
 * No task depends on another, and how work is divided depends on its shape alone, not on the number of threads: results
 * are the same bits with one thread and with sixteen.
 */
#ifndef PARALLEL_H
#define PARALLEL_H

enum {
    MAX_THREADS = 16,
    EXIT_NO_VECTORS = 16, /* exit code where the processor lacks the vectors that the kernels were built for */
    SMALL_WORK = 16384    /* inner steps that are not worth a second thread */
};

typedef void task_function(const void *job, int task);

/* Calls body(job, task) for each task from 0 on and returns when all are done. work: about how many inner steps they
 * take in all. */
void parallel_for(int tasks, long work, task_function *body, const void *job);

/* Sets the number of threads, by default the value of FIRMWARE_THREADS or one for each core. Call it before the first
 * parallel_for. */
void parallel_threads(int threads);

#endif
