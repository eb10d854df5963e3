/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_grad.c - the adjoint: which states it starts from, how its work is cut into tasks, and
 * the walk over chunks from the last to the first. As in the forward a task owns a run of heads
 * and takes all of them through a chunk before it goes on (cpu_chunk.c, NOTE [Chunks outside,
 * heads inside]).
 *
 * A fused pass runs both halves of a chunk in one walk (cpu_grad.h, NOTE [Two halves of a
 * chunk]). A staged pass, and a fused one with fewer tasks than threads, spreads: the states
 * are rebuilt and the reverse recurrence run over heads and columns, then the second halves over
 * runs of chunks. The functions of a chunk are the same, and so are the bits.
 *
 * Letters: cpu_chunk.h, kern_grad.h. A unit is a value head of the window, counted key head by key
 * head.
 */
#include "cpu/cpu_grad.h"
#include "base/half.h"

enum { RUN = 8, MAP_RUN = 4, CUT_COLS = 32, MIN_SLOTS = 64 };

/* ---- memory ----------------------------------------------------------------------- */

typedef struct lane {
    dr_grad_lane work;
    float *D;      /* [run][state]; maps: their states */
    float *states; /* fused and states not saved: [chunks of a piece][run][state] */
    float *N;      /* fused and N not saved: [chunks of a piece][run][values] */
} lane;

typedef struct adjoint {
    const dr_pass *p;
    dr_cpu_dims d;
    dr_cpu_cut cut;
    dr_cpu_saved saved;
    lane *lanes;
    bool spread, d_o, want;        /* want: some gradient beside d_initial_state */
    int32_t run;                   /* units of a fused task of the whole problem */
    int64_t map_panels, map_state; /* of the R part of a map: panels, floats */
    /* Spread: from one stage to the next, [NT][HV] each. */
    float *states, *N;             /* NULL where saved has them */
    float *D, *X, *Zn, *zr, *hd;
    /* Sums over tokens, a slot for each of `splits` parts of a piece: they are added up in a fixed
     * order whoever ran them. */
    int64_t splits, slots;
    double *a_log;                 /* [slots][HV] */
    double *dt_bias;               /* [slots][HV][width] */
    int64_t width;
} adjoint;

static lane carve_lane(dr_pass *p, const adjoint *a)
{
    const dr_cpu_dims *d = &a->d;
    dr_arena *arena = &p->scratch;
    lane x = {0};
    dr_cpu_grad_lane_carve(arena, d, &x.work);
    int64_t room = dr_max(a->run, dr_min(RUN, d->HV)) * d->state;
    if (p->staged)
        room = dr_max(room, dr_min(MAP_RUN, d->HV) * (d->state + a->map_state));
    x.D = dr_cpu_take(arena, room, 1);
    if (!a->spread) {
        const int64_t kept = p->plan->longest * a->run;
        if (p->plan->problem.keep != DR_KEEP_STATES)
            x.states = DR_TAKE(arena, float, kept, d->state);
        if (p->plan->problem.keep == DR_KEEP_INPUTS)
            x.N = DR_TAKE(arena, float, kept, d->values);
    }
    return x;
}

static void carve_spread(dr_pass *p, int64_t chunk_heads, adjoint *a)
{
    const dr_cpu_dims *d = &a->d;
    dr_arena *arena = &p->scratch;
    if (p->plan->problem.keep != DR_KEEP_STATES)
        a->states = DR_TAKE(arena, float, chunk_heads, d->state);
    if (p->plan->problem.keep == DR_KEEP_INPUTS)
        a->N = DR_TAKE(arena, float, chunk_heads, d->values);
    a->D = DR_TAKE(arena, float, chunk_heads, d->state);
    a->X = DR_TAKE(arena, float, chunk_heads, d->values);
    a->Zn = DR_TAKE(arena, float, chunk_heads, d->values);
    a->zr = DR_TAKE(arena, float, chunk_heads, d->panels * d->C);
    a->hd = DR_TAKE(arena, float, chunk_heads, d->panels * d->ldk);
}

static void carve(dr_pass *p, adjoint *a)
{
    const dr_plan *plan = p->plan;
    *a = (adjoint){.p = p, .d = dr_cpu_dims_of(p->dev->kern, plan)};
    const dr_cpu_dims *d = &a->d;
    dr_cpu_saved_carve(p, d, &a->saved);
    a->map_panels = dr_ceil_div(d->K, d->NR);
    a->map_state = a->map_panels * d->K4 * d->NR;
    a->splits = dr_max(1, MIN_SLOTS / dr_max(1, plan->n_pieces));
    a->slots = plan->n_pieces * a->splits;
    a->width = d->kda ? d->K : 1;

    dr_pass whole = *p; /* memory must not depend on the window */
    whole.head0 = whole.col0 = 0;
    whole.piece0 = 0;
    whole.piece1 = plan->n_pieces;
    whole.head1 = d->HV;
    whole.col1 = d->V;
    const dr_cpu_cut cut = dr_cpu_cut_of(&whole, d, RUN, true);
    a->run = cut.run;
    a->spread = p->staged || cut.tasks < p->dev->pool.threads;

    int64_t chunk_heads, slot_heads, tasks;
    if (!dr_mul(plan->n_chunks, d->HV, &chunk_heads) || !dr_mul(a->slots, d->HV, &slot_heads) ||
        !dr_mul(slot_heads, dr_ceil_div(d->V, CUT_COLS), &tasks)) {
        p->scratch.overflow = true;
        return;
    }
    if (plan->problem.gate == DR_GATE_SOFTPLUS || plan->problem.gate == DR_GATE_LOWER_BOUND) {
        a->a_log = DR_TAKE(&p->scratch, double, slot_heads, 1);
        a->dt_bias = DR_TAKE(&p->scratch, double, slot_heads, a->width);
    }
    if (a->spread)
        carve_spread(p, chunk_heads, a);
    const int32_t lanes = dr_pool_lanes(&p->dev->pool, tasks);
    a->lanes = DR_TAKE(&p->scratch, lane, lanes, 1);
    for (int32_t i = 0; i < lanes; i++) {
        lane x = carve_lane(p, a);
        if (a->lanes != NULL)
            a->lanes[i] = x;
    }
}

static void open_stage(dr_pass *p, int32_t most, bool whole, adjoint *a)
{
    const dr_io *io = p->io;
    carve(p, a);
    a->cut = dr_cpu_cut_of(p, &a->d, most, whole);
    a->d_o = io->d_o.data != NULL;
    const dr_tensor *const outputs[] = {&io->dq, &io->dk, &io->dv, &io->dg, &io->dbeta,
                                        &io->da_log, &io->ddt_bias};
    for (size_t i = 0; i < DR_COUNT(outputs); i++)
        a->want = a->want || outputs[i]->data != NULL;
}

dr_status dr_cpu_adjoint_layout(dr_pass *p)
{
    adjoint a;
    carve(p, &a);
    return DR_OK;
}

/* ---- tasks ------------------------------------------------------------------------ */

typedef struct part {
    const dr_piece *piece;
    int64_t n;          /* piece */
    int32_t u0, u1;     /* units */
    int32_t n0, n1;     /* columns */
    int64_t p0, p1;     /* and their panels */
} part;

static part part_of(const adjoint *a, int64_t n, int64_t run, int64_t col)
{
    const dr_cpu_cut *c = &a->cut;
    part x = {.piece = &a->p->plan->pieces[n], .n = n};
    x.u0 = (int32_t)run * c->run;
    x.u1 = (int32_t)dr_min(x.u0 + c->run, c->units);
    x.n0 = a->p->col0 + (int32_t)col * c->cols;
    x.n1 = (int32_t)dr_min(x.n0 + c->cols, a->p->col1);
    x.p0 = x.n0 / a->d.NR;
    x.p1 = dr_ceil_div(x.n1, a->d.NR);
    return x;
}

static part part_of_task(const adjoint *a, int64_t task)
{
    const dr_cpu_cut *c = &a->cut;
    return part_of(a, a->p->piece0 + task / c->col_runs / c->runs, task / c->col_runs % c->runs,
                   task % c->col_runs);
}

static int32_t key_of(const adjoint *a, int32_t u) { return a->cut.key0 + u / a->d.G; }
static int32_t value_of(const adjoint *a, int32_t u)
{
    return dr_value_head(&a->p->plan->problem, key_of(a, u), u % a->d.G);
}

static dr_cpu_span span_of(const adjoint *a, const part *x, int64_t c)
{
    return dr_cpu_chunk_span(a->p->plan, x->piece, c);
}

/* Where the arrays of chunk c of a unit lie: in the stage's store, or in the lane's. */
static int64_t stored_at(const adjoint *a, const part *x, int64_t c, int32_t u)
{
    return (x->piece->chunk0 + c) * a->d.HV + value_of(a, u);
}
static int64_t lane_at(const adjoint *a, const part *x, int64_t c, int32_t u)
{
    return c * a->run + (u - x->u0);
}

static float *state_at(const adjoint *a, const lane *w, const part *x, int64_t c, int32_t u)
{
    const int64_t size = a->d.state;
    if (c == 0)
        return a->saved.entry + (x->n * a->d.HV + value_of(a, u)) * size;
    if (w->states != NULL)
        return w->states + lane_at(a, x, c, u) * size;
    return (a->saved.states != NULL ? a->saved.states : a->states) + stored_at(a, x, c, u) * size;
}

static float *reads_at(const adjoint *a, const lane *w, const part *x, int64_t c, int32_t u)
{
    const int64_t size = a->d.values;
    if (w->N != NULL)
        return w->N + lane_at(a, x, c, u) * size;
    return (a->saved.reads != NULL ? a->saved.reads : a->N) + stored_at(a, x, c, u) * size;
}

/* The gradient of the state that leaves chunk c; of the entry state of the piece for c = -1. */
static float *grad_at(const adjoint *a, const lane *w, const part *x, int64_t c, int32_t u)
{
    const int64_t size = a->d.state, own = u - x->u0;
    return !a->spread || c < 0 ? w->D + own * size : a->D + stored_at(a, x, c, u) * size;
}

/* Loads unit u at a span; the keys only when their head comes up first. */
static void load_unit(const adjoint *a, dr_grad_lane *w, const dr_cpu_span *s, int32_t u,
                      bool first, unsigned parts)
{
    const dr_cpu_dims *d = &a->d;
    if (first || u % d->G == 0) {
        dr_cpu_load_keys(a->p, d, s, key_of(a, u), parts, &w->keys);
        if (!d->kda && (parts & DR_CPU_GRADS))
            for (int64_t i = 0; i < s->rows; i += DR_CPU_BLOCK)
                d->kern->transpose(DR_CPU_BLOCK, (int)d->K4, w->keys.q + i * d->ldk, d->ldk,
                                   w->qt + i * d->K4, DR_CPU_BLOCK);
    }
    dr_cpu_load_head(a->p, d, s, value_of(a, u), parts, &w->keys, &w->head);
}

/* ---- states ------------------------------------------------------------------------ */

/* One chunk forwards: N where the forward has not kept it, and the state that leaves (out NULL:
 * nobody wants it). */
static void rebuild_unit(const adjoint *a, lane *w, const part *x, int64_t c, int32_t u)
{
    const dr_cpu_dims *d = &a->d;
    const dr_kern *kern = d->kern;
    dr_grad_lane *g = &w->work;
    const dr_kern_chunk *at = &g->head.at;
    const dr_cpu_span s = span_of(a, x, c);
    const bool with_n = a->saved.reads == NULL, last = c + 1 == x->piece->chunks;
    if (last && !with_n)
        return;
    load_unit(a, g, &s, u, u == x->u0, DR_CPU_PAIRS);
    dr_cpu_load_values(d, &a->p->io->v, &s, value_of(a, u), x->n0, x->n1, g->v);
    const float *S = state_at(a, w, x, c, u);
    float *out = last ? NULL : state_at(a, w, x, c + 1, u), *N = reads_at(a, w, x, c, u);
    float *Xd = at->lam != NULL ? g->Xd : NULL;
    for (int64_t p = x->p0; p < x->p1; p++) {
        const int64_t i = p * d->C * d->NR, state = p * d->K4 * d->NR;
        if (with_n)
            kern->stage_k(at, S + state, g->v + i, g->X, Xd, N + i);
        else
            kern->grad_x(at, g->v + i, N + i, NULL, g->X, Xd);
        if (out != NULL)
            kern->stage_u(at, S + state, Xd != NULL ? Xd : g->X, out + state, NULL);
    }
}

static void rebuild(const adjoint *a, lane *w, const part *x)
{
    if (a->saved.states != NULL)
        return;
    for (int64_t c = 0; c < x->piece->chunks; c++)
        for (int32_t u = x->u0; u < x->u1; u++)
            rebuild_unit(a, w, x, c, u);
}

static void enter(const adjoint *a, const part *x, int32_t j, float *D)
{
    const dr_pass *p = a->p;
    const float *given = dr_pass_entry(p, x->n, j);
    if (given != NULL) {
        const dr_tensor from = dr_cpu_turned(given, a->d.K, a->d.V);
        dr_cpu_load_state(&a->d, &from, 0, 0, x->n0, x->n1, D);
    } else {
        dr_cpu_load_state(&a->d, &p->io->d_final_state, x->n, j, x->n0, x->n1, D);
    }
}

static void leave(const adjoint *a, const part *x, int32_t j, const float *D)
{
    const dr_pass *p = a->p;
    float *exit = dr_pass_exit(p, x->n, j);
    if (exit != NULL) {
        const dr_tensor to = dr_cpu_turned(exit, a->d.K, a->d.V);
        dr_cpu_store_state(&a->d, D, 0, 0, x->n0, x->n1, &to);
    }
    dr_cpu_store_state(&a->d, D, x->n, j, x->n0, x->n1, &p->io->d_initial_state);
}

/* ---- sums over tokens ---------------------------------------------------------------- */

static dr_grad_sums sums_at(const adjoint *a, int64_t slot, int32_t j)
{
    const int64_t at = slot * a->d.HV + j;
    if (a->a_log == NULL)
        return (dr_grad_sums){NULL, NULL};
    return (dr_grad_sums){a->a_log + at, a->dt_bias + at * a->width};
}

static void clear_sums(const adjoint *a, const part *x, int64_t slot)
{
    for (int32_t u = x->u0; a->a_log != NULL && u < x->u1; u++) {
        const dr_grad_sums s = sums_at(a, slot, value_of(a, u));
        *s.a_log = 0;
        memset(s.dt_bias, 0, (size_t)a->width * sizeof *s.dt_bias);
    }
}

static void store_sums(const adjoint *a)
{
    const dr_tensor *a_log = &a->p->io->da_log, *bias = &a->p->io->ddt_bias;
    for (int32_t u = 0; u < a->cut.units; u++) {
        const int32_t j = value_of(a, u);
        double sum = 0;
        for (int64_t i = 0; a_log->data != NULL && i < a->slots; i++)
            sum += *sums_at(a, i, j).a_log;
        if (a_log->data != NULL)
            dr_put(dr_at(a_log, j, 0, 0, 0), a_log->dtype, 0, sum);
        for (int64_t n = 0; bias->data != NULL && n < a->width; n++) {
            sum = 0;
            for (int64_t i = 0; i < a->slots; i++)
                sum += sums_at(a, i, j).dt_bias[n];
            dr_put(dr_at(bias, j, n, 0, 0), bias->dtype, 0, sum);
        }
    }
}

/* ---- reading ahead ------------------------------------------------------------------- */

static void add_stream(dr_kern_ahead *ahead, const void *at, int64_t stride, int64_t rows,
                       int64_t bytes, int64_t tiles)
{
    dr_kern_stream x = {at, stride, (int32_t)rows, (int32_t)dr_ceil_div(bytes, 64), 0, 0};
    x.step = (int32_t)dr_ceil_div(rows * x.lines, dr_max(1, tiles));
    ahead->s[ahead->n++] = x;
}

static void add_rows(dr_kern_ahead *ahead, const dr_tensor *t, const dr_cpu_span *s, int32_t head,
                     int64_t width, int64_t tiles)
{
    const int64_t size = (int64_t)dr_dtype_size(t->dtype);
    if (t->data != NULL && (t->stride[3] == 1 || width == 1))
        add_stream(ahead, dr_at(t, s->batch, s->t0, head, 0), t->stride[1] * size, s->c,
                   width * size, tiles);
}

/* What the unit after u of a fused walk will read: token rows while D is updated, states
 * while they are multiplied. */
static void look_ahead(const adjoint *a, const lane *w, const part *x, int64_t c, int32_t u,
                       dr_kern_ahead *rows, dr_kern_ahead *states)
{
    const dr_cpu_dims *d = &a->d;
    const dr_io *io = a->p->io;
    rows->n = states->n = 0;
    if (++u == x->u1) {
        u = x->u0;
        c--;
    }
    if (a->spread || c < 0)
        return;
    const dr_cpu_span s = span_of(a, x, c);
    const int32_t j = value_of(a, u);
    const int64_t tiles = d->panels * d->K4 / 4, products = 3 * d->C / DR_CPU_BLOCK * d->K4 / 4;
    if (u == x->u0 || u % d->G == 0) {
        add_rows(rows, &io->k, &s, key_of(a, u), d->K, tiles);
        add_rows(rows, &io->q, &s, key_of(a, u), d->K, tiles);
    }
    add_rows(rows, &io->v, &s, j, d->V, tiles);
    add_rows(rows, &io->d_o, &s, j, d->V, tiles);
    add_stream(states, state_at(a, w, x, c, u), 0, 1, d->state * 4, products);
    add_stream(states, reads_at(a, w, x, c, u), 0, 1, d->values * 4, products);
    add_stream(states, grad_at(a, w, x, c, u), 0, 1, d->state * 4, products);
    if (d->kda)
        add_rows(states, &io->g, &s, j, d->K, products);
}

/* ---- the walk ----------------------------------------------------------------------- */

enum half { FIRST = 1, SECOND = 2 };

static void grad_unit(const adjoint *a, lane *w, const part *x, int64_t c, int32_t u,
                      unsigned halves)
{
    const dr_pass *p = a->p;
    const dr_cpu_dims *d = &a->d;
    dr_grad_lane *g = &w->work;
    const dr_cpu_span s = span_of(a, x, c);
    const int32_t j = value_of(a, u);
    const int64_t at = stored_at(a, x, c, u);
    const dr_grad_chunk chunk = {
        .H = state_at(a, w, x, c, u),
        .N = reads_at(a, w, x, c, u),
        .D = grad_at(a, w, x, c, u),
        .dH = grad_at(a, w, x, c - 1, u),
        .X = a->spread ? a->X + at * d->values : g->X,
        .Zn = a->spread ? a->Zn + at * d->values : g->Zn,
        .zr = a->spread ? a->zr + at * d->panels * d->C : g->zr,
        .hd = a->spread ? a->hd + at * d->panels * d->ldk : g->hd,
    };
    load_unit(a, g, &s, u, u == x->u0,
              DR_CPU_PAIRS | DR_CPU_Q | (halves & SECOND ? DR_CPU_GRADS : 0));
    if (a->d_o)
        dr_cpu_load_values(d, &p->io->d_o, &s, j, x->n0, x->n1, g->dO);
    dr_kern_ahead rows, states;
    look_ahead(a, w, x, c, u, &rows, &states);
    if (halves & FIRST) {
        dr_cpu_load_values(d, &p->io->v, &s, j, x->n0, x->n1, g->v);
        dr_cpu_grad_solve(d, g, &chunk, a->d_o, x->p0, x->p1);
    }
    if (halves & SECOND)
        dr_cpu_grad_pairs(d, g, &chunk, a->d_o, &states);
    if (halves & FIRST)
        dr_cpu_grad_step(d, g, &chunk, a->d_o, x->p0, x->p1, &rows);
    if (halves & SECOND) {
        const int64_t split = ((c + 1) * a->splits - 1) / x->piece->chunks;
        const dr_grad_sums sums = sums_at(a, x->n * a->splits + split, j);
        dr_cpu_grad_finish(d, g, &chunk, a->d_o, u % d->G == 0, &states);
        dr_cpu_grad_store_head(p, d, &s, j, g, &sums);
        if (u % d->G == d->G - 1)
            dr_cpu_grad_store_keys(p, d, &s, key_of(a, u), g);
    }
}

/* Chunks [c0, c1), from the last to the first. */
static void walk(const adjoint *a, lane *w, const part *x, int64_t c0, int64_t c1, unsigned halves)
{
    for (int64_t c = c1; c-- > c0;)
        for (int32_t u = x->u0; u < x->u1; u++)
            grad_unit(a, w, x, c, u, halves);
}

static void reverse_walk(const adjoint *a, lane *w, const part *x, unsigned halves)
{
    const int64_t chunks = x->piece->chunks;
    for (int32_t u = x->u0; u < x->u1; u++)
        enter(a, x, value_of(a, u), grad_at(a, w, x, chunks - 1, u));
    walk(a, w, x, 0, chunks, halves);
    for (int32_t u = x->u0; u < x->u1; u++)
        leave(a, x, value_of(a, u), grad_at(a, w, x, -1, u));
}

static void fused_task(void *arg, int64_t task, int32_t lane_index)
{
    const adjoint *a = arg;
    lane *w = &a->lanes[lane_index];
    const part x = part_of_task(a, task);
    for (int64_t i = 0; i < a->splits; i++)
        clear_sums(a, &x, x.n * a->splits + i);
    rebuild(a, w, &x);
    reverse_walk(a, w, &x, a->want ? FIRST | SECOND : FIRST);
}

static void rebuild_task(void *arg, int64_t task, int32_t lane_index)
{
    const adjoint *a = arg;
    const part x = part_of_task(a, task);
    rebuild(a, &a->lanes[lane_index], &x);
}

static void recur_task(void *arg, int64_t task, int32_t lane_index)
{
    const adjoint *a = arg;
    const part x = part_of_task(a, task);
    reverse_walk(a, &a->lanes[lane_index], &x, FIRST);
}

/* A task is a slot and a run of heads. */
static void output_task(void *arg, int64_t task, int32_t lane_index)
{
    const adjoint *a = arg;
    const int64_t slot = a->p->piece0 * a->splits + task / a->cut.runs, split = slot % a->splits;
    const part x = part_of(a, slot / a->splits, task % a->cut.runs, 0);
    clear_sums(a, &x, slot);
    walk(a, &a->lanes[lane_index], &x, x.piece->chunks * split / a->splits,
         x.piece->chunks * (split + 1) / a->splits, SECOND);
}

static void run_rebuild(dr_pass *p)
{
    adjoint a;
    open_stage(p, RUN, false, &a);
    if (a.saved.states == NULL)
        dr_pool_run(&p->dev->pool, a.cut.tasks, rebuild_task, &a);
}

static void run_recur(dr_pass *p)
{
    adjoint a;
    open_stage(p, RUN, false, &a);
    dr_pool_run(&p->dev->pool, a.cut.tasks, recur_task, &a);
}

static void run_output(dr_pass *p)
{
    adjoint a;
    open_stage(p, RUN, true, &a);
    if (!a.want)
        return;
    const int64_t slots = (p->piece1 - p->piece0) * a.splits;
    dr_pool_run(&p->dev->pool, slots * a.cut.runs, output_task, &a);
    store_sums(&a);
}

dr_status dr_cpu_adjoint_prepare(dr_pass *p)
{
    if (p->staged)
        run_rebuild(p);
    return DR_OK;
}

dr_status dr_cpu_adjoint_recur(dr_pass *p)
{
    adjoint a;
    const dr_arena saved = p->saved, scratch = p->scratch;
    open_stage(p, RUN, true, &a);
    if (!a.spread) {
        dr_pool_run(&p->dev->pool, a.cut.tasks, fused_task, &a);
        store_sums(&a);
        return DR_OK;
    }
    void (*const steps[])(dr_pass *) = {run_rebuild, run_recur, run_output};
    const size_t first = p->staged ? 1 : 0, last = p->staged ? 1 : 2;
    for (size_t i = first; i <= last; i++) {
        p->saved = saved; /* every step carves anew */
        p->scratch = scratch;
        steps[i](p);
    }
    return DR_OK;
}

dr_status dr_cpu_adjoint_output(dr_pass *p)
{
    if (p->staged)
        run_output(p);
    return DR_OK;
}

/* ---- maps ------------------------------------------------------------------------- */

/* The map of a piece is what the reverse recurrence makes of the columns [0 | I]: those of the
 * window start at zero and see dO, K more start as the identity and see nothing. Their gradients
 * at the entry, V-major, are the rows of [C; R]. */
static void map_task(void *arg, int64_t task, int32_t lane_index)
{
    const adjoint *a = arg;
    const dr_pass *p = a->p;
    const dr_cpu_dims *d = &a->d;
    lane *w = &a->lanes[lane_index];
    const part x = part_of_task(a, task);
    const int64_t room = d->state + a->map_state, panel = d->K4 * d->NR;
    const bool with_r = x.n0 == p->col0; /* one of the column tasks */
    if (dr_pass_map(p, x.n, 0) == NULL)
        return;
    memset(w->D, 0, (size_t)((x.u1 - x.u0) * room) * sizeof *w->D);
    for (int32_t u = 0; u < x.u1 - x.u0; u++)
        for (int64_t i = 0; i < d->K; i++)
            w->D[u * room + d->state + i / d->NR * panel + i * d->NR + i % d->NR] = 1;
    for (int64_t c = x.piece->chunks; c-- > 0;) {
        const dr_cpu_span s = span_of(a, &x, c);
        for (int32_t u = x.u0; u < x.u1; u++) {
            float *D = w->D + (u - x.u0) * room;
            load_unit(a, &w->work, &s, u, u == x.u0, DR_CPU_PAIRS | DR_CPU_Q);
            if (a->d_o)
                dr_cpu_load_values(d, &p->io->d_o, &s, value_of(a, u), x.n0, x.n1, w->work.dO);
            dr_cpu_grad_reverse(d, &w->work, a->d_o ? w->work.dO + x.p0 * d->C * d->NR : NULL,
                                x.p1 - x.p0, D + x.p0 * panel);
            if (with_r)
                dr_cpu_grad_reverse(d, &w->work, NULL, a->map_panels, D + d->state);
        }
    }
    for (int32_t u = x.u0; u < x.u1; u++) {
        const float *D = w->D + (u - x.u0) * room;
        const float *map = dr_pass_map(p, x.n, value_of(a, u));
        const dr_tensor rows_c = dr_cpu_turned(map, d->K, d->V);
        const dr_tensor rows_r = dr_cpu_turned(map + (int64_t)d->V * d->K, d->K, d->K);
        dr_cpu_store_state(d, D, 0, 0, x.n0, x.n1, &rows_c);
        if (with_r)
            dr_cpu_store_state(d, D + d->state, 0, 0, 0, d->K, &rows_r);
    }
}

dr_status dr_cpu_adjoint_summarize(dr_pass *p)
{
    adjoint a;
    open_stage(p, MAP_RUN, false, &a);
    dr_pool_run(&p->dev->pool, a.cut.tasks, map_task, &a);
    return DR_OK;
}
