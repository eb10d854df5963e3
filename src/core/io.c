/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io.c - the tensors of a delta-rule call, checked against the problem and brought to the
 * form that backends see (backend.h). Layout options end here: state_v_first becomes a pair
 * of swapped strides, a missing batch axis an axis of extent 1.
 */
#include "core/delta.h"

typedef struct io_check {
    const dr_context *ctx;
    const dr_plan *plan;
    int64_t B, T, H, HV, K, V, N, NT;
    bool raw; /* the gate has parameters */
} io_check;

static dr_status token_tensor(const io_check *c, const dr_tensor *t, const char *name,
                              const char *letters, int64_t heads, int64_t width, bool required,
                              bool output, dr_tensor *out)
{
    int32_t rank = width > 0 ? 4 : 3;
    const dr_expect want = {name, letters, rank, {c->B, c->T, heads, width}, c->B == 1, required,
                            output};
    DR_TRY(dr_tensor_check(c->ctx, t, &want, out));
    if (rank == 3)
        dr_tensor_widen(out);
    return DR_OK;
}

static dr_status state_tensor(const io_check *c, const dr_tensor *t, const char *name, int64_t slots,
                              bool output, dr_tensor *out)
{
    bool v_first = c->plan->problem.state_v_first != 0;
    const dr_expect want = {name, v_first ? "[N,HV,V,K]" : "[N,HV,K,V]", 4,
                            {slots, c->HV, v_first ? c->V : c->K, v_first ? c->K : c->V}, false,
                            false, output};
    DR_TRY(dr_tensor_check(c->ctx, t, &want, out));
    if (v_first && out->data != NULL) {
        int64_t stride = out->stride[2];
        out->stride[2] = out->stride[3];
        out->stride[3] = stride;
        out->shape[2] = c->K;
        out->shape[3] = c->V;
    }
    return DR_OK;
}

/* Inputs that both directions read. */
static dr_status common_inputs(const io_check *c, const dr_io *io, dr_io *out)
{
    const dr_problem *p = &c->plan->problem;
    bool kda = dr_variant_find(p->variant)->gate_per_channel;
    const char *g_letters = kda ? "[B,T,HV,K]" : "[B,T,HV]";
    DR_TRY(token_tensor(c, &io->q, "q", "[B,T,H,K]", c->H, c->K, true, false, &out->q));
    DR_TRY(token_tensor(c, &io->k, "k", "[B,T,H,K]", c->H, c->K, true, false, &out->k));
    DR_TRY(token_tensor(c, &io->v, "v", "[B,T,HV,V]", c->HV, c->V, true, false, &out->v));
    DR_TRY(token_tensor(c, &io->beta, "beta", "[B,T,HV]", c->HV, 0, true, false, &out->beta));
    if (p->gate == DR_GATE_NONE)
        DR_TRY(dr_tensor_absent(&io->g, "g", "with DR_GATE_NONE"));
    else
        DR_TRY(token_tensor(c, &io->g, "g", g_letters, c->HV, kda ? c->K : 0, true, false, &out->g));
    if (!c->raw) {
        DR_TRY(dr_tensor_absent(&io->a_log, "a_log", "unless the gate is raw"));
        DR_TRY(dr_tensor_absent(&io->dt_bias, "dt_bias", "unless the gate is raw"));
        return DR_OK;
    }
    const dr_expect a_log = {"a_log", "[HV]", 1, {c->HV, 0, 0, 0}, false,
                             p->gate == DR_GATE_SOFTPLUS, false};
    DR_TRY(dr_vector_check(c->ctx, &io->a_log, &a_log, &out->a_log));
    return dr_bias_check(c->ctx, &io->dt_bias, "dt_bias", false, c->HV, dr_gate_width(p),
                         &out->dt_bias);
}

static dr_status forward_tensors(const io_check *c, const dr_io *io, int64_t slots, dr_io *out)
{
    DR_TRY(token_tensor(c, &io->o, "o", "[B,T,HV,V]", c->HV, c->V, false, true, &out->o));
    DR_TRY(state_tensor(c, &io->final_state, "final_state", slots, true, &out->final_state));
    return state_tensor(c, &io->chunk_states, "chunk_states", c->NT, true, &out->chunk_states);
}

static dr_status adjoint_tensors(const io_check *c, const dr_io *io, dr_io *out)
{
    const dr_problem *p = &c->plan->problem;
    bool kda = dr_variant_find(p->variant)->gate_per_channel;
    if (io->state_index != NULL)
        return dr_fail(DR_ERR_ARG, "state_index: must be NULL for the adjoint");
    DR_TRY(token_tensor(c, &io->d_o, "d_o", "[B,T,HV,V]", c->HV, c->V, false, false, &out->d_o));
    DR_TRY(state_tensor(c, &io->d_final_state, "d_final_state", c->N, false, &out->d_final_state));
    DR_TRY(token_tensor(c, &io->dq, "dq", "[B,T,H,K]", c->H, c->K, false, true, &out->dq));
    DR_TRY(token_tensor(c, &io->dk, "dk", "[B,T,H,K]", c->H, c->K, false, true, &out->dk));
    DR_TRY(token_tensor(c, &io->dv, "dv", "[B,T,HV,V]", c->HV, c->V, false, true, &out->dv));
    DR_TRY(token_tensor(c, &io->dbeta, "dbeta", "[B,T,HV]", c->HV, 0, false, true, &out->dbeta));
    if (p->gate == DR_GATE_NONE)
        DR_TRY(dr_tensor_absent(&io->dg, "dg", "with DR_GATE_NONE"));
    else
        DR_TRY(token_tensor(c, &io->dg, "dg", kda ? "[B,T,HV,K]" : "[B,T,HV]", c->HV,
                            kda ? c->K : 0, false, true, &out->dg));
    DR_TRY(state_tensor(c, &io->d_initial_state, "d_initial_state", c->N, true,
                        &out->d_initial_state));
    if (io->a_log.data == NULL)
        DR_TRY(dr_tensor_absent(&io->da_log, "da_log", "when a_log is"));
    if (io->dt_bias.data == NULL)
        DR_TRY(dr_tensor_absent(&io->ddt_bias, "ddt_bias", "when dt_bias is"));
    const dr_expect da_log = {"da_log", "[HV]", 1, {c->HV, 0, 0, 0}, false, false, true};
    DR_TRY(dr_vector_check(c->ctx, &io->da_log, &da_log, &out->da_log));
    return dr_bias_check(c->ctx, &io->ddt_bias, "ddt_bias", true, c->HV, dr_gate_width(p),
                         &out->ddt_bias);
}

dr_status dr_io_normalise(const dr_plan *plan, const dr_io *io, int dir, int32_t *order, dr_io *out)
{
    if (io == NULL)
        return dr_fail(DR_ERR_ARG, "io: must not be NULL");
    if (io->size != sizeof *io)
        return dr_fail(DR_ERR_ARG, "io.size: must be %zu (DR_IO_INIT), got %u", sizeof *io, io->size);
    const dr_problem *p = &plan->problem;
    const io_check c = {plan->ctx, plan, p->batch, p->tokens, p->heads, p->value_heads, p->key_dim,
                        p->value_dim, plan->n_pieces, plan->n_chunks,
                        p->gate == DR_GATE_SOFTPLUS || p->gate == DR_GATE_LOWER_BOUND};
    *out = (dr_io)DR_IO_INIT;
    DR_TRY(common_inputs(&c, io, out));
    int64_t slots = c.N;
    if (io->state_index != NULL) {
        const dr_tensor *pool = io->final_state.data ? &io->final_state : &io->initial_state;
        if (pool->data == NULL)
            return dr_fail(DR_ERR_ARG, "state_index: needs initial_state or final_state");
        slots = pool->rank == 4 ? pool->shape[0] : 0;
    }
    DR_TRY(state_tensor(&c, &io->initial_state, "initial_state", slots, false, &out->initial_state));
    if (dir > 0)
        DR_TRY(forward_tensors(&c, io, slots, out));
    else
        DR_TRY(adjoint_tensors(&c, io, out));
    DR_TRY(dr_state_index_check(io->state_index, c.N, slots, order));
    out->state_index = io->state_index;
    return DR_OK;
}
