/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_api.c - dr_plan and dr_buffers: a problem on a context, what it needs, and memory
 * for it. Sizes come from the backend's own layout stages, run on empty arenas.
 */
#include "core/delta.h"

static dr_status measure(dr_plan *plan, int dir, bool staged, size_t *saved, size_t *scratch)
{
    *saved = *scratch = 0;
    dr_pass p;
    dr_pass_open(&p, plan, NULL, dir, staged);
    DR_TRY(dr_pass_layout(&p));
    if (p.saved.overflow || p.scratch.overflow)
        return dr_fail(DR_ERR_MEMORY, "plan: the working memory of this problem exceeds 2^62 bytes");
    *saved = p.saved.used;
    *scratch = p.scratch.used;
    return DR_OK;
}

static dr_status measure_all(dr_plan *plan)
{
    size_t saved = 0, other = 0, staged_forward = 0, staged_backward = 0;
    DR_TRY(measure(plan, +1, false, &plan->saved, &plan->forward_scratch));
    DR_TRY(measure(plan, -1, false, &saved, &plan->backward_scratch));
    DR_TRY(measure(plan, +1, true, &other, &staged_forward));
    assert(saved == plan->saved && other == plan->saved);
    DR_TRY(measure(plan, -1, true, &other, &staged_backward));
    assert(other == plan->saved);
    plan->staged_scratch = staged_forward > staged_backward ? staged_forward : staged_backward;
    return DR_OK;
}

dr_status dr_plan_create(const dr_context *ctx, const dr_problem *problem, dr_plan **out)
{
    if (out == NULL)
        return dr_fail(DR_ERR_ARG, "out: must not be NULL");
    *out = NULL;
    if (ctx == NULL)
        return dr_fail(DR_ERR_ARG, "ctx: must not be NULL");
    dr_problem complete;
    DR_TRY(dr_problem_complete(problem, &complete));
    DR_TRY(ctx->backend->supports(ctx->dev, &complete));
    complete.chunk = ctx->backend->chunk(ctx->dev, &complete);
    dr_plan *plan = dr_alloc(sizeof *plan);
    if (plan == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %zu bytes", sizeof *plan);
    plan->ctx = ctx;
    dr_status status = dr_plan_cut(plan, &complete);
    if (status == DR_OK)
        status = measure_all(plan);
    if (status != DR_OK) {
        dr_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return DR_OK;
}

void dr_plan_destroy(dr_plan *plan)
{
    if (plan == NULL)
        return;
    dr_plan_clear(plan);
    dr_free(plan);
}

dr_status dr_plan_describe(const dr_plan *plan, dr_plan_info *info)
{
    if (plan == NULL || info == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", plan == NULL ? "plan" : "info");
    if (info->size != sizeof *info)
        return dr_fail(DR_ERR_ARG, "info.size: must be %zu (DR_PLAN_INFO_INIT), got %u", sizeof *info,
                       info->size);
    info->chunk = plan->problem.chunk;
    info->sequences = plan->n_pieces;
    info->chunks = plan->n_chunks;
    info->saved_bytes = plan->saved;
    info->forward_scratch = plan->forward_scratch;
    info->backward_scratch = plan->backward_scratch;
    info->staged_scratch = plan->staged_scratch;
    return DR_OK;
}

dr_status dr_buffers_create(const dr_plan *plan, dr_buffers *out)
{
    if (plan == NULL || out == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", plan == NULL ? "plan" : "out");
    size_t scratch = dr_plan_fused_scratch(plan);
    if (plan->staged_scratch > scratch)
        scratch = plan->staged_scratch;
    return dr_buffers_alloc(plan->saved, scratch, out);
}

dr_status dr_buffers_alloc(size_t saved, size_t scratch, dr_buffers *out)
{
    dr_buffers b = DR_BUFFERS_INIT;
    b.saved_bytes = saved;
    b.scratch_bytes = scratch;
    b.saved = dr_alloc(saved);
    b.scratch = b.saved != NULL ? dr_alloc(scratch) : NULL;
    *out = b;
    if (b.saved == NULL || b.scratch == NULL) {
        dr_buffers_destroy(out);
        return dr_fail(DR_ERR_MEMORY, "buffers: no memory for %zu + %zu bytes", saved, scratch);
    }
    return DR_OK;
}

void dr_buffers_destroy(dr_buffers *buffers)
{
    if (buffers == NULL)
        return;
    dr_free(buffers->saved);
    dr_free(buffers->scratch);
    *buffers = (dr_buffers)DR_BUFFERS_INIT;
}

dr_status dr_buffers_check(const dr_buffers *b, size_t saved, bool saved_required, size_t scratch)
{
    if (b == NULL)
        return dr_fail(DR_ERR_ARG, "buffers: must not be NULL");
    if (b->size != sizeof *b)
        return dr_fail(DR_ERR_ARG, "buffers.size: must be %zu (DR_BUFFERS_INIT), got %u", sizeof *b,
                       b->size);
    if ((b->saved != NULL || saved_required) && (b->saved == NULL || b->saved_bytes < saved))
        return dr_fail(DR_ERR_BUFFER, "buffers.saved: needs %zu bytes, got %zu at %p", saved,
                       b->saved_bytes, b->saved);
    if (b->scratch == NULL || b->scratch_bytes < scratch)
        return dr_fail(DR_ERR_BUFFER, "buffers.scratch: needs %zu bytes, got %zu at %p", scratch,
                       b->scratch_bytes, b->scratch);
    if ((uintptr_t)b->saved % DR_ALIGN != 0 || (uintptr_t)b->scratch % DR_ALIGN != 0)
        return dr_fail(DR_ERR_BUFFER, "buffers: must be aligned to %d bytes, got saved %p, scratch %p",
                       DR_ALIGN, b->saved, b->scratch);
    const uintptr_t s = (uintptr_t)b->saved, x = (uintptr_t)b->scratch;
    if (b->saved != NULL && s < x + scratch && x < s + saved)
        return dr_fail(DR_ERR_BUFFER, "buffers: saved (%zu bytes at %p) and scratch (%zu bytes at %p) must "
                       "not overlap", saved, b->saved, scratch, b->scratch);
    return DR_OK;
}
