/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm_threads.c - N ranks in one process. A hub holds, for every ordered pair of ranks, the
 * queue of transfers that still look for their counterpart; whoever posts the second half of
 * a pair copies the bytes, straight from buffer to buffer, outside the lock.
 *
 * NOTE [Aborted hubs]: after an abort nothing is matched any more, so no buffer is touched
 * once wait has returned; a copy under way when the abort comes is finished first.
 */
#include "base/base.h"

#include <deltarule/comm.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <time.h>

typedef enum { PENDING, COPYING, DONE } transfer_state;

typedef struct entry {
    dr_transfer transfer;
    transfer_state state;
    struct entry *next; /* in the queue of its pair */
} entry;

typedef struct queue {
    entry *first, *last; /* all sends or all receives: opposite ones match at once */
} queue;

typedef struct hub {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t size, open;
    bool aborted;
    char why[200];
    queue *queues; /* [sender][receiver] */
} hub;

typedef struct threads_comm {
    dr_comm base;
    hub *hub;
} threads_comm;

typedef struct threads_batch {
    dr_batch base;
    int32_t n;
    entry entries[];
} threads_batch;

static const dr_comm_ops threads_ops;

static dr_status broken(threads_comm *c)
{
    c->base.health = DR_ERR_COMM;
    return dr_fail(DR_ERR_COMM, "comm: rank %d gave up: %s", c->base.rank, c->hub->why);
}

/* Called with the lock held. */
static void abort_hub(hub *h, const char *why)
{
    if (!h->aborted) {
        h->aborted = true;
        snprintf(h->why, sizeof h->why, "%s", why);
    }
    pthread_cond_broadcast(&h->changed);
}

static queue *queue_of(const threads_comm *c, const dr_transfer *t)
{
    int64_t from = t->is_send ? c->base.rank : t->peer, to = t->is_send ? t->peer : c->base.rank;
    return &c->hub->queues[from * c->hub->size + to];
}

/* Matches or enqueues one entry; the lock is held on entry and on return. */
static void offer(threads_comm *c, entry *mine)
{
    hub *h = c->hub;
    queue *q = queue_of(c, &mine->transfer);
    entry *other = q->first;
    if (other == NULL || other->transfer.is_send == mine->transfer.is_send) {
        if (q->last != NULL)
            q->last->next = mine;
        else
            q->first = mine;
        q->last = mine;
        return;
    }
    q->first = other->next;
    if (q->first == NULL)
        q->last = NULL;
    other->next = NULL;
    if (other->transfer.bytes != mine->transfer.bytes) {
        char why[160];
        snprintf(why, sizeof why, "ranks %d and %d disagree on the size of a transfer (%zu and %zu bytes)",
                 c->base.rank, mine->transfer.peer, mine->transfer.bytes, other->transfer.bytes);
        abort_hub(h, why);
        return;
    }
    entry *from = mine->transfer.is_send ? mine : other, *to = mine->transfer.is_send ? other : mine;
    mine->state = other->state = COPYING;
    pthread_mutex_unlock(&h->lock);
    memcpy(to->transfer.buffer, from->transfer.buffer, from->transfer.bytes);
    pthread_mutex_lock(&h->lock);
    mine->state = other->state = DONE;
    pthread_cond_broadcast(&h->changed);
}

static dr_status threads_post(dr_comm *comm, const dr_transfer *transfers, int32_t n, dr_batch **out)
{
    threads_comm *c = (threads_comm *)comm;
    threads_batch *b = dr_alloc(sizeof *b + (size_t)n * sizeof(entry));
    if (b == NULL)
        return dr_fail(DR_ERR_MEMORY, "comm: no memory for a batch of %d transfers", n);
    b->base.comm = comm;
    for (int32_t i = 0; i < n; i++)
        if (transfers[i].bytes > 0)
            b->entries[b->n++].transfer = transfers[i];
    pthread_mutex_lock(&c->hub->lock);
    bool aborted = c->hub->aborted;
    for (int32_t i = 0; i < b->n && !c->hub->aborted; i++)
        offer(c, &b->entries[i]);
    pthread_mutex_unlock(&c->hub->lock);
    if (aborted) {
        dr_free(b);
        return broken(c);
    }
    *out = &b->base;
    return DR_OK;
}

/* Lock held. How many entries are in a state. */
static int32_t count(const threads_batch *b, transfer_state state)
{
    int32_t n = 0;
    for (int32_t i = 0; i < b->n; i++)
        n += b->entries[i].state == state;
    return n;
}

static dr_status threads_test(dr_batch *batch, int32_t *done)
{
    threads_batch *b = (threads_batch *)batch;
    threads_comm *c = (threads_comm *)batch->comm;
    pthread_mutex_lock(&c->hub->lock);
    *done = count(b, DONE) == b->n;
    bool aborted = c->hub->aborted && !*done;
    pthread_mutex_unlock(&c->hub->lock);
    return aborted ? broken(c) : DR_OK;
}

static struct timespec deadline(double seconds)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    double whole = (double)t.tv_sec + (double)t.tv_nsec * 1e-9 + (seconds < 1e8 ? seconds : 1e8);
    t.tv_sec = (time_t)whole;
    t.tv_nsec = (long)((whole - (double)t.tv_sec) * 1e9);
    return t;
}

static dr_status threads_wait(dr_batch *batch)
{
    threads_batch *b = (threads_batch *)batch;
    threads_comm *c = (threads_comm *)batch->comm;
    hub *h = c->hub;
    struct timespec end = deadline(c->base.timeout);
    pthread_mutex_lock(&h->lock);
    while (count(b, DONE) < b->n && !h->aborted)
        if (pthread_cond_timedwait(&h->changed, &h->lock, &end) == ETIMEDOUT && count(b, DONE) < b->n) {
            char why[160];
            snprintf(why, sizeof why, "rank %d waited longer than %g s for a transfer", c->base.rank,
                     c->base.timeout);
            abort_hub(h, why);
        }
    while (count(b, COPYING) > 0) /* NOTE [Aborted hubs] */
        pthread_cond_wait(&h->changed, &h->lock);
    bool arrived = count(b, DONE) == b->n;
    pthread_mutex_unlock(&h->lock);
    dr_free(b);
    return arrived ? DR_OK : broken(c);
}

static void threads_abort(dr_comm *comm, const char *why)
{
    threads_comm *c = (threads_comm *)comm;
    pthread_mutex_lock(&c->hub->lock);
    abort_hub(c->hub, why);
    pthread_mutex_unlock(&c->hub->lock);
    comm->health = DR_ERR_COMM;
}

static void hub_free(hub *h)
{
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->lock);
    dr_free(h->queues);
    dr_free(h);
}

/* A rank that closes with transfers of others still waiting for it will never answer them; they
 * run into their time limit, as with a rank that died. */
static void threads_close(dr_comm *comm)
{
    threads_comm *c = (threads_comm *)comm;
    hub *h = c->hub;
    pthread_mutex_lock(&h->lock);
    bool last = --h->open == 0;
    pthread_mutex_unlock(&h->lock);
    if (last)
        hub_free(h);
    dr_free(c);
}

static hub *hub_create(int32_t size)
{
    hub *h = dr_alloc(sizeof *h);
    if (h == NULL)
        return NULL;
    h->queues = dr_alloc((size_t)size * (size_t)size * sizeof(queue));
    if (h->queues == NULL) {
        dr_free(h);
        return NULL;
    }
    h->size = h->open = size;
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->changed, NULL);
    return h;
}

static threads_comm *rank_create(hub *h, int32_t rank)
{
    threads_comm *c = dr_alloc(sizeof *c);
    if (c != NULL) {
        c->base = (dr_comm){&threads_ops, rank, h->size, DR_OK, DR_COMM_TIMEOUT};
        c->hub = h;
    }
    return c;
}

static dr_status no_memory(int32_t size)
{
    return dr_fail(DR_ERR_MEMORY, "comm: no memory for %d ranks", size);
}

dr_status dr_comm_threads_create(int32_t size, dr_comm **out)
{
    if (out == NULL)
        return dr_fail(DR_ERR_ARG, "out: must not be NULL");
    if (size < 1 || size > 4096)
        return dr_fail(DR_ERR_ARG, "size: must be 1 to 4096 ranks, got %d", size);
    hub *h = hub_create(size);
    if (h == NULL)
        return no_memory(size);
    for (int32_t r = 0; r < size; r++) {
        threads_comm *c = rank_create(h, r);
        if (c == NULL) {
            while (r-- > 0)
                dr_free(out[r]);
            hub_free(h);
            return no_memory(size);
        }
        out[r] = &c->base;
    }
    return DR_OK;
}

dr_status dr_comm_self_create(dr_comm **out) { return dr_comm_threads_create(1, out); }

/* The lowest rank of each color makes the hub; its address travels as a message. */
static dr_status threads_split(dr_comm *comm, int32_t color, int32_t key, dr_comm **out)
{
    typedef struct who {
        int32_t color, key;
    } who;
    who mine = {color, key};
    who *all = dr_alloc((size_t)comm->size * sizeof *all);
    dr_transfer *t = dr_alloc((size_t)comm->size * sizeof *t);
    hub *h = NULL;
    int32_t rank = 0, size = 0, leader = -1, n = 0;
    dr_status status = all != NULL && t != NULL ? DR_OK : no_memory(comm->size);
    if (status == DR_OK)
        status = dr_comm_allgather(comm, &mine, all, sizeof mine);
    for (int32_t r = 0; status == DR_OK && color >= 0 && r < comm->size; r++) {
        if (all[r].color != color)
            continue;
        if (leader < 0)
            leader = r;
        size++;
        rank += all[r].key < key || (all[r].key == key && r < comm->rank);
    }
    if (status == DR_OK && leader == comm->rank && (h = hub_create(size)) == NULL)
        status = no_memory(size);
    for (int32_t r = 0; status == DR_OK && color >= 0 && r < comm->size; r++)
        if (leader == comm->rank && r != comm->rank && all[r].color == color)
            t[n++] = (dr_transfer){r, 1, &h, sizeof h};
    if (status == DR_OK && color >= 0 && leader != comm->rank)
        t[n++] = (dr_transfer){leader, 0, &h, sizeof h};
    dr_batch *batch = NULL;
    if (status == DR_OK)
        status = dr_comm_post(comm, t, n, &batch);
    if (status == DR_OK)
        status = dr_comm_wait(batch);
    if (status == DR_OK && color >= 0) {
        threads_comm *c = rank_create(h, rank);
        if (c == NULL)
            status = no_memory(size);
        else {
            c->base.timeout = comm->timeout;
            *out = &c->base;
        }
    }
    if (status != DR_OK)
        dr_comm_abort(comm, "a split failed");
    dr_free(all);
    dr_free(t);
    return status;
}

static const dr_comm_ops threads_ops = {
    DR_COMM_ABI, "threads", threads_post, threads_test, threads_wait, threads_split, threads_abort,
    threads_close,
};
