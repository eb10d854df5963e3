/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_exec.c - see cp_exec.h. Receives are posted one batch each before any local work and waited
 * for where their value is first read; sends leave as soon as their value exists and are waited for
 * at the end, while the stages after the exchange run.
 */
#include "cp/cp_exec.h"
#include "cp/cp_agree.h"

#include "base/half.h"

static int64_t floats_of(const dr_exec *x, dr_value_kind kind)
{
    return (int64_t)x->HV * (kind == DR_VALUE_MAP ? x->V + x->K : x->V) * x->K;
}

size_t dr_exec_bytes(const dr_exec *x, dr_value_kind kind)
{
    return (size_t)floats_of(x, kind) * sizeof(float);
}

/* The piece whose map leaves slot s in the direction of travel, and the one that its entry enters. */
static int64_t leaving_piece(const dr_exec *x, int64_t s)
{
    return x->dir > 0 ? x->route->slots[s].last : x->route->slots[s].first;
}

static int64_t entered_piece(const dr_exec *x, int64_t s)
{
    return x->dir > 0 ? x->route->slots[s].first : x->route->slots[s].last;
}

void dr_exec_carve(dr_exec *x, dr_arena *saved, dr_arena *scratch)
{
    const dr_program *p = x->program;
    int64_t N = x->route->n_pieces;
    int32_t me = p->me;
    x->kept = DR_TAKE(saved, float, p->n_kept, floats_of(x, DR_VALUE_MAP));
    x->values = DR_TAKE(scratch, float *, p->n_values, 1);
    x->batches = DR_TAKE(scratch, dr_batch *, p->n_values + p->n_ops, 1);
    x->map_of = DR_TAKE(scratch, int32_t, N, 1);
    x->entry_of = DR_TAKE(scratch, int32_t, N, 1);
    x->turn = DR_TAKE(scratch, float, floats_of(x, DR_VALUE_STATE), 1);
    x->n_maps = x->n_entries = x->n_sends = 0;
    bool real = x->map_of != NULL;
    for (int64_t n = 0; real && n < N; n++)
        x->map_of[n] = x->entry_of[n] = -1;
    for (int64_t s = 0; s < x->route->n_slots; s++) {
        const dr_slot *slot = &x->route->slots[s];
        if (slot->rank != me)
            continue;
        bool leaves = x->dir > 0 ? slot->to_next : slot->from_previous;
        bool enters = x->dir > 0 ? slot->from_previous : slot->to_next;
        if (leaves && real)
            x->map_of[leaving_piece(x, s)] = x->n_maps;
        if (enters && real)
            x->entry_of[entered_piece(x, s)] = x->n_entries;
        x->n_maps += leaves;
        x->n_entries += enters;
    }
    x->maps = DR_TAKE(scratch, float, x->n_maps, floats_of(x, DR_VALUE_MAP));
    x->entries = DR_TAKE(scratch, float, x->n_entries, floats_of(x, DR_VALUE_STATE));
    for (int32_t v = 0; v < p->n_values; v++) {
        float *value = DR_TAKE(scratch, float, floats_of(x, (dr_value_kind)p->kinds[v]), 1);
        if (real) {
            x->values[v] = value;
            x->batches[v] = NULL;
        }
    }
}

dr_status dr_exec_post(dr_exec *x)
{
    const dr_program *p = x->program;
    for (int64_t i = 0; i < p->n_ops; i++) {
        const dr_step_op *op = &p->ops[i];
        if (op->op != DR_OP_RECEIVE)
            continue;
        dr_transfer t = {op->peer, 0, x->values[op->dst],
                         dr_exec_bytes(x, (dr_value_kind)p->kinds[op->dst])};
        DR_TRY(dr_comm_post(x->comm, &t, 1, &x->batches[op->dst]));
    }
    return DR_OK;
}

/* The register, once its receive has arrived. */
static dr_status value_of(dr_exec *x, int32_t reg, float **out)
{
    dr_batch *batch = x->batches[reg];
    x->batches[reg] = NULL;
    if (batch != NULL)
        DR_TRY(dr_comm_wait(batch));
    *out = x->values[reg];
    return DR_OK;
}

/* Maps of summarize stay where they are; a MAP value is a view of them. */
static float *map_of_slot(dr_exec *x, int32_t slot)
{
    return x->maps + x->map_of[leaving_piece(x, slot)] * floats_of(x, DR_VALUE_MAP);
}

/* boundary[piece], V-major fp32. */
static const float *boundary_state(dr_exec *x, int64_t piece)
{
    const dr_cp_piece *c = &x->route->pieces[piece];
    if (x->boundary->data == NULL || !(x->dir > 0 ? c->starts : c->ends))
        return NULL;
    float *out = x->turn;
    for (int32_t h = 0; h < x->HV; h++)
        for (int32_t j = 0; j < x->V; j++)
            for (int32_t i = 0; i < x->K; i++)
                *out++ = (float)dr_get(dr_at(x->boundary, piece, h, i, j), x->boundary->dtype, 0);
    return x->turn;
}

static void transpose_maps(const dr_exec *x, const float *map, float *out)
{
    int64_t K = x->K, V = x->V, block = (V + K) * K;
    for (int32_t h = 0; h < x->HV; h++, map += block, out += block) {
        memset(out, 0, (size_t)(V * K) * sizeof *out);
        for (int64_t i = 0; i < K; i++)
            for (int64_t j = 0; j < K; j++)
                out[(V + j) * K + i] = map[(V + i) * K + j];
    }
}

static dr_status run_op(dr_exec *x, const dr_step_op *op)
{
    float *a, *b, *dst = op->op == DR_OP_TRANSPOSE || op->dst < 0 ? NULL : x->values[op->dst];
    int64_t state = floats_of(x, DR_VALUE_STATE);
    switch (op->op) {
    case DR_OP_RECEIVE:
        return DR_OK; /* posted; waited for by its first reader */
    case DR_OP_SOURCE:
        return dr_map_apply(x->ctx, x->HV, x->K, x->V, boundary_state(x, leaving_piece(x, op->a)),
                            map_of_slot(x, op->a), dst);
    case DR_OP_MAP:
        memcpy(dst, map_of_slot(x, op->a), dr_exec_bytes(x, DR_VALUE_MAP));
        return DR_OK;
    case DR_OP_SEND: {
        DR_TRY(value_of(x, op->a, &a));
        dr_transfer t = {op->peer, 1, a, dr_exec_bytes(x, (dr_value_kind)x->program->kinds[op->a])};
        DR_TRY(dr_comm_post(x->comm, &t, 1, &x->batches[x->program->n_values + x->n_sends]));
        x->n_sends++;
        return DR_OK;
    }
    case DR_OP_APPLY:
        DR_TRY(value_of(x, op->a, &a));
        DR_TRY(value_of(x, op->b, &b));
        return dr_map_apply(x->ctx, x->HV, x->K, x->V, a, b, dst);
    case DR_OP_COMPOSE:
        DR_TRY(value_of(x, op->a, &a));
        DR_TRY(value_of(x, op->b, &b));
        return dr_map_compose(x->ctx, x->HV, x->K, x->V, a, b, dst);
    case DR_OP_ADD:
        DR_TRY(value_of(x, op->a, &a));
        DR_TRY(value_of(x, op->b, &b));
        for (int64_t i = 0; i < state; i++)
            dst[i] = a[i] + b[i];
        return DR_OK;
    case DR_OP_TRANSPOSE:
        DR_TRY(value_of(x, op->a, &a));
        if (x->kept != NULL)
            transpose_maps(x, a, x->kept + op->dst * floats_of(x, DR_VALUE_MAP));
        return DR_OK;
    case DR_OP_PULL:
        DR_TRY(value_of(x, op->a, &a));
        return dr_map_apply(x->ctx, x->HV, x->K, x->V, a,
                            x->kept + op->b * floats_of(x, DR_VALUE_MAP), dst);
    case DR_OP_ENTRY:
        DR_TRY(value_of(x, op->a, &a));
        memcpy(x->entries + x->entry_of[entered_piece(x, op->b)] * state, a,
               dr_exec_bytes(x, DR_VALUE_STATE));
        return DR_OK;
    }
    return DR_OK;
}

dr_status dr_exec_run(dr_exec *x)
{
    for (int64_t i = 0; i < x->program->n_ops; i++)
        DR_TRY(run_op(x, &x->program->ops[i]));
    return DR_OK;
}

dr_status dr_exec_finish(dr_exec *x, dr_status status)
{
    return dr_cp_settle(x->comm, status, x->batches, x->program->n_values + x->n_sends);
}
