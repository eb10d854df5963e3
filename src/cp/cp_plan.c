/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_plan.c - one stream over many ranks: the table of protocols, how a protocol is named, the plan
 * of a rank and the calls on it. What happens between the ranks is the engine's (cp_plan.h).
 */
#include "base/half.h"
#include "cp/cp_agree.h"
#include "cp/cp_plan.h"

#include <stdlib.h>

static const dr_cp_protocol *const protocols[] = {
    &dr_cp_p2p,
    &dr_cp_relay,
    &dr_cp_allgather,
    &dr_cp_grouped,
    &dr_cp_doubling,
    &dr_cp_ulysses,
};

/* ---- names --------------------------------------------------------------------------- */

int32_t dr_cp_protocol_count(void) { return (int32_t)DR_COUNT(protocols); }

static const dr_cp_protocol *protocol_at(int32_t index)
{
    return index >= 0 && index < dr_cp_protocol_count() ? protocols[index] : NULL;
}

const char *dr_cp_protocol_name(int32_t index)
{
    return protocol_at(index) != NULL ? protocol_at(index)->name : NULL;
}

const char *dr_cp_protocol_about(int32_t index)
{
    return protocol_at(index) != NULL ? protocol_at(index)->about : NULL;
}

static dr_status unknown_protocol(const char *spec)
{
    char names[160] = "";
    for (int32_t i = 0; i < dr_cp_protocol_count(); i++) {
        strncat(names, i == 0 ? "" : ", ", sizeof names - strlen(names) - 1);
        strncat(names, protocols[i]->name, sizeof names - strlen(names) - 1);
        if (protocols[i]->width == DR_CP_WIDTH)
            strncat(names, ":G", sizeof names - strlen(names) - 1);
    }
    return dr_fail(DR_ERR_ARG, "protocol: must be one of %s, got \"%s\"", names, spec);
}

static dr_status parse_width(const char *spec, const char *at, dr_cp_spec *out)
{
    const dr_cp_protocol *p = out->protocol;
    if (*at != ':' && p->width != DR_CP_WIDTH)
        return DR_OK;
    if (*at == ':' && p->width == DR_CP_NO_WIDTH)
        return dr_fail(DR_ERR_ARG, "protocol: %s takes no width, got \"%s\"", p->name, spec);
    char *end = NULL;
    const long w = *at == ':' ? strtol(at + 1, &end, 10) : 0;
    if (end == NULL || end == at + 1 || (*end != 0 && *end != '+') || w < 1 || w > 65536)
        return dr_fail(DR_ERR_ARG, "protocol: %s needs a width of 1 to 65536, as in \"%s:2\", got \"%s\"",
                       p->name, p->name, spec);
    out->width = (int32_t)w;
    return DR_OK;
}

dr_status dr_cp_spec_parse(const char *spec, dr_cp_spec *out)
{
    *out = (dr_cp_spec){0};
    if (spec == NULL)
        return dr_fail(DR_ERR_ARG, "protocol: must be a name, got NULL");
    const size_t length = strcspn(spec, ":+");
    for (size_t i = 0; i < DR_COUNT(protocols); i++)
        if (strlen(protocols[i]->name) == length && strncmp(protocols[i]->name, spec, length) == 0)
            out->protocol = protocols[i];
    if (out->protocol == NULL)
        return unknown_protocol(spec);
    DR_TRY(parse_width(spec, spec + length, out));
    const char *plus = strchr(spec, '+');
    if (plus != NULL && !out->protocol->takes_rest)
        return dr_fail(DR_ERR_ARG, "protocol: %s takes no second protocol, got \"%s\"",
                       out->protocol->name, spec);
    out->rest = plus != NULL ? plus + 1 : NULL;
    return DR_OK;
}

/* ---- agreement ----------------------------------------------------------------------- */

static const char *const agreed[DR_AGREED] = {"problem", "offsets", "partition", "protocol"};

static void digest(dr_agreement *a, const dr_context *ctx, const dr_problem *p,
                   const dr_partition *partition, const char *protocol)
{
    const int64_t ints[] = {(int64_t)p->variant, p->batch, p->tokens, p->heads, p->value_heads, p->key_dim,
                            p->value_dim, (int64_t)p->gate, (int64_t)p->beta, p->l2norm,
                            (int64_t)p->head_map, p->chunk, (int64_t)p->keep, p->sequences};
    const double reals[] = {p->lower_bound, p->beta_scale, p->l2norm_eps, p->scale};
    uint64_t h = dr_cp_digest(dr_cp_digest(DR_DIGEST, ints, sizeof ints), reals, sizeof reals);
    a->digest[0] = dr_cp_digest(h, ctx->backend->name, strlen(ctx->backend->name));
    a->digest[1] = dr_cp_digest_offsets(p->offsets, p->sequences);
    a->digest[2] = dr_cp_digest_partition(partition);
    a->digest[3] = dr_cp_digest(DR_DIGEST, protocol, strlen(protocol));
}

/* ---- plan ----------------------------------------------------------------------------- */

/* Everything that this rank can find wrong by itself. */
static dr_status build(dr_cp_plan *plan, const dr_problem *problem, const dr_partition *partition,
                       const char *spec, dr_agreement *mine)
{
    dr_problem complete;
    DR_TRY(dr_problem_complete(problem, &complete));
    if (complete.batch != 1)
        return dr_fail(DR_ERR_SHAPE, "batch: must be 1 under context parallelism (rows are sequences of the "
                       "stream), got %lld", (long long)complete.batch);
    DR_TRY(dr_cp_spec_parse(spec, &plan->spec));
    DR_TRY(dr_route_build(&plan->route, partition, plan->comm->rank, complete.tokens, complete.offsets,
                          complete.sequences));
    if (partition->ranks != plan->comm->size)
        return dr_fail(DR_ERR_ARG, "partition.ranks: must be the size of the communicator (%d), got %d",
                       plan->comm->size, partition->ranks);
    dr_problem local = *problem;
    local.tokens = plan->route.tokens;
    local.offsets = plan->route.offsets;
    local.sequences = plan->route.n_pieces;
    DR_TRY(dr_plan_create(plan->ctx, &local, &plan->inner));
    complete.chunk = plan->inner->problem.chunk;
    DR_TRY(plan->spec.protocol->engine->build(plan, &complete, partition));
    digest(mine, plan->ctx, &complete, partition, spec);
    return DR_OK;
}

dr_status dr_cp_plan_fit(dr_cp_plan *plan, const dr_arena *saved, const dr_arena *scratch)
{
    if (saved->overflow || scratch->overflow)
        return dr_fail(DR_ERR_MEMORY, "plan: the working memory of this problem exceeds 2^62 bytes");
    plan->saved = saved->used > plan->saved ? saved->used : plan->saved;
    plan->scratch = scratch->used > plan->scratch ? scratch->used : plan->scratch;
    return DR_OK;
}

static dr_status join(dr_cp_plan *plan, const dr_problem *problem, const dr_partition *partition)
{
    const dr_cp_engine *engine = plan->spec.protocol->engine;
    dr_problem complete;
    if (engine->join == NULL)
        return DR_OK;
    DR_TRY(dr_problem_complete(problem, &complete));
    complete.chunk = plan->inner->problem.chunk;
    return engine->join(plan, &complete, partition);
}

dr_status dr_cp_plan_create(const dr_context *ctx, struct dr_comm *comm, const dr_problem *problem,
                            const dr_partition *partition, const char *protocol, dr_cp_plan **out)
{
    if (out == NULL)
        return dr_fail(DR_ERR_ARG, "out: must not be NULL");
    *out = NULL;
    if (ctx == NULL || comm == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", ctx == NULL ? "ctx" : "comm");
    dr_cp_plan *plan = dr_alloc(sizeof *plan);
    if (plan == NULL) {
        dr_comm_abort(comm, "no memory for a plan");
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %zu bytes", sizeof *plan);
    }
    plan->ctx = ctx;
    plan->comm = comm;
    dr_agreement mine = {0};
    dr_agreement_set(&mine, build(plan, problem, partition, protocol, &mine));
    dr_status status = dr_cp_agree(comm, &mine, agreed);
    if (status == DR_OK)
        status = join(plan, problem, partition);
    if (status != DR_OK) {
        dr_cp_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return DR_OK;
}

void dr_cp_plan_destroy(dr_cp_plan *plan)
{
    if (plan == NULL)
        return;
    if (plan->spec.protocol != NULL)
        plan->spec.protocol->engine->clear(plan);
    dr_plan_destroy(plan->inner);
    dr_route_clear(&plan->route);
    dr_free(plan);
}

/* ---- what a plan says -------------------------------------------------------------------- */

dr_status dr_cp_plan_describe(const dr_cp_plan *plan, dr_cp_info *info)
{
    if (plan == NULL || info == NULL || info->size != sizeof *info)
        return dr_fail(DR_ERR_ARG, "plan, info: must be given, info with size %zu (DR_CP_INFO_INIT)",
                       sizeof *info);
    *info = (dr_cp_info){sizeof *info, plan->route.tokens, plan->route.n_pieces, plan->saved,
                         plan->scratch, {0, 0}, {0, 0}};
    plan->spec.protocol->engine->describe(plan, info);
    return DR_OK;
}

dr_status dr_cp_plan_piece(const dr_cp_plan *plan, int64_t index, dr_cp_piece *piece)
{
    if (plan == NULL || piece == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", plan == NULL ? "plan" : "piece");
    if (index < 0 || index >= plan->route.n_pieces)
        return dr_fail(DR_ERR_ARG, "index: must be 0 to %lld, got %lld",
                       (long long)plan->route.n_pieces - 1, (long long)index);
    *piece = plan->route.pieces[index];
    return DR_OK;
}

dr_status dr_cp_buffers_create(const dr_cp_plan *plan, dr_buffers *out)
{
    if (plan == NULL || out == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", plan == NULL ? "plan" : "out");
    return dr_buffers_alloc(plan->saved, plan->scratch, out);
}

/* ---- calls ------------------------------------------------------------------------------- */

/* d_initial_state is the gradient of what the caller gave: nothing for pieces entered from elsewhere. */
static void clear_inner_gradients(const dr_cp_plan *plan, const dr_tensor *t)
{
    for (int64_t n = 0; t->data != NULL && n < plan->route.n_pieces; n++) {
        if (plan->route.pieces[n].starts)
            continue;
        dr_tensor one = *t;
        one.data = dr_at(t, n, 0, 0, 0);
        one.shape[0] = 1;
        dr_tensor_zero_tail(&one, 0);
    }
}

static dr_status run(const dr_cp_plan *plan, const dr_io *io, const dr_buffers *buffers, int dir)
{
    if (plan == NULL)
        return dr_fail(DR_ERR_ARG, "plan: must not be NULL");
    if (plan->comm->health != DR_OK)
        return dr_fail(DR_ERR_COMM, "comm: rank %d can no longer be used after a failure",
                       plan->comm->rank);
    dr_io normal;
    dr_status status = dr_buffers_check(buffers, plan->saved, dir < 0, plan->scratch);
    if (status == DR_OK && io != NULL && io->state_index != NULL)
        status = dr_fail(DR_ERR_ARG, "state_index: must be NULL under context parallelism");
    if (status == DR_OK)
        status = dr_io_normalise(plan->inner, io, dir, NULL, &normal);
    if (status != DR_OK) { /* the peers are on their way into the exchange */
        dr_comm_abort(plan->comm, dr_last_error());
        return status;
    }
    status = plan->spec.protocol->engine->run(plan, dir, io, &normal, buffers);
    if (status == DR_OK && dir < 0)
        clear_inner_gradients(plan, &normal.d_initial_state);
    return status;
}

dr_status dr_cp_forward(const dr_cp_plan *plan, const dr_io *io, const dr_buffers *buffers)
{
    return run(plan, io, buffers, DR_FORWARD);
}

dr_status dr_cp_backward(const dr_cp_plan *plan, const dr_io *io, const dr_buffers *buffers)
{
    return run(plan, io, buffers, DR_ADJOINT);
}
