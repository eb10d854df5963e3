/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_relay.c - the protocol "relay": the state travels down the ranks window by window (heads x
 * state columns) while the ranks work on other windows. It needs no map, so no product is computed
 * twice, and where the cuts fall on edges of chunks the bits are those of one rank. It serves
 * partitions that give every rank one stretch of the stream.
 *
 * NOTE [What a rank does next]: what others wait for goes first. A rank whose leaving piece needs no
 * entry runs that before anything else, window by window, and sends at once. Otherwise the next window
 * goes as soon as its entry has arrived. While none has, the rank prepares heads, runs pieces that
 * need no entry and writes outputs of heads that are through, in this order: preparing is what the
 * first windows need, and outputs nobody waits for. It blocks only when nothing of this is left.
 * All of it changes when something is computed, never what.
 */
#include "cp/cp_plan.h"

enum { WINDOWS_PER_RANK = 4, LEAST_COLS = 64, COL_GRAIN = 32 };

/* One direction of travel; -1: nobody, none. */
typedef struct relay_side {
    int32_t from, to;
    int64_t entered, leaving; /* pieces */
} relay_side;

typedef struct relay {
    int32_t heads, n_heads; /* value heads of a window; windows over heads */
    int32_t cols, n_cols;   /* state columns of a window; windows over columns */
    relay_side forward, adjoint;
} relay;

/* ---- plan ---------------------------------------------------------------------------- */

static dr_status check_partition(const dr_route *route, int32_t ranks)
{
    int64_t *slots = dr_alloc((size_t)ranks * sizeof *slots);
    if (slots == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %d ranks", ranks);
    dr_status status = DR_OK;
    for (int64_t s = 0; s < route->n_slots && status == DR_OK; s++) {
        const int32_t rank = route->slots[s].rank;
        if (++slots[rank] > 1)
            status = dr_fail(DR_ERR_SUPPORT, "partition: relay needs one stretch of the stream per rank, but "
                             "rank %d owns more; p2p, allgather, grouped and doubling serve this", rank);
    }
    dr_free(slots);
    return status;
}

static void find_sides(const dr_cp_plan *plan, relay *own)
{
    own->forward = own->adjoint = (relay_side){-1, -1, -1, -1};
    const dr_slot *slots = plan->route.slots;
    for (int64_t s = 0; s < plan->route.n_slots; s++) {
        if (slots[s].rank != plan->comm->rank)
            continue;
        if (slots[s].from_previous) {
            own->forward.from = own->adjoint.to = slots[s - 1].rank;
            own->forward.entered = own->adjoint.leaving = slots[s].first;
        }
        if (slots[s].to_next) {
            own->forward.to = own->adjoint.from = slots[s + 1].rank;
            own->forward.leaving = own->adjoint.entered = slots[s].last;
        }
    }
}

/* All ranks must come to the same windows: nothing here depends on this rank. A window holds whole
 * groups of a key head; tiled heads have no such windows but the whole. */
static dr_status cut_windows(const dr_cp_plan *plan, relay *own)
{
    const dr_problem *p = &plan->inner->problem;
    const int32_t G = p->value_heads / p->heads, width = plan->spec.width;
    if (width > p->heads)
        return dr_fail(DR_ERR_ARG, "protocol: relay:%d takes more heads at once than the %d key heads",
                       width, p->heads);
    const bool tiled = p->head_map == DR_HEADS_TILED && G > 1;
    own->heads = tiled ? p->value_heads : dr_max(width, 1) * G;
    own->n_heads = (int32_t)dr_ceil_div(p->value_heads, own->heads);
    int64_t parts = dr_ceil_div((int64_t)WINDOWS_PER_RANK * plan->comm->size, own->n_heads);
    parts = dr_max(1, dr_min(parts, p->value_dim / LEAST_COLS));
    own->cols = (int32_t)dr_round_up(dr_ceil_div(p->value_dim, parts), COL_GRAIN);
    own->n_cols = (int32_t)dr_ceil_div(p->value_dim, own->cols);
    return DR_OK;
}

/* ---- a trip ---------------------------------------------------------------------------- */

typedef struct trip {
    const dr_cp_plan *plan;
    const relay *own;
    const relay_side *side;
    float *entry, *exit;           /* [HV,V,K] of the entered and the leaving piece */
    int32_t *entry_of, *exit_of;   /* per piece, as in dr_pass */
    dr_batch **receives, **sends;  /* per window */
    dr_transfer *transfers;        /* of one window */
    dr_windows windows;
    int32_t n;                     /* windows */
    /* How far the windows, or the heads, have come; each goes in order. */
    int32_t prepared, freed, entered, put, sent;
} trip;

static void carve(const dr_cp_plan *plan, const relay_side *side, trip *t, dr_arena *saved,
                  dr_arena *scratch)
{
    const dr_problem *p = &plan->inner->problem;
    const relay *own = plan->own;
    const int64_t states = (int64_t)p->value_heads * p->value_dim * p->key_dim;
    const int64_t N = plan->route.n_pieces;
    *t = (trip){.plan = plan, .own = own, .side = side, .n = own->n_heads * own->n_cols};
    DR_TAKE(saved, char, plan->inner->saved, 1);
    DR_TAKE(scratch, char, plan->inner->staged_scratch, 1);
    t->entry = DR_TAKE(scratch, float, side->from >= 0 ? states : 0, 1);
    t->exit = DR_TAKE(scratch, float, side->to >= 0 ? states : 0, 1);
    t->entry_of = DR_TAKE(scratch, int32_t, N, 1);
    t->exit_of = DR_TAKE(scratch, int32_t, N, 1);
    t->receives = DR_TAKE(scratch, dr_batch *, t->n, 1);
    t->sends = DR_TAKE(scratch, dr_batch *, t->n, 1);
    t->transfers = DR_TAKE(scratch, dr_transfer, own->heads, 1);
}

static dr_status measure(dr_cp_plan *plan)
{
    const relay *own = plan->own;
    const relay_side *sides[] = {&own->forward, &own->adjoint};
    for (int i = 0; i < 2; i++) {
        dr_arena saved = {0}, scratch = {0};
        trip t;
        carve(plan, sides[i], &t, &saved, &scratch);
        if (saved.overflow || scratch.overflow)
            return dr_fail(DR_ERR_MEMORY, "plan: the working memory of this problem exceeds 2^62 bytes");
        plan->saved = saved.used > plan->saved ? saved.used : plan->saved;
        plan->scratch = scratch.used > plan->scratch ? scratch.used : plan->scratch;
    }
    return DR_OK;
}

static dr_status build(dr_cp_plan *plan, const dr_problem *problem, const dr_partition *partition)
{
    (void)problem;
    relay *own = plan->own = dr_alloc(sizeof *own);
    if (own == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %zu bytes", sizeof *own);
    DR_TRY(check_partition(&plan->route, dr_max(partition->ranks, plan->comm->size)));
    DR_TRY(cut_windows(plan, own));
    find_sides(plan, own);
    return measure(plan);
}

static void clear(dr_cp_plan *plan) { dr_free(plan->own); }

static dr_window window_of(const trip *t, int32_t w)
{
    const dr_problem *p = &t->plan->inner->problem;
    const int32_t h = w / t->own->n_cols * t->own->heads, c = w % t->own->n_cols * t->own->cols;
    return (dr_window){.head0 = h,
                       .head1 = (int32_t)dr_min(h + t->own->heads, p->value_heads),
                       .col0 = c,
                       .col1 = (int32_t)dr_min(c + t->own->cols, p->value_dim),
                       .piece1 = t->plan->route.n_pieces,
                       .entry = t->entry,
                       .exit = t->exit,
                       .entry_of = t->entry_of,
                       .exit_of = t->exit_of};
}

/* All columns of window w of the heads. */
static dr_window heads_of(const trip *t, int32_t w)
{
    dr_window x = window_of(t, w * t->own->n_cols);
    x.col1 = t->plan->inner->problem.value_dim;
    return x;
}

/* The transfers of a window: one, or one per head where columns are cut. */
static int32_t transfers_of(trip *t, int32_t w, int32_t peer, bool is_send)
{
    const dr_problem *p = &t->plan->inner->problem;
    const dr_window x = window_of(t, w);
    float *states = is_send ? t->exit : t->entry;
    const int32_t step = t->own->n_cols == 1 ? x.head1 - x.head0 : 1;
    int32_t n = 0;
    for (int32_t h = x.head0; h < x.head1; h += step)
        t->transfers[n++] = (dr_transfer){
            peer, is_send, states + ((int64_t)h * p->value_dim + x.col0) * p->key_dim,
            (size_t)((int64_t)step * (x.col1 - x.col0) * p->key_dim) * sizeof(float)};
    return n;
}

static void describe(const dr_cp_plan *plan, dr_cp_info *info)
{
    const relay *own = plan->own;
    const dr_problem *p = &plan->inner->problem;
    const relay_side *sides[] = {&own->forward, &own->adjoint};
    for (int d = 0; d < 2; d++) {
        if (sides[d]->to < 0)
            continue;
        info->sends[d] = own->n_cols == 1 ? own->n_heads : (int64_t)own->n_cols * p->value_heads;
        info->send_bytes[d] = (int64_t)p->value_heads * p->value_dim * p->key_dim *
                              (int64_t)sizeof(float);
    }
}

static dr_status post_receives(trip *t)
{
    for (int32_t w = 0; t->side->from >= 0 && w < t->n; w++) {
        const int32_t n = transfers_of(t, w, t->side->from, false);
        DR_TRY(dr_comm_post(t->plan->comm, t->transfers, n, &t->receives[w]));
    }
    return DR_OK;
}

static dr_status prepare_up_to(trip *t, int32_t heads)
{
    while (t->prepared < heads) {
        const dr_window x = heads_of(t, t->prepared);
        DR_TRY(dr_windows_run(&t->windows, DR_WINDOW_PREPARE, &x));
        t->prepared++;
    }
    return DR_OK;
}

static dr_status recur(trip *t, int32_t w, int64_t piece0, int64_t piece1, bool leaves)
{
    dr_window x = window_of(t, w);
    x.piece0 = piece0;
    x.piece1 = piece1;
    DR_TRY(prepare_up_to(t, w / t->own->n_cols + 1));
    if (piece0 < piece1)
        DR_TRY(dr_windows_run(&t->windows, DR_WINDOW_RECUR, &x));
    if (!leaves)
        return DR_OK;
    const int32_t n = transfers_of(t, w, t->side->to, true);
    DR_TRY(dr_comm_post(t->plan->comm, t->transfers, n, &t->sends[t->sent]));
    t->sent++;
    return DR_OK;
}

/* The next window of the pieces that need no entry. */
static dr_status run_free(trip *t)
{
    const int64_t N = t->plan->route.n_pieces, e = t->side->entered;
    const bool leaves = t->side->to >= 0 && t->side->leaving != e;
    const int32_t w = t->freed++;
    if (e < 0)
        return recur(t, w, 0, N, leaves);
    DR_TRY(recur(t, w, 0, e, false));
    return recur(t, w, e + 1, N, leaves);
}

/* The next window of the entered piece; waits if its entry has not arrived. */
static dr_status run_entered(trip *t)
{
    const int64_t e = t->side->entered;
    const int32_t w = t->entered++;
    dr_batch *batch = t->receives[w];
    t->receives[w] = NULL;
    DR_TRY(dr_comm_wait(batch));
    return recur(t, w, e, e + 1, t->side->to >= 0 && t->side->leaving == e);
}

static dr_status put_heads(trip *t)
{
    const dr_window x = heads_of(t, t->put++);
    return dr_windows_run(&t->windows, DR_WINDOW_OUTPUT, &x);
}

static dr_status run_windows(trip *t)
{
    const bool others_wait = t->side->to >= 0 && t->side->leaving != t->side->entered;
    if (t->side->from < 0)
        t->entered = t->n;
    while (t->put < t->own->n_heads) {
        int32_t arrived = 0;
        const int32_t through = dr_min(t->freed, t->entered) / t->own->n_cols;
        if (others_wait && t->freed < t->n) {
            DR_TRY(run_free(t));
            continue;
        }
        if (t->entered < t->n)
            DR_TRY(dr_comm_test(t->receives[t->entered], &arrived));
        if (arrived)
            DR_TRY(run_entered(t));
        else if (t->prepared < t->own->n_heads)
            DR_TRY(prepare_up_to(t, t->prepared + 1));
        else if (t->freed < t->n)
            DR_TRY(run_free(t));
        else if (t->put < through)
            DR_TRY(put_heads(t));
        else
            DR_TRY(run_entered(t));
    }
    return DR_OK;
}

/* Waits for what is under way; a failure aborts the communicator so that no peer waits in vain. */
static dr_status finish(trip *t, dr_status status)
{
    char why[200] = ""; /* dr_last_error may change while waiting */
    if (status != DR_OK) {
        strncpy(why, dr_last_error(), sizeof why - 1);
        dr_comm_abort(t->plan->comm, why);
    }
    for (int32_t w = 0; w < t->n; w++) {
        if (t->receives[w] != NULL)
            dr_comm_wait(t->receives[w]); /* after a failure only: gives the buffers back */
        dr_status sent = t->sends[w] != NULL ? dr_comm_wait(t->sends[w]) : DR_OK;
        if (status == DR_OK && sent != DR_OK) {
            status = sent;
            strncpy(why, dr_last_error(), sizeof why - 1);
        }
    }
    return status == DR_OK ? DR_OK : dr_fail(status, "%s", why);
}

static dr_status run(const dr_cp_plan *plan, int dir, const dr_io *io, const dr_io *normal,
                     const dr_buffers *buffers)
{
    (void)normal;
    const relay *own = plan->own;
    dr_arena saved = {.base = buffers->saved, .size = plan->saved};
    dr_arena scratch = {.base = buffers->scratch, .size = plan->scratch};
    dr_buffers inner = *buffers;
    trip t;
    carve(plan, dir > 0 ? &own->forward : &own->adjoint, &t, &saved, &scratch);
    for (int64_t n = 0; n < plan->route.n_pieces; n++) {
        t.entry_of[n] = n == t.side->entered ? 0 : -1;
        t.exit_of[n] = n == t.side->leaving ? 0 : -1;
    }
    for (int32_t w = 0; w < t.n; w++)
        t.receives[w] = t.sends[w] = NULL;
    inner.saved_bytes = plan->inner->saved;
    inner.scratch_bytes = plan->inner->staged_scratch;
    dr_status status = post_receives(&t);
    if (status == DR_OK)
        status = dr_windows_open(&t.windows, plan->inner, (dr_direction)dir, io, &inner);
    if (status == DR_OK) {
        status = run_windows(&t);
        dr_windows_close(&t.windows, status);
    }
    status = finish(&t, status);
    dr_arena_done(&saved);
    dr_arena_done(&scratch);
    return status;
}

static const dr_cp_engine engine = {build, NULL, clear, describe, run};

const dr_cp_protocol dr_cp_relay = {
    .name = "relay",
    .about = "states travel window by window, no maps; one stretch of the stream per rank",
    .width = DR_CP_MAY_WIDTH,
    .engine = &engine,
};
