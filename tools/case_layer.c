/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case_layer.c - cases of whole layers: their parameters are declared from the list that the
 * layer itself gives, their gradients by the names "grad.PARAMETER".
 */
#include "case_run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void declare_params(dr_case_run *run)
{
    dr_layer_io *io = &run->layer_io;
    int32_t count = dr_layer_param_count(run->layer);
    if (count > DR_CASE_MAX_PARAMS) {
        dr_case_fail(run, DR_ERR_SUPPORT);
        return;
    }
    for (int32_t i = 0; i < count; i++) {
        dr_param_info p;
        dr_status status = dr_layer_param(run->layer, i, &p);
        if (status != DR_OK) {
            dr_case_fail(run, status);
            return;
        }
        dr_case_extents e = {p.rank, {0}};
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
        if (dr_case_trips(&run->c) == 2)
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
    dr_case_extents rows = E3(c->B, c->T, c->hidden);
    const int in = DR_CASE_INPUT, out = DR_CASE_OUTPUT, grad = DR_CASE_GRADIENT;
    dr_case_fixed(run, &io->x, "x", in, rows);
    dr_case_fixed(run, &io->y, "y", out, rows);
    if (dr_case_trips(c) == 2) {
        dr_case_fixed(run, &io->dy, "dy", in, rows);
        dr_case_fixed(run, &io->dx, "dx", grad, rows);
    }
    if (c->flags & DR_CASE_NO_STATE)
        return;
    dr_case_extents conv = E3(N, dr_layer_conv_channels(run->layer), c->width - 1);
    dr_case_extents state = E4(N, c->HV, c->K, c->V);
    dr_case_fixed(run, &io->conv_in, "conv_in", in, conv);
    dr_case_fixed(run, &io->state_in, "state_in", in, state);
    dr_case_fixed(run, &io->conv_out, "conv_out", out, conv);
    dr_case_fixed(run, &io->state_out, "state_out", out, state);
    if (dr_case_trips(c) != 2)
        return;
    dr_case_fixed(run, &io->d_conv_out, "d_conv_out", in, conv);
    dr_case_fixed(run, &io->d_state_out, "d_state_out", in, state);
    dr_case_fixed(run, &io->d_conv_in, "d_conv_in", grad, conv);
    dr_case_fixed(run, &io->d_state_in, "d_state_in", grad, state);
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
    dr_case_poison(&run->buffers);
    run->layer_io = (dr_layer_io)DR_LAYER_IO_INIT;
    declare_params(run);
    declare_layer_io(run, dr_case_sequences(c));
    return run->status;
}

static dr_status call_layer(dr_case_run *run, dr_direction dir)
{
    dr_buffers b = dr_case_buffers(run, run->buffers);
    return dir == DR_FORWARD ? dr_layer_forward(run->layer_plan, &run->layer_io, &b)
                             : dr_layer_backward(run->layer_plan, &run->layer_io, &b);
}

static dr_status call_layer_step(dr_case_run *run, dr_direction dir)
{
    (void)dir;
    return dr_layer_step(run->layer_plan, &run->layer_io, &run->buffers);
}

const dr_case_row dr_case_layer = {"layer", 2, open_layer, call_layer};
const dr_case_row dr_case_layer_step = {"layer-step", 1, open_layer, call_layer_step};
