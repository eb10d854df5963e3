/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.h - communicators: how the ranks of a context-parallel group exchange bytes. One
 * primitive is required, a batch of point-to-point transfers that is posted early and
 * waited late; the rest is built from it. The table is public: a host program may bring
 * its own communicator.
 *
 * Contract of a communicator
 *  - Between one sender and one receiver, transfers match in the order posted; there are
 *    no tags. Matching transfers have equal byte counts; zero bytes are not transferred.
 *  - post returns at once. Buffers belong to the batch until wait has returned.
 *  - test never blocks and drives progress. wait frees the batch, whatever it returns.
 *  - After a failure `health` is DR_ERR_COMM for good: every pending and later call on
 *    any rank returns DR_ERR_COMM within the time limit. abort never blocks.
 *  - One thread at a time uses one dr_comm.
 */
#ifndef DELTARULE_COMM_H
#define DELTARULE_COMM_H

#include "deltarule.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DR_COMM_ABI 1

typedef struct dr_comm dr_comm;

/* Implementations embed it as their first member. */
typedef struct dr_batch {
    dr_comm *comm;
} dr_batch;

typedef struct dr_transfer {
    int32_t peer;
    int32_t is_send;
    void *buffer; /* only read when is_send */
    size_t bytes;
} dr_transfer;

typedef struct dr_comm_ops {
    uint32_t abi; /* DR_COMM_ABI; first member, for ever */
    const char *name;
    dr_status (*post)(dr_comm *comm, const dr_transfer *transfers, int32_t n, dr_batch **out);
    dr_status (*test)(dr_batch *batch, int32_t *done);
    dr_status (*wait)(dr_batch *batch);
    /* A communicator of the ranks with the same color, ordered by key, then by rank. Collective.
     * color < 0: *out is NULL. Optional: NULL answers DR_ERR_SUPPORT. */
    dr_status (*split)(dr_comm *comm, int32_t color, int32_t key, dr_comm **out);
    void (*abort)(dr_comm *comm, const char *why);
    void (*close)(dr_comm *comm);
} dr_comm_ops;

struct dr_comm {
    const dr_comm_ops *ops;
    int32_t rank, size;
    dr_status health;
    double timeout; /* seconds that wait may take; > 0 */
};

#define DR_COMM_TIMEOUT 300.0 /* of a new communicator */

/* ---- ready-made communicators --------------------------------------------- */

/* One rank; transfers to itself match like any others. */
DR_API dr_status dr_comm_self_create(dr_comm **out);

/* size ranks in one process, one thread each: out[r] is rank r's handle, to be used by
 * one thread at a time and closed by it. The shared part goes with the last close. */
DR_API dr_status dr_comm_threads_create(int32_t size, dr_comm **out);

/* Wraps a communicator and writes down what goes through it. Closing it closes inner. */
typedef struct dr_comm_event {
    int32_t peer;
    int32_t is_send;
    size_t bytes;
    int64_t posted; /* place in the rank's sequence of posts and waits */
    int64_t waited; /* the same; -1: not yet */
} dr_comm_event;
DR_API dr_status dr_comm_record_create(dr_comm *inner, dr_comm **out);
DR_API int64_t dr_comm_record_count(const dr_comm *comm);
DR_API dr_status dr_comm_record_event(const dr_comm *comm, int64_t index, dr_comm_event *event);
DR_API void dr_comm_record_clear(dr_comm *comm);

/* ---- calls ------------------------------------------------------------------ */

/* Checked forms of the table's entries. Errors: ERR_ARG, ERR_COMM, ERR_MEMORY. */
DR_API dr_status dr_comm_post(dr_comm *comm, const dr_transfer *transfers, int32_t n,
                              dr_batch **out);
DR_API dr_status dr_comm_test(dr_batch *batch, int32_t *done);
DR_API dr_status dr_comm_wait(dr_batch *batch);
DR_API dr_status dr_comm_split(dr_comm *comm, int32_t color, int32_t key, dr_comm **out);
DR_API void dr_comm_abort(dr_comm *comm, const char *why);
DR_API void dr_comm_close(dr_comm *comm); /* NULL is fine */
DR_API dr_status dr_comm_set_timeout(dr_comm *comm, double seconds);

/* For communicators that live outside the library: makes the sentence dr_last_error, logs it and
 * returns status. */
DR_API dr_status dr_comm_fail(dr_status status, const char *sentence);

/* all[size * bytes] receives every rank's mine[bytes], in rank order. */
DR_API dr_status dr_comm_allgather(dr_comm *comm, const void *mine, void *all, size_t bytes);

/* values[count] of every rank become their sum, added in rank order: the same bits on all ranks, at
 * any time. Each rank sums a share of the values; 2 (size-1)/size of them leave each rank. */
DR_API dr_status dr_comm_sum(dr_comm *comm, float *values, int64_t count);

#ifdef __cplusplus
}
#endif
#endif
