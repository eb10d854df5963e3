/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case_delta.c - cases of the delta rule: whole passes, decoding, and the stages with their maps.
 * Raw gates, packed documents, pools, layouts of states and what is kept all come from the case.
 */
#include "case_run.h"

#include <math.h>
#include <string.h>

static void declare_states(dr_case_run *run)
{
    const dr_case *c = &run->c;
    dr_io *io = &run->io;
    if (c->flags & (DR_CASE_NO_STATE | DR_CASE_ENTRY))
        return;
    int64_t slots = dr_case_pool(run, &io->state_index);
    dr_case_extents e =
        c->state_v_first ? E4(slots, c->HV, c->V, c->K) : E4(slots, c->HV, c->K, c->V);
    if (c->flags & DR_CASE_FRESH) {
        dr_case_output(run, &io->final_state, "final_state", c->state_dtype, e);
        return;
    }
    dr_case_input(run, &io->initial_state, "initial_state", c->state_dtype, e, DR_VALUES_EVEN, 1);
    if (c->flags & (DR_CASE_IN_PLACE | DR_CASE_POOL))
        dr_case_alias(run, &io->final_state, "final_state", "initial_state");
    else
        dr_case_output(run, &io->final_state, "final_state", c->state_dtype, e);
    if (dr_case_trips(c) == 2) {
        dr_case_input(run, &io->d_final_state, "d_final_state", c->state_dtype, e, DR_VALUES_EVEN,
                      1);
        dr_case_gradient(run, &io->d_initial_state, "d_initial_state", c->state_dtype, e, false);
    }
}

static void declare_gate(dr_case_run *run, dr_case_extents gates)
{
    const dr_case *c = &run->c;
    dr_io *io = &run->io;
    bool raw = c->gate == DR_GATE_SOFTPLUS || c->gate == DR_GATE_LOWER_BOUND;
    if (c->gate == DR_GATE_NONE)
        return;
    dr_case_values values = raw                            ? DR_VALUES_EVEN
                            : c->gate == DR_GATE_FACTOR    ? DR_VALUES_FACTOR
                            : c->flags & DR_CASE_ALTERNATE ? DR_VALUES_ALTERNATE
                                                           : DR_VALUES_DECAY;
    dr_case_input(run, &io->g, "g", c->gate_dtype, gates, values, raw ? 3 : c->decay);
    if (dr_case_trips(c) == 2)
        dr_case_gradient(run, &io->dg, "dg", c->gate_dtype, gates, true);
    if (!raw)
        return;
    dr_case_extents bias = c->variant == DR_KDA ? E2(c->HV, c->K) : E1(c->HV);
    if (!(c->flags & DR_CASE_NO_A_LOG))
        dr_case_input(run, &io->a_log, "a_log", c->gate_dtype, E1(c->HV), DR_VALUES_EVEN, 1);
    if (!(c->flags & DR_CASE_NO_BIAS))
        dr_case_input(run, &io->dt_bias, "dt_bias", c->gate_dtype, bias, DR_VALUES_EVEN, 1);
    if (dr_case_trips(c) == 2 && io->a_log.data != NULL)
        dr_case_gradient(run, &io->da_log, "da_log", c->gate_dtype, E1(c->HV), true);
    if (dr_case_trips(c) == 2 && io->dt_bias.data != NULL)
        dr_case_gradient(run, &io->ddt_bias, "ddt_bias", c->gate_dtype, bias, false);
}

void dr_case_declare_io(dr_case_run *run)
{
    const dr_case *c = &run->c;
    dr_io *io = &run->io;
    dr_case_extents keys = E4(c->B, c->T, c->H, c->K), rows = E4(c->B, c->T, c->HV, c->V);
    dr_case_extents heads = E3(c->B, c->T, c->HV);
    dr_case_extents gates = c->variant == DR_KDA ? E4(c->B, c->T, c->HV, c->K) : heads;
    /* Without l2norm rows must be no longer than 1, or the recurrence may grow. */
    double span = c->l2norm ? 1 : 1 / sqrt(c->K);
    *io = (dr_io)DR_IO_INIT;
    dr_case_input(run, &io->q, "q", c->dtype, keys, DR_VALUES_EVEN, span);
    dr_case_input(run, &io->k, "k", c->dtype, keys, DR_VALUES_EVEN, span);
    dr_case_input(run, &io->v, "v", c->dtype, rows, DR_VALUES_EVEN, 1);
    if (c->beta == DR_BETA_LOGIT)
        dr_case_input(run, &io->beta, "beta", c->gate_dtype, heads, DR_VALUES_EVEN, 4);
    else
        dr_case_input(run, &io->beta, "beta", c->gate_dtype, heads, DR_VALUES_BETA, 1);
    declare_gate(run, gates);
    dr_case_output(run, &io->o, "o", c->dtype, rows);
    declare_states(run);
    if (dr_case_trips(c) != 2)
        return;
    dr_case_input(run, &io->d_o, "d_o", c->dtype, rows, DR_VALUES_EVEN, 1);
    dr_case_gradient(run, &io->dq, "dq", c->dtype, keys, true);
    dr_case_gradient(run, &io->dk, "dk", c->dtype, keys, false);
    dr_case_gradient(run, &io->dv, "dv", c->dtype, rows, false);
    dr_case_gradient(run, &io->dbeta, "dbeta", c->gate_dtype, heads, false);
}

dr_problem dr_case_problem(const dr_case *c)
{
    dr_problem p = DR_PROBLEM_INIT;
    p.variant = c->variant;
    p.batch = c->B;
    p.tokens = c->T;
    p.heads = c->H;
    p.value_heads = c->HV;
    p.key_dim = c->K;
    p.value_dim = c->V;
    p.offsets = c->offsets;
    p.sequences = c->N;
    p.gate = c->gate;
    p.lower_bound = c->lower_bound;
    p.beta = c->beta;
    p.beta_scale = c->beta_scale;
    p.l2norm = c->l2norm;
    p.l2norm_eps = c->eps;
    p.scale = c->scale;
    p.head_map = c->head_map;
    p.state_v_first = c->state_v_first;
    p.chunk = c->chunk;
    p.keep = c->keep;
    return p;
}

static dr_status open_delta(dr_case_run *run)
{
    dr_problem p = dr_case_problem(&run->c);
    dr_status status = dr_plan_create(run->ctx, &p, &run->plan);
    if (status == DR_OK)
        status = dr_plan_describe(run->plan, &run->info);
    if (status == DR_OK)
        status = dr_buffers_create(run->plan, &run->buffers);
    if (status != DR_OK)
        return status;
    dr_case_poison(&run->buffers);
    dr_case_declare_io(run);
    const dr_case *c = &run->c;
    if (c->flags & DR_CASE_CHUNK_STATES)
        dr_case_output(run, &run->io.chunk_states, "chunk_states", c->state_dtype,
                       c->state_v_first ? E4(run->info.chunks, c->HV, c->V, c->K)
                                        : E4(run->info.chunks, c->HV, c->K, c->V));
    return run->status;
}

static dr_status call_delta(dr_case_run *run, dr_direction dir)
{
    dr_buffers b = dr_case_buffers(run, run->buffers);
    return dir == DR_FORWARD ? dr_forward(run->plan, &run->io, &b)
                             : dr_backward(run->plan, &run->io, &b);
}

static dr_status call_step(dr_case_run *run, dr_direction dir)
{
    (void)dir;
    return dr_step(run->plan, &run->io, &run->buffers);
}

static dr_status open_stages(dr_case_run *run)
{
    dr_status status = open_delta(run);
    if (status != DR_OK)
        return status;
    const dr_case *c = &run->c;
    int64_t N = dr_case_sequences(c);
    dr_case_extents states = E4(N, c->HV, c->V, c->K), maps = E4(N, c->HV, c->V + c->K, c->K);
    dr_case_fixed(run, &run->states, "states", DR_CASE_INPUT, states);
    dr_case_fixed(run, &run->maps, "maps", DR_CASE_OUTPUT, maps);
    dr_case_fixed(run, &run->d_maps, "d_maps", DR_CASE_GRADIENT, maps);
    dr_case_fixed(run, &run->applied, "applied", DR_CASE_OUTPUT, states);
    dr_case_fixed(run, &run->composed, "composed", DR_CASE_OUTPUT, maps);
    if (!(c->flags & DR_CASE_ENTRY))
        return run->status;
    dr_case_fixed(run, &run->entry, "entry", DR_CASE_INPUT, states);
    dr_case_fixed(run, &run->exit, "exit", DR_CASE_OUTPUT, states);
    dr_case_fixed(run, &run->d_entry, "d_exit", DR_CASE_INPUT, states);
    dr_case_fixed(run, &run->d_exit, "d_entry", DR_CASE_GRADIENT, states);
    return run->status;
}

static dr_status call_stages(dr_case_run *run, dr_direction dir)
{
    const dr_case *c = &run->c;
    bool forward = dir == DR_FORWARD;
    float *maps = forward ? run->maps.data : run->d_maps.data;
    dr_status status = dr_prepare(run->plan, dir, &run->io, &run->buffers);
    if (status == DR_OK)
        status = dr_summarize(run->plan, dir, &run->io, &run->buffers, maps);
    if (status == DR_OK)
        status = dr_recur(run->plan, dir, &run->io, &run->buffers,
                          forward ? run->entry.data : run->d_entry.data,
                          forward ? run->exit.data : run->d_exit.data);
    if (status == DR_OK)
        status = dr_output(run->plan, dir, &run->io, &run->buffers);
    if (status != DR_OK || !forward)
        return status;
    int64_t n = dr_case_sequences(c) * c->HV;
    status = dr_map_apply(run->ctx, n, c->K, c->V, run->states.data, maps, run->applied.data);
    if (status == DR_OK)
        status = dr_map_compose(run->ctx, n, c->K, c->V, maps, maps, run->composed.data);
    return status;
}

const dr_case_row dr_case_delta = {"delta", 2, open_delta, call_delta};
const dr_case_row dr_case_step = {"step", 1, open_delta, call_step};
const dr_case_row dr_case_stages = {"stages", 2, open_stages, call_stages};
