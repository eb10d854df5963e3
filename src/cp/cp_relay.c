/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_relay.c - the protocol "relay": the state travels down the ranks window by window of heads, while
 * the ranks work on other windows. It needs no map, so no product is computed
 * twice, and where the cuts fall on edges of chunks the bits are those of one rank. It serves
 * partitions that give every rank one stretch of the stream.
 *
 * NOTE [What a rank does next]: what others wait for goes first. A rank whose leaving piece needs no
 * entry runs that before anything else, window by window, and sends at once. Otherwise the next window
 * goes as soon as its entry has arrived; while none has, the rank runs pieces that need no entry, and
 * blocks only when none of these is left. All of it changes when something is computed, never what.
 *
 * NOTE [Why fused]: running the recurrence of a window first and its outputs later would let a rank
 * fill its waiting with outputs, but what passes between the stages then goes through memory:
 * measured, such a window costs 1.4 times the fused one. With W windows over P ranks the fused trip
 * takes W + P - 1 steps instead of W.
 */
#include "cp/cp_agree.h"
#include "cp/cp_plan.h"

/* One direction of travel; -1: nobody, none. */
typedef struct relay_side {
    int32_t from, to;
    int64_t entered, leaving; /* pieces */
} relay_side;

typedef struct relay {
    int32_t heads, windows; /* value heads of a window; how many */
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
    own->windows = (int32_t)dr_ceil_div(p->value_heads, own->heads);
    return DR_OK;
}

/* ---- a trip ---------------------------------------------------------------------------- */

typedef struct trip {
    const dr_cp_plan *plan;
    const relay *own;
    const relay_side *side;
    float *entry, *exit;           /* [HV,V,K] of the entered and the leaving piece */
    int32_t *entry_of, *exit_of;   /* per piece, as in dr_pass */
    dr_batch **batches;            /* receives per window, NULL once waited for; then the sends */
    dr_windows windows;
    int32_t n;                     /* windows */
    int32_t freed, entered, sent;  /* how far they have come, each in order */
} trip;

static void carve(const dr_cp_plan *plan, const relay_side *side, trip *t, dr_arena *saved,
                  dr_arena *scratch)
{
    const dr_problem *p = &plan->inner->problem;
    const relay *own = plan->own;
    const int64_t states = (int64_t)p->value_heads * p->value_dim * p->key_dim;
    const int64_t N = plan->route.n_pieces;
    *t = (trip){.plan = plan, .own = own, .side = side, .n = own->windows};
    DR_TAKE(saved, char, plan->inner->saved, 1);
    DR_TAKE(scratch, char, dr_plan_fused_scratch(plan->inner), 1);
    t->entry = DR_TAKE(scratch, float, side->from >= 0 ? states : 0, 1);
    t->exit = DR_TAKE(scratch, float, side->to >= 0 ? states : 0, 1);
    t->entry_of = DR_TAKE(scratch, int32_t, N, 1);
    t->exit_of = DR_TAKE(scratch, int32_t, N, 1);
    t->batches = DR_TAKE(scratch, dr_batch *, 2 * (int64_t)t->n, 1);
}

static dr_status measure(dr_cp_plan *plan)
{
    const relay *own = plan->own;
    const relay_side *sides[] = {&own->forward, &own->adjoint};
    for (int i = 0; i < 2; i++) {
        dr_arena saved = {0}, scratch = {0};
        trip t;
        carve(plan, sides[i], &t, &saved, &scratch);
        DR_TRY(dr_cp_plan_fit(plan, &saved, &scratch));
    }
    return DR_OK;
}

static dr_status build(dr_cp_plan *plan, const dr_problem *problem, const dr_partition *partition)
{
    (void)problem;
    relay *own = plan->own = dr_alloc(sizeof *own);
    if (own == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %zu bytes", sizeof *own);
    DR_TRY(check_partition(&plan->route, partition->ranks));
    DR_TRY(cut_windows(plan, own));
    find_sides(plan, own);
    return measure(plan);
}

static void clear(dr_cp_plan *plan) { dr_free(plan->own); }

static dr_window window_of(const trip *t, int32_t w)
{
    const int32_t h = w * t->own->heads, HV = t->plan->inner->problem.value_heads;
    return (dr_window){.head0 = h,
                       .head1 = (int32_t)dr_min(h + t->own->heads, HV),
                       .entry = t->entry,
                       .exit = t->exit,
                       .entry_of = t->entry_of,
                       .exit_of = t->exit_of};
}

static dr_transfer transfer_of(const trip *t, int32_t w, bool is_send)
{
    const dr_problem *p = &t->plan->inner->problem;
    const dr_window x = window_of(t, w);
    const int64_t state = (int64_t)p->value_dim * p->key_dim;
    return (dr_transfer){is_send ? t->side->to : t->side->from, is_send,
                         (is_send ? t->exit : t->entry) + x.head0 * state,
                         (size_t)((x.head1 - x.head0) * state) * sizeof(float)};
}

static void describe(const dr_cp_plan *plan, dr_cp_info *info)
{
    const relay *own = plan->own;
    const dr_problem *p = &plan->inner->problem;
    const relay_side *sides[] = {&own->forward, &own->adjoint};
    for (int d = 0; d < 2; d++) {
        if (sides[d]->to < 0)
            continue;
        info->sends[d] = own->windows;
        info->send_bytes[d] = (int64_t)p->value_heads * p->value_dim * p->key_dim *
                              (int64_t)sizeof(float);
    }
}

static dr_status post_receives(trip *t)
{
    for (int32_t w = 0; t->side->from >= 0 && w < t->n; w++) {
        const dr_transfer x = transfer_of(t, w, false);
        DR_TRY(dr_comm_post(t->plan->comm, &x, 1, &t->batches[w]));
    }
    return DR_OK;
}

static dr_status run_window(trip *t, int32_t w, int64_t piece0, int64_t piece1, bool leaves)
{
    dr_window x = window_of(t, w);
    x.piece0 = piece0;
    x.piece1 = piece1;
    DR_TRY(dr_windows_run(&t->windows, &x));
    if (!leaves)
        return DR_OK;
    const dr_transfer out = transfer_of(t, w, true);
    DR_TRY(dr_comm_post(t->plan->comm, &out, 1, &t->batches[t->n + t->sent]));
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
        return run_window(t, w, 0, N, leaves);
    if (e > 0)
        DR_TRY(run_window(t, w, 0, e, leaves && e == N - 1));
    return e < N - 1 ? run_window(t, w, e + 1, N, leaves) : DR_OK;
}

/* The next window of the entered piece; waits if its entry has not arrived. */
static dr_status run_entered(trip *t)
{
    const int64_t e = t->side->entered;
    const int32_t w = t->entered++;
    dr_batch *batch = t->batches[w];
    t->batches[w] = NULL;
    DR_TRY(dr_comm_wait(batch));
    return run_window(t, w, e, e + 1, t->side->to >= 0 && t->side->leaving == e);
}

static dr_status run_windows(trip *t)
{
    const bool others_wait = t->side->to >= 0 && t->side->leaving != t->side->entered;
    while (t->freed < t->n || t->entered < t->n) {
        int32_t arrived = 0;
        if (t->entered < t->n && !(others_wait && t->freed < t->n))
            DR_TRY(dr_comm_test(t->batches[t->entered], &arrived));
        DR_TRY(!arrived && t->freed < t->n ? run_free(t) : run_entered(t));
    }
    return DR_OK;
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
        t.batches[w] = NULL;
    inner.saved_bytes = plan->inner->saved;
    inner.scratch_bytes = dr_plan_fused_scratch(plan->inner);
    if (t.side->from < 0) /* nothing to wait for: all pieces are free */
        t.entered = t.n;
    else if (plan->route.n_pieces == 1)
        t.freed = t.n;
    dr_status status = post_receives(&t);
    if (status == DR_OK)
        status = dr_windows_open(&t.windows, plan->inner, io, &inner, dir, 0, 0);
    if (status == DR_OK) {
        status = run_windows(&t);
        dr_windows_close(&t.windows, status);
    }
    status = dr_cp_settle(plan->comm, status, t.batches, t.n + t.sent);
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
