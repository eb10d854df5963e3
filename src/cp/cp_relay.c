/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_relay.c - the protocol "relay": the state travels down the ranks window by window of heads, and
 * within a window by runs of columns, while the ranks work on other windows. It needs no map, so no
 * product is computed twice, and where the cuts fall on edges of chunks the bits are those of one rank.
 * It serves partitions that give every rank one stretch of the stream.
 *
 * NOTE [What a rank does next]: what others wait for goes first. A rank whose leaving piece needs no
 * entry runs that before anything else, window by window, and sends at once. Otherwise the next window
 * goes as soon as its entry has arrived; while none has, the rank runs pieces that need no entry, and
 * blocks only when none of these is left. All of it changes when something is computed, never what.
 *
 * NOTE [Through ranks]: a rank that is one piece in the middle of a sequence has no other piece to
 * fill its waiting with, and W windows over P such ranks take W + P - 1 steps. Where the backend can,
 * it goes in slots (backend.h, NOTE [Slots]): a run of 32 columns is passed on when it has gone through
 * this rank, so that the pipeline fills in steps of a quarter of a head (V = 128); waiting is filled
 * with preparing windows to come and, in the adjoint, with the half of a window that nobody waits
 * for. Every message is the same whichever way the ranks at its ends go.
 */
#include "cp/cp_agree.h"
#include "cp/cp_plan.h"

/* One direction of travel; -1: nobody, none. */
typedef struct relay_side {
    int32_t from, to;
    int64_t entered, leaving; /* pieces */
} relay_side;

enum { CUT_COLS = 32 };

typedef struct relay {
    int32_t heads, windows; /* value heads of a window; how many */
    int32_t cols, cuts;     /* state columns of a message; how many runs of them */
    int32_t slots;          /* of a trip in slots; 0: windows are fused */
    size_t scratch;         /* of the inner plan's trips */
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
    own->cols = width > 0 ? p->value_dim : (int32_t)dr_min(CUT_COLS, p->value_dim);
    own->cuts = (int32_t)dr_ceil_div(p->value_dim, own->cols);
    return DR_OK;
}

/* Slots are for a rank that is one piece in the middle of a sequence. A window waits for its output
 * while its columns are passed on; with the ranks in step those of the windows that the pipeline
 * holds, and one being filled, are enough to keep every rank at work. */
static dr_status choose_slots(const dr_cp_plan *plan, relay *own)
{
    own->scratch = dr_plan_fused_scratch(plan->inner);
    const bool through = plan->route.n_pieces == 1 && (own->forward.from >= 0 || own->forward.to >= 0);
    if (!through || own->cuts == 1 || !plan->ctx->backend->slots)
        return DR_OK;
    own->slots = (int32_t)dr_min(own->windows, 2 + 2 * dr_ceil_div(plan->comm->size - 1, own->cuts));
    own->scratch = 0;
    for (int dir = -1; dir <= 1; dir += 2) {
        size_t bytes;
        DR_TRY(dr_windows_scratch(plan->inner, dir, own->slots, own->heads, &bytes));
        own->scratch = dr_max(own->scratch, bytes);
    }
    return DR_OK;
}

/* ---- a trip ---------------------------------------------------------------------------- */

typedef struct trip {
    const dr_cp_plan *plan;
    const relay *own;
    const relay_side *side;
    float *entry, *exit;           /* [HV,V,K] of the entered and the leaving piece */
    int32_t *entry_of, *exit_of;   /* per piece, as in dr_pass */
    dr_batch **receives, **sends;  /* [windows][cuts], NULL where none is under way */
    dr_transfer *parts;            /* of a message */
    dr_windows windows;
    int32_t n;                     /* windows */
    int32_t freed, entered;        /* how far they have come, each in order */
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
    DR_TAKE(scratch, char, own->scratch, 1);
    t->entry = DR_TAKE(scratch, float, side->from >= 0 ? states : 0, 1);
    t->exit = DR_TAKE(scratch, float, side->to >= 0 ? states : 0, 1);
    t->entry_of = DR_TAKE(scratch, int32_t, N, 1);
    t->exit_of = DR_TAKE(scratch, int32_t, N, 1);
    t->receives = DR_TAKE(scratch, dr_batch *, 2 * (int64_t)t->n, own->cuts);
    t->parts = DR_TAKE(scratch, dr_transfer, own->heads, 1);
    t->sends = t->receives == NULL ? NULL : t->receives + (int64_t)t->n * own->cuts;
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
    DR_TRY(choose_slots(plan, own));
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

/* A message: the columns of a run in every head of a window, rows of [V,K]. Whole states of
 * neighbouring heads are one transfer. */
static dr_status post(trip *t, int32_t w, int32_t cut, bool is_send)
{
    const dr_problem *p = &t->plan->inner->problem;
    const relay *own = t->own;
    const dr_window x = window_of(t, w);
    const int64_t row = p->key_dim, state = p->value_dim * row, col = (int64_t)cut * own->cols;
    float *base = is_send ? t->exit : t->entry;
    dr_batch **batch = &(is_send ? t->sends : t->receives)[(int64_t)w * own->cuts + cut];
    dr_transfer part = {is_send ? t->side->to : t->side->from, is_send, base + x.head0 * state,
                        (size_t)((x.head1 - x.head0) * state) * sizeof(float)};
    if (own->cuts == 1)
        return dr_comm_post(t->plan->comm, &part, 1, batch);
    dr_transfer *parts = t->parts;
    const int64_t rows = dr_min(own->cols, p->value_dim - col);
    for (int32_t j = x.head0; j < x.head1; j++) {
        part.buffer = base + j * state + col * row;
        part.bytes = (size_t)(rows * row) * sizeof(float);
        parts[j - x.head0] = part;
    }
    return dr_comm_post(t->plan->comm, parts, x.head1 - x.head0, batch);
}

static void describe(const dr_cp_plan *plan, dr_cp_info *info)
{
    const relay *own = plan->own;
    const dr_problem *p = &plan->inner->problem;
    const relay_side *sides[] = {&own->forward, &own->adjoint};
    for (int d = 0; d < 2; d++) {
        if (sides[d]->to < 0)
            continue;
        info->sends[d] = own->cuts > 1 ? (int64_t)p->value_heads * own->cuts : own->windows;
        info->send_bytes[d] = (int64_t)p->value_heads * p->value_dim * p->key_dim *
                              (int64_t)sizeof(float);
    }
}

static dr_status post_receives(trip *t)
{
    for (int32_t w = 0; t->side->from >= 0 && w < t->n; w++)
        for (int32_t c = 0; c < t->own->cuts; c++)
            DR_TRY(post(t, w, c, false));
    return DR_OK;
}

/* Whether an entry is there; once it is, its batch is gone. */
static dr_status arrived(dr_batch **batch, bool wait, bool *here)
{
    int32_t done = 1;
    if (*batch != NULL && !wait)
        DR_TRY(dr_comm_test(*batch, &done));
    *here = done;
    if (*batch == NULL || !done)
        return DR_OK;
    dr_batch *over = *batch;
    *batch = NULL;
    return dr_comm_wait(over);
}

/* ---- in fused windows ------------------------------------------------------------------- */

static dr_status run_window(trip *t, int32_t w, int64_t piece0, int64_t piece1, bool leaves)
{
    dr_window x = window_of(t, w);
    x.piece0 = piece0;
    x.piece1 = piece1;
    DR_TRY(dr_windows_run(&t->windows, &x));
    for (int32_t c = 0; leaves && c < t->own->cuts; c++)
        DR_TRY(post(t, w, c, true));
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

/* The next window of the entered piece, whose entry is there. */
static dr_status run_entered(trip *t)
{
    const int64_t e = t->side->entered;
    return run_window(t, t->entered++, e, e + 1, t->side->to >= 0 && t->side->leaving == e);
}

static dr_status all_arrived(trip *t, int32_t w, bool wait, bool *here)
{
    *here = true;
    for (int32_t c = 0; c < t->own->cuts && *here; c++)
        DR_TRY(arrived(&t->receives[(int64_t)w * t->own->cuts + c], wait, here));
    return DR_OK;
}

static dr_status run_fused(trip *t)
{
    if (t->side->from < 0) /* nothing to wait for: all pieces are free */
        t->entered = t->n;
    else if (t->plan->route.n_pieces == 1)
        t->freed = t->n;
    const bool others_wait = t->side->to >= 0 && t->side->leaving != t->side->entered;
    while (t->freed < t->n || t->entered < t->n) {
        bool here = false;
        if (t->entered < t->n && !(others_wait && t->freed < t->n))
            DR_TRY(all_arrived(t, t->entered, t->freed == t->n, &here));
        DR_TRY(here ? run_entered(t) : run_free(t));
    }
    return DR_OK;
}

/* ---- in slots ---------------------------------------------------------------------------- */

static dr_status run_stage(trip *t, int32_t w, int32_t cut, dr_window_stage stage)
{
    const dr_problem *p = &t->plan->inner->problem;
    dr_window x = window_of(t, w);
    x.piece1 = 1;
    x.slot = w % t->own->slots;
    x.col0 = stage == DR_WINDOW_RECUR ? cut * t->own->cols : 0;
    x.col1 = stage == DR_WINDOW_RECUR ? (int32_t)dr_min(x.col0 + t->own->cols, p->value_dim)
                                      : p->value_dim;
    return dr_windows_stage(&t->windows, &x, stage);
}

static dr_status run_slots(trip *t)
{
    const int32_t cuts = t->own->cuts, slots = t->own->slots;
    int32_t prepared = 0, passed = 0, done = 0; /* windows, runs of columns, windows */
    while (done < t->n) {
        const int32_t w = passed / cuts; /* the window whose columns are next */
        const bool room = prepared < t->n && prepared - done < slots, whole = done < w;
        bool here = false;
        if (w < t->n)
            DR_TRY(arrived(&t->receives[passed], !room && !whole, &here));
        if (here && w < prepared) {
            DR_TRY(run_stage(t, w, passed % cuts, DR_WINDOW_RECUR));
            if (t->side->to >= 0)
                DR_TRY(post(t, w, passed % cuts, true));
            passed++;
        } else if (room) {
            DR_TRY(run_stage(t, prepared++, 0, DR_WINDOW_PREPARE));
        } else if (whole) {
            DR_TRY(run_stage(t, done++, 0, DR_WINDOW_OUTPUT));
        }
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
    const int64_t messages = 2 * (int64_t)t.n * own->cuts;
    for (int64_t i = 0; i < messages; i++)
        t.receives[i] = NULL;
    inner.saved_bytes = plan->inner->saved;
    inner.scratch_bytes = own->scratch;
    dr_status status = post_receives(&t);
    if (status == DR_OK)
        status = dr_windows_open(&t.windows, plan->inner, io, &inner, dir, own->slots, own->heads);
    if (status == DR_OK) {
        status = own->slots > 0 ? run_slots(&t) : run_fused(&t);
        dr_windows_close(&t.windows, status);
    }
    status = dr_cp_settle(plan->comm, status, t.receives, messages);
    dr_arena_done(&saved);
    dr_arena_done(&scratch);
    return status;
}

static const dr_cp_engine engine = {build, NULL, clear, describe, run};

const dr_cp_protocol dr_cp_relay = {
    .name = "relay",
    .about = "states travel by heads and columns, no maps; one stretch of the stream per rank",
    .width = DR_CP_MAY_WIDTH,
    .engine = &engine,
};
