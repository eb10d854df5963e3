/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context.c - the table of backends, and contexts: a backend opened with its threads.
 */
#include "core/core.h"

static const dr_backend *const backends[] = {
    &dr_backend_cpu,
    &dr_backend_ref,
};

const char *dr_backend_name(int index)
{
    return index >= 0 && (size_t)index < DR_COUNT(backends) ? backends[index]->name : NULL;
}

dr_status dr_context_create(const char *backend, const dr_context_options *options,
                            dr_context **out)
{
    if (out == NULL)
        return dr_fail(DR_ERR_ARG, "out: must not be NULL");
    *out = NULL;
    if (backend == NULL)
        return dr_fail(DR_ERR_ARG, "backend: must be a name, got NULL");
    const dr_backend *found = NULL;
    for (size_t i = 0; i < DR_COUNT(backends); i++)
        if (strcmp(backends[i]->name, backend) == 0)
            found = backends[i];
    if (found == NULL)
        return dr_fail(DR_ERR_ARG, "backend: must be \"cpu\" or \"ref\", got \"%s\"", backend);
    dr_pool pool;
    DR_TRY(dr_pool_init(&pool, options));
    dr_context *ctx = dr_alloc(sizeof *ctx);
    if (ctx == NULL)
        return dr_fail(DR_ERR_MEMORY, "context: no memory for %zu bytes", sizeof *ctx);
    ctx->backend = found;
    ctx->pool = pool;
    dr_status status = found->open(&ctx->pool, &ctx->dev);
    if (status != DR_OK) {
        dr_free(ctx);
        return status;
    }
    *out = ctx;
    return DR_OK;
}

void dr_context_destroy(dr_context *ctx)
{
    if (ctx == NULL)
        return;
    ctx->backend->close(ctx->dev);
    dr_free(ctx);
}

const char *dr_context_backend(const dr_context *ctx) { return ctx->backend->name; }

int32_t dr_context_threads(const dr_context *ctx) { return ctx->pool.threads; }

const char *dr_context_isa(const dr_context *ctx) { return ctx->backend->isa(ctx->dev); }

const char *dr_context_isa_reason(const dr_context *ctx)
{
    return ctx->backend->isa_reason(ctx->dev);
}

dr_status dr_supports(const dr_context *ctx, const dr_problem *problem)
{
    if (ctx == NULL)
        return dr_fail(DR_ERR_ARG, "ctx: must not be NULL");
    dr_problem complete;
    DR_TRY(dr_problem_complete(problem, &complete));
    return ctx->backend->supports(ctx->dev, &complete);
}
