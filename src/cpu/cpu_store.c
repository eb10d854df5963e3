/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_store.c - gradients of a chunk on their way out: back through the gate and beta
 * activations, the query scale and the normalisation, into the form of the caller's tensors. The
 * counterpart of the loads in cpu_factors.c.
 *
 * Sums over tokens (da_log, ddt_bias) are kept in double, in the order of the chunks.
 */
#include "cpu/cpu_grad.h"
#include "base/half.h"

static void put_column(const dr_tensor *t, const dr_cpu_span *s, int32_t j, const float *x)
{
    for (int32_t i = 0; t->data != NULL && i < s->c; i++)
        dr_put(dr_at(t, s->batch, s->t0 + i, j, 0), t->dtype, 0, x[i]);
}

/* da becomes the gradient of what g held: n elements of one token. sums: raw gates only. */
static void through_gate(const dr_pass *p, int32_t n, const float *decay, const float *d_g,
                         const float *d_a, float *da, const dr_grad_sums *sums)
{
    if (p->plan->problem.gate == DR_GATE_FACTOR)
        return;
    for (int32_t i = 0; i < n; i++)
        da[i] *= decay[i];
    if (sums->a_log == NULL)
        return;
    double a_log = 0;
    for (int32_t i = 0; i < n; i++) {
        a_log += (double)(da[i] * d_a[i]);
        da[i] *= d_g[i];
        sums->dt_bias[i] += (double)da[i];
    }
    *sums->a_log += a_log;
}

static void store_gate(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s, int32_t j,
                       dr_grad_lane *lane, const dr_grad_sums *sums)
{
    const dr_cpu_head *head = &lane->head;
    const dr_tensor *dg = &p->io->dg;
    for (int32_t i = 0; i < s->c; i++) {
        const int64_t at = d->kda ? i * d->ldk : i;
        through_gate(p, d->kda ? d->K : 1, lane->a + at, head->d_g + at, head->d_a + at,
                     lane->da + at, sums);
    }
    if (!d->kda)
        put_column(dg, s, j, lane->da);
    else if (dg->data != NULL)
        dr_cpu_store_rows(d, lane->da, d->ldk, s, j, d->K, dg);
}

void dr_cpu_grad_store_head(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s, int32_t j,
                            dr_grad_lane *lane, const dr_grad_sums *sums)
{
    if (p->io->dv.data != NULL)
        dr_cpu_store_values(d, lane->v, s, j, 0, d->V, &p->io->dv);
    for (int32_t i = 0; i < s->c; i++)
        lane->db[i] *= lane->head.d_b[i];
    put_column(&p->io->dbeta, s, j, lane->db);
    if (p->plan->problem.gate != DR_GATE_NONE)
        store_gate(p, d, s, j, lane, sums);
}

/* From the gradient of y = scale x / |x| (rstd NULL: scale x) to that of x, in place. With one
 * column x / |x| has no direction to turn to: what eps leaves is stated, since 1 - y^2 cancels. */
static void through_norm(const dr_cpu_dims *d, const dr_cpu_span *s, double eps, double scale,
                         const float *y, const float *rstd, float *grad)
{
    if (rstd == NULL || d->K > 1) {
        d->kern->grad_norm(s->c, (int)d->ldk, (float)scale, y, rstd, grad);
        return;
    }
    for (int32_t i = 0; i < s->c; i++)
        grad[i * d->ldk] *= (float)(scale * eps * rstd[i] * rstd[i] * rstd[i]);
}

void dr_cpu_grad_store_keys(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s, int32_t h,
                            dr_grad_lane *lane)
{
    const dr_problem *q = &p->plan->problem;
    const dr_cpu_keys *keys = &lane->keys;
    if (p->io->dq.data != NULL) {
        through_norm(d, s, q->l2norm_eps, q->scale, keys->q, q->l2norm ? keys->q_rstd : NULL,
                     lane->dq);
        dr_cpu_store_rows(d, lane->dq, d->ldk, s, h, d->K, &p->io->dq);
    }
    if (p->io->dk.data != NULL) {
        if (q->l2norm)
            through_norm(d, s, q->l2norm_eps, 1, keys->k, keys->k_rstd, lane->dk);
        dr_cpu_store_rows(d, lane->dk, d->ldk, s, h, d->K, &p->io->dk);
    }
}
