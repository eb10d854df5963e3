/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref.c - the oracle backend: its memory, the token, the recurrence, and everything that
 * runs forwards: stages, step, maps of both directions. The adjoint is in ref_grad.c, the
 * row operations are in ref_rows.c. Letters: ref.h.
 *
 * NOTE [Two walks]: the staged trip splits recur from output simply by walking the tokens
 * twice. recur keeps the state that enters each piece (in fp64), output starts from it.
 */
#include "ref/ref.h"

#define DEFAULT_CHUNK 64

/* ---- memory ------------------------------------------------------------------------ */

static dr_ref_lane carve_lane(dr_pass *p)
{
    const dr_plan *plan = p->plan;
    const dr_problem *q = &plan->problem;
    dr_arena *a = &p->scratch;
    int64_t K = q->key_dim, V = q->value_dim;
    dr_ref_lane x = {0};
    x.token.q = DR_TAKE(a, double, K, 1);
    x.token.k = DR_TAKE(a, double, K, 1);
    x.token.decay = DR_TAKE(a, double, K, 1);
    x.token.v = DR_TAKE(a, double, V + K, 1);
    x.token.d_o = DR_TAKE(a, double, V + K, 1);
    x.token.r = DR_TAKE(a, double, V + K, 1);
    x.S = DR_TAKE(a, double, K, V + K);
    x.row = DR_TAKE(a, double, dr_max(K, V), 1);
    if (p->dir > 0)
        return x;
    int64_t G = q->value_heads / q->heads, c = dr_min(q->chunk, q->tokens);
    int64_t L = q->keep == DR_KEEP_STATES ? 0 : plan->longest;
    x.d_decay = DR_TAKE(a, double, K, 1);
    x.dS = DR_TAKE(a, double, G, K * V);
    x.entries = DR_TAKE(a, double, L * G, K * V);
    x.history = DR_TAKE(a, double, c + 1, K * V);
    x.dq = DR_TAKE(a, double, c, K);
    x.dk = DR_TAKE(a, double, c, K);
    return x;
}

dr_ref_trip dr_ref_carve(dr_pass *p)
{
    const dr_plan *plan = p->plan;
    const dr_problem *q = &plan->problem;
    int64_t N = plan->n_pieces, HV = q->value_heads, K = q->key_dim, V = q->value_dim;
    dr_ref_trip t = {0};
    int64_t kept = q->keep == DR_KEEP_STATES ? plan->n_chunks : N;
    double *saved = DR_TAKE(&p->saved, double, kept * HV, K * V);
    t.saved = dr_tensor_make(saved, DR_F64, 4, kept, HV, K, V);
    if (p->staged) {
        double *entry = DR_TAKE(&p->scratch, double, N * HV, K * V);
        t.entry = dr_tensor_make(entry, DR_F64, 4, N, HV, K, V);
    }
    if (p->dir < 0) {
        t.da_log = DR_TAKE(&p->scratch, double, N, HV);
        t.ddt_bias = DR_TAKE(&p->scratch, double, N * HV, dr_gate_width(q));
    }
    int32_t lanes = dr_pool_lanes(&p->dev->pool, N * HV);
    t.lanes = DR_TAKE(&p->scratch, dr_ref_lane, lanes, 1);
    for (int32_t i = 0; i < lanes; i++) {
        dr_ref_lane lane = carve_lane(p);
        if (t.lanes != NULL)
            t.lanes[i] = lane;
    }
    return t;
}

static dr_status layout(dr_pass *p)
{
    dr_ref_carve(p);
    return DR_OK;
}

/* ---- states ------------------------------------------------------------------------ */

/* [N,HV,K,n] over memory that holds [N,HV,n,K]. */
static dr_tensor v_major(const float *data, int64_t N, int64_t HV, int64_t K, int64_t n)
{
    dr_tensor t = dr_tensor_make((void *)data, DR_F32, 4, N, HV, K, n);
    t.stride[2] = 1;
    t.stride[3] = K;
    return t;
}

void dr_ref_load_state(const dr_tensor *from, int64_t slot, int32_t j, int32_t K, int32_t c0,
                       int32_t n, double *S)
{
    bool zero = from->data == NULL || slot < 0;
    for (int32_t i = 0; i < K; i++)
        for (int32_t c = 0; c < n; c++)
            S[(int64_t)i * n + c] =
                zero ? 0 : dr_get(dr_at(from, slot, j, i, c0 + c), from->dtype, 0);
}

void dr_ref_store_state(const dr_tensor *to, int64_t slot, int32_t j, int32_t K, int32_t c0,
                        int32_t n, const double *S)
{
    if (to->data == NULL || slot < 0)
        return;
    for (int32_t i = 0; i < K; i++)
        for (int32_t c = 0; c < n; c++)
            dr_put(dr_at(to, slot, j, i, c0 + c), to->dtype, 0, S[(int64_t)i * n + c]);
}

/* Slot of io's states; -1: a padding sequence. */
static int64_t slot_of(const dr_pass *p, int64_t piece)
{
    return p->dir > 0 && p->io->state_index != NULL ? p->io->state_index[piece] : piece;
}

void dr_ref_load_entry(const dr_pass *p, int64_t piece, int32_t j, int32_t c0, int32_t n, double *S)
{
    const dr_problem *q = &p->plan->problem;
    dr_tensor given = v_major(dr_pass_entry(p, piece, j), 1, 1, q->key_dim, q->value_dim);
    const dr_tensor *own = p->dir > 0 ? &p->io->initial_state : &p->io->d_final_state;
    if (given.data != NULL)
        dr_ref_load_state(&given, 0, 0, q->key_dim, c0, n, S);
    else
        dr_ref_load_state(own, slot_of(p, piece), j, q->key_dim, c0, n, S);
}

void dr_ref_store_exit(const dr_pass *p, int64_t piece, int32_t j, int32_t c0, int32_t n,
                       const double *S)
{
    const dr_problem *q = &p->plan->problem;
    dr_tensor exit = v_major(dr_pass_exit(p, piece, j), 1, 1, q->key_dim, q->value_dim);
    const dr_tensor *own = p->dir > 0 ? &p->io->final_state : &p->io->d_initial_state;
    dr_ref_store_state(&exit, 0, 0, q->key_dim, c0, n, S);
    dr_ref_store_state(own, slot_of(p, piece), j, q->key_dim, c0, n, S);
}

/* ---- the token ------------------------------------------------------------------------ */

void dr_ref_load_row(const dr_tensor *from, int64_t b, int64_t t, int32_t h, int32_t c0,
                     int32_t n, double *out)
{
    for (int32_t c = 0; c < n; c++)
        out[c] = from->data ? dr_get(dr_at(from, b, t, h, c0 + c), from->dtype, 0) : 0;
}

void dr_ref_store_row(const dr_tensor *to, int64_t b, int64_t t, int32_t h, int32_t c0,
                      int32_t n, const double *in)
{
    if (to->data != NULL)
        for (int32_t c = 0; c < n; c++)
            dr_put(dr_at(to, b, t, h, c0 + c), to->dtype, 0, in[c]);
}

/* What g and the gate's parameters say at one token, head and channel, as a factor. */
static double decay_factor(const dr_problem *q, const dr_io *io, double g, int32_t j, int32_t c)
{
    if (q->gate == DR_GATE_NONE)
        return 1;
    if (q->gate == DR_GATE_FACTOR)
        return g;
    if (q->gate == DR_GATE_LOG)
        return exp(g);
    dr_ref_gate_params x = dr_ref_load_gate_params(&io->a_log, &io->dt_bias, j, c);
    return exp(dr_ref_gate_at(q->gate, q->lower_bound, x.a, g + x.dt_bias).g);
}

void dr_ref_load_token(const dr_pass *p, int64_t b, int64_t t, int32_t j, int32_t c0, int32_t n,
                       dr_ref_token *x)
{
    const dr_problem *q = &p->plan->problem;
    const dr_io *io = p->io;
    int32_t K = q->key_dim, h = dr_key_head(q, j), width = dr_gate_width(q);
    dr_ref_load_row(&io->q, b, t, h, 0, K, x->q);
    dr_ref_load_row(&io->k, b, t, h, 0, K, x->k);
    if (q->l2norm) {
        dr_ref_normalise(x->q, K, q->l2norm_eps);
        dr_ref_normalise(x->k, K, q->l2norm_eps);
    }
    dr_ref_load_row(&io->v, b, t, j, c0, n, x->v);
    if (p->dir < 0)
        dr_ref_load_row(&io->d_o, b, t, j, c0, n, x->d_o);
    dr_ref_load_row(&io->g, b, t, j, 0, width, x->decay);
    for (int32_t i = 0; i < width; i++)
        x->decay[i] = decay_factor(q, io, x->decay[i], j, i);
    for (int32_t i = width; i < K; i++)
        x->decay[i] = x->decay[0];
    dr_ref_load_row(&io->beta, b, t, j, 0, 1, &x->beta);
    if (q->beta == DR_BETA_LOGIT)
        x->beta = q->beta_scale * dr_ref_sigmoid(x->beta);
    x->scale = q->scale;
}

/* ---- the recurrence ------------------------------------------------------------------- */

void dr_ref_advance(const dr_ref_token *x, int32_t K, int32_t n, double *S)
{
    double *r = x->r;
    memcpy(r, x->v, (size_t)n * sizeof *r);
    for (int32_t i = 0; i < K; i++) {
        double *row = S + (int64_t)i * n;
        for (int32_t c = 0; c < n; c++) {
            row[c] *= x->decay[i];    /* R = D S */
            r[c] -= x->k[i] * row[c]; /* r = v - R^T k */
        }
    }
    for (int32_t i = 0; i < K; i++)
        for (int32_t c = 0; c < n; c++)
            S[(int64_t)i * n + c] += x->k[i] * x->beta * r[c]; /* S = R + k (beta r)^T */
}

/* o = scale S^T q */
static void read_out(const dr_ref_token *x, int32_t K, int32_t n, const double *S, double *o)
{
    memset(o, 0, (size_t)n * sizeof *o);
    for (int32_t i = 0; i < K; i++)
        for (int32_t c = 0; c < n; c++)
            o[c] += x->scale * x->q[i] * S[(int64_t)i * n + c];
}

/* ---- forward stages -------------------------------------------------------------------- */

/* What a walk over the tokens is for. */
typedef struct walk {
    dr_pass *p;
    dr_ref_trip trip;
    bool states;  /* from entry to exit, leaving everything that is asked for on the way */
    bool outputs; /* writes o */
} walk;

/* A state that enters a chunk goes where it is wanted. */
static void pass_chunk(const walk *w, int64_t chunk, int32_t j, const double *S)
{
    const dr_pass *p = w->p;
    const dr_problem *q = &p->plan->problem;
    int32_t K = q->key_dim, c0 = p->col0, n = p->col1 - p->col0;
    dr_ref_store_state(&p->io->chunk_states, chunk, j, K, c0, n, S);
    if (q->keep == DR_KEEP_STATES)
        dr_ref_store_state(&w->trip.saved, chunk, j, K, c0, n, S);
}

static void walk_piece(void *arg, int64_t task, int32_t lane)
{
    const walk *w = arg;
    const dr_pass *p = w->p;
    const dr_problem *q = &p->plan->problem;
    int32_t heads = p->head1 - p->head0, j = p->head0 + (int32_t)(task % heads);
    int64_t m = p->piece0 + task / heads;
    const dr_piece *piece = &p->plan->pieces[m];
    int32_t K = q->key_dim, c0 = p->col0, n = p->col1 - p->col0;
    dr_ref_lane *at = &w->trip.lanes[lane];
    double *S = at->S;
    if (w->states) {
        dr_ref_load_entry(p, m, j, c0, n, S);
        dr_ref_store_state(&w->trip.entry, m, j, K, c0, n, S);
        if (q->keep != DR_KEEP_STATES)
            dr_ref_store_state(&w->trip.saved, m, j, K, c0, n, S);
    } else {
        dr_ref_load_state(&w->trip.entry, m, j, K, c0, n, S);
    }
    for (int64_t t = piece->begin; t < piece->end; t++) {
        if (w->states && (t - piece->begin) % q->chunk == 0)
            pass_chunk(w, piece->chunk0 + (t - piece->begin) / q->chunk, j, S);
        dr_ref_load_token(p, piece->batch, t, j, c0, n, &at->token);
        dr_ref_advance(&at->token, K, n, S);
        if (w->outputs && p->io->o.data != NULL) {
            read_out(&at->token, K, n, S, at->row);
            dr_ref_store_row(&p->io->o, piece->batch, t, j, c0, n, at->row);
        }
    }
    if (w->states)
        dr_ref_store_exit(p, m, j, c0, n, S);
}

static dr_status run_walk(dr_pass *p, bool states, bool outputs)
{
    walk w = {p, dr_ref_carve(p), states, outputs};
    int64_t tasks = (p->piece1 - p->piece0) * (p->head1 - p->head0);
    dr_pool_run(&p->dev->pool, tasks, walk_piece, &w);
    return DR_OK;
}

/* Nothing here is prepared: a token is activated when it is read. */
static dr_status prepare(dr_pass *p)
{
    (void)p;
    return DR_OK;
}

static dr_status recur(dr_pass *p) { return run_walk(p, true, !p->staged); }

static dr_status output(dr_pass *p) { return p->staged ? run_walk(p, false, true) : DR_OK; }

/* The same walk: one token at a time is what this backend does anyway. */
static dr_status step(dr_pass *p) { return run_walk(p, true, true); }

/* ---- maps ------------------------------------------------------------------------------ */

/* The map of a piece is what the recurrence makes of the columns [0 | I]: those of the
 * window start from zero and see v (or d_o), K more start from the identity and see
 * nothing. Their exits are the rows of [B; A], or [C; R]. */
static void map_piece(void *arg, int64_t task, int32_t lane)
{
    const walk *w = arg;
    const dr_pass *p = w->p;
    const dr_problem *q = &p->plan->problem;
    int32_t heads = p->head1 - p->head0, j = p->head0 + (int32_t)(task % heads);
    int64_t m = task / heads;
    const dr_piece *piece = &p->plan->pieces[m];
    int32_t K = q->key_dim, V = q->value_dim, n = p->col1 - p->col0, all = n + K;
    dr_ref_token *x = &w->trip.lanes[lane].token;
    double *S = w->trip.lanes[lane].S;
    dr_tensor map = v_major(dr_pass_map(p, m, j), 1, 1, K, V + K);
    if (map.data == NULL)
        return;
    memset(S, 0, (size_t)K * all * sizeof *S);
    for (int32_t i = 0; i < K; i++)
        S[(int64_t)i * all + n + i] = 1;
    memset(x->v + n, 0, (size_t)K * sizeof *x->v);
    memset(x->d_o + n, 0, (size_t)K * sizeof *x->d_o);
    for (int64_t s = 0; s < piece->end - piece->begin; s++) {
        int64_t t = p->dir > 0 ? piece->begin + s : piece->end - 1 - s;
        dr_ref_load_token(p, piece->batch, t, j, p->col0, n, x);
        (p->dir > 0 ? dr_ref_advance : dr_ref_retreat)(x, K, all, S);
    }
    for (int32_t i = 0; i < K; i++)
        for (int32_t c = 0; c < all; c++)
            dr_put(dr_at(&map, 0, 0, i, c < n ? p->col0 + c : V + c - n), DR_F32, 0,
                   S[(int64_t)i * all + c]);
}

dr_status dr_ref_summarize(dr_pass *p)
{
    walk w = {.p = p, .trip = dr_ref_carve(p)};
    int64_t tasks = p->plan->n_pieces * (p->head1 - p->head0);
    dr_pool_run(&p->dev->pool, tasks, map_piece, &w);
    return DR_OK;
}

typedef struct product {
    int32_t K, V, rows;
    const float *in, *map;
    float *out;
} product;

static void multiply_row(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const product *x = arg;
    int64_t m = task / x->rows, row = task % x->rows;
    const float *B = x->map + m * (x->V + x->K) * x->K, *A = B + (int64_t)x->V * x->K;
    const float *in = x->in ? x->in + task * x->K : NULL;
    for (int32_t c = 0; c < x->K; c++) {
        double sum = row < x->V ? B[row * x->K + c] : 0;
        for (int32_t i = 0; in != NULL && i < x->K; i++)
            sum += (double)in[i] * A[(int64_t)i * x->K + c];
        x->out[task * x->K + c] = (float)sum;
    }
}

static dr_status apply(const dr_device *dev, int64_t n, int32_t K, int32_t V, int32_t rows,
                       const float *in, const float *map, float *out)
{
    product x = {K, V, rows, in, map, out};
    dr_pool_run(&dev->pool, n * rows, multiply_row, &x);
    return DR_OK;
}

/* ---- the device ------------------------------------------------------------------------ */

static dr_status open_device(const dr_pool *pool, dr_device **out)
{
    *out = dr_alloc(sizeof **out);
    if (*out == NULL)
        return dr_fail(DR_ERR_MEMORY, "ref: no memory for %zu bytes", sizeof **out);
    (*out)->pool = *pool;
    return DR_OK;
}

static void close_device(dr_device *dev) { dr_free(dev); }

static const char *isa(const dr_device *dev)
{
    (void)dev;
    return "c";
}

static const char *isa_reason(const dr_device *dev)
{
    (void)dev;
    return "the reference is plain C in fp64 on every machine";
}

/* Whatever dr_problem_complete lets through. */
static dr_status supports(const dr_device *dev, const dr_problem *p)
{
    (void)dev;
    (void)p;
    return DR_OK;
}

static bool takes(const dr_device *dev, dr_dtype dtype)
{
    (void)dev;
    return dr_dtype_size(dtype) != 0;
}

static int32_t chunk_length(const dr_device *dev, const dr_problem *p)
{
    (void)dev;
    return p->chunk != 0 ? p->chunk : DEFAULT_CHUNK;
}

const dr_backend dr_backend_ref = {
    .abi = DR_BACKEND_ABI,
    .name = "ref",
    .open = open_device,
    .close = close_device,
    .isa = isa,
    .isa_reason = isa_reason,
    .supports = supports,
    .takes = takes,
    .chunk = chunk_length,
    .forward = {layout, prepare, dr_ref_summarize, recur, output},
    .adjoint = {layout, prepare, dr_ref_summarize, dr_ref_adjoint_recur, dr_ref_adjoint_output},
    .step = step,
    .apply = apply,
    .conv = dr_ref_conv,
    .gate = dr_ref_gate,
    .beta = dr_ref_beta,
    .l2norm = dr_ref_l2norm,
    .norm = dr_ref_norm,
    .matmul = dr_ref_matmul,
};
