/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_step.c - decoding on the CPU: the token recurrence, one task per sequence and value
 * head. Per token two sweeps over the state, one for what it predicts and one for the update
 * fused with the output (kernels step_columns, step_rows); the decode step of a large model is
 * the traffic of its states, so the first sweep also fetches the state that comes next.
 *
 * A state that is f32 with contiguous columns, or rows (state_v_first), is updated where it
 * lies, block of tokens by block of tokens. Any other goes through a strip of STRIP columns in
 * L1 that stays for all tokens, so that it is rounded once.
 *
 * Letters: K V widths of a state, k q v beta of a token, d its decay factors, dk = d k.
 */
#include "cpu/cpu_rows.h"
#include "base/half.h"

#include <math.h>

enum {
    BLOCK = 8,  /* tokens prepared together */
    STRIP = 32, /* columns taken together */
    ROOM = 16   /* columns of a strip that is not in place */
};

typedef struct step {
    const dr_pass *p;
    const dr_kern *kern;
    int32_t K, V, heads; /* heads of the window */
    bool raw;            /* the gate has parameters */
    bool rows, cols;     /* both states are f32 and contiguous along K, along V */
    int32_t lanes;
} step;

/* A block of tokens as one value head sees it. */
typedef struct block {
    int32_t count;
    int64_t b, t0;
    float beta[BLOCK];
    _Alignas(DR_ALIGN) float k[BLOCK][DR_MAX_DIM];
    float q[BLOCK][DR_MAX_DIM]; /* times scale */
    float d[BLOCK][DR_MAX_DIM], dk[BLOCK][DR_MAX_DIM];
} block;

/* The parameters of a head's gate. */
typedef struct gate {
    _Alignas(DR_ALIGN) float ea[DR_MAX_DIM];
    float bias[DR_MAX_DIM];
} gate;

/* ---- tokens ------------------------------------------------------------------------ */

/* Tokens t0 .. of a tensor [B,T,heads,n], a row of floats each. */
static void load_tokens(const step *s, const dr_tensor *t, const block *x, int32_t head, int32_t n,
                        float *dst)
{
    dr_cpu_view v = dr_cpu_view_of(t, 1, 3, x->b, x->t0, head);
    dr_cpu_view_load(s->kern, &v, x->count, n, dst, DR_MAX_DIM);
}

static void normalise(const step *s, float *row, double scale)
{
    const dr_problem *p = &s->p->plan->problem;
    if (p->l2norm)
        scale /= sqrt((double)s->kern->dot(s->K, row, row) + p->l2norm_eps);
    if (scale != 1)
        s->kern->scale_row(s->K, (float)scale, row, row);
}

static void load_gate(const step *s, int32_t j, gate *out)
{
    const dr_tensor *a = &s->p->io->a_log, *dt = &s->p->io->dt_bias;
    const int32_t n = dr_gate_width(&s->p->plan->problem);
    float ea = a->data ? (float)exp(dr_get(dr_at(a, j, 0, 0, 0), a->dtype, 0)) : 1;
    for (int32_t i = 0; i < n; i++) {
        out->ea[i] = ea;
        out->bias[i] = dt->data ? (float)dr_get(dr_at(dt, j, i, 0, 0), dt->dtype, 0) : 0;
    }
}

/* Decay factors of every channel. */
static void load_decay(const step *s, block *x, int32_t j, const gate *params)
{
    const dr_problem *p = &s->p->plan->problem;
    const int32_t n = dr_gate_width(p);
    if (p->gate != DR_GATE_NONE)
        load_tokens(s, &s->p->io->g, x, j, n, x->d[0]);
    for (int32_t i = 0; i < x->count; i++) {
        float *d = x->d[i];
        if (s->raw)
            s->kern->raw_gate(n, p->gate == DR_GATE_LOWER_BOUND, (float)p->lower_bound, params->ea,
                              params->bias, d, d);
        if (s->raw || p->gate == DR_GATE_LOG)
            s->kern->vexp(n, d, d);
        const float all = p->gate == DR_GATE_NONE ? 1 : d[0];
        for (int32_t c = p->gate == DR_GATE_NONE ? 0 : n; c < s->K; c++)
            d[c] = all;
    }
}

static void load_block(const step *s, block *x, int32_t j, const gate *params)
{
    const dr_io *io = s->p->io;
    const dr_problem *p = &s->p->plan->problem;
    int32_t h = dr_key_head(p, j);
    load_tokens(s, &io->k, x, h, s->K, x->k[0]);
    if (io->o.data != NULL)
        load_tokens(s, &io->q, x, h, s->K, x->q[0]);
    load_decay(s, x, j, params);
    for (int32_t i = 0; i < x->count; i++) {
        dr_tensor t = io->beta;
        x->beta[i] = (float)dr_get(dr_at(&t, x->b, x->t0 + i, j, 0), t.dtype, 0);
        if (p->beta == DR_BETA_LOGIT)
            s->kern->sigmoid(1, (float)p->beta_scale, &x->beta[i], &x->beta[i], NULL);
        normalise(s, x->k[i], 1);
        if (io->o.data != NULL)
            normalise(s, x->q[i], p->scale);
        else
            memset(x->q[i], 0, (size_t)s->K * sizeof(float));
        const float *d = x->d[i], *k = x->k[i];
        float *restrict dk = x->dk[i];
        for (int32_t c = 0; c < s->K; c++)
            dk[c] = d[c] * k[c];
    }
}

/* ---- states ------------------------------------------------------------------------ */

static int64_t slot_of(const step *s, int64_t n)
{
    return s->p->io->state_index ? s->p->io->state_index[n] : n;
}

/* A head's state as [rows of channels, value columns]; absent for a sequence without a slot. */
static dr_cpu_view state_of(const step *s, const dr_tensor *t, int64_t n, int32_t j)
{
    int64_t slot = slot_of(s, n);
    return slot < 0 ? (dr_cpu_view){0} : dr_cpu_view_of(t, 2, 3, slot, j, 0);
}

static bool unit(const dr_tensor *t, int axis)
{
    return t->shape[axis] <= 1 || t->stride[axis] == 1;
}

/* Columns [c, c + n) of the state over the tokens of x; v and o are theirs. */
static void step_strip(const step *s, const block *x, int32_t j, int64_t c, int64_t n,
                       const float *in, int64_t ldi, float *out, int64_t ldo, bool rows,
                       const float *ahead)
{
    const dr_io *io = s->p->io;
    _Alignas(DR_ALIGN) float v[BLOCK][STRIP], o[BLOCK][STRIP];
    dr_cpu_view at = dr_cpu_view_at(dr_cpu_view_of(&io->v, 1, 3, x->b, x->t0, j), 0, c);
    dr_cpu_view_load(s->kern, &at, x->count, n, v[0], STRIP);
    for (int32_t i = 0; i < x->count; i++) {
        if (rows)
            s->kern->step_rows(s->K, (int)n, x->d[i], x->dk[i], x->k[i], x->q[i], x->beta[i], v[i],
                               in, ldi, out, ldo, o[i], ahead);
        else
            s->kern->step_columns(s->K, (int)n, x->d[i], x->dk[i], x->k[i], x->q[i], x->beta[i],
                                  v[i], in, ldi, out, ldo, o[i], ahead);
        in = out;
        ldi = ldo;
        ahead = NULL;
    }
    if (io->o.data != NULL) {
        at = dr_cpu_view_at(dr_cpu_view_of(&io->o, 1, 3, x->b, x->t0, j), 0, c);
        dr_cpu_view_store(s->kern, o[0], STRIP, x->count, n, &at);
    }
}

/* The state where it lies. next: what this lane is likely to want next, K floats a column. */
static void in_place(const step *s, const dr_piece *piece, block *x, int32_t j, const gate *params,
                     dr_cpu_view from, dr_cpu_view to, const float *next)
{
    const bool rows = s->rows;
    for (x->t0 = piece->begin; x->t0 < piece->end; x->t0 += BLOCK) {
        x->count = (int32_t)dr_min(BLOCK, piece->end - x->t0);
        load_block(s, x, j, params);
        for (int64_t c = s->p->col0; c < s->p->col1; c += STRIP) {
            const float *in = (const float *)dr_cpu_view_at(from, 0, c).data;
            float *out = (float *)dr_cpu_view_at(to, 0, c).data;
            const float *ahead = next != NULL ? next + (c - s->p->col0) * s->K : NULL;
            step_strip(s, x, j, c, dr_min(STRIP, s->p->col1 - c), in, rows ? from.col : from.row,
                       out, rows ? to.col : to.row, rows, ahead);
        }
        from = to;
        next = NULL;
    }
}

/* Any other state. */
static void by_strips(const step *s, const dr_piece *piece, block *x, int32_t j, const gate *params,
                      dr_cpu_view from, dr_cpu_view to)
{
    _Alignas(DR_ALIGN) float S[DR_MAX_DIM * ROOM];
    for (int64_t c = s->p->col0; c < s->p->col1; c += ROOM) {
        int64_t n = dr_min(ROOM, s->p->col1 - c);
        dr_cpu_view at = dr_cpu_view_at(from, 0, c);
        if (at.data != NULL)
            dr_cpu_view_load(s->kern, &at, s->K, n, S, ROOM);
        else
            memset(S, 0, sizeof S);
        for (x->t0 = piece->begin; x->t0 < piece->end; x->t0 += BLOCK) {
            x->count = (int32_t)dr_min(BLOCK, piece->end - x->t0);
            if (c == s->p->col0 || piece->end - piece->begin > BLOCK)
                load_block(s, x, j, params);
            step_strip(s, x, j, c, n, S, ROOM, S, ROOM, false, NULL);
        }
        at = dr_cpu_view_at(to, 0, c);
        if (at.data != NULL)
            dr_cpu_view_store(s->kern, S, ROOM, s->K, n, &at);
    }
}

/* The state of a task's head, if there is one and it is one block of memory. */
static const float *next_state(const step *s, int64_t task)
{
    const dr_tensor *t = &s->p->io->initial_state;
    if (task >= s->p->plan->n_pieces * s->heads ||
        (s->cols ? t->stride[2] != s->V : t->stride[3] != s->K))
        return NULL;
    dr_cpu_view v = state_of(s, t, task / s->heads, s->p->head0 + (int32_t)(task % s->heads));
    return (const float *)dr_cpu_view_at(v, 0, s->p->col0).data;
}

static void step_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const step *s = arg;
    const dr_io *io = s->p->io;
    int64_t n = task / s->heads;
    int32_t j = s->p->head0 + (int32_t)(task % s->heads);
    const dr_piece *piece = &s->p->plan->pieces[n];
    dr_cpu_view from = state_of(s, &io->initial_state, n, j);
    dr_cpu_view to = state_of(s, &io->final_state, n, j);
    block x;
    gate params;
    x.b = piece->batch;
    if (s->raw)
        load_gate(s, j, &params);
    if ((s->rows || s->cols) && from.data != NULL && piece->end > piece->begin) {
        in_place(s, piece, &x, j, &params, from, to, next_state(s, task + s->lanes));
    } else {
        by_strips(s, piece, &x, j, &params, from, to);
    }
}

dr_status dr_cpu_step(dr_pass *p)
{
    const dr_problem *problem = &p->plan->problem;
    const dr_tensor *a = &p->io->initial_state, *b = &p->io->final_state;
    bool f32 = a->dtype == DR_F32 && b->dtype == DR_F32;
    step s = {.p = p, .kern = p->dev->kern, .K = problem->key_dim, .V = problem->value_dim,
              .heads = p->head1 - p->head0,
              .raw = problem->gate == DR_GATE_SOFTPLUS || problem->gate == DR_GATE_LOWER_BOUND,
              .cols = f32 && unit(a, 3) && unit(b, 3)};
    s.rows = f32 && !s.cols && unit(a, 2) && unit(b, 2);
    int64_t tasks = p->plan->n_pieces * s.heads;
    s.lanes = dr_pool_lanes(&p->dev->pool, tasks);
    dr_pool_run(&p->dev->pool, tasks, step_task, &s);
    return DR_OK;
}
