/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case_rows.c - cases of the row operations and of the matrix product.
 */
#include "case_run.h"

static dr_status open_conv(dr_case_run *run)
{
    const dr_case *c = &run->c;
    dr_conv_args *a = &run->conv;
    *a = (dr_conv_args)DR_CONV_ARGS_INIT;
    a->activation = c->activation;
    a->dilation = c->dilation;
    a->offsets = c->offsets;
    a->sequences = c->N;
    dr_case_extents rows = E3(c->B, c->T, c->HV), taps = E2(c->HV, c->width);
    dr_case_input(run, &a->x, "x", c->dtype, rows, DR_VALUES_EVEN, 1.5);
    dr_case_input(run, &a->weight, "weight", c->dtype, taps, DR_VALUES_EVEN, 1);
    if (!(c->flags & DR_CASE_NO_BIAS))
        dr_case_input(run, &a->bias, "bias", c->dtype, E1(c->HV), DR_VALUES_EVEN, 1);
    dr_case_output(run, &a->y, "y", c->dtype, rows);
    bool states = !(c->flags & DR_CASE_NO_STATE);
    int64_t columns = (int64_t)(c->width - 1) * c->dilation + !!(c->flags & DR_CASE_STATE_PLUS);
    int64_t slots = states ? dr_case_pool(run, &a->state_index) : 0;
    dr_case_extents history = E3(slots, c->HV, columns);
    if (states) {
        dr_case_input(run, &a->initial_state, "initial_state", c->state_dtype, history,
                      DR_VALUES_EVEN, 1.5);
        if (c->flags & (DR_CASE_IN_PLACE | DR_CASE_POOL))
            dr_case_alias(run, &a->final_state, "final_state", "initial_state");
        else
            dr_case_output(run, &a->final_state, "final_state", c->state_dtype, history);
    }
    if (dr_case_trips(c) != 2)
        return run->status;
    dr_case_input(run, &a->dy, "dy", c->dtype, rows, DR_VALUES_EVEN, 1);
    dr_case_gradient(run, &a->dx, "dx", c->dtype, rows, false);
    dr_case_gradient(run, &a->dweight, "dweight", c->dtype, taps, true);
    if (a->bias.data != NULL)
        dr_case_gradient(run, &a->dbias, "dbias", c->dtype, E1(c->HV), false);
    if (states) {
        dr_case_input(run, &a->d_final_state, "d_final_state", c->state_dtype, history,
                      DR_VALUES_EVEN, 1);
        dr_case_gradient(run, &a->d_initial_state, "d_initial_state", c->state_dtype, history,
                         false);
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
    dr_case_extents rows = wide_gate ? E4(c->B, c->T, c->HV, c->K) : E3(c->B, c->T, c->HV);
    dr_case_extents bias = wide_gate ? E1((int64_t)c->HV * c->K) : E1(c->HV);
    *a = (dr_gate_args)DR_GATE_ARGS_INIT;
    a->gate = c->gate;
    a->lower_bound = c->lower_bound;
    dr_case_input(run, &a->x, "x", c->dtype, rows, DR_VALUES_EVEN, 4);
    if (!(c->flags & DR_CASE_NO_A_LOG))
        dr_case_input(run, &a->a_log, "a_log", c->gate_dtype, E1(c->HV), DR_VALUES_EVEN, 1);
    if (!(c->flags & DR_CASE_NO_BIAS))
        dr_case_input(run, &a->dt_bias, "dt_bias", c->gate_dtype, bias, DR_VALUES_EVEN, 1);
    dr_case_output(run, &a->g, "g", c->gate_dtype, rows);
    dr_case_input(run, &a->dg, "dg", c->gate_dtype, rows, DR_VALUES_EVEN, 1);
    dr_case_gradient(run, &a->dx, "dx", c->dtype, rows, true);
    if (a->a_log.data != NULL)
        dr_case_gradient(run, &a->da_log, "da_log", c->gate_dtype, E1(c->HV), false);
    if (a->dt_bias.data != NULL)
        dr_case_gradient(run, &a->ddt_bias, "ddt_bias", c->gate_dtype, bias, false);
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
    dr_case_extents rows = E3(c->B, c->T, c->HV);
    dr_beta_args *a = &run->beta;
    *a = (dr_beta_args)DR_BETA_ARGS_INIT;
    a->scale = c->beta_scale;
    dr_case_input(run, &a->x, "x", c->dtype, rows, DR_VALUES_EVEN, 8);
    dr_case_output(run, &a->beta, "beta", c->gate_dtype, rows);
    dr_case_input(run, &a->dbeta, "dbeta", c->gate_dtype, rows, DR_VALUES_EVEN, 1);
    dr_case_gradient(run, &a->dx, "dx", c->dtype, rows, true);
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
    dr_case_extents rows = E4(c->B, c->T, c->H, c->K);
    dr_l2norm_args *a = &run->l2norm;
    *a = (dr_l2norm_args)DR_L2NORM_ARGS_INIT;
    a->eps = c->eps;
    dr_case_input(run, &a->x, "x", c->dtype, rows, DR_VALUES_ROWS, 2);
    dr_case_output(run, &a->y, "y", c->dtype, rows);
    dr_case_input(run, &a->dy, "dy", c->dtype, rows, DR_VALUES_ROWS, 1);
    dr_case_gradient(run, &a->dx, "dx", c->dtype, rows, true);
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
    dr_case_extents rows = E4(c->B, c->T, c->HV, c->V);
    dr_norm_args *a = &run->norm;
    *a = (dr_norm_args)DR_NORM_ARGS_INIT;
    a->activation = c->activation;
    a->eps = c->eps;
    dr_case_input(run, &a->x, "x", c->dtype, rows, DR_VALUES_ROWS, 2);
    dr_case_input(run, &a->gate, "gate", c->dtype, rows, DR_VALUES_EVEN, 4);
    dr_case_input(run, &a->weight, "weight", c->gate_dtype, E1(c->V), DR_VALUES_POSITIVE, 1);
    dr_case_output(run, &a->y, "y", c->dtype, rows);
    dr_case_input(run, &a->dy, "dy", c->dtype, rows, DR_VALUES_ROWS, 1);
    dr_case_gradient(run, &a->dx, "dx", c->dtype, rows, true);
    dr_case_gradient(run, &a->dgate, "dgate", c->dtype, rows, false);
    dr_case_gradient(run, &a->dweight, "dweight", c->gate_dtype, E1(c->V), false);
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
    dr_case_input(run, &a->a, "a", c->dtype, turned ? E2(c->K, c->T) : E2(c->T, c->K),
                  DR_VALUES_EVEN, 1);
    dr_case_input(run, &a->b, "b", c->dtype, turned ? E2(c->V, c->K) : E2(c->K, c->V),
                  DR_VALUES_EVEN, 1);
    if (turned) {
        a->a = swapped(a->a);
        a->b = swapped(a->b);
    }
    dr_case_output(run, &a->out, "out", c->dtype, E2(c->T, c->V));
    return run->status;
}

static dr_status call_matmul(dr_case_run *run, dr_direction dir)
{
    (void)dir;
    return dr_matmul(run->ctx, &run->matmul);
}

const dr_case_row dr_case_conv = {"conv", 2, open_conv, call_conv};
const dr_case_row dr_case_conv_step = {"conv-step", 1, open_conv, call_conv_step};
const dr_case_row dr_case_gate = {"gate", 2, open_gate, call_gate};
const dr_case_row dr_case_beta = {"beta", 2, open_beta, call_beta};
const dr_case_row dr_case_l2norm = {"l2norm", 2, open_l2norm, call_l2norm};
const dr_case_row dr_case_norm = {"norm", 2, open_norm, call_norm};
const dr_case_row dr_case_matmul = {"matmul", 1, open_matmul, call_matmul};
