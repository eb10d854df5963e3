/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_run.c - the engine of protocols that are programs over states and maps: it has the generator
 * write both programs, chain by chain, and runs them between the stages of a pass. All of the rank's
 * work that needs no entry is done first; the exchange is one point in time.
 */
#include "cp/cp_exec.h"
#include "cp/cp_plan.h"

typedef struct programs {
    dr_program forward, adjoint;
} programs;

static bool continues(const dr_route *route, int64_t s)
{
    const dr_slot *slot = &route->slots[s];
    return slot->from_previous && slot->to_next && slot->first == slot->last;
}

/* Calls the generator for every chain, in token order. */
static dr_status generate(dr_program *p, const dr_route *route, const dr_cp_spec *spec, bool adjoint)
{
    const dr_cp_protocol *protocol = spec->protocol;
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
        (transposed ? protocol->generate_adjoint : protocol->generate)(p, &chain, spec->width);
    }
    dr_free(nodes);
    return p->status;
}

/* The memory of a call: the inner plan's, then the program's. */
static void carve(const dr_cp_plan *plan, int dir, dr_exec *x, dr_arena *saved, dr_arena *scratch)
{
    const dr_problem *p = &plan->inner->problem;
    const programs *own = plan->own;
    *x = (dr_exec){.ctx = plan->ctx, .comm = plan->comm, .route = &plan->route, .dir = dir,
                   .program = dir > 0 ? &own->forward : &own->adjoint,
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
        DR_TRY(dr_cp_plan_fit(plan, &saved, &scratch));
    }
    return DR_OK;
}

static dr_status build(dr_cp_plan *plan, const dr_problem *problem, const dr_partition *partition)
{
    (void)problem;
    (void)partition;
    programs *own = plan->own = dr_alloc(sizeof *own);
    if (own == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %zu bytes", sizeof *own);
    own->forward.me = own->adjoint.me = plan->comm->rank;
    DR_TRY(generate(&own->forward, &plan->route, &plan->spec, false));
    DR_TRY(generate(&own->adjoint, &plan->route, &plan->spec, true));
    return measure(plan);
}

static void clear(dr_cp_plan *plan)
{
    programs *own = plan->own;
    if (own == NULL)
        return;
    dr_program_clear(&own->forward);
    dr_program_clear(&own->adjoint);
    dr_free(own);
}

static void describe(const dr_cp_plan *plan, dr_cp_info *info)
{
    const programs *own = plan->own;
    const dr_program *both[2] = {&own->forward, &own->adjoint};
    const dr_problem *p = &plan->inner->problem;
    for (int d = 0; d < 2; d++)
        for (int64_t i = 0; i < both[d]->n_ops; i++) {
            const dr_step_op *op = &both[d]->ops[i];
            if (op->op != DR_OP_SEND)
                continue;
            int64_t rows = both[d]->kinds[op->a] == DR_VALUE_MAP ? p->value_dim + p->key_dim
                                                                 : p->value_dim;
            info->sends[d]++;
            info->send_bytes[d] += rows * p->key_dim * p->value_heads * (int64_t)sizeof(float);
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

static dr_status run(const dr_cp_plan *plan, int dir, const dr_io *io, const dr_io *normal,
                     const dr_buffers *buffers)
{
    dr_arena saved = {.base = buffers->saved, .size = plan->saved};
    dr_arena scratch = {.base = buffers->scratch, .size = plan->scratch};
    dr_exec x;
    carve(plan, dir, &x, &saved, &scratch);
    x.boundary = dir > 0 ? &normal->initial_state : &normal->d_final_state;
    dr_buffers inner = *buffers;
    inner.saved_bytes = plan->inner->saved;
    inner.scratch_bytes = plan->inner->staged_scratch;
    dr_status status = dr_exec_finish(&x, stages(plan, &x, io, &inner));
    dr_arena_done(&saved);
    dr_arena_done(&scratch);
    return status;
}

const dr_cp_engine dr_cp_programs = {build, NULL, clear, describe, run};
