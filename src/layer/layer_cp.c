/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer_cp.c - a layer on one rank's share of a stream. Its plan is a layer plan whose sequences are the
 * rank's pieces; only two stages know the other ranks: the convolution begins with the history that a
 * halo brings, and the delta rule runs by its protocol. Everything else is a matter of single tokens.
 * The history is kept for the adjoint, which therefore exchanges gradients only.
 */
#include "layer/params.h"

#include <deltarule/comm.h>

typedef struct dr_layer_cp {
    dr_comm *comm;
    dr_cp_plan *delta;
    dr_halo *halo;
    size_t halo_scratch;
    bool *ends; /* [N]: the piece holds the last token of its sequence */
} dr_layer_cp;

void dr_layer_cp_clear(dr_layer_plan *plan)
{
    if (plan->cp == NULL)
        return;
    dr_cp_plan_destroy(plan->cp->delta);
    dr_halo_destroy(plan->cp->halo);
    dr_free(plan->cp->ends);
    dr_free(plan->cp);
}

/* What the ranks refuse together leaves the communicator whole; what this rank alone has found does
 * not, since the others go on and would wait for it. */
static dr_status alone(dr_comm *comm, dr_status status)
{
    if (status != DR_OK)
        dr_comm_abort(comm, dr_last_error());
    return status;
}

dr_status dr_layer_cp_close(const dr_layer_plan *plan, dr_status status)
{
    return plan != NULL && plan->cp != NULL ? alone(plan->cp->comm, status) : status;
}

/* ---- memory ---------------------------------------------------------------------------- */

static int64_t halo_width(const dr_layer_plan *plan) { return plan->layer->config.conv_width - 1; }

static int64_t channels(const dr_layer_plan *plan) { return plan->layer->part[DR_PART_QKV].width; }

void dr_layer_cp_layout(const dr_layer_plan *plan, dr_layer_trip trip, dr_arena *home, dr_arena *scratch,
                        dr_layer_blocks *out)
{
    const dr_buffers none = DR_BUFFERS_INIT;
    const int64_t width = channels(plan) * halo_width(plan);
    if (plan->cp == NULL)
        return;
    out->halo = none;
    out->halo.scratch_bytes = plan->cp->halo_scratch + 1; /* a call asks for memory even if for none of it */
    out->halo.scratch = DR_TAKE(scratch, char, out->halo.scratch_bytes, 1);
    out->history = DR_TAKE(home, float, plan->n_sequences, width);
    if (trip != DR_TRIP_BACKWARD)
        return;
    out->d_history = DR_TAKE(scratch, float, plan->n_sequences, width);
    out->d_leaving = DR_TAKE(scratch, float, plan->n_sequences, width);
}

/* ---- plans ------------------------------------------------------------------------------- */

static dr_status check_layout(const dr_layer_layout *layout)
{
    if (layout->size != sizeof *layout)
        return dr_fail(DR_ERR_ARG, "layout.size: must be %zu (DR_LAYER_LAYOUT_INIT), got %u",
                       sizeof *layout, layout->size);
    if (layout->mask != NULL)
        return dr_fail(DR_ERR_ARG, "mask: must be NULL under context parallelism; offsets leave padding out");
    return DR_OK;
}

/* The rank's pieces as the sequences of the plan. */
static dr_status take_pieces(dr_layer_plan *plan, const dr_cp_info *info)
{
    plan->batch = plan->outer_batch = 1;
    plan->rows = plan->tokens = plan->outer_tokens = info->tokens;
    plan->n_sequences = info->pieces;
    plan->offsets = dr_alloc((size_t)(info->pieces + 1) * sizeof *plan->offsets);
    plan->cp->ends = dr_alloc((size_t)(info->pieces + 1) * sizeof *plan->cp->ends);
    if (plan->offsets == NULL || plan->cp->ends == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %lld pieces", (long long)info->pieces);
    for (int64_t n = 0; n < info->pieces; n++) {
        dr_cp_piece piece;
        DR_TRY(dr_cp_plan_piece(plan->cp->delta, n, &piece));
        plan->offsets[n] = piece.begin;
        plan->offsets[n + 1] = piece.end;
        plan->cp->ends[n] = piece.ends != 0;
    }
    return DR_OK;
}

static dr_status create_exchanges(dr_layer_plan *plan, const dr_layer_layout *layout,
                                  const dr_partition *partition, const char *protocol, dr_cp_info *info)
{
    dr_layer_cp *cp = plan->cp;
    dr_problem problem = plan->layer->problem;
    problem.batch = layout->batch;
    problem.tokens = layout->tokens;
    problem.offsets = layout->offsets;
    problem.sequences = layout->offsets != NULL ? layout->sequences : 0;
    DR_TRY(dr_cp_plan_create(plan->layer->ctx, cp->comm, &problem, partition, protocol, &cp->delta));
    dr_halo_config config = DR_HALO_CONFIG_INIT;
    config.tokens = layout->tokens;
    config.offsets = problem.offsets;
    config.sequences = problem.sequences;
    config.partition = partition;
    config.channels = channels(plan);
    config.width = halo_width(plan);
    DR_TRY(dr_halo_create(plan->layer->ctx, cp->comm, &config, &cp->halo));
    DR_TRY(dr_halo_describe(cp->halo, info));
    cp->halo_scratch = info->scratch_bytes;
    return dr_cp_plan_describe(cp->delta, info);
}

static dr_status fill_plan(dr_layer_plan *plan, const dr_layer *layer, struct dr_comm *comm,
                           const dr_layer_layout *layout, const dr_partition *partition,
                           const char *protocol)
{
    const dr_plan_info none = DR_PLAN_INFO_INIT;
    dr_cp_info info = DR_CP_INFO_INIT;
    plan->layer = layer;
    plan->cp = dr_alloc(sizeof *plan->cp);
    if (plan->cp == NULL)
        return alone(comm, dr_fail(DR_ERR_MEMORY, "plan: no memory for %zu bytes", sizeof *plan->cp));
    plan->cp->comm = comm;
    DR_TRY(alone(comm, check_layout(layout)));
    DR_TRY(create_exchanges(plan, layout, partition, protocol, &info));
    DR_TRY(alone(comm, take_pieces(plan, &info)));
    plan->core_info = none;
    plan->core_info.saved_bytes = info.saved_bytes;
    plan->core_info.forward_scratch = plan->core_info.backward_scratch = info.scratch_bytes;
    return alone(comm, dr_layer_plan_finish(plan));
}

dr_status dr_layer_cp_plan_create(const dr_layer *layer, struct dr_comm *comm,
                                  const dr_layer_layout *layout, const struct dr_partition *partition,
                                  const char *protocol, dr_layer_plan **out)
{
    if (out == NULL)
        return dr_fail(DR_ERR_ARG, "out: must not be NULL");
    *out = NULL;
    if (layer == NULL || comm == NULL || layout == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL",
                       layer == NULL ? "layer" : comm == NULL ? "comm" : "layout");
    dr_layer_plan *plan = dr_alloc(sizeof *plan);
    if (plan == NULL)
        return alone(comm, dr_fail(DR_ERR_MEMORY, "plan: no memory for %zu bytes", sizeof *plan));
    dr_status status = fill_plan(plan, layer, comm, layout, partition, protocol);
    if (status != DR_OK) {
        dr_layer_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return DR_OK;
}

/* ---- stages -------------------------------------------------------------------------------- */

static dr_tensor states(const dr_layer_call *c, float *data)
{
    return dr_tensor_make(data, DR_F32, 3, c->plan->n_sequences, channels(c->plan), halo_width(c->plan), 0);
}

static dr_tensor rows(const dr_layer_call *c, float *data)
{
    return dr_tensor_make(data, DR_F32, 3, 1, c->plan->rows, channels(c->plan), 0);
}

/* conv_in and its gradient in one form: a state of no columns is none. */
static dr_tensor given(const dr_layer_call *c, const dr_tensor *t)
{
    return t->data != NULL && halo_width(c->plan) > 0 ? states(c, t->data) : (dr_tensor)DR_TENSOR_NONE;
}

dr_tensor dr_layer_cp_entering(const dr_layer_call *c)
{
    return c->plan->cp != NULL ? states(c, c->blocks.history) : c->io->conv_in;
}

dr_tensor dr_layer_cp_d_entering(const dr_layer_call *c)
{
    return c->plan->cp != NULL ? states(c, c->blocks.d_history) : c->io->d_conv_in;
}

/* The convolution reads every piece's gradient, but only the last piece of a sequence has one. */
dr_tensor dr_layer_cp_d_leaving(const dr_layer_call *c)
{
    const int64_t each = channels(c->plan) * halo_width(c->plan);
    const float *from = c->io->d_conv_out.data;
    if (c->plan->cp == NULL || from == NULL)
        return c->io->d_conv_out;
    memset(c->blocks.d_leaving, 0, (size_t)(c->plan->n_sequences * each) * sizeof *from);
    for (int64_t n = 0; n < c->plan->n_sequences; n++)
        if (c->plan->cp->ends[n])
            memcpy(c->blocks.d_leaving + n * each, from + n * each, (size_t)each * sizeof *from);
    return states(c, c->blocks.d_leaving);
}

dr_status dr_layer_cp_history(dr_layer_call *c)
{
    if (c->plan->cp == NULL || halo_width(c->plan) == 0)
        return DR_OK;
    const dr_tensor x = rows(c, c->blocks.value[DR_PART_QKV]), first = given(c, &c->io->conv_in);
    const dr_tensor history = states(c, c->blocks.history);
    return dr_halo_forward(c->plan->cp->halo, &x, &first, &history, &c->blocks.halo);
}

dr_status dr_layer_cp_d_history(dr_layer_call *c)
{
    if (c->plan->cp == NULL || halo_width(c->plan) == 0)
        return DR_OK;
    const dr_tensor dx = rows(c, c->blocks.grad[DR_PART_QKV]), d_first = given(c, &c->io->d_conv_in);
    const dr_tensor d_history = states(c, c->blocks.d_history);
    return dr_halo_backward(c->plan->cp->halo, &d_history, &dx, &d_first, &c->blocks.halo);
}

dr_status dr_layer_cp_forward(const dr_layer_call *c, const dr_io *io)
{
    return dr_cp_forward(c->plan->cp->delta, io, &c->blocks.core);
}

dr_status dr_layer_cp_backward(const dr_layer_call *c, const dr_io *io)
{
    return dr_cp_backward(c->plan->cp->delta, io, &c->blocks.core);
}
