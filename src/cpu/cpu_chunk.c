/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_chunk.c - the forward: how a pass is cut into tasks, what it keeps where, and the walk
 * over chunks. One walk serves the fused trip, the staged recurrence and the maps; they
 * differ in which stages run and where states live.
 *
 * NOTE [Chunks outside, heads inside]: a task owns a run of heads and walks the chunks of a
 * piece with all of them, so that the rows it reads are neighbours in memory while the states
 * pass through L2 once per chunk. While a head's states are updated, the rows of the next
 * head or chunk are fetched, a few lines between register tiles.
 *
 * Letters: cpu_chunk.h. A unit is a value head of the window, counted key head by key head.
 */
#include "cpu/cpu_chunk.h"
#include "base/half.h"

enum { RUN = 8, MAP_RUN = 4, CUT_COLS = 32 };

/* ---- sizes ------------------------------------------------------------------------ */

dr_cpu_dims dr_cpu_dims_of(const dr_kern *kern, const dr_plan *plan)
{
    const dr_problem *q = &plan->problem;
    dr_cpu_dims d = {.kern = kern,
                     .H = q->heads,
                     .HV = q->value_heads,
                     .G = q->value_heads / q->heads,
                     .K = q->key_dim,
                     .V = q->value_dim,
                     .C = q->chunk,
                     .K4 = dr_round_up(q->key_dim, 4),
                     .ldk = dr_round_up(q->key_dim, 16),
                     .NR = kern->nr,
                     .panels = dr_ceil_div(q->value_dim, kern->nr),
                     .kda = dr_variant_find(q->variant)->gate_per_channel};
    d.state = d.panels * d.K4 * d.NR;
    d.values = d.panels * d.C * d.NR;
    return d;
}

dr_cpu_span dr_cpu_chunk_span(const dr_plan *plan, const dr_piece *piece, int64_t j)
{
    const int64_t C = plan->problem.chunk;
    dr_cpu_span s = {.index = piece->chunk0 + j, .batch = piece->batch, .t0 = piece->begin + j * C};
    s.c = (int32_t)dr_min(C, piece->end - s.t0);
    s.rows = (int32_t)dr_round_up(s.c, 4);
    return s;
}

void dr_cpu_saved_carve(dr_pass *p, const dr_cpu_dims *d, dr_cpu_saved *out)
{
    const dr_plan *plan = p->plan;
    const dr_keep keep = plan->problem.keep;
    int64_t chunk_heads = 0;
    if (!dr_mul(plan->n_chunks, d->HV, &chunk_heads))
        p->saved.overflow = true;
    *out = (dr_cpu_saved){0};
    out->entry = DR_TAKE(&p->saved, float, plan->n_pieces * d->HV, d->state);
    if (keep != DR_KEEP_INPUTS)
        out->reads = DR_TAKE(&p->saved, float, chunk_heads, d->values);
    if (keep == DR_KEEP_STATES)
        out->states = DR_TAKE(&p->saved, float, chunk_heads, d->state);
}

dr_cpu_cut dr_cpu_cut_of(const dr_pass *p, const dr_cpu_dims *d, int32_t most, bool whole)
{
    const int64_t threads = p->dev->pool.threads, N = p->piece1 - p->piece0;
    const bool tiled = p->plan->problem.head_map == DR_HEADS_TILED && d->G > 1;
    dr_cpu_cut c = {.key0 = tiled ? 0 : p->head0 / d->G, .units = p->head1 - p->head0};
    const int64_t grain = whole ? d->G : 1, grains = c.units / grain;
    int64_t run = dr_max(1, dr_min(most / grain, N * grains / threads)) * grain;
    if (run > d->G)
        run -= run % d->G; /* whole groups share their keys */
    c.run = (int32_t)run;
    c.runs = (int32_t)dr_ceil_div(c.units, run);
    const int64_t cols = dr_ceil_div(p->col1 - p->col0, CUT_COLS);
    int64_t parts = whole ? 1 : dr_max(1, dr_min(cols, threads / dr_max(1, N * c.runs)));
    c.cols = (int32_t)(dr_ceil_div(cols, parts) * CUT_COLS);
    c.col_runs = (int32_t)dr_ceil_div(p->col1 - p->col0, c.cols);
    c.tasks = N * c.runs * c.col_runs;
    return c;
}

/* ---- memory ----------------------------------------------------------------------- */

/* What a lane works in. */
typedef struct lane {
    dr_cpu_keys keys;
    dr_cpu_head head;
    float *v, *o;   /* [values] */
    float *X, *Xd;  /* [C][NR] */
    float *states;  /* of a run: [RUN][state], or [MAP_RUN][state and the panels of A] */
} lane;

typedef struct forward {
    const dr_pass *p;
    dr_cpu_dims d;
    dr_cpu_cut cut;
    dr_cpu_saved saved;
    lane *lanes;
    int64_t map_panels, map_state; /* of the A part of a map: panels, floats */
    /* staged: from one stage to the next, [NT][HV] each */
    float *L, *P;  /* [C][C] */
    float *X;      /* [values] */
    float *states; /* [state] entering each chunk */
    bool want_o; /* queries are read, outputs written */
} forward;

static lane carve_lane(dr_pass *p, const forward *f)
{
    dr_arena *a = &p->scratch;
    const dr_cpu_dims *d = &f->d;
    lane x = {0};
    dr_cpu_keys_carve(a, d, &x.keys);
    dr_cpu_head_carve(a, d, false, &x.head);
    x.v = dr_cpu_take(a, d->values, 1);
    x.o = dr_cpu_take(a, d->values, 1);
    x.X = dr_cpu_take(a, d->C, d->NR);
    x.Xd = dr_cpu_take(a, d->C, d->NR);
    int64_t room = dr_min(RUN, d->HV) * d->state;
    if (p->staged)
        room = dr_max(room, dr_min(MAP_RUN, d->HV) * (d->state + f->map_state));
    x.states = dr_cpu_take(a, room, 1);
    return x;
}

static void carve(dr_pass *p, forward *f)
{
    const dr_plan *plan = p->plan;
    *f = (forward){.p = p, .d = dr_cpu_dims_of(p->dev->kern, plan)};
    const dr_cpu_dims *d = &f->d;
    dr_cpu_saved_carve(p, d, &f->saved);
    f->map_panels = dr_ceil_div(d->K, d->NR);
    f->map_state = f->map_panels * d->K4 * d->NR;
    int64_t chunk_heads, tasks;
    if (!dr_mul(plan->n_chunks + plan->n_pieces, d->HV, &chunk_heads) ||
        !dr_mul(chunk_heads, dr_ceil_div(d->V, CUT_COLS), &tasks)) {
        p->scratch.overflow = true;
        return;
    }
    if (p->staged) {
        f->L = DR_TAKE(&p->scratch, float, chunk_heads, d->C * d->C);
        f->P = DR_TAKE(&p->scratch, float, chunk_heads, d->C * d->C);
        f->X = DR_TAKE(&p->scratch, float, chunk_heads, d->values);
        f->states = DR_TAKE(&p->scratch, float, chunk_heads, d->state);
    }
    const int32_t lanes = dr_pool_lanes(&p->dev->pool, tasks);
    f->lanes = DR_TAKE(&p->scratch, lane, lanes, 1);
    for (int32_t i = 0; i < lanes; i++) {
        lane x = carve_lane(p, f);
        if (f->lanes != NULL)
            f->lanes[i] = x;
    }
}

/* Opens a stage: memory, and what the caller wants. */
static void open_stage(dr_pass *p, int32_t most, forward *f)
{
    carve(p, f);
    f->cut = dr_cpu_cut_of(p, &f->d, most, false);
    f->want_o = p->io->o.data != NULL;
}

dr_status dr_cpu_forward_layout(dr_pass *p)
{
    forward f;
    carve(p, &f);
    return DR_OK;
}

/* ---- tasks ------------------------------------------------------------------------ */

/* The part of the work that a task owns. */
typedef struct part {
    int64_t n;          /* piece */
    int32_t u0, u1;     /* units */
    int32_t n0, n1;     /* columns */
    int64_t p0, p1;     /* and their panels */
} part;

static part part_of(const forward *f, int64_t task)
{
    const dr_cpu_cut *c = &f->cut;
    part x;
    int64_t col = task % c->col_runs, run = task / c->col_runs % c->runs;
    x.n = f->p->piece0 + task / c->col_runs / c->runs;
    x.u0 = (int32_t)run * c->run;
    x.u1 = (int32_t)dr_min(x.u0 + c->run, c->units);
    x.n0 = f->p->col0 + (int32_t)col * c->cols;
    x.n1 = (int32_t)dr_min(x.n0 + c->cols, f->p->col1);
    x.p0 = x.n0 / f->d.NR;
    x.p1 = dr_ceil_div(x.n1, f->d.NR);
    return x;
}

static int32_t key_of(const forward *f, int32_t u) { return f->cut.key0 + u / f->d.G; }
static int32_t value_of(const forward *f, int32_t u)
{
    return dr_value_head(&f->p->plan->problem, key_of(f, u), u % f->d.G);
}

/* Loads unit u at a span; the keys only when their head comes up first. L and P go to, or come
 * from, the stage's store. */
static void load_unit(const forward *f, lane *w, const dr_cpu_span *s, int32_t u, bool first,
                      unsigned parts)
{
    const int32_t j = value_of(f, u);
    if (f->L != NULL) {
        const int64_t at = (s->index * f->d.HV + j) * f->d.C * f->d.C;
        w->head.L = f->L + at;
        w->head.P = f->P + at;
    }
    if (first || u % f->d.G == 0)
        dr_cpu_load_keys(f->p, &f->d, s, key_of(f, u), parts, &w->keys);
    dr_cpu_load_head(f->p, &f->d, s, j, parts, &w->keys, &w->head);
}

/* ---- reading ahead ---------------------------------------------------------------- */

static void add_stream(dr_kern_ahead *a, const dr_tensor *t, const dr_cpu_span *s, int32_t head,
                       int32_t n0, int32_t n1, int64_t tiles)
{
    if (t->data == NULL || (t->stride[3] != 1 && n1 - n0 > 1))
        return;
    const int64_t size = (int64_t)dr_dtype_size(t->dtype);
    dr_kern_stream x = {.at = dr_at(t, s->batch, s->t0, head, n0),
                        .stride = t->stride[1] * size,
                        .rows = s->c,
                        .lines = (int32_t)dr_ceil_div((n1 - n0) * size, 64)};
    x.step = (int32_t)dr_ceil_div((int64_t)x.rows * x.lines, dr_max(1, tiles));
    a->s[a->n++] = x;
}

/* The rows that the unit after u of this walk will read. */
static void look_ahead(const forward *f, const part *x, const dr_cpu_span *s, int32_t u,
                       dr_kern_ahead *a)
{
    const dr_io *io = f->p->io;
    const dr_plan *plan = f->p->plan;
    const dr_piece *piece = &plan->pieces[x->n];
    dr_cpu_span next = *s;
    a->n = 0;
    if (++u == x->u1) {
        int64_t j = s->index - piece->chunk0 + 1;
        if (j == piece->chunks)
            return;
        next = dr_cpu_chunk_span(plan, piece, j);
        u = x->u0;
    }
    const int64_t tiles = (x->p1 - x->p0) * f->d.K4 / 4;
    if (u == x->u0 || u % f->d.G == 0) {
        add_stream(a, &io->k, &next, key_of(f, u), 0, f->d.K, tiles);
        if (f->want_o)
            add_stream(a, &io->q, &next, key_of(f, u), 0, f->d.K, tiles);
    }
    add_stream(a, &io->v, &next, value_of(f, u), x->n0, x->n1, tiles);
    if (f->d.kda)
        add_stream(a, &io->g, &next, value_of(f, u), 0, f->d.K, tiles);
}

/* ---- the walk --------------------------------------------------------------------- */

/* Where the states around a chunk lie: panels of one head. */
typedef struct step {
    const float *in;
    float *out;
    float *X; /* [panels][C][NR]; NULL: nobody needs it afterwards */
    float *N; /* likewise */
    float *o;
} step;

/* The stages of one chunk on panels [p0, p1). v NULL: values are zero. */
static void run_panels(const dr_cpu_dims *d, lane *w, const float *v, const step *x, int64_t p0,
                       int64_t p1, dr_kern_ahead *ahead)
{
    const dr_kern *kern = d->kern;
    const dr_kern_chunk *c = &w->head.at;
    const int64_t panel = d->K4 * d->NR, block = d->C * d->NR;
    for (int64_t p = p0; p < p1; p++) {
        float *X = x->X != NULL ? x->X + p * block : w->X;
        kern->stage_k(c, x->in + p * panel, v != NULL ? v + p * block : NULL, X,
                      c->lam != NULL ? w->Xd : NULL, x->N != NULL ? x->N + p * block : NULL);
        if (x->o != NULL)
            kern->stage_q(c, x->in + p * panel, X, x->o + p * block);
        kern->stage_u(c, x->in + p * panel, c->lam != NULL ? w->Xd : X, x->out + p * panel, ahead);
    }
}

/* The state that enters chunk `index` of head j: in its slot where chunk states are kept, else in
 * the lane. */
static float *state_slot(const forward *f, int64_t index, int32_t j, float *own)
{
    float *kept = f->states != NULL ? f->states : f->saved.states;
    return kept != NULL ? kept + (index * f->d.HV + j) * f->d.state : own;
}

static void keep_panels(const forward *f, const part *x, const float *S, float *to)
{
    const int64_t panel = f->d.K4 * f->d.NR;
    const size_t bytes = (size_t)((x->p1 - x->p0) * panel) * sizeof *S;
    if (to != S)
        memcpy(to + x->p0 * panel, S + x->p0 * panel, bytes);
}

/* The slot of a piece in the states of io. */
static int64_t slot_of(const dr_pass *p, int64_t n)
{
    return p->io->state_index != NULL ? p->io->state_index[n] : n;
}

static void enter(const forward *f, const part *x, int32_t j, float *S)
{
    const dr_pass *p = f->p;
    const float *given = dr_pass_entry(p, x->n, j);
    if (given != NULL) {
        const dr_tensor from = dr_cpu_turned(given, f->d.K, f->d.V);
        dr_cpu_load_state(&f->d, &from, 0, 0, x->n0, x->n1, S);
    } else {
        dr_cpu_load_state(&f->d, &p->io->initial_state, slot_of(p, x->n), j, x->n0, x->n1, S);
    }
    if (f->saved.entry != NULL)
        keep_panels(f, x, S, f->saved.entry + (x->n * f->d.HV + j) * f->d.state);
}

static void leave(const forward *f, const part *x, int32_t j, const float *S)
{
    const dr_pass *p = f->p;
    float *exit = dr_pass_exit(p, x->n, j);
    if (exit != NULL) {
        const dr_tensor to = dr_cpu_turned(exit, f->d.K, f->d.V);
        dr_cpu_store_state(&f->d, S, 0, 0, x->n0, x->n1, &to);
    }
    dr_cpu_store_state(&f->d, S, slot_of(p, x->n), j, x->n0, x->n1, &p->io->final_state);
}

/* One chunk of one head of the recurrence. */
static void recur_unit(const forward *f, lane *w, const part *x, const dr_cpu_span *s, int32_t u,
                       unsigned parts, bool last)
{
    const dr_pass *p = f->p;
    const dr_cpu_dims *d = &f->d;
    const int32_t j = value_of(f, u);
    const int64_t at = s->index * d->HV + j;
    float *own = w->states + (u - x->u0) * d->state;
    step st = {.in = state_slot(f, s->index, j, own),
               .out = last ? own : state_slot(f, s->index + 1, j, own),
               .X = f->X != NULL ? f->X + at * d->values : NULL,
               .N = f->saved.reads != NULL ? f->saved.reads + at * d->values : NULL,
               .o = f->want_o ? w->o : NULL};
    dr_kern_ahead ahead;
    load_unit(f, w, s, u, u == x->u0, parts);
    dr_cpu_load_values(d, &p->io->v, s, j, x->n0, x->n1, w->v);
    if (f->saved.states != NULL)
        keep_panels(f, x, st.in, f->saved.states + at * d->state);
    if (p->io->chunk_states.data != NULL)
        dr_cpu_store_state(d, st.in, s->index, j, x->n0, x->n1, &p->io->chunk_states);
    look_ahead(f, x, s, u, &ahead);
    run_panels(d, w, w->v, &st, x->p0, x->p1, &ahead);
    if (st.o != NULL)
        dr_cpu_store_values(d, w->o, s, j, x->n0, x->n1, &p->io->o);
}

static void recur_task(void *arg, int64_t task, int32_t lane_index)
{
    const forward *f = arg;
    lane *w = &f->lanes[lane_index];
    const part x = part_of(f, task);
    const dr_piece *piece = &f->p->plan->pieces[x.n];
    const unsigned parts = f->p->staged ? 0 : DR_CPU_PAIRS | (f->want_o ? DR_CPU_Q : 0);
    for (int32_t u = x.u0; u < x.u1; u++) {
        float *own = w->states + (u - x.u0) * f->d.state;
        enter(f, &x, value_of(f, u),
              piece->chunks > 0 ? state_slot(f, piece->chunk0, value_of(f, u), own) : own);
    }
    for (int64_t j = 0; j < piece->chunks; j++) {
        const dr_cpu_span s = dr_cpu_chunk_span(f->p->plan, piece, j);
        for (int32_t u = x.u0; u < x.u1; u++)
            recur_unit(f, w, &x, &s, u, parts, j + 1 == piece->chunks);
    }
    for (int32_t u = x.u0; u < x.u1; u++)
        leave(f, &x, value_of(f, u), w->states + (u - x.u0) * f->d.state);
}

dr_status dr_cpu_forward_recur(dr_pass *p)
{
    forward f;
    open_stage(p, RUN, &f);
    f.want_o = f.want_o && !p->staged;
    dr_pool_run(&p->dev->pool, f.cut.tasks, recur_task, &f);
    return DR_OK;
}

/* ---- what surrounds the recurrence when staged ------------------------------------------ */

/* Prepare and output have no order: a task is a chunk and a run of heads. */
typedef struct chunk_part {
    dr_cpu_span span;
    int32_t u0, u1;
} chunk_part;

static chunk_part chunk_part_of(const forward *f, int64_t task)
{
    const dr_plan *plan = f->p->plan;
    const int64_t index = task / f->cut.runs;
    int64_t low = 0, high = plan->n_pieces - 1; /* the last piece that starts at or before it */
    while (low < high) {
        int64_t mid = low + (high - low + 1) / 2;
        if (plan->pieces[mid].chunk0 <= index)
            low = mid;
        else
            high = mid - 1;
    }
    const dr_piece *piece = &plan->pieces[low];
    chunk_part x = {.span = dr_cpu_chunk_span(plan, piece, index - piece->chunk0)};
    x.u0 = (int32_t)(task % f->cut.runs) * f->cut.run;
    x.u1 = (int32_t)dr_min(x.u0 + f->cut.run, f->cut.units);
    return x;
}

static void prepare_task(void *arg, int64_t task, int32_t lane_index)
{
    const forward *f = arg;
    lane *w = &f->lanes[lane_index];
    const chunk_part x = chunk_part_of(f, task);
    for (int32_t u = x.u0; u < x.u1; u++)
        load_unit(f, w, &x.span, u, u == x.u0,
                  DR_CPU_PAIRS | (f->p->io->q.data != NULL ? DR_CPU_Q : 0));
}

static void output_task(void *arg, int64_t task, int32_t lane_index)
{
    const forward *f = arg;
    const dr_pass *p = f->p;
    const dr_cpu_dims *d = &f->d;
    lane *w = &f->lanes[lane_index];
    const chunk_part x = chunk_part_of(f, task);
    const int64_t panel = d->K4 * d->NR, block = d->C * d->NR;
    for (int32_t u = x.u0; u < x.u1; u++) {
        const int32_t j = value_of(f, u);
        const int64_t at = x.span.index * d->HV + j;
        load_unit(f, w, &x.span, u, u == x.u0, DR_CPU_Q);
        for (int64_t i = p->col0 / d->NR; i < dr_ceil_div(p->col1, d->NR); i++)
            d->kern->stage_q(&w->head.at, f->states + at * d->state + i * panel,
                             f->X + at * d->values + i * block, w->o + i * block);
        dr_cpu_store_values(d, w->o, &x.span, j, p->col0, p->col1, &p->io->o);
    }
}

dr_status dr_cpu_forward_prepare(dr_pass *p)
{
    if (!p->staged)
        return DR_OK;
    forward f;
    open_stage(p, RUN, &f);
    dr_pool_run(&p->dev->pool, p->plan->n_chunks * f.cut.runs, prepare_task, &f);
    return DR_OK;
}

dr_status dr_cpu_forward_output(dr_pass *p)
{
    if (!p->staged || p->io->o.data == NULL)
        return DR_OK;
    forward f;
    open_stage(p, RUN, &f);
    dr_pool_run(&p->dev->pool, p->plan->n_chunks * f.cut.runs, output_task, &f);
    return DR_OK;
}

/* ---- maps ------------------------------------------------------------------------- */

/* The map of a piece is what the walk makes of the columns [0 | I]: those of the window start
 * at zero and see v, K more start as the identity and see nothing. Their exits, V-major, are the
 * rows of [B; A]. */
static void map_task(void *arg, int64_t task, int32_t lane_index)
{
    const forward *f = arg;
    const dr_pass *p = f->p;
    const dr_cpu_dims *d = &f->d;
    lane *w = &f->lanes[lane_index];
    const part x = part_of(f, task);
    const dr_piece *piece = &p->plan->pieces[x.n];
    const int64_t room = d->state + f->map_state;
    const bool with_a = x.n0 == p->col0; /* one of the column tasks */
    if (dr_pass_map(p, x.n, 0) == NULL)
        return;
    memset(w->states, 0, (size_t)((x.u1 - x.u0) * room) * sizeof *w->states);
    for (int32_t u = 0; u < x.u1 - x.u0; u++)
        for (int64_t i = 0; i < d->K; i++)
            w->states[u * room + d->state + i / d->NR * d->K4 * d->NR + i * d->NR + i % d->NR] = 1;
    for (int64_t c = 0; c < piece->chunks; c++) {
        const dr_cpu_span s = dr_cpu_chunk_span(p->plan, piece, c);
        for (int32_t u = x.u0; u < x.u1; u++) {
            float *B = w->states + (u - x.u0) * room, *A = B + d->state;
            dr_kern_ahead ahead;
            load_unit(f, w, &s, u, u == x.u0, 0);
            dr_cpu_load_values(d, &p->io->v, &s, value_of(f, u), x.n0, x.n1, w->v);
            look_ahead(f, &x, &s, u, &ahead);
            run_panels(d, w, w->v, &(step){.in = B, .out = B}, x.p0, x.p1, &ahead);
            if (with_a)
                run_panels(d, w, NULL, &(step){.in = A, .out = A}, 0, f->map_panels, NULL);
        }
    }
    for (int32_t u = x.u0; u < x.u1; u++) {
        const float *B = w->states + (u - x.u0) * room;
        const float *map = dr_pass_map(p, x.n, value_of(f, u));
        const dr_tensor rows_b = dr_cpu_turned(map, d->K, d->V);
        const dr_tensor rows_a = dr_cpu_turned(map + (int64_t)d->V * d->K, d->K, d->K);
        dr_cpu_store_state(d, B, 0, 0, x.n0, x.n1, &rows_b);
        if (with_a)
            dr_cpu_store_state(d, B + d->state, 0, 0, 0, d->K, &rows_a);
    }
}

dr_status dr_cpu_forward_summarize(dr_pass *p)
{
    forward f;
    open_stage(p, MAP_RUN, &f);
    f.want_o = false;
    dr_pool_run(&p->dev->pool, f.cut.tasks, map_task, &f);
    return DR_OK;
}
