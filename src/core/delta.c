/* SPDX-License-Identifier: Apache-2.0 */
/*
 * delta.c - the pass driver: one-call forward and backward, the staged form, the decode
 * step, and maps. Everything that can fail has failed before the first stage runs; the
 * order of the stages is written once, in run_pass.
 */
#include "core/delta.h"

#define MAGIC_SAVED 0x6465767361737264u
#define MAGIC_TRIP 0x7069727473707264u

/* How far a staged trip has come. */
enum { STAGE_PREPARED = 1, STAGE_RECURRED = 2, STAGE_DONE = 3 };

static uint64_t mix(uint64_t h, const void *data, size_t bytes)
{
    const unsigned char *c = data;
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ c[i]) * 0x100000001b3u;
    return h;
}

/* Digest of what a saved buffer depends on. */
static uint64_t plan_digest(const dr_plan *plan)
{
    const dr_problem *p = &plan->problem;
    const int64_t ints[] = {(int64_t)p->variant, p->batch, p->tokens, p->heads, p->value_heads,
                            p->key_dim, p->value_dim, (int64_t)p->gate, (int64_t)p->beta, p->l2norm,
                            (int64_t)p->head_map, p->chunk, (int64_t)p->keep, plan->n_pieces};
    const double reals[] = {p->lower_bound, p->beta_scale, p->l2norm_eps, p->scale};
    uint64_t h = mix(0xcbf29ce484222325u, ints, sizeof ints);
    h = mix(h, reals, sizeof reals);
    if (p->offsets != NULL)
        h = mix(h, p->offsets, (size_t)(plan->n_pieces + 1) * sizeof *p->offsets);
    return mix(h, plan->ctx->backend->name, strlen(plan->ctx->backend->name));
}

/* Core's own blocks stand first in both arenas: stamps, and room to sort state_index. */
static dr_stamp *saved_stamp(dr_pass *p) { return DR_TAKE(&p->saved, dr_stamp, 1, 1); }

typedef struct core_scratch {
    dr_stamp *stamp;
    int32_t *order;
} core_scratch;

static core_scratch scratch_blocks(dr_pass *p)
{
    core_scratch s = {DR_TAKE(&p->scratch, dr_stamp, 1, 1),
                      DR_TAKE(&p->scratch, int32_t, p->plan->n_pieces, 1)};
    return s;
}

static core_scratch pass_open(dr_pass *p, dr_stamp **saved, const dr_plan *plan,
                              const dr_buffers *buffers, int dir, bool staged)
{
    *p = (dr_pass){.dev = plan->ctx->dev, .plan = plan, .dir = dir, .staged = staged};
    p->head1 = plan->problem.value_heads;
    p->col1 = plan->problem.value_dim;
    p->piece1 = plan->n_pieces;
    if (buffers != NULL) {
        p->saved = (dr_arena){.base = buffers->saved, .size = plan->saved};
        size_t scratch = staged ? plan->staged_scratch
                                : dir > 0 ? plan->forward_scratch : plan->backward_scratch;
        p->scratch = (dr_arena){.base = buffers->scratch, .size = scratch};
    }
    *saved = saved_stamp(p);
    return scratch_blocks(p);
}

void dr_pass_open(dr_pass *p, const dr_plan *plan, const dr_buffers *buffers, int dir, bool staged)
{
    dr_stamp *saved;
    pass_open(p, &saved, plan, buffers, dir, staged);
}

static const dr_stages *stages_of(const dr_pass *p)
{
    const dr_backend *b = p->plan->ctx->backend;
    return p->dir > 0 ? &b->forward : &b->adjoint;
}

dr_status dr_pass_layout(dr_pass *p) { return stages_of(p)->layout(p); }

static void pass_close(dr_pass *p)
{
    assert(!p->saved.overflow && !p->scratch.overflow);
    dr_arena_done(&p->saved);
    dr_arena_done(&p->scratch);
}

static bool stamp_fits(const dr_stamp *s, uint64_t magic, const dr_plan *plan)
{
    return s != NULL && s->magic == magic && s->plan == plan_digest(plan);
}

static dr_status check_saved(const dr_stamp *s, const dr_plan *plan)
{
    if (!stamp_fits(s, MAGIC_SAVED, plan))
        return dr_fail(DR_ERR_BUFFER, "buffers.saved: must hold what a forward of this problem left, "
                       "but no such forward has written it");
    return DR_OK;
}

/* From here until the forward has succeeded, saved holds nothing to go back from. */
static void void_saved(dr_stamp *s, int dir)
{
    if (dir > 0 && s != NULL)
        *s = (dr_stamp){0};
}

static dr_status check_outputs(const dr_plan *plan, const dr_io *io)
{
    if (io->o.data == NULL && io->final_state.data == NULL && io->chunk_states.data == NULL &&
        plan->n_chunks > 0)
        return dr_fail(DR_ERR_ARG, "o: must be given, or else final_state or chunk_states");
    return DR_OK;
}

/* Tokens that belong to no sequence: outputs and gradients are zero there. */
static void zero_tails(const dr_plan *plan, const dr_io *io)
{
    const dr_tensor *all[] = {&io->o, &io->dq, &io->dk, &io->dv, &io->dg, &io->dbeta};
    if (plan->tail < plan->problem.tokens)
        for (size_t i = 0; i < DR_COUNT(all); i++)
            dr_tensor_zero_tail(all[i], plan->tail);
}

/* Whether the backend serves trips in slots. */
static dr_status check_slots(const dr_plan *plan, int32_t slots)
{
    if (slots > 0 && !plan->ctx->backend->slots)
        return dr_fail(DR_ERR_SUPPORT, "backend: %s cannot pass states on column by column",
                       plan->ctx->backend->name);
    return DR_OK;
}

dr_status dr_windows_scratch(const dr_plan *plan, int dir, int32_t slots, int32_t heads,
                             size_t *bytes)
{
    dr_pass p;
    *bytes = 0;
    assert(slots >= 0 && (slots == 0 || (heads > 0 && heads <= plan->problem.value_heads)));
    DR_TRY(check_slots(plan, slots));
    dr_pass_open(&p, plan, NULL, dir, false);
    p.slots = slots;
    p.slot_heads = heads;
    DR_TRY(dr_pass_layout(&p));
    if (p.scratch.overflow)
        return dr_fail(DR_ERR_MEMORY, "plan: the working memory of this problem exceeds 2^62 bytes");
    *bytes = p.scratch.used;
    return DR_OK;
}

static dr_status run_pass(dr_pass *p)
{
    const dr_stages *s = stages_of(p);
    DR_TRY(s->prepare(p));
    DR_TRY(s->recur(p));
    return s->output(p);
}

dr_status dr_windows_open(dr_windows *w, const dr_plan *plan, const dr_io *io,
                          const dr_buffers *buffers, int dir, int32_t slots, int32_t heads)
{
    if (plan == NULL)
        return dr_fail(DR_ERR_ARG, "plan: must not be NULL");
    size_t scratch = dir > 0 ? plan->forward_scratch : plan->backward_scratch;
    if (slots > 0)
        DR_TRY(dr_windows_scratch(plan, dir, slots, heads, &scratch));
    DR_TRY(dr_buffers_check(buffers, plan->saved, dir < 0, scratch));
    core_scratch own = pass_open(&w->pass, &w->saved, plan, buffers, dir, false);
    w->pass.scratch.size = scratch;
    w->pass.slots = slots;
    w->pass.slot_heads = heads;
    dr_status status = dr_io_normalise(plan, io, dir, own.order, &w->normal);
    if (status == DR_OK)
        status = dir < 0 ? check_saved(w->saved, plan) : check_outputs(plan, &w->normal);
    if (status == DR_OK) {
        void_saved(w->saved, dir);
        *own.stamp = (dr_stamp){0}; /* a staged trip that was under way ends here */
    } else {
        pass_close(&w->pass);
    }
    return status;
}

/* Every call of a window carves anew. */
static dr_pass window_pass(const dr_windows *w, const dr_window *x)
{
    dr_pass p = w->pass;
    p.io = &w->normal;
    if (x == NULL)
        return p;
    p.head0 = x->head0;
    p.head1 = x->head1;
    p.piece0 = x->piece0;
    p.piece1 = x->piece1;
    p.entry = x->entry;
    p.entry_of = x->entry_of;
    p.exit = x->exit;
    p.exit_of = x->exit_of;
    if (p.slots > 0) {
        p.slot = x->slot;
        p.col0 = x->col0;
        p.col1 = x->col1;
    }
    return p;
}

dr_status dr_windows_run(const dr_windows *w, const dr_window *x)
{
    dr_pass p = window_pass(w, x);
    assert(p.slots == 0);
    dr_status status = run_pass(&p);
    assert(!p.saved.overflow && !p.scratch.overflow);
    return status;
}

dr_status dr_windows_stage(const dr_windows *w, const dr_window *x, dr_window_stage stage)
{
    dr_pass p = window_pass(w, x);
    assert(x->slot >= 0 && x->slot < p.slots && x->head1 - x->head0 <= p.slot_heads);
    const dr_stages *s = stages_of(&p);
    dr_stage *const stages[] = {s->prepare, s->recur, s->output};
    dr_status status = stages[stage](&p);
    assert(!p.saved.overflow && !p.scratch.overflow);
    return status;
}

void dr_windows_close(dr_windows *w, dr_status status)
{
    const dr_plan *plan = w->pass.plan;
    if (status == DR_OK) {
        zero_tails(plan, &w->normal);
        if (w->pass.dir > 0 && w->saved != NULL)
            *w->saved = (dr_stamp){.magic = MAGIC_SAVED, .plan = plan_digest(plan)};
    }
    pass_close(&w->pass);
}

static dr_status run(const dr_plan *plan, const dr_io *io, const dr_buffers *buffers, int dir)
{
    dr_windows w;
    DR_TRY(dr_windows_open(&w, plan, io, buffers, dir, 0, 0));
    dr_status status = dr_windows_run(&w, NULL);
    dr_windows_close(&w, status);
    return status;
}

dr_status dr_forward(const dr_plan *plan, const dr_io *io, const dr_buffers *buffers)
{
    return run(plan, io, buffers, DR_FORWARD);
}

dr_status dr_backward(const dr_plan *plan, const dr_io *io, const dr_buffers *buffers)
{
    return run(plan, io, buffers, DR_ADJOINT);
}

dr_status dr_step(const dr_plan *plan, const dr_io *io, const dr_buffers *buffers)
{
    if (plan == NULL)
        return dr_fail(DR_ERR_ARG, "plan: must not be NULL");
    DR_TRY(dr_buffers_check(buffers, 0, false, plan->forward_scratch));
    dr_buffers step_buffers = *buffers;
    step_buffers.saved = NULL;
    dr_pass p;
    dr_stamp *saved;
    core_scratch own = pass_open(&p, &saved, plan, &step_buffers, DR_FORWARD, false);
    dr_io normal;
    dr_status status = dr_io_normalise(plan, io, DR_FORWARD, own.order, &normal);
    if (status == DR_OK && (normal.initial_state.data == NULL || normal.final_state.data == NULL))
        status = dr_fail(DR_ERR_ARG, "%s: must be given to dr_step",
                         normal.initial_state.data == NULL ? "initial_state" : "final_state");
    if (status == DR_OK && normal.chunk_states.data != NULL)
        status = dr_fail(DR_ERR_ARG, "chunk_states: must be absent in dr_step, which has no chunks");
    if (status == DR_OK) {
        p.io = &normal;
        status = plan->ctx->backend->step(&p);
    }
    if (status == DR_OK)
        zero_tails(plan, &normal);
    pass_close(&p);
    return status;
}

/* ---- staged form ------------------------------------------------------------------- */

typedef struct trip {
    dr_pass pass;
    dr_io normal;
    dr_stamp *saved;
    core_scratch own;
} trip;

/* Opens a stage that needs the trip to have reached `least` (0: a new trip). */
static dr_status trip_open(trip *t, const char *call, const dr_plan *plan, dr_direction dir,
                           const dr_io *io, const dr_buffers *buffers, int least)
{
    if (plan == NULL)
        return dr_fail(DR_ERR_ARG, "plan: must not be NULL");
    if (dir != DR_FORWARD && dir != DR_ADJOINT)
        return dr_fail(DR_ERR_ARG, "dir: must be DR_FORWARD (1) or DR_ADJOINT (-1), got %d", (int)dir);
    DR_TRY(dr_buffers_check(buffers, plan->saved, dir < 0, plan->staged_scratch));
    t->own = pass_open(&t->pass, &t->saved, plan, buffers, dir, true);
    dr_status status = dr_io_normalise(plan, io, dir, t->own.order, &t->normal);
    if (status == DR_OK && dir < 0)
        status = check_saved(t->saved, plan);
    const dr_stamp *s = t->own.stamp;
    if (status == DR_OK && least > 0 &&
        !(stamp_fits(s, MAGIC_TRIP, plan) && s->dir == (int)dir && s->stage >= least &&
          s->stage < STAGE_DONE && s->saved == t->saved && s->scratch == plan->staged_scratch))
        status = dr_fail(DR_ERR_ARG, "%s: needs %s on the same buffers and direction first", call,
                         least == STAGE_PREPARED ? "dr_prepare" : "dr_recur");
    if (status != DR_OK)
        pass_close(&t->pass);
    t->pass.io = &t->normal;
    return status;
}

static dr_status trip_close(trip *t, dr_status status, int reached)
{
    if (status == DR_OK)
        *t->own.stamp = (dr_stamp){.magic = MAGIC_TRIP, .plan = plan_digest(t->pass.plan),
                                   .dir = t->pass.dir, .stage = reached, .saved = t->saved,
                                   .scratch = t->pass.plan->staged_scratch};
    pass_close(&t->pass);
    return status;
}

dr_status dr_prepare(const dr_plan *plan, dr_direction dir, const dr_io *io,
                     const dr_buffers *buffers)
{
    trip t;
    DR_TRY(trip_open(&t, "dr_prepare", plan, dir, io, buffers, 0));
    void_saved(t.saved, dir);
    return trip_close(&t, stages_of(&t.pass)->prepare(&t.pass), STAGE_PREPARED);
}

dr_status dr_summarize_some(const dr_plan *plan, dr_direction dir, const dr_io *io,
                            const dr_buffers *buffers, float *maps, const int32_t *map_of)
{
    if (maps == NULL)
        return dr_fail(DR_ERR_ARG, "maps: must not be NULL");
    trip t;
    DR_TRY(trip_open(&t, "dr_summarize", plan, dir, io, buffers, STAGE_PREPARED));
    int reached = t.own.stamp->stage;
    t.pass.maps = maps;
    t.pass.map_of = map_of;
    return trip_close(&t, stages_of(&t.pass)->summarize(&t.pass), reached);
}

dr_status dr_summarize(const dr_plan *plan, dr_direction dir, const dr_io *io,
                       const dr_buffers *buffers, float *maps)
{
    return dr_summarize_some(plan, dir, io, buffers, maps, NULL);
}

dr_status dr_recur_some(const dr_plan *plan, dr_direction dir, const dr_io *io,
                        const dr_buffers *buffers, const float *entry, const int32_t *entry_of,
                        float *exit)
{
    trip t;
    DR_TRY(trip_open(&t, "dr_recur", plan, dir, io, buffers, STAGE_PREPARED));
    t.pass.entry = entry;
    t.pass.entry_of = entry_of;
    t.pass.exit = exit;
    dr_status status = stages_of(&t.pass)->recur(&t.pass);
    if (status == DR_OK && dir == DR_FORWARD && t.saved != NULL)
        *t.saved = (dr_stamp){.magic = MAGIC_SAVED, .plan = plan_digest(plan)};
    return trip_close(&t, status, STAGE_RECURRED);
}

dr_status dr_recur(const dr_plan *plan, dr_direction dir, const dr_io *io, const dr_buffers *buffers,
                   const float *entry, float *exit)
{
    return dr_recur_some(plan, dir, io, buffers, entry, NULL, exit);
}

dr_status dr_output(const dr_plan *plan, dr_direction dir, const dr_io *io,
                    const dr_buffers *buffers)
{
    trip t;
    DR_TRY(trip_open(&t, "dr_output", plan, dir, io, buffers, STAGE_RECURRED));
    dr_status status = stages_of(&t.pass)->output(&t.pass);
    if (status == DR_OK)
        zero_tails(plan, &t.normal);
    return trip_close(&t, status, STAGE_DONE);
}

/* ---- maps -------------------------------------------------------------------------- */

static dr_status check_maps(const dr_context *ctx, int64_t n, int32_t K, int32_t V)
{
    if (ctx == NULL)
        return dr_fail(DR_ERR_ARG, "ctx: must not be NULL");
    if (n < 0 || n > INT64_MAX / (8 * 2 * DR_MAX_DIM * DR_MAX_DIM))
        return dr_fail(DR_ERR_ARG, "n: must be 0 or more maps that fit memory, got %lld", (long long)n);
    if (K < 1 || K > DR_MAX_DIM || V < 1 || V > DR_MAX_DIM)
        return dr_fail(DR_ERR_SHAPE, "K, V: must be 1 to %d, got %d, %d", DR_MAX_DIM, K, V);
    return DR_OK;
}

static bool overlap(const float *a, int64_t na, const float *b, int64_t nb)
{
    return (uintptr_t)a < (uintptr_t)(b + nb) && (uintptr_t)b < (uintptr_t)(a + na);
}

dr_status dr_map_apply(const dr_context *ctx, int64_t n, int32_t K, int32_t V, const float *states,
                       const float *maps, float *out)
{
    DR_TRY(check_maps(ctx, n, K, V));
    if (n == 0)
        return DR_OK;
    if (maps == NULL || out == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", maps == NULL ? "maps" : "out");
    int64_t state = (int64_t)K * V, map = (int64_t)(V + K) * K;
    if (overlap(out, n * state, maps, n * map) ||
        (states != NULL && overlap(out, n * state, states, n * state)))
        return dr_fail(DR_ERR_ARG, "out: must not overlap the states or maps");
    return ctx->backend->apply(ctx->dev, n, K, V, V, states, maps, out);
}

dr_status dr_map_compose(const dr_context *ctx, int64_t n, int32_t K, int32_t V, const float *first,
                         const float *second, float *out)
{
    DR_TRY(check_maps(ctx, n, K, V));
    if (n == 0)
        return DR_OK;
    if (first == NULL || second == NULL || out == NULL)
        return dr_fail(DR_ERR_ARG, "first, second, out: must not be NULL, got %p, %p, %p",
                       (const void *)first, (const void *)second, (void *)out);
    int64_t map = (int64_t)(V + K) * K;
    if (overlap(out, n * map, first, n * map) || overlap(out, n * map, second, n * map))
        return dr_fail(DR_ERR_ARG, "out: must not overlap first or second");
    return ctx->backend->apply(ctx->dev, n, K, V, V + K, first, second, out);
}
