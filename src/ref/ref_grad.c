/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_grad.c - the adjoint of the recurrence, token by token, and from there through
 * gate, beta and l2norm to the inputs as the caller passed them. dS is the gradient of
 * the state; states themselves are replayed chunk by chunk. Letters: ref.h, and G value
 * heads share a key head.
 */
#include "ref/ref.h"

/* ---- one token --------------------------------------------------------------------- */

/* dS gains what the output of token x hands back; e = dS^T k. */
static void receive(const dr_ref_token *x, int32_t K, int32_t n, double *dS, double *e)
{
    memset(e, 0, (size_t)n * sizeof *e);
    for (int32_t i = 0; i < K; i++) {
        double *row = dS + (int64_t)i * n;
        for (int32_t c = 0; c < n; c++) {
            row[c] += x->scale * x->q[i] * x->d_o[c];
            e[c] += x->k[i] * row[c];
        }
    }
}

/* dS = D (dS - k dr^T): from after the write of token x to before its decay. */
static void release(const dr_ref_token *x, int32_t K, int32_t n, const double *dr, double *dS)
{
    for (int32_t i = 0; i < K; i++)
        for (int32_t c = 0; c < n; c++) {
            double *at = &dS[(int64_t)i * n + c];
            *at = x->decay[i] * (*at - x->k[i] * dr[c]);
        }
}

void dr_ref_retreat(const dr_ref_token *x, int32_t K, int32_t n, double *dS)
{
    receive(x, K, n, dS, x->r);
    for (int32_t c = 0; c < n; c++)
        x->r[c] *= x->beta; /* dr = beta e */
    release(x, K, n, x->r, dS);
}

/* Everything one token hands back: dS as dr_ref_retreat, dq and dk added to, dv [V],
 * d_decay [K] and d_beta written. before and after are its states. */
static void token_gradients(const dr_ref_token *x, int32_t K, int32_t V, const double *before,
                            const double *after, double *dS, double *dq, double *dk, double *dv,
                            double *d_decay, double *d_beta)
{
    double *r = x->r; /* the residual, v - (D before)^T k */
    memcpy(r, x->v, (size_t)V * sizeof *r);
    for (int32_t i = 0; i < K; i++)
        for (int32_t c = 0; c < V; c++)
            r[c] -= x->k[i] * (x->decay[i] * before[(int64_t)i * V + c]);
    receive(x, K, V, dS, dv); /* dv holds e at first */
    *d_beta = 0;
    for (int32_t c = 0; c < V; c++) {
        *d_beta += dv[c] * r[c];
        dv[c] *= x->beta;
    }
    for (int32_t i = 0; i < K; i++) {
        const double *S0 = before + (int64_t)i * V, *S1 = after + (int64_t)i * V;
        const double *dS1 = dS + (int64_t)i * V;
        double dqi = 0, dki = 0, d_factor = 0;
        for (int32_t c = 0; c < V; c++) {
            dqi += x->scale * S1[c] * x->d_o[c];
            dki += dS1[c] * x->beta * r[c] - x->decay[i] * S0[c] * dv[c];
            /* Of the factor itself, dR * S0, and so exact where the factor is 0. */
            d_factor += (dS1[c] - x->k[i] * dv[c]) * S0[c];
        }
        dq[i] += dqi;
        dk[i] += dki;
        d_decay[i] = d_factor;
    }
    release(x, K, V, dv, dS);
}

/* ---- to the inputs as passed ------------------------------------------------------------ */

typedef struct grad {
    dr_pass *p;
    dr_ref_trip trip;
} grad;

/* Gradient of the g that was passed at one channel, given that of the factor; the
 * parameters' shares are added to. */
static double gate_gradient(const dr_pass *p, double g, double factor, double d_factor, int32_t j,
                            int32_t c, double *da_log, double *ddt_bias)
{
    const dr_problem *q = &p->plan->problem;
    if (q->gate == DR_GATE_FACTOR)
        return d_factor;
    double d_log = d_factor * factor;
    if (q->gate == DR_GATE_LOG)
        return d_log;
    dr_ref_gate_params x = dr_ref_load_gate_params(&p->io->a_log, &p->io->dt_bias, j, c);
    dr_ref_gate_point at = dr_ref_gate_at(q->gate, q->lower_bound, x.a, g + x.dt_bias);
    *da_log += d_log * at.da_log;
    ddt_bias[c] += d_log * at.dx;
    return d_log * at.dx;
}

/* dv, dg and dbeta of a token; d_decay is spent. */
static void store_token(const grad *w, const dr_piece *piece, int64_t m, int64_t t, int32_t j,
                        const dr_ref_token *x, const double *dv, double *d_decay, double d_beta)
{
    const dr_pass *p = w->p;
    const dr_problem *q = &p->plan->problem;
    const dr_io *io = p->io;
    int32_t width = dr_gate_width(q);
    dr_ref_store_row(&io->dv, piece->batch, t, j, 0, q->value_dim, dv);
    if (q->beta == DR_BETA_LOGIT)
        d_beta *= x->beta * (1 - x->beta / q->beta_scale);
    dr_ref_store_row(&io->dbeta, piece->batch, t, j, 0, 1, &d_beta);
    if (q->gate == DR_GATE_NONE)
        return;
    if (width == 1)
        for (int32_t i = 1; i < q->key_dim; i++)
            d_decay[0] += d_decay[i];
    int64_t share = m * q->value_heads + j;
    for (int32_t c = 0; c < width; c++) {
        double g;
        dr_ref_load_row(&io->g, piece->batch, t, j, c, 1, &g);
        d_decay[c] = gate_gradient(p, g, x->decay[c], d_decay[c], j, c, &w->trip.da_log[share],
                                   &w->trip.ddt_bias[share * width]);
    }
    dr_ref_store_row(&io->dg, piece->batch, t, j, 0, width, d_decay);
}

/* dq or dk of a token and key head, through the l2norm if there is one; y is room for K. */
static void store_key(const dr_pass *p, const dr_tensor *x, const dr_tensor *dx,
                      const dr_piece *piece, int64_t t, int32_t h, double *dy, double *y)
{
    const dr_problem *q = &p->plan->problem;
    int32_t K = q->key_dim;
    if (q->l2norm) {
        dr_ref_load_row(x, piece->batch, t, h, 0, K, y);
        double rstd = dr_ref_normalise(y, K, q->l2norm_eps), dot = 0;
        for (int32_t i = 0; i < K; i++)
            dot += y[i] * dy[i];
        for (int32_t i = 0; i < K; i++)
            dy[i] = rstd * (dy[i] - y[i] * dot);
    }
    dr_ref_store_row(dx, piece->batch, t, h, 0, K, dy);
}

/* ---- one piece and key head ------------------------------------------------------------ */

/* State entering chunk i of a piece for value head j, which is g-th of its group. */
static double *chunk_entry(const grad *w, dr_ref_lane *at, const dr_piece *piece, int64_t i,
                           int32_t j, int32_t g)
{
    const dr_problem *q = &w->p->plan->problem;
    if (q->keep == DR_KEEP_STATES)
        return dr_at(&w->trip.saved, piece->chunk0 + i, j, 0, 0);
    return at->entries + (g * w->p->plan->longest + i) * q->key_dim * q->value_dim;
}

/* Where saved has only the state entering the piece, the others are computed again. */
static void find_entries(const grad *w, dr_ref_lane *at, const dr_piece *piece, int64_t m,
                         int32_t j, int32_t g)
{
    const dr_problem *q = &w->p->plan->problem;
    int32_t K = q->key_dim, V = q->value_dim;
    if (q->keep == DR_KEEP_STATES)
        return;
    dr_ref_load_state(&w->trip.saved, m, j, K, 0, V, at->S);
    for (int64_t i = 0; i < piece->chunks; i++) {
        memcpy(chunk_entry(w, at, piece, i, j, g), at->S, (size_t)K * V * sizeof *at->S);
        int64_t first = piece->begin + i * q->chunk, end = dr_min(first + q->chunk, piece->end);
        for (int64_t t = first; t < end; t++) {
            dr_ref_load_token(w->p, piece->batch, t, j, 0, V, &at->token);
            dr_ref_advance(&at->token, K, V, at->S);
        }
    }
}

/* Chunk i for one value head: states forwards into history, gradients backwards. */
static void chunk_gradients(const grad *w, dr_ref_lane *at, const dr_piece *piece, int64_t m,
                            int64_t i, int32_t j, int32_t g)
{
    const dr_problem *q = &w->p->plan->problem;
    int32_t K = q->key_dim, V = q->value_dim;
    int64_t first = piece->begin + i * q->chunk, c = dr_min(q->chunk, piece->end - first);
    int64_t state = (int64_t)K * V;
    double *S = at->history, *dS = at->dS + g * state;
    memcpy(S, chunk_entry(w, at, piece, i, j, g), (size_t)state * sizeof *S);
    for (int64_t s = 0; s < c; s++) {
        memcpy(S + (s + 1) * state, S + s * state, (size_t)state * sizeof *S);
        dr_ref_load_token(w->p, piece->batch, first + s, j, 0, V, &at->token);
        dr_ref_advance(&at->token, K, V, S + (s + 1) * state);
    }
    for (int64_t s = c; s-- > 0;) {
        double d_beta, *dv = at->row;
        dr_ref_load_token(w->p, piece->batch, first + s, j, 0, V, &at->token);
        token_gradients(&at->token, K, V, S + s * state, S + (s + 1) * state, dS, at->dq + s * K,
                        at->dk + s * K, dv, at->d_decay, &d_beta);
        store_token(w, piece, m, first + s, j, &at->token, dv, at->d_decay, d_beta);
    }
}

static void chunk_backwards(const grad *w, dr_ref_lane *at, const dr_piece *piece, int64_t m,
                            int64_t i, int32_t h)
{
    const dr_problem *q = &w->p->plan->problem;
    int32_t K = q->key_dim;
    int64_t first = piece->begin + i * q->chunk, c = dr_min(q->chunk, piece->end - first);
    memset(at->dq, 0, (size_t)(c * K) * sizeof *at->dq);
    memset(at->dk, 0, (size_t)(c * K) * sizeof *at->dk);
    for (int32_t g = 0; g < q->value_heads / q->heads; g++)
        chunk_gradients(w, at, piece, m, i, dr_value_head(q, h, g), g);
    for (int64_t s = 0; s < c; s++) {
        store_key(w->p, &w->p->io->q, &w->p->io->dq, piece, first + s, h, at->dq + s * K, at->row);
        store_key(w->p, &w->p->io->k, &w->p->io->dk, piece, first + s, h, at->dk + s * K, at->row);
    }
}

static void gradients_of_piece(void *arg, int64_t task, int32_t lane)
{
    const grad *w = arg;
    const dr_pass *p = w->p;
    const dr_problem *q = &p->plan->problem;
    int32_t h = (int32_t)(task % q->heads), G = q->value_heads / q->heads;
    int32_t K = q->key_dim, V = q->value_dim, width = dr_gate_width(q);
    int64_t m = task / q->heads, state = (int64_t)K * V;
    const dr_piece *piece = &p->plan->pieces[m];
    dr_ref_lane *at = &w->trip.lanes[lane];
    int32_t j0 = dr_value_head(q, h, 0);
    if (j0 < p->head0 || j0 >= p->head1 || m < p->piece0 || m >= p->piece1)
        return;
    for (int32_t g = 0; g < G; g++) {
        int32_t j = dr_value_head(q, h, g);
        int64_t share = m * q->value_heads + j;
        if (p->staged)
            dr_ref_load_state(&w->trip.entry, m, j, K, 0, V, at->dS + g * state);
        else
            dr_ref_load_entry(p, m, j, 0, V, at->dS + g * state);
        w->trip.da_log[share] = 0;
        memset(&w->trip.ddt_bias[share * width], 0, (size_t)width * sizeof(double));
        find_entries(w, at, piece, m, j, g);
    }
    for (int64_t i = piece->chunks; i-- > 0;)
        chunk_backwards(w, at, piece, m, i, h);
    for (int32_t g = 0; !p->staged && g < G; g++)
        dr_ref_store_exit(p, m, dr_value_head(q, h, g), 0, V, at->dS + g * state);
}

/* The shares of the pieces, always in the same order. */
static void sum_gate_parameters(const grad *w)
{
    const dr_pass *p = w->p;
    const dr_problem *q = &p->plan->problem;
    const dr_tensor *da_log = &p->io->da_log, *ddt_bias = &p->io->ddt_bias;
    int64_t N = p->plan->n_pieces, HV = q->value_heads, width = dr_gate_width(q);
    for (int32_t j = p->head0; j < p->head1; j++) {
        double sum = 0;
        for (int64_t m = 0; m < N; m++)
            sum += w->trip.da_log[m * HV + j];
        if (da_log->data != NULL)
            dr_put(dr_at(da_log, j, 0, 0, 0), da_log->dtype, 0, sum);
        for (int64_t c = 0; ddt_bias->data != NULL && c < width; c++) {
            sum = 0;
            for (int64_t m = 0; m < N; m++)
                sum += w->trip.ddt_bias[(m * HV + j) * width + c];
            dr_put(dr_at(ddt_bias, j, c, 0, 0), ddt_bias->dtype, 0, sum);
        }
    }
}

static dr_status run_gradients(dr_pass *p)
{
    const dr_problem *q = &p->plan->problem;
    if (p->col0 != 0 || p->col1 != q->value_dim)
        return dr_fail(DR_ERR_SUPPORT, "columns: gradients sum over all of a state (0 to %d), "
                       "got %d to %d", q->value_dim, p->col0, p->col1);
    grad w = {p, dr_ref_carve(p)};
    dr_pool_run(&p->dev->pool, p->plan->n_pieces * q->heads, gradients_of_piece, &w);
    sum_gate_parameters(&w);
    return DR_OK;
}

/* ---- stages ----------------------------------------------------------------------------- */

/* The gradient of the state alone, from a piece's end to its start: it needs no states. */
static void retreat_piece(void *arg, int64_t task, int32_t lane)
{
    const grad *w = arg;
    const dr_pass *p = w->p;
    int32_t heads = p->head1 - p->head0, j = p->head0 + (int32_t)(task % heads);
    int64_t m = p->piece0 + task / heads;
    const dr_piece *piece = &p->plan->pieces[m];
    int32_t K = p->plan->problem.key_dim, c0 = p->col0, n = p->col1 - p->col0;
    dr_ref_lane *at = &w->trip.lanes[lane];
    dr_ref_token x = at->token;
    dr_ref_load_entry(p, m, j, c0, n, at->S);
    dr_ref_store_state(&w->trip.entry, m, j, K, c0, n, at->S);
    for (int64_t t = piece->end; t-- > piece->begin;) {
        dr_ref_load_token(p, piece->batch, t, j, c0, n, &x);
        dr_ref_retreat(&x, K, n, at->S);
    }
    dr_ref_store_exit(p, m, j, c0, n, at->S);
}

dr_status dr_ref_adjoint_recur(dr_pass *p)
{
    if (!p->staged)
        return run_gradients(p);
    grad w = {p, dr_ref_carve(p)};
    int64_t tasks = (p->piece1 - p->piece0) * (p->head1 - p->head0);
    dr_pool_run(&p->dev->pool, tasks, retreat_piece, &w);
    return DR_OK;
}

dr_status dr_ref_adjoint_output(dr_pass *p) { return p->staged ? run_gradients(p) : DR_OK; }
