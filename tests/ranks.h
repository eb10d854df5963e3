/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ranks.h - what the groups share whose ranks are threads of one process: their random numbers,
 * opening, running and closing the ranks, and how far two arrays are apart. The including file
 * defines `static uint64_t seed` first.
 */
#ifndef DR_TEST_RANKS_H
#define DR_TEST_RANKS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <deltarule/comm.h>

#include <math.h>
#include <pthread.h>

static inline double uniform(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) * 0x1p-53;
}

static inline int64_t below(int64_t n) { return (int64_t)(uniform() * (double)n); }

static inline void must(dr_status status)
{
    if (status != DR_OK)
        fail_msg("%s", dr_last_error());
}

static inline void open_ranks(dr_comm **comms, int32_t n, double timeout)
{
    must(dr_comm_threads_create(n, comms));
    for (int32_t r = 0; r < n; r++)
        must(dr_comm_set_timeout(comms[r], timeout));
}

static inline void close_ranks(dr_comm **comms, int32_t n)
{
    for (int32_t r = 0; r < n; r++)
        dr_comm_close(comms[r]);
}

/* A thread for each of the n elements of works, until all have ended. */
static inline void run_ranks(int32_t n, void *(*rank_main)(void *), void *works, size_t each)
{
    pthread_t threads[64];
    assert_true(n <= 64);
    for (int32_t r = 0; r < n; r++)
        assert_int_equal(pthread_create(&threads[r], NULL, rank_main, (char *)works + (size_t)r * each), 0);
    for (int32_t r = 0; r < n; r++)
        pthread_join(threads[r], NULL);
}

/* Relative L2 distance of a from b. */
static inline double distance(const float *a, const float *b, size_t n)
{
    double num = 0, den = 1e-30;
    for (size_t i = 0; i < n; i++) {
        num += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        den += (double)b[i] * b[i];
    }
    return isnan(num) ? INFINITY : sqrt(num / den);
}

#endif
