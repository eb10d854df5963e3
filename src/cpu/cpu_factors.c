/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_factors.c - the factors of a chunk: keys and queries of a key head with their
 * products, and per value head the gates, beta, L, P and the decayed keys. Everything that
 * needs no state, for both directions. What a variant is made of ends here: the stages after
 * it see left operands, L, P and decays only.
 *
 * Letters: cpu_chunk.h. I, J blocks of 16 rows.
 */
#include "cpu/cpu_chunk.h"
#include "base/half.h"

#include <math.h>

enum { STAGGER = 5 * 16 }; /* floats by which an array starts later, counted from a page */

/* ---- arrays ----------------------------------------------------------------------- */

float *dr_cpu_take(dr_arena *a, int64_t n, int64_t m)
{
    int64_t count;
    if (!dr_mul(n, m, &count) || !dr_add(count, STAGGER, &count)) {
        a->overflow = true;
        return NULL;
    }
    return DR_TAKE(a, float, count, 1);
}

void dr_cpu_keys_carve(dr_arena *a, const dr_cpu_dims *d, dr_cpu_keys *out)
{
    *out = (dr_cpu_keys){0};
    out->k = dr_cpu_take(a, d->C, d->ldk);
    out->q = dr_cpu_take(a, d->C, d->ldk);
    out->k_rstd = dr_cpu_take(a, d->C, 1);
    out->q_rstd = dr_cpu_take(a, d->C, 1);
    if (!d->kda) {
        out->kt = dr_cpu_take(a, d->C, d->K4);
        out->kk = dr_cpu_take(a, d->C, d->C);
        out->qk = dr_cpu_take(a, d->C, d->C);
    }
}

/* The scratch of a KDA load, cut from head->tmp. */
typedef struct kda_tmp {
    float *kp, *qp, *kd, *eg, *work; /* [16][ldk], see dr_kern_block */
    float *kdt;                      /* kd as tokens */
    float *kst;                      /* tokens of all blocks: k decayed to the entry of a later */
    float *sum, *a, *z;              /* [C/16][ldk] ln decay of a block; decay before, after it */
    float *over;                     /* [ldk] decay over a block */
} kda_tmp;

static int64_t kda_tmp_cut(const dr_cpu_dims *d, float *base, kda_tmp *out)
{
    const int64_t rows = DR_CPU_BLOCK * d->ldk + STAGGER, vectors = d->C / DR_CPU_BLOCK * d->ldk;
    const struct {
        float **at;
        int64_t size;
    } parts[] = {{&out->kp, rows},
                 {&out->qp, rows},
                 {&out->kd, rows},
                 {&out->eg, rows},
                 {&out->work, rows},
                 {&out->kdt, rows},
                 {&out->kst, d->C * d->K4 + STAGGER},
                 {&out->sum, vectors},
                 {&out->a, vectors},
                 {&out->z, vectors},
                 {&out->over, d->ldk}};
    int64_t at = 0;
    for (size_t i = 0; i < DR_COUNT(parts); i++) {
        *parts[i].at = base != NULL ? base + at : NULL;
        at += parts[i].size;
    }
    return at;
}

void dr_cpu_head_carve(dr_arena *a, const dr_cpu_dims *d, bool grads, dr_cpu_head *out)
{
    const int64_t width = d->kda ? d->ldk : 1;
    kda_tmp tmp;
    *out = (dr_cpu_head){0};
    out->L = dr_cpu_take(a, d->C, d->C);
    out->P = dr_cpu_take(a, d->C, d->C);
    out->g = dr_cpu_take(a, d->C, width);
    out->b = dr_cpu_take(a, d->C, 1);
    out->dec = dr_cpu_take(a, d->ldk, 1);
    out->bias = dr_cpu_take(a, d->kda ? d->ldk : d->C, 1);
    if (d->kda) {
        float **const rows[] = {&out->kbar, &out->qbar, &out->khat};
        for (size_t i = 0; i < DR_COUNT(rows); i++)
            *rows[i] = dr_cpu_take(a, d->C, d->ldk);
        out->kk = dr_cpu_take(a, d->C, d->C);
        out->qk = dr_cpu_take(a, d->C, d->C);
        out->tmp = dr_cpu_take(a, kda_tmp_cut(d, NULL, &tmp), 1);
    } else {
        out->gam = dr_cpu_take(a, d->C, 1);
        out->lam = dr_cpu_take(a, d->C, 1);
    }
    if (grads) {
        if (!d->kda)
            out->E = dr_cpu_take(a, d->C, d->C);
        out->d_g = dr_cpu_take(a, d->C, width);
        out->d_a = dr_cpu_take(a, d->C, width);
        out->d_b = dr_cpu_take(a, d->C, 1);
    }
}

/* ---- key heads -------------------------------------------------------------------- */

static void load_normalised(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s,
                            const dr_tensor *t, int32_t h, float scale, float *x, float *rstd)
{
    const dr_problem *q = &p->plan->problem;
    dr_cpu_load_rows(d, t, s, h, d->K, q->l2norm ? 1 : scale, x, d->ldk);
    if (q->l2norm)
        d->kern->l2rows(s->c, (int)d->ldk, (float)q->l2norm_eps, scale, x, rstd);
    for (int64_t i = q->l2norm ? s->c : 0; i < d->C; i++)
        rstd[i] = 1;
}

/* out = x y^T on and below the diagonal blocks; y as blocks of transposed tokens. */
static void all_pairs(const dr_cpu_dims *d, int32_t rows, const float *x, const float *yt,
                      float *out)
{
    for (int64_t j = 0; j < rows; j += DR_CPU_BLOCK)
        d->kern->pair(rows - (int)j, (int)d->K4, x + j * d->ldk, (int)d->ldk, yt + j * d->K4,
                      out + j * d->C + j, (int)d->C);
}

void dr_cpu_load_keys(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s, int32_t h,
                      unsigned parts, dr_cpu_keys *keys)
{
    const dr_kern *kern = d->kern;
    load_normalised(p, d, s, &p->io->k, h, 1, keys->k, keys->k_rstd);
    if (parts & DR_CPU_Q)
        load_normalised(p, d, s, &p->io->q, h, (float)p->plan->problem.scale, keys->q,
                        keys->q_rstd);
    if (d->kda || !(parts & DR_CPU_PAIRS))
        return;
    for (int64_t j = 0; j < s->rows; j += DR_CPU_BLOCK)
        kern->transpose(DR_CPU_BLOCK, (int)d->K4, keys->k + j * d->ldk, d->ldk,
                        keys->kt + j * d->K4, DR_CPU_BLOCK);
    all_pairs(d, s->rows, keys->k, keys->kt, keys->kk);
    if (parts & DR_CPU_Q)
        all_pairs(d, s->rows, keys->q, keys->kt, keys->qk);
}

/* ---- gates and beta ----------------------------------------------------------------- */

static float gather(const dr_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    return (float)dr_get(dr_at(t, i0, i1, i2, i3), t->dtype, 0);
}

static void load_beta(const dr_pass *p, const dr_cpu_span *s, int32_t j, bool grads,
                      const dr_kern *kern, dr_cpu_head *head)
{
    const dr_problem *q = &p->plan->problem;
    const dr_tensor *t = &p->io->beta;
    for (int32_t i = 0; i < s->c; i++)
        head->b[i] = gather(t, s->batch, s->t0 + i, j, 0);
    if (q->beta == DR_BETA_LOGIT)
        kern->sigmoid(s->c, (float)q->beta_scale, head->b, head->b, grads ? head->d_b : NULL);
    else if (grads)
        for (int32_t i = 0; i < s->c; i++)
            head->d_b[i] = 1;
    for (int64_t i = s->c; i < dr_round_up(s->c, DR_CPU_BLOCK); i++) {
        head->b[i] = 0;
        if (grads)
            head->d_b[i] = 0;
    }
}

/* n values of one gate parameter, in place: ln decays from what g holds. bias: [n]. */
static void activate(const dr_pass *p, const dr_kern *kern, int n, float ea, const float *bias,
                     float *g, float *d_g, float *d_a)
{
    switch (p->plan->problem.gate) {
    case DR_GATE_NONE: break;
    case DR_GATE_LOG: kern->gate_log(n, g, g); break;
    case DR_GATE_FACTOR: kern->gate_factor(n, g, g, d_g); break;
    case DR_GATE_SOFTPLUS:
        kern->gate_softplus(n, g, bias, ea, g, d_g);
        if (d_a != NULL)
            memcpy(d_a, g, (size_t)n * sizeof *g);
        break;
    case DR_GATE_LOWER_BOUND:
        kern->gate_lower(n, g, bias, ea, (float)p->plan->problem.lower_bound, g, d_g, d_a);
        break;
    }
}

/* ln decays of a span into head->g, their derivatives where grads; width elements a token. */
static void load_gates(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s, int32_t j,
                       bool grads, dr_cpu_head *head)
{
    const dr_problem *q = &p->plan->problem;
    const dr_tensor *t = &p->io->g, *bias = &p->io->dt_bias;
    const int64_t block = dr_round_up(s->c, DR_CPU_BLOCK), ld = d->kda ? d->ldk : 1;
    const int32_t width = d->kda ? d->K : 1;
    float *g = head->g, *d_g = grads ? head->d_g : NULL, *d_a = grads ? head->d_a : NULL;
    const size_t bytes = (size_t)(block * ld) * sizeof *g;
    if (q->gate == DR_GATE_NONE || !d->kda)
        memset(g, 0, bytes);
    if (grads) {
        for (int64_t i = 0; i < block * ld; i++)
            d_g[i] = 1;
        memset(d_a, 0, bytes);
    }
    if (q->gate == DR_GATE_NONE)
        return;
    const float ea = p->io->a_log.data != NULL ? expf(gather(&p->io->a_log, j, 0, 0, 0)) : 1;
    const int32_t biases = d->kda ? d->K : s->c;
    for (int32_t i = 0; i < biases; i++)
        head->bias[i] = bias->data != NULL ? gather(bias, j, d->kda ? i : 0, 0, 0) : 0;
    if (!d->kda) {
        for (int32_t i = 0; i < s->c; i++)
            g[i] = gather(t, s->batch, s->t0 + i, j, 0);
        activate(p, d->kern, s->c, ea, head->bias, g, d_g, d_a);
        return;
    }
    dr_cpu_load_rows(d, t, s, j, width, 1, g, ld);
    if (q->gate == DR_GATE_LOG) { /* padding stays 0: all rows at once */
        activate(p, d->kern, (int)(s->c * ld), ea, NULL, g, d_g, d_a);
        return;
    }
    for (int64_t i = 0; i < s->c; i++)
        activate(p, d->kern, width, ea, head->bias, g + i * ld, grads ? d_g + i * ld : NULL,
                 grads ? d_a + i * ld : NULL);
}

/* ---- value heads ------------------------------------------------------------------ */

static void gdn_factors(const dr_cpu_dims *d, const dr_cpu_span *s, unsigned parts,
                        const dr_cpu_keys *keys, dr_cpu_head *head)
{
    const bool pairs = parts & DR_CPU_PAIRS, q = parts & DR_CPU_Q;
    float all = d->kern->gdn_pairs(s->rows, (int)d->C, head->g, head->b, pairs ? keys->kk : NULL,
                                   q ? keys->qk : NULL, head->gam, head->lam, head->L,
                                   q ? head->P : NULL, parts & DR_CPU_GRADS ? head->E : NULL);
    for (int64_t i = 0; i < d->ldk; i++)
        head->dec[i] = all;
    head->at.kl = head->at.ku = keys->k;
    head->at.ql = keys->q;
    head->at.gam = head->gam;
    head->at.lam = head->lam;
}

/* exp of the sums of all blocks before each block, after each, and of all. */
static void block_decays(const dr_cpu_dims *d, int64_t blocks, const float *sum, float *a, float *z,
                         float *dec)
{
    const int64_t n = d->ldk;
    memset(a, 0, (size_t)n * sizeof *a);
    memset(z + (blocks - 1) * n, 0, (size_t)n * sizeof *z);
    for (int64_t I = 1; I < blocks; I++)
        for (int64_t i = 0; i < n; i++)
            a[I * n + i] = a[(I - 1) * n + i] + sum[(I - 1) * n + i];
    for (int64_t i = 0; i < n; i++)
        dec[i] = a[(blocks - 1) * n + i] + sum[(blocks - 1) * n + i];
    for (int64_t I = blocks - 1; I-- > 0;)
        for (int64_t i = 0; i < n; i++)
            z[I * n + i] = z[(I + 1) * n + i] + sum[(I + 1) * n + i];
    d->kern->vexp((int)(blocks * n), a, a);
    d->kern->vexp((int)(blocks * n), z, z);
    d->kern->vexp((int)n, dec, dec);
}

/* Pairs within block I: a product of k exp(G_i) and k exp(-G_j) where that is safe. */
static void diagonal_block(const dr_cpu_dims *d, int64_t I, const dr_kern_block *b,
                           const kda_tmp *t, dr_cpu_head *head)
{
    const dr_kern *kern = d->kern;
    const int C = (int)d->C, k = (int)d->K4;
    const int64_t square = I * DR_CPU_BLOCK * (d->C + 1);
    float *kk = head->kk + square, *qk = b->q != NULL ? head->qk + square : NULL;
    if (!b->fast) {
        kern->kda_diagonal(b->n, b->ldk, b->k, b->q, b->eg, kk, qk, C, t->work);
        return;
    }
    kern->transpose(DR_CPU_BLOCK, k, b->kd, b->ldk, t->kdt, DR_CPU_BLOCK);
    kern->pair(DR_CPU_BLOCK, k, b->kp, b->ldk, t->kdt, kk, C);
    if (qk != NULL)
        kern->pair(DR_CPU_BLOCK, k, b->qp, b->ldk, t->kdt, qk, C);
}

/* Pairs of rows of block I with tokens of the blocks before: the row carries exp of its sum from
 * the entry of I, the token exp of its sum to the end of its own block and over the blocks
 * between. */
static void cross_blocks(const dr_cpu_dims *d, int64_t I, int32_t rows, const dr_kern_block *b,
                         const kda_tmp *t, dr_cpu_head *head)
{
    for (int64_t J = 0; J < I; J++) {
        const float *kst = t->kst + J * DR_CPU_BLOCK * d->K4;
        const int64_t at = I * DR_CPU_BLOCK * d->C + J * DR_CPU_BLOCK;
        d->kern->pair(rows, (int)d->K4, b->kp, b->ldk, kst, head->kk + at, (int)d->C);
        if (b->q != NULL)
            d->kern->pair(rows, (int)d->K4, b->qp, b->ldk, kst, head->qk + at, (int)d->C);
    }
}

/* Makes the tokens of block I, and those before, ready for the rows of later blocks. */
static void extend_tokens(const dr_cpu_dims *d, int64_t I, const dr_kern_block *b, const kda_tmp *t)
{
    const int64_t block = DR_CPU_BLOCK * d->K4;
    const int k = (int)d->K4;
    d->kern->vexp((int)d->ldk, t->sum + I * d->ldk, t->over);
    for (int64_t J = 0; J < I; J++)
        d->kern->kda_reach(k, t->over, t->kst + J * block, t->kst + J * block);
    if (b->fast)
        d->kern->kda_reach(k, t->over, t->kdt, t->kst + I * block);
    else
        d->kern->transpose(DR_CPU_BLOCK, k, b->kd, b->ldk, t->kst + I * block, DR_CPU_BLOCK);
}

static void kda_factors(const dr_cpu_dims *d, const dr_cpu_span *s, unsigned parts,
                        const dr_cpu_keys *keys, dr_cpu_head *head)
{
    const dr_kern *kern = d->kern;
    const bool pairs = parts & DR_CPU_PAIRS, q = parts & DR_CPU_Q;
    const int n = (int)d->ldk;
    const int64_t blocks = dr_ceil_div(s->c, DR_CPU_BLOCK), block = DR_CPU_BLOCK * d->ldk;
    bool fast[DR_CPU_MAX_CHUNK / DR_CPU_BLOCK];
    kda_tmp t;
    kda_tmp_cut(d, head->tmp, &t);
    for (int64_t I = 0; I < blocks; I++)
        fast[I] = kern->kda_sums(n, n, head->g + I * block, head->kbar + I * block,
                                 t.sum + I * d->ldk);
    block_decays(d, blocks, t.sum, t.a, t.z, head->dec);
    for (int64_t I = 0; I < blocks; I++) {
        const int64_t at = I * block;
        dr_kern_block b = {.n = n, .ldk = n, .fast = fast[I], .k = keys->k + at,
                           .q = q ? keys->q + at : NULL, .g = head->g + at, .a = t.a + I * d->ldk,
                           .z = t.z + I * d->ldk, .kbar = head->kbar + at, .qbar = head->qbar + at,
                           .khat = head->khat + at, .kd = t.kd, .eg = t.eg};
        if (pairs && I > 0) {
            b.kp = t.kp;
            b.qp = t.qp;
        }
        kern->kda_rows(&b);
        if (!pairs)
            continue;
        if (I == 0) { /* nothing has decayed before it */
            b.kp = b.kbar;
            b.qp = b.qbar;
        }
        diagonal_block(d, I, &b, &t, head);
        cross_blocks(d, I, (int32_t)dr_min(DR_CPU_BLOCK, s->rows - I * DR_CPU_BLOCK), &b, &t, head);
        if (I + 1 < blocks)
            extend_tokens(d, I, &b, &t);
    }
    if (pairs)
        kern->kda_pairs(s->rows, (int)d->C, head->b, head->kk, q ? head->qk : NULL, head->L,
                        q ? head->P : NULL);
    head->at.kl = head->kbar;
    head->at.ql = head->qbar;
    head->at.ku = head->khat;
    head->at.gam = head->at.lam = NULL;
}

void dr_cpu_load_head(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s, int32_t j,
                      unsigned parts, const dr_cpu_keys *keys, dr_cpu_head *head)
{
    const bool grads = parts & DR_CPU_GRADS;
    load_beta(p, s, j, grads, d->kern, head);
    load_gates(p, d, s, j, grads, head);
    (d->kda ? kda_factors : gdn_factors)(d, s, parts, keys, head);
    head->at.rows = s->rows;
    head->at.k = (int32_t)d->K4;
    head->at.ldk = (int32_t)d->ldk;
    head->at.ldc = (int32_t)d->C;
    head->at.L = head->L;
    head->at.P = head->P;
    head->at.b = head->b;
    head->at.dec = head->dec;
}
