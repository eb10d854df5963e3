/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer_check.c - every rule about the tensors of a layer call. All of a caller's mistakes are
 * found here, before the first stage runs, so that a refused call has written nothing.
 */
#include "layer/params.h"

#include <stdio.h>

static bool is_contiguous(const dr_tensor *t)
{
    int64_t stride = 1;
    for (int32_t i = t->rank - 1; i >= 0; i--) {
        if (t->shape[i] != 1 && t->stride[i] != stride)
            return dr_tensor_empty(t);
        stride *= t->shape[i];
    }
    return true;
}

/* The same extents in the same order, those of 1 aside: published files keep A_log as [HV] or
 * [1,1,HV,1], and a batch of one may go without its axis. */
static bool same_extents(const dr_tensor *t, const dr_expect *want)
{
    int32_t i = 0, j = 0;
    if (t->rank < 1 || t->rank > DR_MAX_RANK)
        return false;
    for (;;) {
        while (i < t->rank && t->shape[i] == 1)
            i++;
        while (j < want->rank && want->shape[j] == 1)
            j++;
        if (i == t->rank || j == want->rank)
            return i == t->rank && j == want->rank;
        if (t->shape[i++] != want->shape[j++])
            return false;
    }
}

static dr_tensor contiguous(float *data, const dr_expect *want)
{
    const int64_t *n = want->shape;
    return dr_tensor_make(data, DR_F32, want->rank, n[0], n[1], n[2], n[3]);
}

static dr_status check_tensor(const dr_layer *layer, const dr_tensor *t, const dr_expect *want)
{
    dr_tensor view = *t, checked;
    if (t->data != NULL && same_extents(t, want)) {
        view = contiguous(t->data, want);
        view.dtype = t->dtype;
    }
    DR_TRY(dr_tensor_check(layer->ctx, &view, want, &checked));
    if (checked.data == NULL)
        return DR_OK;
    if (t->dtype != DR_F32)
        return dr_fail(DR_ERR_SHAPE, "%s: dtype must be f32, got %s", want->name,
                       dr_dtype_name(t->dtype));
    if (!is_contiguous(t))
        return dr_fail(DR_ERR_SHAPE, "%s: must be contiguous", want->name);
    return DR_OK;
}

/* All missing parameters in one sentence. */
static dr_status check_missing(const dr_layer *layer, const dr_tensor *params)
{
    char names[512] = "";
    size_t at = 0;
    int32_t missing = 0;
    for (int32_t i = 0; i < layer->n_params; i++) {
        if (params[i].data != NULL)
            continue;
        if (at < sizeof names)
            at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", missing ? ", " : "",
                                   layer->params[i].info.name);
        missing++;
    }
    if (missing > 0)
        return dr_fail(DR_ERR_ARG, "params: %d of %d are missing: %s", missing, layer->n_params,
                       names);
    return DR_OK;
}

static dr_status check_params(const dr_layer *layer, const dr_tensor *tensors, const char *array,
                              bool output)
{
    static const char *const letters[DR_USES] = {
        [DR_USE_LINEAR] = "[out,in]", [DR_USE_CONV] = "[channels,1,W]",
        [DR_USE_CONV_BIAS] = "[channels]", [DR_USE_A_LOG] = "[HV]",
        [DR_USE_DT_BIAS] = "[decays]", [DR_USE_NORM] = "[V]"};
    for (int32_t i = 0; i < layer->n_params; i++) {
        const dr_param_info *info = &layer->params[i].info;
        char name[80];
        snprintf(name, sizeof name, "%s[%d] (%s)", array, i, info->name);
        dr_expect want = {name, letters[layer->params[i].row->use], info->rank, {0}, false, false,
                          output};
        memcpy(want.shape, info->shape, sizeof want.shape);
        if (tensors[i].data != NULL)
            DR_TRY(check_tensor(layer, &tensors[i], &want));
    }
    return DR_OK;
}

dr_status dr_layer_check_params(const dr_layer *layer, const dr_tensor *params)
{
    DR_TRY(check_missing(layer, params));
    return check_params(layer, params, "params", false);
}

static dr_status check_rows(const dr_layer_call *c, const dr_tensor *t, const char *name,
                            bool required, bool output)
{
    const dr_layer_plan *p = c->plan;
    const dr_expect want = {name, "[B,T,hidden]", 3,
                            {p->outer_batch, p->outer_tokens, c->layer->config.hidden, 0}, false,
                            required, output};
    return check_tensor(c->layer, t, &want);
}

/* One of the eight state tensors, in the order of the struct. */
typedef struct state_arg {
    const char *name;
    const dr_tensor *t;
    bool conv, required, output;
} state_arg;

static dr_status check_states(dr_layer_call *c, const state_arg *states, size_t n)
{
    const dr_layer_config *config = &c->layer->config;
    const int64_t D = c->layer->part[DR_PART_QKV].width;
    const dr_tensor *first = NULL;
    for (size_t i = 0; i < n && first == NULL; i++)
        if (states[i].t->data != NULL)
            first = states[i].t;
    c->slots = c->plan->n_sequences;
    if (c->plan->cp != NULL && c->io->state_index != NULL)
        return dr_fail(DR_ERR_ARG, "state_index: must be NULL under context parallelism");
    if (c->io->state_index != NULL) {
        if (first == NULL)
            return dr_fail(DR_ERR_ARG, "state_index: needs a state tensor");
        c->slots = first->shape[0];
    }
    for (size_t i = 0; i < n; i++) {
        const state_arg *s = &states[i];
        const dr_expect conv = {s->name, "[N,D,W-1]", 3, {c->slots, D, config->conv_width - 1, 0},
                                false, s->required, s->output};
        const dr_expect state = {s->name, "[N,HV,K,V]", 4,
                                 {c->slots, config->value_heads, config->key_dim,
                                  config->value_dim}, false, s->required, s->output};
        if (c->plan->run_start != NULL)
            DR_TRY(dr_tensor_absent(s->t, s->name, "with a mask"));
        DR_TRY(check_tensor(c->layer, s->t, s->conv ? &conv : &state));
    }
    return dr_state_index_check(c->io->state_index, c->plan->n_sequences, c->slots,
                                c->blocks.order);
}

dr_status dr_layer_check_forward(dr_layer_call *c, bool step)
{
    const dr_layer_io *io = c->io;
    if (step && c->plan->run_start != NULL)
        return dr_fail(DR_ERR_ARG, "plan: dr_layer_step needs states, which a mask does not allow");
    if (step && c->plan->cp != NULL)
        return dr_fail(DR_ERR_ARG, "plan: dr_layer_step decodes on one rank, got a plan over many");
    const state_arg states[] = {
        {"conv_in", &io->conv_in, true, step, false},
        {"conv_out", &io->conv_out, true, step, true},
        {"state_in", &io->state_in, false, step, false},
        {"state_out", &io->state_out, false, step, true},
    };
    DR_TRY(check_rows(c, &io->x, "x", true, false));
    DR_TRY(check_rows(c, &io->y, "y", true, true));
    return check_states(c, states, DR_COUNT(states));
}

dr_status dr_layer_check_backward(dr_layer_call *c)
{
    const dr_layer_io *io = c->io;
    const state_arg states[] = {
        {"conv_in", &io->conv_in, true, false, false},
        {"state_in", &io->state_in, false, false, false},
        {"d_conv_in", &io->d_conv_in, true, false, true},
        {"d_conv_out", &io->d_conv_out, true, false, false},
        {"d_state_in", &io->d_state_in, false, false, true},
        {"d_state_out", &io->d_state_out, false, false, false},
    };
    if (io->state_index != NULL)
        return dr_fail(DR_ERR_ARG, "state_index: must be NULL for dr_layer_backward");
    DR_TRY(check_rows(c, &io->x, "x", true, false));
    DR_TRY(check_rows(c, &io->dy, "dy", true, false));
    DR_TRY(check_rows(c, &io->dx, "dx", false, true));
    if (io->grads != NULL)
        DR_TRY(check_params(c->layer, io->grads, "grads", true));
    DR_TRY(check_states(c, states, DR_COUNT(states)));
    const dr_layer_stamp *s = c->blocks.stamp;
    if (s->magic != DR_LAYER_MAGIC || s->digest != c->plan->digest)
        return dr_fail(DR_ERR_BUFFER, "buffers.saved: must hold what dr_layer_forward of this "
                       "layer and layout left, but none has written it");
    return DR_OK;
}
