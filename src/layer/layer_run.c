/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer_run.c - a layer's calls: checked (layer_check.c), then the stages in order, each one a
 * public operation on views of the buffers that layer.c laid out. q, k and v are never
 * copied: they are strided views of the convolved rows.
 */
#include "layer/params.h"

/* ---- opening and closing ------------------------------------------------------------- */

/* Plan, io, parameters and buffers; then the memory of the call stands ready. */
static dr_status call_open(dr_layer_call *c, const dr_layer_plan *plan, const dr_layer_io *io,
                           const dr_buffers *buffers, dr_layer_trip trip)
{
    if (plan == NULL || io == NULL || buffers == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL",
                       plan == NULL ? "plan" : io == NULL ? "io" : "buffers");
    if (io->size != sizeof *io)
        return dr_fail(DR_ERR_ARG, "io.size: must be %zu (DR_LAYER_IO_INIT), got %u", sizeof *io,
                       io->size);
    if (io->params == NULL)
        return dr_fail(DR_ERR_ARG, "params: must not be NULL");
    DR_TRY(dr_layer_check_params(plan->layer, io->params));
    DR_TRY(dr_buffers_check(buffers, trip == DR_TRIP_FORWARD_ALONE ? 0 : plan->saved,
                            trip == DR_TRIP_BACKWARD, plan->scratch[trip]));
    *c = (dr_layer_call){.plan = plan, .layer = plan->layer, .io = io};
    c->scratch = (dr_arena){.base = buffers->scratch, .size = plan->scratch[trip]};
    if (trip != DR_TRIP_FORWARD_ALONE)
        c->saved = (dr_arena){.base = buffers->saved, .size = plan->saved};
    dr_layer_layout_blocks(plan, trip, &c->saved, &c->scratch, &c->blocks);
    assert(!c->saved.overflow && !c->scratch.overflow);
    return DR_OK;
}

static dr_status call_close(dr_layer_call *c, dr_status status)
{
    dr_arena_done(&c->saved);
    dr_arena_done(&c->scratch);
    return status;
}

/* ---- views ------------------------------------------------------------------------- */

/* A part as [rows,width] in the buffers of values or of gradients. */
static dr_tensor matrix(const dr_layer_call *c, float *const buffers[], dr_layer_part part)
{
    const dr_layer_section *s = &c->layer->part[part];
    float *base = buffers[s->buffer];
    const int64_t stride = c->layer->part[s->buffer].width;
    return (dr_tensor){base ? base + s->first : NULL, DR_F32, 2, {c->plan->rows, s->width, 0, 0},
                       {stride, 1, 0, 0}};
}

static dr_tensor transposed(dr_tensor t)
{
    return (dr_tensor){t.data, t.dtype, 2, {t.shape[1], t.shape[0], 0, 0},
                       {t.stride[1], t.stride[0], 0, 0}};
}

/* A part as [B,T,width]; buffer has the columns of the part's buffer. */
static dr_tensor tokens(const dr_layer_call *c, float *buffer, dr_layer_part part)
{
    const dr_layer_plan *p = c->plan;
    const dr_layer_section *s = &c->layer->part[part];
    const int64_t stride = c->layer->part[s->buffer].width;
    return (dr_tensor){buffer + s->first, DR_F32, 3, {p->batch, p->tokens, s->width, 0},
                       {dr_max(p->tokens, 1) * stride, stride, 1, 0}};
}

/* The same as [B,T,heads,width of a head]. */
static dr_tensor heads(const dr_layer_call *c, float *buffer, dr_layer_part part, int32_t n)
{
    dr_tensor t = tokens(c, buffer, part);
    t.rank = 4;
    t.shape[3] = t.shape[2] / n;
    t.shape[2] = n;
    t.stride[2] = t.shape[3];
    t.stride[3] = 1;
    return t;
}

/* Raw gates: [B,T,HV] or, one for each channel, [B,T,HV,K]. */
static dr_tensor decays(const dr_layer_call *c, float *buffer)
{
    if (c->layer->type->variant == DR_KDA)
        return heads(c, buffer, DR_PART_DECAY, c->layer->config.value_heads);
    return tokens(c, buffer, DR_PART_DECAY);
}

/* The channels of a part in a convolution state [slots,D,W-1]. */
static dr_tensor conv_state(const dr_layer_call *c, const dr_tensor *state, dr_layer_part part)
{
    const dr_layer_section *s = &c->layer->part[part];
    const int64_t D = c->layer->part[DR_PART_QKV].width, halo = c->layer->config.conv_width - 1;
    if (state->data == NULL || halo == 0)
        return (dr_tensor)DR_TENSOR_NONE;
    float *data = (float *)state->data + s->first * halo;
    return (dr_tensor){data, DR_F32, 3, {c->slots, s->width, halo, 0}, {D * halo, halo, 1, 0}};
}

static dr_tensor state(const dr_layer_call *c, const dr_tensor *t)
{
    const dr_layer_config *config = &c->layer->config;
    if (t->data == NULL)
        return (dr_tensor)DR_TENSOR_NONE;
    return dr_tensor_make(t->data, DR_F32, 4, c->slots, config->value_heads, config->key_dim,
                          config->value_dim);
}

static dr_tensor shaped(const dr_layer_call *c, int32_t i, float *data)
{
    const dr_param_info *info = &c->layer->params[i].info;
    if (data == NULL)
        return (dr_tensor)DR_TENSOR_NONE;
    return dr_tensor_make(data, DR_F32, info->rank, info->shape[0], info->shape[1], info->shape[2],
                          info->shape[3]);
}

static dr_tensor param(const dr_layer_call *c, int32_t i)
{
    return shaped(c, i, c->io->params[i].data);
}

static bool grad_wanted(const dr_layer_call *c, int32_t i)
{
    return c->io->grads != NULL && c->io->grads[i].data != NULL;
}

/* Where a stage writes the gradient of a parameter that is not LINEAR. Those stages
 * overwrite, so to accumulate they write to scratch and add_grads follows. */
static dr_tensor grad_target(const dr_layer_call *c, int32_t i)
{
    if (!grad_wanted(c, i))
        return (dr_tensor)DR_TENSOR_NONE;
    return shaped(c, i, c->io->accumulate ? c->blocks.d_param[i] : c->io->grads[i].data);
}

static void add_grads(const dr_layer_call *c)
{
    for (int32_t i = 0; c->io->accumulate && i < c->layer->n_params; i++) {
        const float *from = c->blocks.d_param[i];
        if (from == NULL || !grad_wanted(c, i))
            continue;
        float *to = c->io->grads[i].data;
        for (int64_t j = 0; j < c->layer->params[i].count; j++)
            to[j] += from[j];
    }
}

/* ---- the rows that count, see params.h --------------------------------------------- */

/* Rows of a caller's tensor, without padding: its own memory, or gathered into packed. */
static float *take_rows(const dr_layer_call *c, const dr_tensor *outer, float *packed)
{
    const dr_layer_plan *p = c->plan;
    const int64_t width = c->layer->config.hidden;
    const float *from = outer->data;
    if (p->run_start == NULL)
        return outer->data;
    for (int64_t n = 0; n < p->n_sequences; n++) {
        int64_t length = p->offsets[n + 1] - p->offsets[n];
        if (length > 0)
            memcpy(packed + p->offsets[n] * width, from + p->run_start[n] * width,
                   (size_t)(length * width) * sizeof(float));
    }
    return packed;
}

/* The way back: rows that do not count become zero. */
static void put_rows(const dr_layer_call *c, const float *packed, const dr_tensor *outer)
{
    const dr_layer_plan *p = c->plan;
    const int64_t width = c->layer->config.hidden, all = p->outer_batch * p->outer_tokens;
    float *to = outer->data;
    if (p->run_start == NULL) {
        if (p->rows < all)
            memset(to + p->rows * width, 0, (size_t)((all - p->rows) * width) * sizeof(float));
        return;
    }
    int64_t done = 0; /* rows of `to` that are written */
    for (int64_t n = 0; n < p->n_sequences; n++) {
        int64_t length = p->offsets[n + 1] - p->offsets[n], start = p->run_start[n];
        if (length == 0)
            continue;
        memset(to + done * width, 0, (size_t)((start - done) * width) * sizeof(float));
        memcpy(to + start * width, packed + p->offsets[n] * width,
               (size_t)(length * width) * sizeof(float));
        done = start + length;
    }
    if (done < all)
        memset(to + done * width, 0, (size_t)((all - done) * width) * sizeof(float));
}

/* ---- stages ------------------------------------------------------------------------ */

static dr_status multiply(const dr_layer_call *c, dr_tensor a, dr_tensor b, dr_tensor out,
                          bool accumulate)
{
    dr_matmul_args args = DR_MATMUL_ARGS_INIT;
    args.a = a;
    args.b = b;
    args.out = out;
    args.accumulate = accumulate;
    return dr_matmul(c->layer->ctx, &args);
}

static dr_status linear(dr_layer_call *c, int32_t i)
{
    const dr_layer_row *row = c->layer->params[i].row;
    float *const *value = c->blocks.value;
    return multiply(c, matrix(c, value, row->from), transposed(param(c, i)),
                    matrix(c, value, row->to), false);
}

/* written: parts whose gradient has a first summand already. */
static dr_status linear_backward(dr_layer_call *c, int32_t i, bool *written)
{
    const dr_layer_row *row = c->layer->params[i].row;
    const dr_tensor d_to = matrix(c, c->blocks.grad, row->to);
    if (grad_wanted(c, i))
        DR_TRY(multiply(c, transposed(d_to), matrix(c, c->blocks.value, row->from),
                        shaped(c, i, c->io->grads[i].data), c->io->accumulate != 0));
    if (c->blocks.grad[row->from] != NULL) {
        DR_TRY(multiply(c, d_to, param(c, i), matrix(c, c->blocks.grad, row->from),
                        written[row->from]));
        written[row->from] = true;
    }
    return DR_OK;
}

static bool is_projection(const dr_layer_call *c, int32_t i)
{
    const dr_layer_row *row = c->layer->params[i].row;
    return row->use == DR_USE_LINEAR && row->to != DR_PART_Y;
}

static dr_conv_args conv_common(dr_layer_call *c, int32_t i)
{
    const dr_layer_part part = c->layer->params[i].row->to;
    dr_conv_args a = DR_CONV_ARGS_INIT;
    a.activation = DR_ACT_SILU;
    a.offsets = c->plan->offsets;
    a.sequences = c->plan->offsets != NULL ? c->plan->n_sequences : 0;
    a.x = tokens(c, c->blocks.value[DR_PART_QKV], part);
    a.weight = param(c, i);
    if (c->layer->config.conv_bias)
        a.bias = param(c, i + 1);
    const dr_tensor entering = dr_layer_cp_entering(c);
    a.initial_state = conv_state(c, &entering, part);
    return a;
}

typedef dr_status conv_fn(const dr_context *ctx, const dr_conv_args *args);

/* final: where the leaving states go; none when the backward pass computes q, k, v again. */
static dr_status convolve(dr_layer_call *c, conv_fn *conv, const dr_tensor *final)
{
    for (int32_t i = 0; i < c->layer->n_params; i++) {
        if (c->layer->params[i].row->use != DR_USE_CONV)
            continue;
        dr_conv_args a = conv_common(c, i);
        a.y = tokens(c, c->blocks.act, c->layer->params[i].row->to);
        a.final_state = conv_state(c, final, c->layer->params[i].row->to);
        if (a.initial_state.data != NULL || a.final_state.data != NULL)
            a.state_index = c->io->state_index;
        DR_TRY(conv(c->layer->ctx, &a));
    }
    return DR_OK;
}

static dr_status convolve_backward(dr_layer_call *c)
{
    const dr_tensor d_entering = dr_layer_cp_d_entering(c), d_leaving = dr_layer_cp_d_leaving(c);
    for (int32_t i = 0; i < c->layer->n_params; i++) {
        const dr_layer_part part = c->layer->params[i].row->to;
        if (c->layer->params[i].row->use != DR_USE_CONV)
            continue;
        dr_conv_args a = conv_common(c, i);
        a.dy = tokens(c, c->blocks.d_act, part);
        a.d_final_state = conv_state(c, &d_leaving, part);
        a.dx = tokens(c, c->blocks.grad[DR_PART_QKV], part);
        a.dweight = grad_target(c, i);
        if (c->layer->config.conv_bias)
            a.dbias = grad_target(c, i + 1);
        a.d_initial_state = conv_state(c, &d_entering, part);
        DR_TRY(dr_conv_backward(c->layer->ctx, &a));
    }
    return dr_layer_cp_d_history(c);
}

static dr_io delta_common(dr_layer_call *c)
{
    const dr_layer_config *config = &c->layer->config;
    dr_io io = DR_IO_INIT;
    io.q = heads(c, c->blocks.act, DR_PART_Q, config->heads);
    io.k = heads(c, c->blocks.act, DR_PART_K, config->heads);
    io.v = heads(c, c->blocks.act, DR_PART_V, config->value_heads);
    io.g = decays(c, c->blocks.value[DR_PART_DECAY]);
    io.beta = tokens(c, c->blocks.value[DR_PART_BETA], DR_PART_BETA);
    io.a_log = param(c, dr_layer_find_use(c->layer, DR_USE_A_LOG));
    io.dt_bias = param(c, dr_layer_find_use(c->layer, DR_USE_DT_BIAS));
    io.initial_state = state(c, &c->io->state_in);
    return io;
}

typedef dr_status delta_fn(const dr_plan *plan, const dr_io *io, const dr_buffers *buffers);

static dr_status delta(dr_layer_call *c, delta_fn *run)
{
    dr_io io = delta_common(c);
    io.o = heads(c, c->blocks.o, DR_PART_NORMED, c->layer->config.value_heads);
    io.final_state = state(c, &c->io->state_out);
    if (io.initial_state.data != NULL || io.final_state.data != NULL)
        io.state_index = c->io->state_index;
    if (c->plan->cp != NULL)
        return dr_layer_cp_forward(c, &io);
    return run(c->plan->core, &io, &c->blocks.core);
}

static dr_status delta_backward(dr_layer_call *c)
{
    const dr_layer_config *config = &c->layer->config;
    dr_io io = delta_common(c);
    io.d_o = heads(c, c->blocks.d_o, DR_PART_NORMED, config->value_heads);
    io.d_final_state = state(c, &c->io->d_state_out);
    io.dq = heads(c, c->blocks.d_act, DR_PART_Q, config->heads);
    io.dk = heads(c, c->blocks.d_act, DR_PART_K, config->heads);
    io.dv = heads(c, c->blocks.d_act, DR_PART_V, config->value_heads);
    io.dg = decays(c, c->blocks.grad[DR_PART_DECAY]);
    io.dbeta = tokens(c, c->blocks.grad[DR_PART_BETA], DR_PART_BETA);
    io.da_log = grad_target(c, dr_layer_find_use(c->layer, DR_USE_A_LOG));
    io.ddt_bias = grad_target(c, dr_layer_find_use(c->layer, DR_USE_DT_BIAS));
    io.d_initial_state = state(c, &c->io->d_state_in);
    if (c->plan->cp != NULL)
        return dr_layer_cp_backward(c, &io);
    return dr_backward(c->plan->core, &io, &c->blocks.core);
}

static dr_norm_args norm_common(dr_layer_call *c)
{
    const dr_layer_config *config = &c->layer->config;
    dr_norm_args a = DR_NORM_ARGS_INIT;
    a.activation = c->layer->type->gate_activation;
    a.eps = config->norm_eps;
    a.x = heads(c, c->blocks.o, DR_PART_NORMED, config->value_heads);
    a.gate = heads(c, c->blocks.value[DR_PART_GATE], DR_PART_GATE, config->value_heads);
    a.weight = param(c, dr_layer_find_use(c->layer, DR_USE_NORM));
    return a;
}

static dr_status normalise(dr_layer_call *c)
{
    dr_norm_args a = norm_common(c);
    a.y = heads(c, c->blocks.value[DR_PART_NORMED], DR_PART_NORMED, c->layer->config.value_heads);
    return dr_gated_norm(c->layer->ctx, &a);
}

static dr_status normalise_backward(dr_layer_call *c)
{
    const int32_t HV = c->layer->config.value_heads;
    dr_norm_args a = norm_common(c);
    a.dy = heads(c, c->blocks.grad[DR_PART_NORMED], DR_PART_NORMED, HV);
    a.dx = heads(c, c->blocks.d_o, DR_PART_NORMED, HV);
    a.dgate = heads(c, c->blocks.grad[DR_PART_GATE], DR_PART_GATE, HV);
    a.dweight = grad_target(c, dr_layer_find_use(c->layer, DR_USE_NORM));
    return dr_gated_norm_backward(c->layer->ctx, &a);
}

/* ---- the calls --------------------------------------------------------------------- */

static dr_status run_forward(dr_layer_call *c, conv_fn *conv, delta_fn *core)
{
    const int32_t last = c->layer->n_params - 1;
    float **value = c->blocks.value;
    value[DR_PART_X] = take_rows(c, &c->io->x, value[DR_PART_X]);
    if (value[DR_PART_Y] == NULL)
        value[DR_PART_Y] = c->io->y.data;
    for (int32_t i = 0; i < c->layer->n_params; i++)
        if (is_projection(c, i))
            DR_TRY(linear(c, i));
    DR_TRY(dr_layer_cp_history(c));
    DR_TRY(convolve(c, conv, &c->io->conv_out));
    DR_TRY(delta(c, core));
    DR_TRY(normalise(c));
    DR_TRY(linear(c, last));
    put_rows(c, value[DR_PART_Y], &c->io->y);
    return DR_OK;
}

static dr_status run_backward(dr_layer_call *c)
{
    const dr_tensor none = DR_TENSOR_NONE;
    const int32_t last = c->layer->n_params - 1;
    float **value = c->blocks.value, **grad = c->blocks.grad;
    bool written[DR_PARTS] = {false};
    value[DR_PART_X] = take_rows(c, &c->io->x, value[DR_PART_X]);
    grad[DR_PART_Y] = take_rows(c, &c->io->dy, grad[DR_PART_Y]);
    if (grad[DR_PART_X] == NULL || c->io->dx.data == NULL)
        grad[DR_PART_X] = c->io->dx.data;
    if (grad_wanted(c, last))
        DR_TRY(normalise(c));
    DR_TRY(linear_backward(c, last, written));
    DR_TRY(normalise_backward(c));
    DR_TRY(convolve(c, dr_conv, &none));
    DR_TRY(delta_backward(c));
    DR_TRY(convolve_backward(c));
    for (int32_t i = last - 1; i >= 0; i--)
        if (is_projection(c, i))
            DR_TRY(linear_backward(c, i, written));
    if (c->io->dx.data != NULL)
        put_rows(c, grad[DR_PART_X], &c->io->dx);
    add_grads(c);
    return DR_OK;
}

static dr_status forward(const dr_layer_plan *plan, const dr_layer_io *io, const dr_buffers *buffers)
{
    dr_layer_call c;
    bool keep = buffers != NULL && buffers->saved != NULL;
    DR_TRY(call_open(&c, plan, io, buffers, keep ? DR_TRIP_FORWARD : DR_TRIP_FORWARD_ALONE));
    dr_status status = dr_layer_check_forward(&c, false);
    if (status == DR_OK && keep)
        c.blocks.stamp->magic = 0;
    if (status == DR_OK)
        status = run_forward(&c, dr_conv, dr_forward);
    if (status == DR_OK && keep)
        *c.blocks.stamp = (dr_layer_stamp){DR_LAYER_MAGIC, plan->digest};
    return call_close(&c, status);
}

dr_status dr_layer_step(const dr_layer_plan *plan, const dr_layer_io *io, const dr_buffers *buffers)
{
    dr_layer_call c;
    DR_TRY(call_open(&c, plan, io, buffers, DR_TRIP_FORWARD_ALONE));
    dr_status status = dr_layer_check_forward(&c, true);
    if (status == DR_OK)
        status = run_forward(&c, dr_conv_step, dr_step);
    return call_close(&c, status);
}

static dr_status backward(const dr_layer_plan *plan, const dr_layer_io *io, const dr_buffers *buffers)
{
    dr_layer_call c;
    DR_TRY(call_open(&c, plan, io, buffers, DR_TRIP_BACKWARD));
    dr_status status = dr_layer_check_backward(&c);
    if (status == DR_OK)
        status = run_backward(&c);
    return call_close(&c, status);
}

dr_status dr_layer_forward(const dr_layer_plan *plan, const dr_layer_io *io,
                           const dr_buffers *buffers)
{
    return dr_layer_cp_close(plan, forward(plan, io, buffers));
}

dr_status dr_layer_backward(const dr_layer_plan *plan, const dr_layer_io *io,
                            const dr_buffers *buffers)
{
    return dr_layer_cp_close(plan, backward(plan, io, buffers));
}
