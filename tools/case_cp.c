/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case_cp.c - cases of the delta rule over ranks: one thread each, joined by the communicator
 * of threads. The tensors of the run are those of the whole stream, so that whoever fills,
 * reads and compares runs need not know of ranks; this file spreads inputs over the ranks by
 * the partition and gathers what they computed. Batch rows become sequences of one stream.
 *
 * Of states that a rank must not read nothing is spread: they stay poisoned. Gradients of the
 * parameters are sums over the ranks, kept in the type of the arithmetic until they are added.
 * Rank 0 is the calling thread.
 */
#include "case_run.h"
#include "tool.h"

#include <deltarule/comm.h>

#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------ */
/* What a call reads and writes                                             */
/* ------------------------------------------------------------------------ */

enum span { TOKENS, STARTS, ENDS, PARAMETER }; /* STARTS, ENDS: of the state of a piece */

static const struct field {
    size_t at; /* in dr_io */
    enum span span;
    int role;
} fields[] = {
    {offsetof(dr_io, q), TOKENS, DR_CASE_INPUT},
    {offsetof(dr_io, k), TOKENS, DR_CASE_INPUT},
    {offsetof(dr_io, v), TOKENS, DR_CASE_INPUT},
    {offsetof(dr_io, g), TOKENS, DR_CASE_INPUT},
    {offsetof(dr_io, beta), TOKENS, DR_CASE_INPUT},
    {offsetof(dr_io, d_o), TOKENS, DR_CASE_INPUT},
    {offsetof(dr_io, a_log), PARAMETER, DR_CASE_INPUT},
    {offsetof(dr_io, dt_bias), PARAMETER, DR_CASE_INPUT},
    {offsetof(dr_io, initial_state), STARTS, DR_CASE_INPUT},
    {offsetof(dr_io, d_final_state), ENDS, DR_CASE_INPUT},
    {offsetof(dr_io, o), TOKENS, DR_CASE_OUTPUT},
    {offsetof(dr_io, final_state), ENDS, DR_CASE_OUTPUT},
    {offsetof(dr_io, dq), TOKENS, DR_CASE_GRADIENT},
    {offsetof(dr_io, dk), TOKENS, DR_CASE_GRADIENT},
    {offsetof(dr_io, dv), TOKENS, DR_CASE_GRADIENT},
    {offsetof(dr_io, dg), TOKENS, DR_CASE_GRADIENT},
    {offsetof(dr_io, dbeta), TOKENS, DR_CASE_GRADIENT},
    {offsetof(dr_io, da_log), PARAMETER, DR_CASE_GRADIENT},
    {offsetof(dr_io, ddt_bias), PARAMETER, DR_CASE_GRADIENT},
    {offsetof(dr_io, d_initial_state), STARTS, DR_CASE_GRADIENT},
};
enum { FIELDS = sizeof fields / sizeof fields[0] };

typedef struct rank_state {
    dr_case_world *world;
    int32_t rank;
    dr_comm *comm;
    dr_cp_plan *plan;
    dr_cp_info info;
    dr_buffers buffers;
    dr_io io;
    char *memory[FIELDS];
    dr_direction dir;
    dr_status status;
    double seconds;
    char why[512];
} rank_state;

struct dr_case_world {
    dr_case_run *run;
    dr_partition partition;
    dr_fragment *fragments;
    int64_t *offsets; /* where batch rows became sequences */
    int32_t ranks;
    bool has_start;
    pthread_barrier_t start;
    pthread_mutex_t gate; /* held while threads are started */
    bool cancelled;
    rank_state *rank;
};

static dr_tensor *tensor_of(dr_io *io, const struct field *f)
{
    return (dr_tensor *)((char *)io + f->at);
}

static dr_tensor slice(dr_tensor t, int32_t axis, int64_t begin, int64_t end)
{
    t.data = (char *)t.data + begin * t.stride[axis] * (int64_t)dr_dtype_size(t.dtype);
    t.shape[axis] = end - begin;
    return t;
}

static int64_t count_of(const dr_tensor *t)
{
    int64_t count = 1;
    for (int32_t i = 0; i < t->rank; i++)
        count *= t->shape[i];
    return count;
}

static void copy(const dr_tensor *from, const dr_tensor *to)
{
    for (int64_t i = 0, n = count_of(from); i < n; i++)
        dr_case_set_element(to, i, dr_case_element(from, i));
}

static void add(const dr_tensor *from, const dr_tensor *to)
{
    for (int64_t i = 0, n = count_of(from); i < n; i++)
        dr_case_set_element(to, i, dr_case_element(to, i) + dr_case_element(from, i));
}

/* ------------------------------------------------------------------------ */
/* Between the stream and the ranks                                         */
/* ------------------------------------------------------------------------ */

static void move(const dr_tensor *whole, const dr_tensor *part, bool spread)
{
    copy(spread ? whole : part, spread ? part : whole);
}

static void move_tokens(rank_state *r, const dr_tensor *whole, const dr_tensor *local, bool spread)
{
    const dr_partition *p = &r->world->partition;
    int64_t at = 0;
    for (int64_t i = 0; i < p->count; i++) {
        const dr_fragment *f = &p->fragments[i];
        if (f->rank != r->rank)
            continue;
        dr_tensor there = slice(*whole, 1, f->begin, f->end);
        dr_tensor here = slice(*local, 1, at, at + f->end - f->begin);
        move(&there, &here, spread);
        at += f->end - f->begin;
    }
}

static void move_states(rank_state *r, const dr_tensor *whole, const dr_tensor *local,
                        enum span span, bool spread)
{
    for (int64_t n = 0; n < r->info.pieces; n++) {
        dr_cp_piece piece;
        if (dr_cp_plan_piece(r->plan, n, &piece) != DR_OK)
            continue;
        if (span == STARTS ? !piece.starts : !piece.ends)
            continue;
        dr_tensor there = slice(*whole, 0, piece.sequence, piece.sequence + 1);
        dr_tensor here = slice(*local, 0, n, n + 1);
        move(&there, &here, spread);
    }
}

static void move_field(rank_state *r, const struct field *f, bool spread)
{
    const dr_tensor *whole = tensor_of(&r->world->run->io, f), *local = tensor_of(&r->io, f);
    if (whole->data == NULL)
        return;
    if (f->span == TOKENS)
        move_tokens(r, whole, local, spread);
    else if (f->span != PARAMETER)
        move_states(r, whole, local, f->span, spread);
    else if (spread)
        copy(whole, local);
}

/* A tensor of this rank beside that of the stream. */
static bool place_field(rank_state *r, int index)
{
    const struct field *f = &fields[index];
    dr_case_run *run = r->world->run;
    const dr_tensor *whole = tensor_of(&run->io, f);
    dr_tensor *local = tensor_of(&r->io, f);
    if (whole->data == NULL)
        return true;
    if (f->at == offsetof(dr_io, final_state) && whole->data == run->io.initial_state.data) {
        *local = r->io.initial_state; /* in place; declared before */
        return true;
    }
    *local = *whole;
    if (f->span == TOKENS)
        local->shape[1] = r->info.tokens;
    else if (f->span != PARAMETER)
        local->shape[0] = r->info.pieces;
    else if (f->role == DR_CASE_GRADIENT && !run->wide)
        local->dtype = DR_F32;
    size_t bytes;
    r->memory[index] = dr_case_place(local, run->c.layout, &bytes);
    if (r->memory[index] != NULL && f->role == DR_CASE_INPUT)
        move_field(r, f, true);
    return r->memory[index] != NULL;
}

static void gather(dr_case_run *run, dr_direction dir)
{
    const int role = dir == DR_FORWARD ? DR_CASE_OUTPUT : DR_CASE_GRADIENT;
    dr_case_world *w = run->world;
    for (int i = 0; i < FIELDS; i++)
        for (int32_t r = 0; r < w->ranks && fields[i].role == role; r++)
            if (fields[i].span != PARAMETER)
                move_field(&w->rank[r], &fields[i], false);
    for (int i = 0; i < FIELDS; i++) {
        dr_tensor *whole = tensor_of(&run->io, &fields[i]);
        if (fields[i].role != role || fields[i].span != PARAMETER || whole->data == NULL)
            continue;
        dr_tensor sum = *tensor_of(&w->rank[0].io, &fields[i]);
        for (int32_t r = 1; r < w->ranks; r++)
            add(tensor_of(&w->rank[r].io, &fields[i]), &sum);
        copy(&sum, whole);
    }
}

/* ------------------------------------------------------------------------ */
/* Threads                                                                  */
/* ------------------------------------------------------------------------ */

static _Thread_local char why[512];

const char *dr_case_why(void) { return why[0] != '\0' ? why : dr_last_error(); }

void dr_case_forget(void) { why[0] = '\0'; }

static dr_status build(rank_state *r)
{
    dr_case_run *run = r->world->run;
    dr_problem p = dr_case_problem(&run->c);
    dr_status status =
        dr_cp_plan_create(run->ctx, r->comm, &p, &r->world->partition, run->c.cp, &r->plan);
    if (status == DR_OK)
        status = dr_cp_plan_describe(r->plan, &r->info);
    if (status == DR_OK)
        status = dr_cp_buffers_create(r->plan, &r->buffers);
    if (status != DR_OK)
        return status;
    dr_case_poison(&r->buffers);
    for (int i = 0; i < FIELDS; i++)
        if (!place_field(r, i))
            return DR_ERR_MEMORY;
    return DR_OK;
}

static dr_status trip(rank_state *r)
{
    dr_buffers b = dr_case_buffers(r->world->run, r->buffers);
    pthread_barrier_wait(&r->world->start);
    const double start = dr_tool_now();
    dr_status status = r->dir == DR_FORWARD ? dr_cp_forward(r->plan, &r->io, &b)
                                            : dr_cp_backward(r->plan, &r->io, &b);
    r->seconds = dr_tool_now() - start;
    return status;
}

static void *rank_main(void *user)
{
    rank_state *r = user;
    pthread_mutex_lock(&r->world->gate);
    const bool cancelled = r->world->cancelled;
    pthread_mutex_unlock(&r->world->gate);
    if (cancelled)
        return NULL;
    r->status = r->plan == NULL ? build(r) : trip(r);
    if (r->status != DR_OK)
        snprintf(r->why, sizeof r->why, "%s", dr_last_error());
    return NULL;
}

/* Every rank's turn: to build, or to make one trip. A rank's own failure goes before those of
 * its peers, which only learn that it gave up. */
static dr_status run_ranks(dr_case_world *w, dr_direction dir)
{
    pthread_t *threads = calloc((size_t)w->ranks, sizeof *threads);
    int32_t started = 1;
    if (threads == NULL)
        return DR_ERR_MEMORY;
    pthread_mutex_lock(&w->gate);
    for (int32_t r = 0; r < w->ranks; r++) {
        w->rank[r].dir = dir;
        w->rank[r].status = DR_OK;
    }
    while (started < w->ranks &&
           pthread_create(&threads[started], NULL, rank_main, &w->rank[started]) == 0)
        started++;
    w->cancelled = started < w->ranks;
    pthread_mutex_unlock(&w->gate);
    rank_main(&w->rank[0]);
    for (int32_t r = 1; r < started; r++)
        pthread_join(threads[r], NULL);
    free(threads);
    why[0] = '\0';
    if (w->cancelled) {
        snprintf(why, sizeof why, "the thread of rank %d could not be started", started);
        return DR_ERR_MEMORY;
    }
    const rank_state *failed = NULL;
    for (int32_t r = 0; r < w->ranks; r++)
        if (w->rank[r].status != DR_OK && (failed == NULL || failed->status == DR_ERR_COMM))
            failed = &w->rank[r];
    if (failed == NULL)
        return DR_OK;
    snprintf(why, sizeof why, "%s", failed->why);
    return failed->status;
}

/* ------------------------------------------------------------------------ */
/* The operation                                                            */
/* ------------------------------------------------------------------------ */

/* Rows of a batch are sequences of one stream. */
static dr_status make_stream(dr_case_world *w, dr_case *c)
{
    if (c->offsets != NULL || c->B == 1)
        return DR_OK;
    w->offsets = calloc((size_t)c->B + 1, sizeof *w->offsets);
    if (w->offsets == NULL)
        return DR_ERR_MEMORY;
    for (int64_t n = 0; n <= c->B; n++)
        w->offsets[n] = n * c->T;
    c->offsets = w->offsets;
    c->N = c->B;
    c->T *= c->B;
    c->B = 1;
    return DR_OK;
}

static dr_status make_partition(dr_case_world *w, const dr_case *c, int64_t rows)
{
    static const int64_t weights[] = {3, 0, 1, 2};
    const int32_t ranks = w->ranks;
    const int64_t shares = c->cut == DR_CASE_CUTS ? rows : c->cut == DR_CASE_ZIGZAG ? 2 : 1;
    dr_fragment *f = w->fragments = calloc((size_t)(shares * ranks), sizeof *f);
    if (f == NULL)
        return DR_ERR_MEMORY;
    w->partition = (dr_partition)DR_PARTITION_INIT;
    w->partition.ranks = ranks;
    w->partition.count = shares * ranks;
    w->partition.fragments = f;
    if (c->cut == DR_CASE_CONTIGUOUS)
        return dr_partition_contiguous(c->T, ranks, f);
    if (c->cut == DR_CASE_ZIGZAG)
        return dr_partition_zigzag(c->T, ranks, f);
    for (int64_t i = 0; i < shares * ranks && c->cut == DR_CASE_CUTS; i++) {
        const int64_t row = i / ranks * (c->T / rows), r = i % ranks;
        f[i] = (dr_fragment){row + c->cuts[r], row + c->cuts[r + 1], (int32_t)r};
    }
    int64_t sum = 0, before = 0;
    for (int32_t r = 0; r < ranks; r++)
        sum += weights[r % 4];
    for (int32_t r = 0; r < ranks && c->cut == DR_CASE_UNEVEN; r++) {
        const int64_t after = before + weights[r % 4];
        f[r] = (dr_fragment){c->T * before / sum, c->T * after / sum, r};
        before = after;
    }
    return DR_OK;
}

static dr_status open_cp(dr_case_run *run)
{
    dr_case_world *w = run->world = calloc(1, sizeof *w);
    if (w == NULL)
        return DR_ERR_MEMORY;
    const int64_t rows = run->c.B;
    w->run = run;
    pthread_mutex_init(&w->gate, NULL);
    dr_status status = make_stream(w, &run->c);
    if (status != DR_OK)
        return status;
    dr_case_declare_io(run);
    const int32_t ranks = run->c.ranks;
    w->rank = calloc((size_t)ranks, sizeof *w->rank);
    if (run->status != DR_OK || w->rank == NULL)
        return run->status != DR_OK ? run->status : DR_ERR_MEMORY;
    w->ranks = ranks;
    status = make_partition(w, &run->c, rows);
    if (status != DR_OK)
        return status;
    dr_comm **comms = calloc((size_t)ranks, sizeof *comms);
    if (comms == NULL || pthread_barrier_init(&w->start, NULL, (unsigned)ranks) != 0) {
        free(comms);
        return DR_ERR_MEMORY;
    }
    w->has_start = true;
    status = dr_comm_threads_create(ranks, comms);
    for (int32_t r = 0; r < ranks && status == DR_OK; r++)
        w->rank[r] = (rank_state){.world = w,
                                  .rank = r,
                                  .comm = comms[r],
                                  .info = DR_CP_INFO_INIT,
                                  .buffers = DR_BUFFERS_INIT,
                                  .io = DR_IO_INIT};
    free(comms);
    return status == DR_OK ? run_ranks(w, DR_FORWARD) : status;
}

static dr_status call_cp(dr_case_run *run, dr_direction dir)
{
    dr_status status = run_ranks(run->world, dir);
    if (status == DR_OK && !(run->c.flags & DR_CASE_APART))
        gather(run, dir);
    return status;
}

void dr_case_world_close(dr_case_world *w)
{
    for (int32_t r = 0; w != NULL && w->rank != NULL && r < w->ranks; r++) {
        rank_state *one = &w->rank[r];
        for (int i = 0; i < FIELDS; i++)
            free(one->memory[i]);
        dr_buffers_destroy(&one->buffers);
        dr_cp_plan_destroy(one->plan);
        dr_comm_close(one->comm);
    }
    if (w == NULL)
        return;
    if (w->has_start)
        pthread_barrier_destroy(&w->start);
    pthread_mutex_destroy(&w->gate);
    free(w->rank);
    free(w->fragments);
    free(w->offsets);
    free(w);
}

double dr_case_seconds(const dr_case_run *run)
{
    double slowest = 0;
    for (int32_t r = 0; r < run->world->ranks; r++)
        slowest = run->world->rank[r].seconds > slowest ? run->world->rank[r].seconds : slowest;
    return slowest;
}

void dr_case_traffic(const dr_case_run *run, dr_direction dir, int64_t *sends, int64_t *bytes)
{
    *sends = *bytes = 0;
    for (int32_t r = 0; r < run->world->ranks; r++) {
        *sends += run->world->rank[r].info.sends[dir == DR_ADJOINT];
        *bytes += run->world->rank[r].info.send_bytes[dir == DR_ADJOINT];
    }
}

size_t dr_case_world_workspace(const dr_case_world *w)
{
    size_t most = 0;
    for (int32_t r = 0; r < w->ranks; r++) {
        const dr_cp_info *info = &w->rank[r].info;
        const size_t saved = w->run->c.flags & DR_CASE_NO_SAVED ? 0 : info->saved_bytes;
        most = saved + info->scratch_bytes > most ? saved + info->scratch_bytes : most;
    }
    return most;
}

const dr_case_row dr_case_cp = {"cp", 2, open_cp, call_cp};
