/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_grad_chunk.c - the adjoint of one chunk of one value head, see the notes in cpu_grad.h.
 * States are only ever read as left operands in the panels they live in; what is transposed is
 * the small side, tokens by value columns.
 */
#include "cpu/cpu_grad.h"

void dr_cpu_grad_lane_carve(dr_arena *a, const dr_cpu_dims *d, dr_grad_lane *out)
{
    const int64_t C = d->C;
    *out = (dr_grad_lane){0};
    dr_cpu_keys_carve(a, d, &out->keys);
    dr_cpu_head_carve(a, d, true, &out->head);
    float **const values[] = {&out->v, &out->dO, &out->X, &out->Zn, &out->turned};
    for (size_t i = 0; i < DR_COUNT(values); i++)
        *values[i] = dr_cpu_take(a, d->values, 1);
    out->R = dr_cpu_take(a, C, d->NR);
    out->Xd = dr_cpu_take(a, C, d->NR);
    out->zr = dr_cpu_take(a, d->panels, C);
    out->hd = dr_cpu_take(a, d->panels, d->ldk);
    float **const squares[] = {&out->ox, &out->zx, &out->m, &out->w, &out->wt, &out->ms, &out->B};
    for (size_t i = 0; i < (d->kda ? 3 : DR_COUNT(squares)); i++)
        *squares[i] = dr_cpu_take(a, C, C);
    float **const rows[] = {&out->hq, &out->hz, &out->dx, &out->dq, &out->dk,
                             &out->kg, &out->qg};
    for (size_t i = 0; i < DR_COUNT(rows) - (d->kda ? 1 : 0); i++)
        *rows[i] = dr_cpu_take(a, C, d->ldk);
    out->a = dr_cpu_take(a, C, d->kda ? d->ldk : 1);
    out->da = dr_cpu_take(a, C, d->kda ? d->ldk : 1);
    out->db = dr_cpu_take(a, C, 1);
    out->sum_hd = dr_cpu_take(a, d->ldk, 1);
    if (d->kda) {
        out->work = dr_cpu_take(a, 5 * C, 16);
    } else {
        out->qt = dr_cpu_take(a, C, d->K4);
        out->b0 = dr_cpu_take(a, C, 1);
        out->bx = dr_cpu_take(a, C, 1);
    }
}

/* Rows [rows, rows up to a block) of a panel. */
static void clear_tail(const dr_cpu_dims *d, int32_t rows, float *panel)
{
    const int64_t end = dr_round_up(rows, DR_CPU_BLOCK);
    memset(panel + rows * d->NR, 0, (size_t)((end - rows) * d->NR) * sizeof *panel);
}

void dr_cpu_grad_solve(const dr_cpu_dims *d, dr_grad_lane *lane, const dr_grad_chunk *x, bool d_o,
                       int64_t p0, int64_t p1)
{
    const dr_kern_chunk *c = &lane->head.at;
    for (int64_t p = p0; p < p1; p++) {
        const int64_t at = p * d->C * d->NR;
        d->kern->grad_x(c, lane->v + at, x->N + at, lane->R, x->X + at, NULL);
        d->kern->grad_z(c, x->D + p * d->K4 * d->NR, d_o ? lane->dO + at : NULL, lane->R,
                        x->Zn + at, x->zr + p * d->C);
        clear_tail(d, c->rows, x->X + at);
        clear_tail(d, c->rows, x->Zn + at);
    }
}

/* The left operands of the gradient of H. */
static const float *scale_rows(const dr_cpu_dims *d, dr_grad_lane *lane)
{
    const dr_kern_chunk *c = &lane->head.at;
    d->kern->grad_scaled(c->rows, (int)d->ldk, c->b, c->gam, c->kl, lane->kg);
    if (c->gam == NULL)
        return c->ql;
    d->kern->grad_scaled(c->rows, (int)d->ldk, c->gam, NULL, c->ql, lane->qg);
    return lane->qg;
}

void dr_cpu_grad_step(const dr_cpu_dims *d, dr_grad_lane *lane, const dr_grad_chunk *x, bool d_o,
                      int64_t p0, int64_t p1, dr_kern_ahead *ahead)
{
    const float *qg = scale_rows(d, lane);
    for (int64_t p = p0; p < p1; p++) {
        const int64_t at = p * d->C * d->NR, state = p * d->K4 * d->NR;
        d->kern->grad_d(&lane->head.at, x->D + state, x->H + state, qg,
                        d_o ? lane->dO + at : NULL, lane->kg, x->Zn + at, x->dH + state,
                        x->hd + p * d->ldk, ahead);
    }
}

void dr_cpu_grad_reverse(const dr_cpu_dims *d, dr_grad_lane *lane, const float *dO, int64_t panels,
                         float *D)
{
    const float *qg = scale_rows(d, lane);
    for (int64_t p = 0; p < panels; p++) {
        float *Dp = D + p * d->K4 * d->NR;
        const float *Op = dO != NULL ? dO + p * d->C * d->NR : NULL;
        d->kern->grad_z(&lane->head.at, Dp, Op, NULL, lane->Zn, NULL);
        d->kern->grad_d(&lane->head.at, Dp, NULL, qg, Op, lane->kg, lane->Zn, Dp, NULL, NULL);
    }
}

/* Blocks of 16 tokens of all panels, transposed, into lane->turned. */
static void turn(const dr_cpu_dims *d, dr_grad_lane *lane, const float *values)
{
    const int NR = (int)d->NR;
    for (int64_t i = 0; i < lane->head.at.rows; i += DR_CPU_BLOCK)
        for (int64_t p = 0; p < d->panels; p++)
            d->kern->transpose(DR_CPU_BLOCK, NR, values + (p * d->C + i) * NR, NR,
                               lane->turned + (i * d->panels + p * DR_CPU_BLOCK) * NR,
                               DR_CPU_BLOCK);
}

/* S times what is turned, tokens; zero in the padding channels. */
static void times_state(const dr_cpu_dims *d, const dr_grad_lane *lane, const float *S, float *out,
                        dr_kern_ahead *ahead)
{
    const size_t padding = (size_t)((d->ldk - d->K4) * DR_CPU_BLOCK) * sizeof *out;
    for (int64_t i = 0; i < lane->head.at.rows; i += DR_CPU_BLOCK) {
        float *block = out + i * d->ldk;
        d->kern->grad_left((int)d->K4, (int)d->panels, S, lane->turned + i * d->panels * d->NR,
                           block, ahead);
        memset(block + d->K4 * DR_CPU_BLOCK, 0, padding);
    }
}

/* a times what is turned, on and below the diagonal blocks. */
static void times_tokens(const dr_cpu_dims *d, const dr_grad_lane *lane, const float *a, float *out)
{
    const int32_t rows = lane->head.at.rows;
    for (int64_t j = 0; j < rows; j += DR_CPU_BLOCK)
        d->kern->grad_pair(rows - (int)j, (int)d->panels, d->C * d->NR, a + j * d->NR,
                           lane->turned + j * d->panels * d->NR, out + j * d->C + j, (int)d->C);
}

void dr_cpu_grad_pairs(const dr_cpu_dims *d, dr_grad_lane *lane, const dr_grad_chunk *x, bool d_o,
                       dr_kern_ahead *ahead)
{
    if (!d_o)
        memset(lane->dO, 0, (size_t)d->values * sizeof *lane->dO);
    turn(d, lane, x->X);
    times_tokens(d, lane, lane->dO, lane->ox);
    times_tokens(d, lane, x->Zn, lane->zx);
    times_state(d, lane, x->D, lane->dx, ahead);
}

static void sum_panels(int64_t panels, int64_t n, const float *parts, float *out)
{
    memcpy(out, parts, (size_t)n * sizeof *out);
    for (int64_t p = 1; p < panels; p++)
        for (int64_t i = 0; i < n; i++)
            out[i] += parts[p * n + i];
}

static void finish_gdn(const dr_cpu_dims *d, dr_grad_lane *lane, bool first)
{
    const dr_kern *kern = d->kern;
    const dr_cpu_keys *keys = &lane->keys;
    const dr_cpu_head *head = &lane->head;
    const int32_t rows = head->at.rows;
    const int C = (int)d->C;
    kern->grad_gdn_pairs(rows, C, head->b, keys->kk, keys->qk, head->E, lane->ox, lane->zx, lane->w,
                         lane->m, lane->B, lane->db);
    kern->grad_gdn_mirror((int)dr_round_up(rows, DR_CPU_BLOCK), C, lane->w, lane->m, lane->wt,
                          lane->ms);
    for (int64_t i = 0; i < rows; i += DR_CPU_BLOCK) {
        const int64_t at = i * d->ldk;
        kern->grad_gdn_block(&head->at, (int)(i / DR_CPU_BLOCK), keys->kt + i * d->K4,
                             lane->qt + i * d->K4, lane->hq + at, lane->hz + at, lane->dx + at,
                             lane->w, lane->wt, lane->ms, lane->hq + at, lane->hz + at, lane->b0,
                             lane->bx);
        kern->grad_rows((int)d->ldk, lane->hq + at, lane->dq + at, d->ldk, !first);
        kern->grad_rows((int)d->ldk, lane->hz + at, lane->dk + at, d->ldk, !first);
    }
    float corner = 0;
    for (int64_t i = 0; i < d->K4; i++)
        corner += lane->sum_hd[i];
    kern->vexp(rows, head->g, lane->a);
    kern->grad_gdn_decay(rows, C, head->gam, head->E, lane->B, lane->b0, lane->bx, corner,
                         lane->da);
}

static void finish_kda(const dr_cpu_dims *d, dr_grad_lane *lane, bool first)
{
    const dr_cpu_keys *keys = &lane->keys;
    const dr_cpu_head *head = &lane->head;
    const int C = (int)d->C, ldk = (int)d->ldk;
    d->kern->vexp(head->at.rows * ldk, head->g, lane->a);
    d->kern->grad_kda_pairs(head->at.rows, C, head->b, head->kk, lane->zx, lane->m, lane->db);
    d->kern->grad_kda_mix(head->at.rows, ldk, C, keys->k, keys->q, lane->a, head->b, lane->hq,
                          lane->hz, lane->dx, lane->sum_hd, lane->ox, lane->m, lane->dq, lane->dk,
                          lane->da, !first, lane->work);
}

void dr_cpu_grad_finish(const dr_cpu_dims *d, dr_grad_lane *lane, const dr_grad_chunk *x, bool d_o,
                        bool first, dr_kern_ahead *ahead)
{
    sum_panels(d->panels, d->C, x->zr, lane->db);
    sum_panels(d->panels, d->ldk, x->hd, lane->sum_hd);
    d->kern->grad_dv(lane->head.at.rows, (int)d->panels, d->C * d->NR, lane->head.b, x->Zn,
                     lane->v);
    turn(d, lane, x->Zn);
    times_state(d, lane, x->H, lane->hz, ahead);
    if (d_o) {
        turn(d, lane, lane->dO);
        times_state(d, lane, x->H, lane->hq, ahead);
    } else {
        memset(lane->hq, 0, (size_t)(d->C * d->ldk) * sizeof *lane->hq);
    }
    if (d->kda)
        finish_kda(d, lane, first);
    else
        finish_gdn(d, lane, first);
}
