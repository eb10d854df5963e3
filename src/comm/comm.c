/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm.c - the checked calls of comm.h, and the collectives built from batches. Nothing
 * here knows how bytes travel.
 */
#include "base/base.h"

#include <deltarule/comm.h>

#include <math.h>

static dr_status check_comm(const dr_comm *comm)
{
    if (comm == NULL)
        return dr_fail(DR_ERR_ARG, "comm: must not be NULL");
    if (comm->ops->abi != DR_COMM_ABI)
        return dr_fail(DR_ERR_ARG, "comm: its table has ABI %u, this library needs %d",
                       comm->ops->abi, DR_COMM_ABI);
    if (comm->health != DR_OK)
        return dr_fail(DR_ERR_COMM, "comm: rank %d of %s can no longer be used after a failure",
                       comm->rank, comm->ops->name);
    return DR_OK;
}

/* A host's own communicator may fail without a sentence: then it gets this one. */
static dr_status explained(const dr_comm *comm, const char *call, uint64_t before, dr_status status)
{
    if (status != DR_OK && dr_fail_count() == before)
        return dr_fail(status, "comm: %s of %s on rank %d returned \"%s\" without a reason", call,
                       comm->ops->name, comm->rank, dr_status_text(status));
    return status;
}

dr_status dr_comm_fail(dr_status status, const char *sentence)
{
    return dr_fail(status, "%s", sentence != NULL ? sentence : "no reason given");
}

dr_status dr_comm_post(dr_comm *comm, const dr_transfer *transfers, int32_t n, dr_batch **out)
{
    if (out == NULL)
        return dr_fail(DR_ERR_ARG, "out: must not be NULL");
    *out = NULL;
    DR_TRY(check_comm(comm));
    if (n < 0 || (n > 0 && transfers == NULL))
        return dr_fail(DR_ERR_ARG, "transfers: must be n >= 0 entries, got n = %d at %p", n,
                       (const void *)transfers);
    for (int32_t i = 0; i < n; i++) {
        const dr_transfer *t = &transfers[i];
        if (t->peer < 0 || t->peer >= comm->size)
            return dr_fail(DR_ERR_ARG, "transfers[%d].peer: must be 0 to %d, got %d", i,
                           comm->size - 1, t->peer);
        if (t->bytes > 0 && t->buffer == NULL)
            return dr_fail(DR_ERR_ARG, "transfers[%d].buffer: must be given for %zu bytes", i,
                           t->bytes);
    }
    const uint64_t before = dr_fail_count();
    return explained(comm, "post", before, comm->ops->post(comm, transfers, n, out));
}

dr_status dr_comm_test(dr_batch *batch, int32_t *done)
{
    if (batch == NULL || done == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", batch == NULL ? "batch" : "done");
    const dr_comm *comm = batch->comm;
    const uint64_t before = dr_fail_count();
    return explained(comm, "test", before, comm->ops->test(batch, done));
}

dr_status dr_comm_wait(dr_batch *batch)
{
    if (batch == NULL)
        return dr_fail(DR_ERR_ARG, "batch: must not be NULL");
    const dr_comm *comm = batch->comm; /* wait frees the batch */
    const uint64_t before = dr_fail_count();
    return explained(comm, "wait", before, comm->ops->wait(batch));
}

dr_status dr_comm_split(dr_comm *comm, int32_t color, int32_t key, dr_comm **out)
{
    if (out == NULL)
        return dr_fail(DR_ERR_ARG, "out: must not be NULL");
    *out = NULL;
    DR_TRY(check_comm(comm));
    if (comm->ops->split == NULL)
        return dr_fail(DR_ERR_SUPPORT, "comm: %s cannot be split", comm->ops->name);
    const uint64_t before = dr_fail_count();
    return explained(comm, "split", before, comm->ops->split(comm, color, key, out));
}

void dr_comm_abort(dr_comm *comm, const char *why)
{
    if (comm != NULL)
        comm->ops->abort(comm, why != NULL ? why : "no reason given");
}

void dr_comm_close(dr_comm *comm)
{
    if (comm != NULL)
        comm->ops->close(comm);
}

dr_status dr_comm_set_timeout(dr_comm *comm, double seconds)
{
    DR_TRY(check_comm(comm));
    if (!(seconds > 0) || !isfinite(seconds))
        return dr_fail(DR_ERR_ARG, "seconds: must be finite and above 0, got %g", seconds);
    comm->timeout = seconds;
    return DR_OK;
}

/* Sends to and receives from everybody at once, itself included. */
dr_status dr_comm_allgather(dr_comm *comm, const void *mine, void *all, size_t bytes)
{
    DR_TRY(check_comm(comm));
    if (bytes > 0 && (mine == NULL || all == NULL))
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", mine == NULL ? "mine" : "all");
    dr_transfer *t = dr_alloc(2 * (size_t)comm->size * sizeof *t);
    if (t == NULL)
        return dr_fail(DR_ERR_MEMORY, "comm: no memory for %d transfers", 2 * comm->size);
    int32_t n = 0;
    for (int32_t r = 0; r < comm->size; r++) {
        char *slot = (char *)all + (size_t)r * bytes;
        if (r == comm->rank) {
            if (bytes > 0)
                memcpy(slot, mine, bytes);
            continue;
        }
        t[n++] = (dr_transfer){r, 0, slot, bytes};
        t[n++] = (dr_transfer){r, 1, (void *)mine, bytes};
    }
    dr_batch *batch;
    dr_status status = dr_comm_post(comm, t, n, &batch);
    dr_free(t);
    return status == DR_OK ? dr_comm_wait(batch) : status;
}
