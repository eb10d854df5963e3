/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref_rows.c - the row operations in fp64, both directions, element by element. Nothing
 * is allocated: a task computes again what it needs, and a gradient that sums over rows
 * (of a weight, a bias, a gate parameter) belongs to one task as a whole.
 */
#include "ref/ref.h"

static double get(const dr_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    return dr_get(dr_at(t, i0, i1, i2, i3), t->dtype, 0);
}

/* Absent tensors read as zero where the contract says so, and drop what is written. */
static double get_or_0(const dr_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    return t->data ? get(t, i0, i1, i2, i3) : 0;
}

static void put(const dr_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3, double x)
{
    if (t->data != NULL)
        dr_put(dr_at(t, i0, i1, i2, i3), t->dtype, 0, x);
}

typedef struct act_point {
    double y, dy_dx;
} act_point;

static act_point activate(dr_activation form, double x)
{
    if (form == DR_ACT_NONE)
        return (act_point){x, 1};
    double s = dr_ref_sigmoid(x), c = dr_ref_sigmoid(-x); /* c = 1 - s, to full precision */
    if (form == DR_ACT_SIGMOID)
        return (act_point){s, s * c};
    return (act_point){x * s, s * (1 + x * c)};
}

/* ---- convolution ------------------------------------------------------------------- */

/* One sequence of a convolution: tokens t in [0,T), history t < 0. */
typedef struct conv_seq {
    const dr_conv_args *a;
    int64_t n, b, begin, T, W, slot;
} conv_seq;

typedef struct conv_job {
    const dr_conv_args *a;
    int64_t sequences;
} conv_job;

static conv_seq conv_sequence(const dr_conv_args *a, int64_t n)
{
    conv_seq s = {.a = a, .n = n, .b = n, .T = a->x.shape[1], .W = a->weight.shape[1]};
    if (a->offsets != NULL) {
        s.b = 0;
        s.begin = a->offsets[n];
        s.T = a->offsets[n + 1] - s.begin;
    }
    s.slot = a->state_index ? a->state_index[n] : n;
    return s;
}

/* Column of a state of this width that holds token t as of the end of `tokens` tokens: the
 * last column is the newest. Negative: further back than the state reaches. */
static int64_t column(const dr_tensor *state, int64_t tokens, int64_t t)
{
    return state->shape[2] - tokens + t;
}

static double source(const conv_seq *s, int64_t t, int64_t d)
{
    if (t >= 0)
        return get(&s->a->x, s->b, s->begin + t, d, 0);
    const dr_tensor *state = &s->a->initial_state;
    int64_t at = state->data != NULL && s->slot >= 0 ? column(state, 0, t) : -1;
    return at >= 0 ? get(state, s->slot, d, at, 0) : 0;
}

/* How far tap j looks back. */
static int64_t lag(const conv_seq *s, int64_t j) { return (s->W - 1 - j) * s->a->dilation; }

static act_point conv_point(const conv_seq *s, int64_t t, int64_t d)
{
    double p = get_or_0(&s->a->bias, d, 0, 0, 0);
    for (int64_t j = 0; j < s->W; j++)
        p += get(&s->a->weight, d, j, 0, 0) * source(s, t - lag(s, j), d);
    return activate(s->a->activation, p);
}

/* A task is one channel of one sequence: the old state is read before the new one is
 * written, and that from its oldest column on, so both may be the same memory. */
static void conv_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const conv_job *job = arg;
    const dr_conv_args *a = job->a;
    int64_t d = task / job->sequences;
    conv_seq s = conv_sequence(a, task % job->sequences);
    for (int64_t t = 0; a->y.data != NULL && t < s.T; t++)
        put(&a->y, s.b, s.begin + t, d, 0, conv_point(&s, t, d).y);
    if (a->final_state.data == NULL || s.slot < 0)
        return;
    int64_t width = a->final_state.shape[2];
    for (int64_t i = 0; i < width; i++)
        put(&a->final_state, s.slot, d, i, 0, source(&s, s.T - width + i, d));
}

/* Gradient of the convolution before its activation; zero outside the sequence. */
static double conv_dp(const conv_seq *s, int64_t t, int64_t d)
{
    if (t < 0 || t >= s->T)
        return 0;
    return get_or_0(&s->a->dy, s->b, s->begin + t, d, 0) * conv_point(s, t, d).dy_dx;
}

/* Gradient of source(t): from the taps that look at it, and from the final state. */
static double conv_dsource(const conv_seq *s, int64_t t, int64_t d)
{
    double sum = 0;
    for (int64_t j = 0; j < s->W; j++)
        sum += get(&s->a->weight, d, j, 0, 0) * conv_dp(s, t + lag(s, j), d);
    const dr_tensor *state = &s->a->d_final_state;
    int64_t at = state->data != NULL ? column(state, s->T, t) : -1;
    return at >= 0 ? sum + get(state, s->n, d, at, 0) : sum;
}

/* A task is one channel, all sequences. */
static void conv_adjoint_task(void *arg, int64_t d, int32_t lane)
{
    (void)lane;
    const conv_job *job = arg;
    const dr_conv_args *a = job->a;
    int64_t W = a->weight.shape[1];
    for (int64_t j = 0; a->dweight.data != NULL && j < W; j++) {
        double sum = 0;
        for (int64_t n = 0; n < job->sequences; n++) {
            conv_seq s = conv_sequence(a, n);
            for (int64_t t = 0; t < s.T; t++)
                sum += conv_dp(&s, t, d) * source(&s, t - lag(&s, j), d);
        }
        put(&a->dweight, d, j, 0, 0, sum);
    }
    double dbias = 0;
    for (int64_t n = 0; n < job->sequences; n++) {
        conv_seq s = conv_sequence(a, n);
        for (int64_t t = 0; a->dbias.data != NULL && t < s.T; t++)
            dbias += conv_dp(&s, t, d);
        int64_t width = a->d_initial_state.data != NULL ? a->d_initial_state.shape[2] : 0;
        for (int64_t i = 0; i < width; i++)
            put(&a->d_initial_state, n, d, i, 0, conv_dsource(&s, i - width, d));
        for (int64_t t = 0; a->dx.data != NULL && t < s.T; t++)
            put(&a->dx, s.b, s.begin + t, d, 0, conv_dsource(&s, t, d));
    }
    put(&a->dbias, d, 0, 0, 0, dbias);
}

dr_status dr_ref_conv(dr_device *dev, int dir, const dr_conv_args *a)
{
    int64_t D = a->x.shape[2];
    conv_job job = {a, a->offsets ? a->sequences : a->x.shape[0]};
    if (dir > 0)
        dr_pool_run(&dev->pool, D * job.sequences, conv_task, &job);
    else
        dr_pool_run(&dev->pool, D, conv_adjoint_task, &job);
    return DR_OK;
}

/* ---- gate -------------------------------------------------------------------------- */

typedef struct gate_job {
    const dr_gate_args *a;
    int dir;
} gate_job;

/* A task is one value head, so its a_log and dt_bias gradients are whole. */
static void gate_task(void *arg, int64_t j, int32_t lane)
{
    (void)lane;
    const gate_job *job = arg;
    const dr_gate_args *a = job->a;
    const int64_t *shape = a->x.shape;
    double da_log = 0;
    for (int64_t c = 0; c < shape[3]; c++) {
        dr_ref_gate_params w = dr_ref_load_gate_params(&a->a_log, &a->dt_bias, j, c);
        double ddt_bias = 0;
        for (int64_t b = 0; b < shape[0]; b++)
            for (int64_t t = 0; t < shape[1]; t++) {
                double x = get(&a->x, b, t, j, c) + w.dt_bias;
                dr_ref_gate_point at = dr_ref_gate_at(a->gate, a->lower_bound, w.a, x);
                if (job->dir > 0) {
                    put(&a->g, b, t, j, c, at.g);
                    continue;
                }
                double dg = get(&a->dg, b, t, j, c);
                put(&a->dx, b, t, j, c, dg * at.dx);
                ddt_bias += dg * at.dx;
                da_log += dg * at.da_log;
            }
        if (job->dir < 0)
            put(&a->ddt_bias, j, c, 0, 0, ddt_bias);
    }
    if (job->dir < 0)
        put(&a->da_log, j, 0, 0, 0, da_log);
}

dr_status dr_ref_gate(dr_device *dev, int dir, const dr_gate_args *a)
{
    gate_job job = {a, dir};
    dr_pool_run(&dev->pool, a->x.shape[2], gate_task, &job);
    return DR_OK;
}

/* ---- rows of rank 4 ------------------------------------------------------------------ */

/* Rows [n0,n1,n2] counted in order: index[0..2] of one. */
typedef struct row {
    int64_t at[3];
} row;

static int64_t row_count(const dr_tensor *x) { return x->shape[0] * x->shape[1] * x->shape[2]; }

static row row_find(const dr_tensor *x, int64_t i)
{
    return (row){{i / x->shape[2] / x->shape[1], i / x->shape[2] % x->shape[1], i % x->shape[2]}};
}

static double get_in(const dr_tensor *t, const row *r, int64_t c)
{
    return get(t, r->at[0], r->at[1], r->at[2], c);
}

static void put_in(const dr_tensor *t, const row *r, int64_t c, double x)
{
    put(t, r->at[0], r->at[1], r->at[2], c, x);
}

static double sum_of_squares(const dr_tensor *x, const row *r)
{
    double sum = 0;
    for (int64_t c = 0; c < x->shape[3]; c++)
        sum += get_in(x, r, c) * get_in(x, r, c);
    return sum;
}

/* ---- beta ---------------------------------------------------------------------------- */

typedef struct beta_job {
    const dr_beta_args *a;
    int dir;
} beta_job;

static void beta_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const beta_job *job = arg;
    const dr_beta_args *a = job->a;
    row r = row_find(&a->x, task);
    for (int64_t c = 0; c < a->x.shape[3]; c++) {
        act_point s = activate(DR_ACT_SIGMOID, get_in(&a->x, &r, c));
        if (job->dir > 0)
            put_in(&a->beta, &r, c, a->scale * s.y);
        else
            put_in(&a->dx, &r, c, get_in(&a->dbeta, &r, c) * a->scale * s.dy_dx);
    }
}

dr_status dr_ref_beta(dr_device *dev, int dir, const dr_beta_args *a)
{
    beta_job job = {a, dir};
    dr_pool_run(&dev->pool, row_count(&a->x), beta_task, &job);
    return DR_OK;
}

/* ---- l2norm -------------------------------------------------------------------------- */

typedef struct l2norm_job {
    const dr_l2norm_args *a;
    int dir;
} l2norm_job;

static void l2norm_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const l2norm_job *job = arg;
    const dr_l2norm_args *a = job->a;
    row r = row_find(&a->x, task);
    int64_t D = a->x.shape[3];
    double rstd = 1 / sqrt(sum_of_squares(&a->x, &r) + a->eps), dot = 0;
    if (job->dir > 0) {
        for (int64_t c = 0; c < D; c++)
            put_in(&a->y, &r, c, get_in(&a->x, &r, c) * rstd);
        return;
    }
    for (int64_t c = 0; c < D; c++)
        dot += get_in(&a->x, &r, c) * rstd * get_in(&a->dy, &r, c);
    for (int64_t c = 0; c < D; c++)
        put_in(&a->dx, &r, c,
               rstd * (get_in(&a->dy, &r, c) - get_in(&a->x, &r, c) * rstd * dot));
}

dr_status dr_ref_l2norm(dr_device *dev, int dir, const dr_l2norm_args *a)
{
    l2norm_job job = {a, dir};
    dr_pool_run(&dev->pool, row_count(&a->x), l2norm_task, &job);
    return DR_OK;
}

/* ---- gated norm ---------------------------------------------------------------------- */

/* Channels of dweight per task: enough that the row's norm, computed again by every task,
 * does not cost more than the sums. */
#define WEIGHT_BLOCK 64

static double rms_factor(const dr_norm_args *a, const row *r)
{
    return 1 / sqrt(sum_of_squares(&a->x, r) / (double)a->x.shape[3] + a->eps);
}

static void norm_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const dr_norm_args *a = arg;
    row r = row_find(&a->x, task);
    double rstd = rms_factor(a, &r);
    for (int64_t c = 0; c < a->x.shape[3]; c++)
        put_in(&a->y, &r, c, get_in(&a->x, &r, c) * rstd * get(&a->weight, c, 0, 0, 0) *
                                 activate(a->activation, get_in(&a->gate, &r, c)).y);
}

static void norm_adjoint_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const dr_norm_args *a = arg;
    row r = row_find(&a->x, task);
    int64_t V = a->x.shape[3];
    double rstd = rms_factor(a, &r), mean = 0; /* of dxn * xn, xn = x rstd */
    for (int64_t c = 0; c < V; c++) {
        double xn = get_in(&a->x, &r, c) * rstd, dy = get_in(&a->dy, &r, c);
        act_point act = activate(a->activation, get_in(&a->gate, &r, c));
        mean += dy * get(&a->weight, c, 0, 0, 0) * act.y * xn / (double)V;
    }
    for (int64_t c = 0; c < V; c++) {
        double xn = get_in(&a->x, &r, c) * rstd, w = get(&a->weight, c, 0, 0, 0);
        double dy = get_in(&a->dy, &r, c);
        act_point act = activate(a->activation, get_in(&a->gate, &r, c));
        put_in(&a->dx, &r, c, rstd * (dy * w * act.y - xn * mean));
        put_in(&a->dgate, &r, c, dy * xn * w * act.dy_dx);
    }
}

static void norm_weight_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const dr_norm_args *a = arg;
    int64_t c0 = task * WEIGHT_BLOCK, c1 = dr_min(c0 + WEIGHT_BLOCK, a->x.shape[3]);
    double sum[WEIGHT_BLOCK] = {0};
    for (int64_t i = 0; i < row_count(&a->x); i++) {
        row r = row_find(&a->x, i);
        double rstd = rms_factor(a, &r);
        for (int64_t c = c0; c < c1; c++)
            sum[c - c0] += get_in(&a->dy, &r, c) * get_in(&a->x, &r, c) * rstd *
                           activate(a->activation, get_in(&a->gate, &r, c)).y;
    }
    for (int64_t c = c0; c < c1; c++)
        put(&a->dweight, c, 0, 0, 0, sum[c - c0]);
}

dr_status dr_ref_norm(dr_device *dev, int dir, const dr_norm_args *a)
{
    int64_t blocks = dir < 0 && a->dweight.data ? dr_ceil_div(a->x.shape[3], WEIGHT_BLOCK) : 0;
    dr_pool_run(&dev->pool, blocks, norm_weight_task, (void *)a);
    dr_pool_run(&dev->pool, row_count(&a->x), dir > 0 ? norm_task : norm_adjoint_task, (void *)a);
    return DR_OK;
}

/* ---- matmul -------------------------------------------------------------------------- */

static void matmul_task(void *arg, int64_t i, int32_t lane)
{
    (void)lane;
    const dr_matmul_args *a = arg;
    for (int64_t j = 0; j < a->out.shape[1]; j++) {
        double sum = 0;
        for (int64_t l = 0; l < a->a.shape[1]; l++)
            sum += get(&a->a, i, l, 0, 0) * get(&a->b, l, j, 0, 0);
        double old = a->accumulate ? get(&a->out, i, j, 0, 0) : 0;
        put(&a->out, i, j, 0, 0, old + a->alpha * sum);
    }
}

dr_status dr_ref_matmul(dr_device *dev, const dr_matmul_args *a)
{
    dr_pool_run(&dev->pool, a->out.shape[0], matmul_task, (void *)a);
    return DR_OK;
}
