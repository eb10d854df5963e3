/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm_sum.c - the sum of an array over all ranks, for parameter gradients. Every rank owns an equal
 * share of the elements, receives it from all others, adds in rank order, and sends the sums to all
 * others. Each element is summed in one place and one order, so all ranks end with the same bits.
 */
#include "base/base.h"

#include <deltarule/comm.h>

static int64_t share_begin(const dr_comm *comm, int64_t count, int32_t rank)
{
    return count / comm->size * rank + dr_min(rank, count % comm->size);
}

/* To and from every other rank: its share of values, and the parts of this rank's share. parts: one for
 * each other rank, in rank order; NULL: the own share goes out and theirs come in. */
static dr_status exchange(dr_comm *comm, float *values, int64_t count, float *parts, dr_transfer *t)
{
    const int64_t begin = share_begin(comm, count, comm->rank);
    const int64_t mine = share_begin(comm, count, comm->rank + 1) - begin;
    int32_t n = 0;
    for (int32_t r = 0, other = 0; r < comm->size; r++) {
        if (r == comm->rank)
            continue;
        float *theirs = values + share_begin(comm, count, r);
        const size_t bytes = (size_t)(values + share_begin(comm, count, r + 1) - theirs) * sizeof *values;
        const size_t my_bytes = (size_t)mine * sizeof *values;
        if (parts != NULL) {
            t[n++] = (dr_transfer){r, 0, parts + other++ * mine, my_bytes};
            t[n++] = (dr_transfer){r, 1, theirs, bytes};
        } else {
            t[n++] = (dr_transfer){r, 0, theirs, bytes};
            t[n++] = (dr_transfer){r, 1, values + begin, my_bytes};
        }
    }
    dr_batch *batch;
    DR_TRY(dr_comm_post(comm, t, n, &batch));
    return dr_comm_wait(batch);
}

static void add_parts(const dr_comm *comm, float *mine, int64_t n, const float *parts)
{
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int32_t r = 0, other = 0; r < comm->size; r++)
            sum += r == comm->rank ? mine[i] : parts[other++ * n + i];
        mine[i] = sum;
    }
}

dr_status dr_comm_sum(dr_comm *comm, float *values, int64_t count)
{
    if (comm == NULL || count < 0 || (values == NULL && count > 0))
        return dr_fail(DR_ERR_ARG, "comm, values, count: must be given, given, >= 0; got %p, %p, %lld",
                       (void *)comm, (void *)values, (long long)count);
    if (comm->size == 1 || count == 0)
        return DR_OK;
    const int64_t begin = share_begin(comm, count, comm->rank);
    const int64_t mine = share_begin(comm, count, comm->rank + 1) - begin;
    float *parts = dr_alloc((size_t)dr_max(mine * (comm->size - 1), 1) * sizeof *parts);
    dr_transfer *t = dr_alloc(2 * (size_t)comm->size * sizeof *t);
    dr_status status = DR_OK;
    if (parts == NULL || t == NULL) {
        dr_comm_abort(comm, "no memory for a sum");
        status = dr_fail(DR_ERR_MEMORY, "comm: no memory for a sum of %lld values", (long long)count);
    }
    if (status == DR_OK)
        status = exchange(comm, values, count, parts, t);
    if (status == DR_OK) {
        add_parts(comm, values + begin, mine, parts);
        status = exchange(comm, values, count, NULL, t);
    }
    dr_free(parts);
    dr_free(t);
    return status;
}
