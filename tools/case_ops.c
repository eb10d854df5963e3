/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case_ops.c - what every operation reads and writes in a run of a case: one opener that
 * declares its tensors and one caller each, and the table of them.
 */
#include "case_run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef dr_case_extents extents;
#define E1(a) ((extents){1, {a, 0, 0, 0}})
#define E2(a, b) ((extents){2, {a, b, 0, 0}})
#define E3(a, b, c) ((extents){3, {a, b, c, 0}})
#define E4(a, b, c, d) ((extents){4, {a, b, c, d}})

static void input(dr_case_run *run, dr_tensor *view, const char *name, dr_dtype dtype, extents e,
                  dr_case_values values, double span)
{
    dr_case_declare(run, view, name, DR_CASE_INPUT, dtype, e, values, span);
}

static void output(dr_case_run *run, dr_tensor *view, const char *name, dr_dtype dtype, extents e)
{
    dr_case_declare(run, view, name, DR_CASE_OUTPUT, dtype, e, DR_VALUES_EVEN, 0);
}

/* An adjoint's output, unless only some are wanted and this is not one of them. */
static void gradient(dr_case_run *run, dr_tensor *view, const char *name, dr_dtype dtype, extents e,
                     bool always)
{
    if (always || !(run->c.flags & DR_CASE_FEW))
        dr_case_declare(run, view, name, DR_CASE_GRADIENT, dtype, e, DR_VALUES_EVEN, 0);
}

/* ------------------------------------------------------------------------ */
/* The delta rule                                                           */
/* ------------------------------------------------------------------------ */

/* The first failure stays. */
static void fail(dr_case_run *run, dr_status status)
{
    if (run->status == DR_OK)
        run->status = status;
}

/* f32 and compact, whatever the case and the run. */
static void fixed(dr_case_run *run, dr_tensor *view, const char *name, int role, extents e)
{
    dr_case_declare(run, view, name, role | DR_CASE_FIXED, DR_F32, e, DR_VALUES_EVEN, 1);
}

static int64_t sequences_of(const dr_case *c) { return c->offsets != NULL ? c->N : c->B; }

static bool has_adjoint(const dr_case *c) { return dr_case_trips(c) == 2; }

/* State slots of the pool, and which sequence has which: the last first, the second none. */
static int64_t make_pool(dr_case_run *run, const int32_t **index)
{
    int64_t N = sequences_of(&run->c);
    if (!(run->c.flags & DR_CASE_POOL))
        return N;
    run->state_index = malloc((size_t)N * sizeof *run->state_index);
    if (run->state_index == NULL) {
        fail(run, DR_ERR_MEMORY);
        return N;
    }
    for (int64_t n = 0; n < N; n++)
        run->state_index[n] = n == 1 ? -1 : (int32_t)(N + 1 - n);
    *index = run->state_index;
    return N + 2;
}

static void declare_states(dr_case_run *run)
{
    const dr_case *c = &run->c;
    dr_io *io = &run->io;
    if (c->flags & (DR_CASE_NO_STATE | DR_CASE_ENTRY))
        return;
    int64_t slots = make_pool(run, &io->state_index);
    extents e = c->state_v_first ? E4(slots, c->HV, c->V, c->K) : E4(slots, c->HV, c->K, c->V);
    if (c->flags & DR_CASE_FRESH) {
        output(run, &io->final_state, "final_state", c->state_dtype, e);
        return;
    }
    input(run, &io->initial_state, "initial_state", c->state_dtype, e, DR_VALUES_EVEN, 1);
    if (c->flags & (DR_CASE_IN_PLACE | DR_CASE_POOL))
        dr_case_alias(run, &io->final_state, "final_state", "initial_state");
    else
        output(run, &io->final_state, "final_state", c->state_dtype, e);
    if (has_adjoint(c)) {
        input(run, &io->d_final_state, "d_final_state", c->state_dtype, e, DR_VALUES_EVEN, 1);
        gradient(run, &io->d_initial_state, "d_initial_state", c->state_dtype, e, false);
    }
}

static void declare_gate(dr_case_run *run, extents gates)
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
    input(run, &io->g, "g", c->gate_dtype, gates, values, raw ? 3 : c->decay);
    if (has_adjoint(c))
        gradient(run, &io->dg, "dg", c->gate_dtype, gates, true);
    if (!raw)
        return;
    extents bias = c->variant == DR_KDA ? E2(c->HV, c->K) : E1(c->HV);
    if (!(c->flags & DR_CASE_NO_A_LOG))
        input(run, &io->a_log, "a_log", c->gate_dtype, E1(c->HV), DR_VALUES_EVEN, 1);
    if (!(c->flags & DR_CASE_NO_BIAS))
        input(run, &io->dt_bias, "dt_bias", c->gate_dtype, bias, DR_VALUES_EVEN, 1);
    if (has_adjoint(c) && io->a_log.data != NULL)
        gradient(run, &io->da_log, "da_log", c->gate_dtype, E1(c->HV), true);
    if (has_adjoint(c) && io->dt_bias.data != NULL)
        gradient(run, &io->ddt_bias, "ddt_bias", c->gate_dtype, bias, false);
}

static void declare_io(dr_case_run *run)
{
    const dr_case *c = &run->c;
    dr_io *io = &run->io;
    extents keys = E4(c->B, c->T, c->H, c->K), rows = E4(c->B, c->T, c->HV, c->V);
    extents heads = E3(c->B, c->T, c->HV);
    extents gates = c->variant == DR_KDA ? E4(c->B, c->T, c->HV, c->K) : heads;
    /* Without l2norm rows must be no longer than 1, or the recurrence may grow. */
    double span = c->l2norm ? 1 : 1 / sqrt(c->K);
    *io = (dr_io)DR_IO_INIT;
    input(run, &io->q, "q", c->dtype, keys, DR_VALUES_EVEN, span);
    input(run, &io->k, "k", c->dtype, keys, DR_VALUES_EVEN, span);
    input(run, &io->v, "v", c->dtype, rows, DR_VALUES_EVEN, 1);
    if (c->beta == DR_BETA_LOGIT)
        input(run, &io->beta, "beta", c->gate_dtype, heads, DR_VALUES_EVEN, 4);
    else
        input(run, &io->beta, "beta", c->gate_dtype, heads, DR_VALUES_BETA, 1);
    declare_gate(run, gates);
    output(run, &io->o, "o", c->dtype, rows);
    declare_states(run);
    if (!has_adjoint(c))
        return;
    input(run, &io->d_o, "d_o", c->dtype, rows, DR_VALUES_EVEN, 1);
    gradient(run, &io->dq, "dq", c->dtype, keys, true);
    gradient(run, &io->dk, "dk", c->dtype, keys, false);
    gradient(run, &io->dv, "dv", c->dtype, rows, false);
    gradient(run, &io->dbeta, "dbeta", c->gate_dtype, heads, false);
}

static dr_problem problem_of(const dr_case *c)
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
    dr_problem p = problem_of(&run->c);
    dr_status status = dr_plan_create(run->ctx, &p, &run->plan);
    if (status == DR_OK)
        status = dr_plan_describe(run->plan, &run->info);
    if (status == DR_OK)
        status = dr_buffers_create(run->plan, &run->buffers);
    if (status != DR_OK)
        return status;
    memset(run->buffers.saved, 0xff, run->buffers.saved_bytes);
    memset(run->buffers.scratch, 0xff, run->buffers.scratch_bytes);
    declare_io(run);
    const dr_case *c = &run->c;
    if (c->flags & DR_CASE_CHUNK_STATES)
        output(run, &run->io.chunk_states, "chunk_states", c->state_dtype,
               c->state_v_first ? E4(run->info.chunks, c->HV, c->V, c->K)
                                : E4(run->info.chunks, c->HV, c->K, c->V));
    return run->status;
}

static dr_buffers buffers_of(const dr_case_run *run)
{
    dr_buffers b = run->buffers;
    if (run->c.flags & DR_CASE_NO_SAVED) {
        b.saved = NULL;
        b.saved_bytes = 0;
    }
    return b;
}

static dr_status call_delta(dr_case_run *run, dr_direction dir)
{
    dr_buffers b = buffers_of(run);
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
    int64_t N = sequences_of(c);
    extents states = E4(N, c->HV, c->V, c->K), maps = E4(N, c->HV, c->V + c->K, c->K);
    fixed(run, &run->states, "states", DR_CASE_INPUT, states);
    fixed(run, &run->maps, "maps", DR_CASE_OUTPUT, maps);
    fixed(run, &run->d_maps, "d_maps", DR_CASE_GRADIENT, maps);
    fixed(run, &run->applied, "applied", DR_CASE_OUTPUT, states);
    fixed(run, &run->composed, "composed", DR_CASE_OUTPUT, maps);
    if (!(c->flags & DR_CASE_ENTRY))
        return run->status;
    fixed(run, &run->entry, "entry", DR_CASE_INPUT, states);
    fixed(run, &run->exit, "exit", DR_CASE_OUTPUT, states);
    fixed(run, &run->d_entry, "d_exit", DR_CASE_INPUT, states);
    fixed(run, &run->d_exit, "d_entry", DR_CASE_GRADIENT, states);
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
    int64_t n = sequences_of(c) * c->HV;
    status = dr_map_apply(run->ctx, n, c->K, c->V, run->states.data, maps, run->applied.data);
    if (status == DR_OK)
        status = dr_map_compose(run->ctx, n, c->K, c->V, maps, maps, run->composed.data);
    return status;
}

/* ------------------------------------------------------------------------ */
/* Row operations                                                           */
/* ------------------------------------------------------------------------ */

static dr_status open_conv(dr_case_run *run)
{
    const dr_case *c = &run->c;
    dr_conv_args *a = &run->conv;
    *a = (dr_conv_args)DR_CONV_ARGS_INIT;
    a->activation = c->activation;
    a->dilation = c->dilation;
    a->offsets = c->offsets;
    a->sequences = c->N;
    extents rows = E3(c->B, c->T, c->HV), taps = E2(c->HV, c->width);
    input(run, &a->x, "x", c->dtype, rows, DR_VALUES_EVEN, 1.5);
    input(run, &a->weight, "weight", c->dtype, taps, DR_VALUES_EVEN, 1);
    if (!(c->flags & DR_CASE_NO_BIAS))
        input(run, &a->bias, "bias", c->dtype, E1(c->HV), DR_VALUES_EVEN, 1);
    output(run, &a->y, "y", c->dtype, rows);
    bool states = !(c->flags & DR_CASE_NO_STATE);
    int64_t columns = (int64_t)(c->width - 1) * c->dilation + !!(c->flags & DR_CASE_STATE_PLUS);
    int64_t slots = states ? make_pool(run, &a->state_index) : 0;
    extents history = E3(slots, c->HV, columns);
    if (states) {
        input(run, &a->initial_state, "initial_state", c->state_dtype, history, DR_VALUES_EVEN,
              1.5);
        if (c->flags & (DR_CASE_IN_PLACE | DR_CASE_POOL))
            dr_case_alias(run, &a->final_state, "final_state", "initial_state");
        else
            output(run, &a->final_state, "final_state", c->state_dtype, history);
    }
    if (!has_adjoint(c))
        return run->status;
    input(run, &a->dy, "dy", c->dtype, rows, DR_VALUES_EVEN, 1);
    gradient(run, &a->dx, "dx", c->dtype, rows, false);
    gradient(run, &a->dweight, "dweight", c->dtype, taps, true);
    if (a->bias.data != NULL)
        gradient(run, &a->dbias, "dbias", c->dtype, E1(c->HV), false);
    if (states) {
        input(run, &a->d_final_state, "d_final_state", c->state_dtype, history, DR_VALUES_EVEN, 1);
        gradient(run, &a->d_initial_state, "d_initial_state", c->state_dtype, history, false);
    }
    return run->status;
}

static dr_status call_conv(dr_case_run *run, dr_direction dir)
{
    return dir == DR_FORWARD ? dr_conv(run->ctx, &run->conv)
                             : dr_conv_backward(run->ctx, &run->conv);
}

static dr_status call_conv_step(dr_case_run *run, dr_direction dir)
{
    (void)dir;
    return dr_conv_step(run->ctx, &run->conv);
}

static dr_status open_gate(dr_case_run *run)
{
    const dr_case *c = &run->c;
    dr_gate_args *a = &run->gate;
    bool wide_gate = c->variant == DR_KDA;
    extents rows = wide_gate ? E4(c->B, c->T, c->HV, c->K) : E3(c->B, c->T, c->HV);
    extents bias = wide_gate ? E1((int64_t)c->HV * c->K) : E1(c->HV);
    *a = (dr_gate_args)DR_GATE_ARGS_INIT;
    a->gate = c->gate;
    a->lower_bound = c->lower_bound;
    input(run, &a->x, "x", c->dtype, rows, DR_VALUES_EVEN, 4);
    if (!(c->flags & DR_CASE_NO_A_LOG))
        input(run, &a->a_log, "a_log", c->gate_dtype, E1(c->HV), DR_VALUES_EVEN, 1);
    if (!(c->flags & DR_CASE_NO_BIAS))
        input(run, &a->dt_bias, "dt_bias", c->gate_dtype, bias, DR_VALUES_EVEN, 1);
    output(run, &a->g, "g", c->gate_dtype, rows);
    input(run, &a->dg, "dg", c->gate_dtype, rows, DR_VALUES_EVEN, 1);
    gradient(run, &a->dx, "dx", c->dtype, rows, true);
    if (a->a_log.data != NULL)
        gradient(run, &a->da_log, "da_log", c->gate_dtype, E1(c->HV), false);
    if (a->dt_bias.data != NULL)
        gradient(run, &a->ddt_bias, "ddt_bias", c->gate_dtype, bias, false);
    return run->status;
}

static dr_status call_gate(dr_case_run *run, dr_direction dir)
{
    return dir == DR_FORWARD ? dr_gate_activate(run->ctx, &run->gate)
                             : dr_gate_backward(run->ctx, &run->gate);
}

static dr_status open_beta(dr_case_run *run)
{
    const dr_case *c = &run->c;
    extents rows = E3(c->B, c->T, c->HV);
    dr_beta_args *a = &run->beta;
    *a = (dr_beta_args)DR_BETA_ARGS_INIT;
    a->scale = c->beta_scale;
    input(run, &a->x, "x", c->dtype, rows, DR_VALUES_EVEN, 8);
    output(run, &a->beta, "beta", c->gate_dtype, rows);
    input(run, &a->dbeta, "dbeta", c->gate_dtype, rows, DR_VALUES_EVEN, 1);
    gradient(run, &a->dx, "dx", c->dtype, rows, true);
    return run->status;
}

static dr_status call_beta(dr_case_run *run, dr_direction dir)
{
    return dir == DR_FORWARD ? dr_beta_sigmoid(run->ctx, &run->beta)
                             : dr_beta_backward(run->ctx, &run->beta);
}

static dr_status open_l2norm(dr_case_run *run)
{
    const dr_case *c = &run->c;
    extents rows = E4(c->B, c->T, c->H, c->K);
    dr_l2norm_args *a = &run->l2norm;
    *a = (dr_l2norm_args)DR_L2NORM_ARGS_INIT;
    a->eps = c->eps;
    input(run, &a->x, "x", c->dtype, rows, DR_VALUES_ROWS, 2);
    output(run, &a->y, "y", c->dtype, rows);
    input(run, &a->dy, "dy", c->dtype, rows, DR_VALUES_ROWS, 1);
    gradient(run, &a->dx, "dx", c->dtype, rows, true);
    return run->status;
}

static dr_status call_l2norm(dr_case_run *run, dr_direction dir)
{
    return dir == DR_FORWARD ? dr_l2norm(run->ctx, &run->l2norm)
                             : dr_l2norm_backward(run->ctx, &run->l2norm);
}

static dr_status open_norm(dr_case_run *run)
{
    const dr_case *c = &run->c;
    extents rows = E4(c->B, c->T, c->HV, c->V);
    dr_norm_args *a = &run->norm;
    *a = (dr_norm_args)DR_NORM_ARGS_INIT;
    a->activation = c->activation;
    a->eps = c->eps;
    input(run, &a->x, "x", c->dtype, rows, DR_VALUES_ROWS, 2);
    input(run, &a->gate, "gate", c->dtype, rows, DR_VALUES_EVEN, 4);
    input(run, &a->weight, "weight", c->gate_dtype, E1(c->V), DR_VALUES_POSITIVE, 1);
    output(run, &a->y, "y", c->dtype, rows);
    input(run, &a->dy, "dy", c->dtype, rows, DR_VALUES_ROWS, 1);
    gradient(run, &a->dx, "dx", c->dtype, rows, true);
    gradient(run, &a->dgate, "dgate", c->dtype, rows, false);
    gradient(run, &a->dweight, "dweight", c->gate_dtype, E1(c->V), false);
    return run->status;
}

static dr_status call_norm(dr_case_run *run, dr_direction dir)
{
    return dir == DR_FORWARD ? dr_gated_norm(run->ctx, &run->norm)
                             : dr_gated_norm_backward(run->ctx, &run->norm);
}

static dr_tensor swapped(dr_tensor t)
{
    int64_t n = t.shape[0], s = t.stride[0];
    t.shape[0] = t.shape[1];
    t.stride[0] = t.stride[1];
    t.shape[1] = n;
    t.stride[1] = s;
    return t;
}

static dr_status open_matmul(dr_case_run *run)
{
    const dr_case *c = &run->c;
    bool turned = (c->flags & DR_CASE_TRANSPOSED) != 0;
    dr_matmul_args *a = &run->matmul;
    *a = (dr_matmul_args)DR_MATMUL_ARGS_INIT;
    a->alpha = c->scale;
    input(run, &a->a, "a", c->dtype, turned ? E2(c->K, c->T) : E2(c->T, c->K), DR_VALUES_EVEN, 1);
    input(run, &a->b, "b", c->dtype, turned ? E2(c->V, c->K) : E2(c->K, c->V), DR_VALUES_EVEN, 1);
    if (turned) {
        a->a = swapped(a->a);
        a->b = swapped(a->b);
    }
    output(run, &a->out, "out", c->dtype, E2(c->T, c->V));
    return run->status;
}

static dr_status call_matmul(dr_case_run *run, dr_direction dir)
{
    (void)dir;
    return dr_matmul(run->ctx, &run->matmul);
}

/* ------------------------------------------------------------------------ */
/* Layers                                                                   */
/* ------------------------------------------------------------------------ */

static void declare_params(dr_case_run *run)
{
    dr_layer_io *io = &run->layer_io;
    int32_t count = dr_layer_param_count(run->layer);
    if (count > DR_CASE_MAX_PARAMS) {
        fail(run, DR_ERR_SUPPORT);
        return;
    }
    for (int32_t i = 0; i < count; i++) {
        dr_param_info p;
        dr_status status = dr_layer_param(run->layer, i, &p);
        if (status != DR_OK) {
            fail(run, status);
            return;
        }
        extents e = {p.rank, {0}};
        double fan_in = 1;
        for (int32_t axis = 0; axis < p.rank; axis++) {
            e.n[axis] = p.shape[axis];
            fan_in *= axis > 0 ? (double)p.shape[axis] : 1;
        }
        dr_case_values values = p.init == DR_INIT_ONES ? DR_VALUES_POSITIVE : DR_VALUES_EVEN;
        double span = p.init == DR_INIT_LINEAR ? 1.7 / sqrt(fan_in) : 1;
        dr_case_declare(run, &run->params[i], p.name, DR_CASE_INPUT | DR_CASE_FIXED, DR_F32, e,
                        values, span);
        char name[DR_CASE_NAME];
        snprintf(name, sizeof name, "grad.%s", p.name);
        if (has_adjoint(&run->c))
            dr_case_declare(run, &run->grads[i], name, DR_CASE_GRADIENT | DR_CASE_FIXED, DR_F32, e,
                            DR_VALUES_EVEN, 0);
    }
    io->params = run->params;
    io->grads = run->grads;
}

/* Layers take f32 only, so a wide run differs from another in the backend alone. */
static void declare_layer_io(dr_case_run *run, int64_t N)
{
    const dr_case *c = &run->c;
    dr_layer_io *io = &run->layer_io;
    extents rows = E3(c->B, c->T, c->hidden);
    const int in = DR_CASE_INPUT, out = DR_CASE_OUTPUT, grad = DR_CASE_GRADIENT;
    fixed(run, &io->x, "x", in, rows);
    fixed(run, &io->y, "y", out, rows);
    if (has_adjoint(c)) {
        fixed(run, &io->dy, "dy", in, rows);
        fixed(run, &io->dx, "dx", grad, rows);
    }
    if (c->flags & DR_CASE_NO_STATE)
        return;
    extents conv = E3(N, dr_layer_conv_channels(run->layer), c->width - 1);
    extents state = E4(N, c->HV, c->K, c->V);
    fixed(run, &io->conv_in, "conv_in", in, conv);
    fixed(run, &io->state_in, "state_in", in, state);
    fixed(run, &io->conv_out, "conv_out", out, conv);
    fixed(run, &io->state_out, "state_out", out, state);
    if (!has_adjoint(c))
        return;
    fixed(run, &io->d_conv_out, "d_conv_out", in, conv);
    fixed(run, &io->d_state_out, "d_state_out", in, state);
    fixed(run, &io->d_conv_in, "d_conv_in", grad, conv);
    fixed(run, &io->d_state_in, "d_state_in", grad, state);
}

static dr_status open_layer(dr_case_run *run)
{
    const dr_case *c = &run->c;
    dr_layer_config config = DR_LAYER_CONFIG_INIT;
    config.kind = c->variant == DR_KDA ? DR_LAYER_KDA : DR_LAYER_GDN;
    config.hidden = c->hidden;
    config.heads = c->H;
    config.value_heads = c->HV;
    config.key_dim = c->K;
    config.value_dim = c->V;
    config.conv_width = c->width;
    config.conv_bias = !(c->flags & DR_CASE_NO_BIAS);
    config.gate = c->gate;
    config.lower_bound = c->lower_bound;
    config.beta_scale = c->beta_scale;
    config.gate_rank = c->gate_rank;
    config.norm_eps = c->eps;
    config.keep = c->keep;
    dr_layer_layout layout = DR_LAYER_LAYOUT_INIT;
    layout.batch = c->B;
    layout.tokens = c->T;
    layout.offsets = c->offsets;
    layout.sequences = c->N;
    if (c->flags & DR_CASE_MASK) { /* padding in the middle and at the end of rows */
        run->mask = malloc((size_t)(c->B * c->T));
        if (run->mask == NULL)
            return DR_ERR_MEMORY;
        for (int64_t i = 0; i < c->B * c->T; i++)
            run->mask[i] = i % 7 != 3 && i % c->T < c->T - 2;
        layout.mask = run->mask;
    }
    dr_status status = dr_layer_create(run->ctx, &config, &run->layer);
    if (status == DR_OK)
        status = dr_layer_plan_create(run->layer, &layout, &run->layer_plan);
    if (status == DR_OK)
        status = dr_layer_buffers_create(run->layer_plan, &run->buffers);
    if (status != DR_OK)
        return status;
    memset(run->buffers.saved, 0xff, run->buffers.saved_bytes);
    memset(run->buffers.scratch, 0xff, run->buffers.scratch_bytes);
    run->layer_io = (dr_layer_io)DR_LAYER_IO_INIT;
    declare_params(run);
    declare_layer_io(run, sequences_of(c));
    return run->status;
}

static dr_status call_layer(dr_case_run *run, dr_direction dir)
{
    dr_buffers b = buffers_of(run);
    return dir == DR_FORWARD ? dr_layer_forward(run->layer_plan, &run->layer_io, &b)
                             : dr_layer_backward(run->layer_plan, &run->layer_io, &b);
}

static dr_status call_layer_step(dr_case_run *run, dr_direction dir)
{
    (void)dir;
    return dr_layer_step(run->layer_plan, &run->layer_io, &run->buffers);
}

const dr_case_row dr_case_rows[DR_CASE_OPS_] = {
    [DR_CASE_DELTA] = {"delta", 2, open_delta, call_delta},
    [DR_CASE_STEP] = {"step", 1, open_delta, call_step},
    [DR_CASE_STAGES] = {"stages", 2, open_stages, call_stages},
    [DR_CASE_CONV] = {"conv", 2, open_conv, call_conv},
    [DR_CASE_CONV_STEP] = {"conv-step", 1, open_conv, call_conv_step},
    [DR_CASE_GATE] = {"gate", 2, open_gate, call_gate},
    [DR_CASE_BETA] = {"beta", 2, open_beta, call_beta},
    [DR_CASE_L2NORM] = {"l2norm", 2, open_l2norm, call_l2norm},
    [DR_CASE_NORM] = {"norm", 2, open_norm, call_norm},
    [DR_CASE_MATMUL] = {"matmul", 1, open_matmul, call_matmul},
    [DR_CASE_LAYER] = {"layer", 2, open_layer, call_layer},
    [DR_CASE_LAYER_STEP] = {"layer-step", 1, open_layer, call_layer_step},
};
