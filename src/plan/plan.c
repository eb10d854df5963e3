/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - validation of a problem, and packed sequences to pieces and chunks. Every
 * rule a problem must obey is written once, here.
 */
#include "plan/plan.h"

#include <float.h>
#include <math.h>

static const dr_variant_row variants[] = {
    {DR_GDN, "gdn", false},
    {DR_KDA, "kda", true},
};

const dr_variant_row *dr_variant_find(dr_variant variant)
{
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        if (variants[i].variant == variant)
            return &variants[i];
    return NULL;
}

dr_status dr_offsets_check(const char *what, const int64_t *offsets, int64_t sequences,
                           int64_t batch, int64_t tokens)
{
    if (offsets == NULL) {
        if (sequences != 0)
            return dr_fail(DR_ERR_ARG, "%s: absent although sequences is %lld", what,
                           (long long)sequences);
        return DR_OK;
    }
    if (sequences < 1 || sequences > INT64_MAX / 64)
        return dr_fail(DR_ERR_ARG, "sequences: must be 1 or more with offsets, got %lld",
                       (long long)sequences);
    if (batch != 1)
        return dr_fail(DR_ERR_SHAPE, "batch: must be 1 when offsets are given, got %lld",
                       (long long)batch);
    if (offsets[0] != 0)
        return dr_fail(DR_ERR_ARG, "%s[0]: must be 0, got %lld", what, (long long)offsets[0]);
    for (int64_t i = 0; i < sequences; i++)
        if (offsets[i + 1] < offsets[i])
            return dr_fail(DR_ERR_ARG, "%s[%lld]: must not be below the one before (%lld), got %lld",
                           what, (long long)(i + 1), (long long)offsets[i],
                           (long long)offsets[i + 1]);
    if (offsets[sequences] > tokens)
        return dr_fail(DR_ERR_ARG, "%s[%lld]: must be at most the number of tokens (%lld), got %lld",
                       what, (long long)sequences, (long long)tokens,
                       (long long)offsets[sequences]);
    return DR_OK;
}

static dr_status check_dims(const dr_problem *p)
{
    if (p->batch < 1 || p->batch > INT32_MAX)
        return dr_fail(DR_ERR_SHAPE, "batch: must be 1 to %d, got %lld", INT32_MAX,
                       (long long)p->batch);
    if (p->tokens < 0 || p->tokens > INT64_MAX / 1024)
        return dr_fail(DR_ERR_SHAPE, "tokens: must be 0 to 2^53, got %lld", (long long)p->tokens);
    if (p->heads < 1 || p->heads > 65536)
        return dr_fail(DR_ERR_SHAPE, "heads: must be 1 to 65536, got %d", p->heads);
    if (p->value_heads < 1 || p->value_heads > 65536)
        return dr_fail(DR_ERR_SHAPE, "value_heads: must be 1 to 65536, got %d", p->value_heads);
    if (p->value_heads % p->heads != 0)
        return dr_fail(DR_ERR_SHAPE, "value_heads: must be a multiple of heads (%d), got %d",
                       p->heads, p->value_heads);
    if (p->key_dim < 1 || p->key_dim > DR_MAX_DIM)
        return dr_fail(DR_ERR_SHAPE, "key_dim: must be 1 to %d, got %d", DR_MAX_DIM, p->key_dim);
    if (p->value_dim < 1 || p->value_dim > DR_MAX_DIM)
        return dr_fail(DR_ERR_SHAPE, "value_dim: must be 1 to %d, got %d", DR_MAX_DIM,
                       p->value_dim);
    int64_t all;
    if (!dr_mul(p->batch, p->tokens + 1, &all) || !dr_mul(all, p->value_heads, &all) ||
        !dr_mul(all, DR_MAX_DIM * 64, &all))
        return dr_fail(DR_ERR_SHAPE, "batch x tokens x value_heads: %lld x %lld x %d is too large",
                       (long long)p->batch, (long long)p->tokens, p->value_heads);
    return DR_OK;
}

static dr_status check_gate(dr_problem *p)
{
    if (p->gate < DR_GATE_NONE || p->gate > DR_GATE_LOWER_BOUND)
        return dr_fail(DR_ERR_ARG,
                       "gate: must be one of DR_GATE_NONE .. DR_GATE_LOWER_BOUND (1 to 5; there is "
                       "no default), got %d", (int)p->gate);
    if (p->gate == DR_GATE_LOWER_BOUND) {
        if (!(p->lower_bound < 0) || !isfinite(p->lower_bound))
            return dr_fail(DR_ERR_ARG, "lower_bound: must be finite and below 0, got %g",
                           p->lower_bound);
    } else if (p->lower_bound != 0) {
        return dr_fail(DR_ERR_ARG, "lower_bound: must be 0 unless gate is DR_GATE_LOWER_BOUND, got %g",
                       p->lower_bound);
    }
    if (p->beta != DR_BETA_VALUE && p->beta != DR_BETA_LOGIT)
        return dr_fail(DR_ERR_ARG,
                       "beta: must be DR_BETA_VALUE (1) or DR_BETA_LOGIT (2; there is no default), "
                       "got %d", (int)p->beta);
    if (p->beta == DR_BETA_VALUE && p->beta_scale != 0 && p->beta_scale != 1)
        return dr_fail(DR_ERR_ARG, "beta_scale: must be 0 or 1 unless beta is DR_BETA_LOGIT, got %g",
                       p->beta_scale);
    if (p->beta_scale == 0)
        p->beta_scale = 1;
    if (p->beta_scale != 1 && p->beta_scale != 2)
        return dr_fail(DR_ERR_ARG, "beta_scale: must be 1 or 2, got %g", p->beta_scale);
    return DR_OK;
}

dr_status dr_problem_complete(const dr_problem *problem, dr_problem *out)
{
    if (problem == NULL)
        return dr_fail(DR_ERR_ARG, "problem: must not be NULL");
    if (problem->size != sizeof *problem)
        return dr_fail(DR_ERR_ARG, "problem.size: must be %zu (DR_PROBLEM_INIT), got %u",
                       sizeof *problem, problem->size);
    dr_problem p = *problem;
    if (dr_variant_find(p.variant) == NULL)
        return dr_fail(DR_ERR_ARG, "variant: must be DR_GDN (1) or DR_KDA (2), got %d",
                       (int)p.variant);
    if (p.value_heads == 0)
        p.value_heads = p.heads;
    DR_TRY(check_dims(&p));
    DR_TRY(check_gate(&p));
    DR_TRY(dr_offsets_check("offsets", p.offsets, p.sequences, p.batch, p.tokens));
    if (p.l2norm_eps != 0 && !p.l2norm)
        return dr_fail(DR_ERR_ARG, "l2norm_eps: must be 0 without l2norm, got %g", p.l2norm_eps);
    if (p.l2norm && p.l2norm_eps == 0)
        p.l2norm_eps = 1e-6;
    if (p.l2norm && !(p.l2norm_eps >= FLT_MIN && p.l2norm_eps <= FLT_MAX))
        return dr_fail(DR_ERR_ARG, "l2norm_eps: must be %g to %g, got %g", FLT_MIN, FLT_MAX,
                       p.l2norm_eps);
    if (!(fabs(p.scale) <= FLT_MAX))
        return dr_fail(DR_ERR_ARG, "scale: must be finite in fp32, got %g", p.scale);
    if (p.scale == 0)
        p.scale = 1 / sqrt(p.key_dim);
    if (p.head_map != DR_HEADS_INTERLEAVED && p.head_map != DR_HEADS_TILED)
        return dr_fail(DR_ERR_ARG, "head_map: must be DR_HEADS_INTERLEAVED (0) or DR_HEADS_TILED (1), "
                       "got %d", (int)p.head_map);
    if (p.chunk < 0)
        return dr_fail(DR_ERR_ARG, "chunk: must be 0 (the backend's choice) or more, got %d", p.chunk);
    if (p.keep < DR_KEEP_FACTORS || p.keep > DR_KEEP_STATES)
        return dr_fail(DR_ERR_ARG, "keep: must be DR_KEEP_FACTORS (0), DR_KEEP_INPUTS (1) or "
                       "DR_KEEP_STATES (2), got %d", (int)p.keep);
    *out = p;
    return DR_OK;
}

dr_status dr_plan_cut(dr_plan *plan, const dr_problem *completed)
{
    plan->problem = *completed;
    dr_problem *p = &plan->problem;
    p->offsets = NULL;
    plan->n_pieces = completed->offsets ? completed->sequences : p->batch;
    plan->pieces = dr_alloc((size_t)plan->n_pieces * sizeof(dr_piece));
    if (plan->pieces == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %lld pieces", (long long)plan->n_pieces);
    if (completed->offsets != NULL) {
        size_t bytes = (size_t)(plan->n_pieces + 1) * sizeof(int64_t);
        int64_t *own = dr_alloc(bytes);
        if (own == NULL)
            return dr_fail(DR_ERR_MEMORY, "plan: no memory for %lld offsets",
                           (long long)plan->n_pieces + 1);
        memcpy(own, completed->offsets, bytes);
        p->offsets = own;
    }
    plan->tail = p->offsets ? p->offsets[plan->n_pieces] : p->tokens;
    for (int64_t n = 0; n < plan->n_pieces; n++) {
        dr_piece *x = &plan->pieces[n];
        x->batch = p->offsets ? 0 : n;
        x->begin = p->offsets ? p->offsets[n] : 0;
        x->end = p->offsets ? p->offsets[n + 1] : p->tokens;
        x->chunk0 = plan->n_chunks;
        x->chunks = dr_ceil_div(x->end - x->begin, p->chunk);
        plan->n_chunks += x->chunks;
        plan->longest = dr_max(plan->longest, x->chunks);
    }
    return DR_OK;
}

void dr_plan_clear(dr_plan *plan)
{
    dr_free(plan->pieces);
    dr_free((void *)plan->problem.offsets);
    plan->pieces = NULL;
    plan->problem.offsets = NULL;
}
