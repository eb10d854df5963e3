/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp.c - one stream over many ranks: the table of protocols, the agreement between ranks, and the
 * driver of a context-parallel pass. A rank computes on its span with a plain plan whose sequences
 * are the rank's pieces; what the pieces owe each other across ranks is the protocol's program.
 *
 * NOTE [Agree, then talk]: creating a plan compares digests of problem, offsets, partition and protocol
 * over all ranks, and every rank's own refusals, before any tensor travels. A failure inside a call aborts
 * the communicator, so no peer waits for a message that will never come.
 */
#include "base/half.h"
#include "core/delta.h"
#include "cp/cp_exec.h"

#include <stdlib.h>

static const dr_cp_protocol *const protocols[] = {
    &dr_cp_p2p,
    &dr_cp_allgather,
    &dr_cp_grouped,
    &dr_cp_doubling,
};

struct dr_cp_plan {
    const dr_context *ctx;
    dr_comm *comm;
    dr_plan *inner;
    dr_route route;
    dr_program forward, adjoint;
    size_t saved, scratch; /* of the whole call */
};

/* ---- protocol names ------------------------------------------------------------------ */

static dr_status parse_protocol(const char *spec, const dr_cp_protocol **out, int32_t *width)
{
    *width = 1;
    if (spec == NULL)
        return dr_fail(DR_ERR_ARG, "protocol: must be a name, got NULL");
    const char *colon = strchr(spec, ':');
    size_t length = colon != NULL ? (size_t)(colon - spec) : strlen(spec);
    for (size_t i = 0; i < DR_COUNT(protocols); i++) {
        const dr_cp_protocol *p = protocols[i];
        if (strlen(p->name) != length || strncmp(p->name, spec, length) != 0)
            continue;
        *out = p;
        if (!p->takes_width) {
            if (colon != NULL)
                return dr_fail(DR_ERR_ARG, "protocol: %s takes no width, got \"%s\"", p->name, spec);
            return DR_OK;
        }
        char *end = NULL;
        long w = colon != NULL ? strtol(colon + 1, &end, 10) : 0;
        if (colon == NULL || end == colon + 1 || *end != 0 || w < 1 || w > 65536)
            return dr_fail(DR_ERR_ARG, "protocol: %s needs a width of 1 to 65536, as in \"%s:2\", got \"%s\"",
                           p->name, p->name, spec);
        *width = (int32_t)w;
        return DR_OK;
    }
    return dr_fail(DR_ERR_ARG, "protocol: must be p2p, allgather, grouped:G or doubling, got \"%s\"", spec);
}

/* ---- agreement ------------------------------------------------------------------------ */

typedef struct agreement {
    int64_t status;
    uint64_t digest[4];
    char sentence[216];
} agreement;

static const char *const agreed[] = {"problem", "offsets", "partition", "protocol"};

static uint64_t mix(uint64_t h, const void *data, size_t bytes)
{
    const unsigned char *c = data;
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ c[i]) * 0x100000001b3u;
    return h;
}

static void digest(agreement *a, const dr_context *ctx, const dr_problem *p,
                   const dr_partition *partition, const char *protocol)
{
    const int64_t ints[] = {(int64_t)p->variant, p->batch, p->tokens, p->heads, p->value_heads, p->key_dim,
                            p->value_dim, (int64_t)p->gate, (int64_t)p->beta, p->l2norm,
                            (int64_t)p->head_map, p->chunk, (int64_t)p->keep, p->sequences};
    const double reals[] = {p->lower_bound, p->beta_scale, p->l2norm_eps, p->scale};
    const uint64_t basis = 0xcbf29ce484222325u;
    a->digest[0] = mix(mix(basis, ints, sizeof ints), reals, sizeof reals);
    a->digest[0] = mix(a->digest[0], ctx->backend->name, strlen(ctx->backend->name));
    a->digest[1] = basis;
    if (p->offsets != NULL)
        a->digest[1] = mix(basis, p->offsets, (size_t)(p->sequences + 1) * sizeof *p->offsets);
    a->digest[2] = mix(basis, &partition->ranks, sizeof partition->ranks);
    for (int64_t i = 0; i < partition->count; i++) {
        const dr_fragment *f = &partition->fragments[i];
        const int64_t row[] = {f->begin, f->end, f->rank};
        a->digest[2] = mix(a->digest[2], row, sizeof row);
    }
    a->digest[3] = mix(basis, protocol, strlen(protocol));
}

/* Every rank learns whether all succeeded and mean the same. */
static dr_status agree(dr_comm *comm, agreement *mine)
{
    agreement *all = dr_alloc((size_t)comm->size * sizeof *all);
    if (all == NULL) {
        dr_comm_abort(comm, "no memory for the agreement");
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %d ranks", comm->size);
    }
    dr_status status = dr_comm_allgather(comm, mine, all, sizeof *mine);
    for (int32_t r = 0; status == DR_OK && r < comm->size; r++)
        if (all[r].status != DR_OK) {
            all[r].sentence[sizeof all[r].sentence - 1] = 0;
            status = r == comm->rank ? dr_fail((dr_status)mine->status, "%s", mine->sentence)
                                     : dr_fail((dr_status)all[r].status, "rank %d refused: %s", r,
                                               all[r].sentence);
        }
    for (int32_t r = 1; status == DR_OK && r < comm->size; r++)
        for (size_t i = 0; i < DR_COUNT(agreed) && status == DR_OK; i++)
            if (all[r].digest[i] != all[0].digest[i])
                status = dr_fail(DR_ERR_ARG, "%s: must be the same on all ranks, but rank %d differs from rank 0",
                                 agreed[i], r);
    dr_free(all);
    return status;
}

/* ---- plan ----------------------------------------------------------------------------- */

static bool continues(const dr_route *route, int64_t s)
{
    const dr_slot *slot = &route->slots[s];
    return slot->from_previous && slot->to_next && slot->first == slot->last;
}

/* Calls the generator for every chain, in token order. */
static dr_status generate(dr_program *p, const dr_route *route, const dr_cp_protocol *protocol,
                          int32_t width, bool adjoint)
{
    dr_node *nodes = dr_alloc((size_t)dr_max(route->n_slots, 1) * sizeof *nodes);
    if (nodes == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %lld slots", (long long)route->n_slots);
    bool transposed = adjoint && protocol->generate_adjoint != NULL;
    for (int64_t s = 0; s < route->n_slots && p->status == DR_OK; s++) {
        if (!route->slots[s].to_next || continues(route, s))
            continue;
        int32_t n = 0;
        int64_t at = s;
        do
            nodes[n++] = (dr_node){route->slots[at].rank, (int32_t)at};
        while (continues(route, ++at));
        nodes[n++] = (dr_node){route->slots[at].rank, (int32_t)at};
        if (adjoint && !transposed)
            for (int32_t i = 0; i < n / 2; i++) {
                dr_node swap = nodes[i];
                nodes[i] = nodes[n - 1 - i];
                nodes[n - 1 - i] = swap;
            }
        const dr_chain chain = {n, nodes};
        (transposed ? protocol->generate_adjoint : protocol->generate)(p, &chain, width);
    }
    dr_free(nodes);
    return p->status;
}

/* The memory of a call: the inner plan's, then the program's. */
static void carve(const dr_cp_plan *plan, int dir, dr_exec *x, dr_arena *saved, dr_arena *scratch)
{
    const dr_problem *p = &plan->inner->problem;
    *x = (dr_exec){.ctx = plan->ctx, .comm = plan->comm, .route = &plan->route, .dir = dir,
                   .program = dir > 0 ? &plan->forward : &plan->adjoint,
                   .HV = p->value_heads, .K = p->key_dim, .V = p->value_dim};
    DR_TAKE(saved, char, plan->inner->saved, 1);
    DR_TAKE(scratch, char, plan->inner->staged_scratch, 1);
    dr_exec_carve(x, saved, scratch);
}

static dr_status measure(dr_cp_plan *plan)
{
    for (int dir = +1; dir >= -1; dir -= 2) {
        dr_arena saved = {0}, scratch = {0};
        dr_exec x;
        carve(plan, dir, &x, &saved, &scratch);
        if (saved.overflow || scratch.overflow)
            return dr_fail(DR_ERR_MEMORY, "plan: the working memory of this problem exceeds 2^62 bytes");
        plan->saved = saved.used > plan->saved ? saved.used : plan->saved;
        plan->scratch = scratch.used > plan->scratch ? scratch.used : plan->scratch;
    }
    return DR_OK;
}

/* Everything that this rank can find wrong by itself. */
static dr_status build(dr_cp_plan *plan, const dr_problem *problem, const dr_partition *partition,
                       const char *spec, agreement *mine)
{
    const dr_cp_protocol *protocol = NULL;
    int32_t width;
    dr_problem complete;
    DR_TRY(dr_problem_complete(problem, &complete));
    if (complete.batch != 1)
        return dr_fail(DR_ERR_SHAPE, "batch: must be 1 under context parallelism (rows are sequences of the "
                       "stream), got %lld", (long long)complete.batch);
    DR_TRY(parse_protocol(spec, &protocol, &width));
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
    plan->forward.me = plan->adjoint.me = plan->comm->rank;
    DR_TRY(generate(&plan->forward, &plan->route, protocol, width, false));
    DR_TRY(generate(&plan->adjoint, &plan->route, protocol, width, true));
    DR_TRY(measure(plan));
    complete.chunk = plan->inner->problem.chunk;
    digest(mine, plan->ctx, &complete, partition, spec);
    return DR_OK;
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
    agreement mine = {0};
    mine.status = build(plan, problem, partition, protocol, &mine);
    if (mine.status != DR_OK)
        strncpy(mine.sentence, dr_last_error(), sizeof mine.sentence - 1);
    dr_status status = agree(comm, &mine);
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
    dr_plan_destroy(plan->inner);
    dr_route_clear(&plan->route);
    dr_program_clear(&plan->forward);
    dr_program_clear(&plan->adjoint);
    dr_free(plan);
}

dr_status dr_cp_plan_describe(const dr_cp_plan *plan, dr_cp_info *info)
{
    if (plan == NULL || info == NULL || info->size != sizeof *info)
        return dr_fail(DR_ERR_ARG, "plan, info: must be given, info with size %zu (DR_CP_INFO_INIT)",
                       sizeof *info);
    *info = (dr_cp_info){sizeof *info, plan->route.tokens, plan->route.n_pieces, plan->saved,
                         plan->scratch, {0, 0}, {0, 0}};
    const dr_program *programs[2] = {&plan->forward, &plan->adjoint};
    for (int d = 0; d < 2; d++)
        for (int64_t i = 0; i < programs[d]->n_ops; i++) {
            const dr_step_op *op = &programs[d]->ops[i];
            if (op->op != DR_OP_SEND)
                continue;
            const dr_problem *p = &plan->inner->problem;
            int64_t rows = programs[d]->kinds[op->a] == DR_VALUE_MAP ? p->value_dim + p->key_dim
                                                                     : p->value_dim;
            info->sends[d]++;
            info->send_bytes[d] += rows * p->key_dim * p->value_heads * (int64_t)sizeof(float);
        }
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

/* ---- driver ---------------------------------------------------------------------------- */

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

static dr_status stages(const dr_cp_plan *plan, dr_exec *x, const dr_io *io, const dr_buffers *inner)
{
    dr_direction dir = x->dir > 0 ? DR_FORWARD : DR_ADJOINT;
    DR_TRY(dr_exec_post(x));
    DR_TRY(dr_prepare(plan->inner, dir, io, inner));
    if (x->n_maps > 0)
        DR_TRY(dr_summarize_some(plan->inner, dir, io, inner, x->maps, x->map_of));
    DR_TRY(dr_exec_run(x));
    DR_TRY(dr_recur_some(plan->inner, dir, io, inner, x->entries, x->entry_of, NULL));
    return dr_output(plan->inner, dir, io, inner);
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
    dr_arena saved = {.base = buffers->saved, .size = plan->saved};
    dr_arena scratch = {.base = buffers->scratch, .size = plan->scratch};
    dr_exec x;
    carve(plan, dir, &x, &saved, &scratch);
    x.boundary = dir > 0 ? &normal.initial_state : &normal.d_final_state;
    dr_buffers inner = *buffers;
    inner.saved_bytes = plan->inner->saved;
    inner.scratch_bytes = plan->inner->staged_scratch;
    status = dr_exec_finish(&x, stages(plan, &x, io, &inner));
    if (status == DR_OK && dir < 0)
        clear_inner_gradients(plan, &normal.d_initial_state);
    dr_arena_done(&saved);
    dr_arena_done(&scratch);
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
