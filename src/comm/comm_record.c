/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm_record.c - a communicator that writes down what goes through it: who, to whom, how
 * many bytes, when posted, when waited for. It changes nothing on the way, so a trace is proof
 * of what a protocol sends.
 */
#include "base/base.h"

#include <deltarule/comm.h>

typedef struct record_comm {
    dr_comm base;
    dr_comm *inner;
    dr_comm_event *events;
    int64_t count, room, clock;
} record_comm;

typedef struct record_batch {
    dr_batch base;
    dr_batch *inner;
    int64_t first, n; /* its events */
} record_batch;

static const dr_comm_ops record_ops;

static record_comm *of(const dr_comm *comm) { return (record_comm *)comm; }

static dr_status grow(record_comm *c, int64_t more)
{
    if (c->count + more <= c->room)
        return DR_OK;
    int64_t room = dr_max(2 * c->room, c->count + more + 64);
    dr_comm_event *events = dr_alloc((size_t)room * sizeof *events);
    if (events == NULL)
        return dr_fail(DR_ERR_MEMORY, "comm: no memory for %lld events", (long long)room);
    if (c->count > 0)
        memcpy(events, c->events, (size_t)c->count * sizeof *events);
    dr_free(c->events);
    c->events = events;
    c->room = room;
    return DR_OK;
}

static dr_status record_post(dr_comm *comm, const dr_transfer *t, int32_t n, dr_batch **out)
{
    record_comm *c = of(comm);
    DR_TRY(grow(c, n));
    record_batch *b = dr_alloc(sizeof *b);
    if (b == NULL)
        return dr_fail(DR_ERR_MEMORY, "comm: no memory for a batch");
    b->base.comm = comm;
    b->first = c->count;
    dr_status status = c->inner->ops->post(c->inner, t, n, &b->inner);
    comm->health = c->inner->health;
    if (status != DR_OK) {
        dr_free(b);
        return status;
    }
    for (int32_t i = 0; i < n; i++)
        if (t[i].bytes > 0)
            c->events[c->count++] = (dr_comm_event){t[i].peer, t[i].is_send, t[i].bytes, c->clock, -1};
    b->n = c->count - b->first;
    c->clock++;
    *out = &b->base;
    return DR_OK;
}

static dr_status record_test(dr_batch *batch, int32_t *done)
{
    dr_status status = dr_comm_test(((record_batch *)batch)->inner, done);
    batch->comm->health = of(batch->comm)->inner->health;
    return status;
}

static dr_status record_wait(dr_batch *batch)
{
    record_batch *b = (record_batch *)batch;
    record_comm *c = of(batch->comm);
    c->inner->timeout = c->base.timeout;
    dr_status status = dr_comm_wait(b->inner);
    c->base.health = c->inner->health;
    for (int64_t i = b->first; i < b->first + b->n && i < c->count; i++)
        c->events[i].waited = c->clock;
    c->clock++;
    dr_free(b);
    return status;
}

static dr_status record_split(dr_comm *comm, int32_t color, int32_t key, dr_comm **out)
{
    dr_status status = dr_comm_split(of(comm)->inner, color, key, out);
    comm->health = of(comm)->inner->health;
    return status;
}

static void record_abort(dr_comm *comm, const char *why)
{
    dr_comm_abort(of(comm)->inner, why);
    comm->health = DR_ERR_COMM;
}

static void record_close(dr_comm *comm)
{
    record_comm *c = of(comm);
    dr_comm_close(c->inner);
    dr_free(c->events);
    dr_free(c);
}

static const dr_comm_ops record_ops = {
    DR_COMM_ABI, "record", record_post, record_test, record_wait, record_split, record_abort,
    record_close,
};

dr_status dr_comm_record_create(dr_comm *inner, dr_comm **out)
{
    if (inner == NULL || out == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", inner == NULL ? "inner" : "out");
    record_comm *c = dr_alloc(sizeof *c);
    if (c == NULL)
        return dr_fail(DR_ERR_MEMORY, "comm: no memory for a recorder");
    c->base = (dr_comm){&record_ops, inner->rank, inner->size, inner->health, inner->timeout};
    c->inner = inner;
    *out = &c->base;
    return DR_OK;
}

static dr_status check_record(const dr_comm *comm)
{
    if (comm == NULL || comm->ops != &record_ops)
        return dr_fail(DR_ERR_ARG, "comm: must be one that dr_comm_record_create made");
    return DR_OK;
}

int64_t dr_comm_record_count(const dr_comm *comm)
{
    return check_record(comm) == DR_OK ? of(comm)->count : 0;
}

dr_status dr_comm_record_event(const dr_comm *comm, int64_t index, dr_comm_event *event)
{
    DR_TRY(check_record(comm));
    if (index < 0 || index >= of(comm)->count || event == NULL)
        return dr_fail(DR_ERR_ARG, "index: must be 0 to %lld, got %lld", (long long)of(comm)->count - 1,
                       (long long)index);
    *event = of(comm)->events[index];
    return DR_OK;
}

void dr_comm_record_clear(dr_comm *comm)
{
    if (check_record(comm) == DR_OK)
        of(comm)->count = of(comm)->clock = 0;
}
