/* Work in pieces, on all cores.
 *
 * A piece never depends on another, and how work is cut depends on its shape alone, not on the number of threads: results
 * are the same bits whether one thread makes all pieces or sixteen do.
 */
#ifndef PARALLEL_H
#define PARALLEL_H

enum {
    MOST_THREADS = 16,
    EXIT_NO_VECTORS = 16, /* the exit code where the processor lacks what the kernels were built for */
    SMALL_WORK = 16384 /* steps of an inner loop that are not worth a second thread */
};

typedef void piece_function(const void *job, int piece);

/* Calls make(job, piece) for each piece from 0 on, and returns when all are made. work: about how many steps of an inner
 * loop all of them take together. */
void parallel_for(int pieces, long work, piece_function *make, const void *job);

/* How many threads there are to be, in place of one for each core or what the environment says in FIRMWARE_THREADS.
 * To be called before the first parallel_for. */
void parallel_threads(int threads);

#endif
