/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_ulysses_column.c - a communicator of every step-th rank of another. Its transfers are the
 * other's, under other numbers: no rank has to agree to it, a recorder sees what goes through it, and
 * an abort on either reaches everybody. Transfers between two ranks match in the order posted, so
 * a pair of ranks may talk through one of the two at a time; members of a row and of a column
 * never are the same pair.
 */
#include "cp/cp_ulysses.h"

typedef struct column {
    dr_comm base;
    dr_comm *whole;
    int32_t first, step;
} column;

typedef struct column_batch {
    dr_batch base;
    dr_batch *whole;
} column_batch;

static column *of(dr_comm *comm) { return (column *)comm; }

static dr_status column_post(dr_comm *comm, const dr_transfer *transfers, int32_t n, dr_batch **out)
{
    column *c = of(comm);
    column_batch *b = dr_alloc(sizeof *b);
    dr_transfer *t = dr_alloc((size_t)dr_max(n, 1) * sizeof *t);
    dr_status status = DR_OK;
    if (b == NULL || t == NULL)
        status = dr_fail(DR_ERR_MEMORY, "comm: no memory for %d transfers", n);
    for (int32_t i = 0; status == DR_OK && i < n; i++) {
        t[i] = transfers[i];
        t[i].peer = c->first + t[i].peer * c->step;
    }
    if (status == DR_OK) {
        b->base.comm = comm;
        status = dr_comm_post(c->whole, t, n, &b->whole);
        comm->health = c->whole->health;
    }
    dr_free(t);
    if (status != DR_OK)
        dr_free(b);
    else
        *out = &b->base;
    return status;
}

static dr_status column_test(dr_batch *batch, int32_t *done)
{
    dr_status status = dr_comm_test(((column_batch *)batch)->whole, done);
    batch->comm->health = of(batch->comm)->whole->health;
    return status;
}

static dr_status column_wait(dr_batch *batch)
{
    dr_status status = dr_comm_wait(((column_batch *)batch)->whole);
    batch->comm->health = of(batch->comm)->whole->health;
    dr_free(batch);
    return status;
}

static void column_abort(dr_comm *comm, const char *why)
{
    dr_comm_abort(of(comm)->whole, why);
    comm->health = DR_ERR_COMM;
}

static void column_close(dr_comm *comm) { dr_free(comm); }

static const dr_comm_ops column_ops = {DR_COMM_ABI, "column", column_post, column_test, column_wait,
                                       NULL, column_abort, column_close};

dr_status dr_column_create(dr_comm *whole, int32_t first, int32_t step, int32_t size, dr_comm **out)
{
    column *c = dr_alloc(sizeof *c);
    if (c == NULL)
        return dr_fail(DR_ERR_MEMORY, "comm: no memory for %zu bytes", sizeof *c);
    c->base = (dr_comm){&column_ops, (whole->rank - first) / step, size, whole->health, whole->timeout};
    c->whole = whole;
    c->first = first;
    c->step = step;
    *out = &c->base;
    return DR_OK;
}
