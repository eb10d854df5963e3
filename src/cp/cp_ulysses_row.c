/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_ulysses_row.c - the tables of a row, and the parcels of its exchange. A parcel is
 * field by field [tokens, heads, width] of one span with the heads of one member, then the states
 * [heads, K, V] of the pieces concerned. Where it meets the row, a run of tokens is one copy.
 */
#include "base/half.h"
#include "cp/cp_ulysses.h"

/* ---- tables ---------------------------------------------------------------------------- */

static dr_status no_memory(void) { return dr_fail(DR_ERR_MEMORY, "plan: no memory for a row"); }

/* Place in its rank's span of the token of the stream. */
static int64_t place_in_span(const dr_partition *partition, int32_t rank, int64_t token)
{
    int64_t at = 0;
    for (int64_t i = 0; i < partition->count; i++) {
        const dr_fragment *f = &partition->fragments[i];
        if (f->rank != rank)
            continue;
        if (token >= f->begin && token < f->end)
            return at + token - f->begin;
        at += f->end - f->begin;
    }
    return at;
}

static dr_status find_runs(dr_row *row, const dr_route *route, const dr_partition *partition)
{
    row->runs = dr_alloc((size_t)dr_max(route->n_slots, 1) * sizeof *row->runs);
    row->member_tokens = dr_alloc((size_t)row->U * sizeof *row->member_tokens);
    if (row->runs == NULL || row->member_tokens == NULL)
        return no_memory();
    for (int64_t s = 0; s < route->n_slots; s++) {
        const dr_slot *slot = &route->slots[s];
        const int32_t m = slot->rank - row->first;
        const int64_t tokens = slot->end - slot->begin;
        if (m < 0 || m >= row->U)
            continue;
        row->runs[row->n_runs++] = (dr_run){m, place_in_span(partition, slot->rank, slot->begin),
                                            row->tokens, tokens};
        row->tokens += tokens;
        row->member_tokens[m] += tokens;
    }
    return DR_OK;
}

/* Appends the pieces of a member that start (or end) a sequence. at_row holds the sequence until the
 * engine knows the pieces of the row. */
static dr_status add_states(dr_parcel *parcel, int32_t member, const dr_route *route, bool starts)
{
    const int64_t room = parcel->n_states + route->n_pieces;
    dr_state_place *states = dr_alloc((size_t)dr_max(room, 1) * sizeof *states);
    if (states == NULL)
        return no_memory();
    if (parcel->n_states > 0)
        memcpy(states, parcel->states, (size_t)parcel->n_states * sizeof *states);
    dr_free(parcel->states);
    parcel->states = states;
    for (int64_t i = 0; i < route->n_pieces; i++) {
        const dr_cp_piece *piece = &route->pieces[i];
        if (starts ? piece->starts : piece->ends)
            states[parcel->n_states++] = (dr_state_place){member, i, piece->sequence};
    }
    return DR_OK;
}

static dr_status find_states(dr_row *row, const dr_problem *p, const dr_partition *partition)
{
    for (int32_t m = 0; m < row->U; m++) {
        dr_route route;
        DR_TRY(dr_route_build(&route, partition, row->first + m, p->tokens, p->offsets, p->sequences));
        dr_status status = add_states(&row->parcel[DR_PARCEL_INPUTS], m, &route, true);
        if (status == DR_OK)
            status = add_states(&row->parcel[DR_PARCEL_OUTPUTS], m, &route, false);
        dr_route_clear(&route);
        DR_TRY(status);
    }
    return DR_OK;
}

static dr_status measure(dr_row *row, dr_parcel *p)
{
    int64_t per_token = 0;
    p->at = dr_alloc((size_t)(row->U + 1) * sizeof *p->at);
    if (p->at == NULL)
        return no_memory();
    for (int i = 0; i < DR_PARCEL_FIELDS; i++)
        per_token += (int64_t)p->field[i].heads * p->field[i].width;
    for (int64_t s = 0; s < p->n_states; s++)
        p->at[p->states[s].member + 1] += (int64_t)row->heads * row->K * row->V;
    for (int32_t m = 0; m < row->U; m++)
        p->at[m + 1] += p->at[m] + row->member_tokens[m] * per_token;
    return DR_OK;
}

dr_status dr_row_build(dr_row *row, const dr_cp_plan *plan, const dr_problem *p,
                       const dr_partition *partition)
{
    row->u = plan->comm->rank % row->U;
    row->first = plan->comm->rank - row->u;
    row->heads = p->value_heads / row->U;
    row->key_heads = p->heads / row->U;
    row->all_key_heads = p->heads;
    row->tiled = p->head_map == DR_HEADS_TILED;
    row->K = p->key_dim;
    row->V = p->value_dim;
    const dr_field key = {row->key_heads, row->K, false}, value = {row->heads, row->V, true};
    const dr_field gate = {row->heads, p->gate == DR_GATE_NONE ? 0 : dr_gate_width(p), true};
    const dr_field beta = {row->heads, 1, true};
    row->parcel[DR_PARCEL_INPUTS] = (dr_parcel){.field = {key, key, value, gate, beta}};
    row->parcel[DR_PARCEL_OUTPUTS] = (dr_parcel){.field = {value}};
    DR_TRY(find_runs(row, &plan->route, partition));
    DR_TRY(find_states(row, p, partition));
    DR_TRY(measure(row, &row->parcel[DR_PARCEL_INPUTS]));
    return measure(row, &row->parcel[DR_PARCEL_OUTPUTS]);
}

void dr_row_clear(dr_row *row)
{
    dr_free(row->runs);
    dr_free(row->member_tokens);
    for (int kind = 0; kind < DR_PARCEL_KINDS; kind++) {
        dr_free(row->parcel[kind].states);
        dr_free(row->parcel[kind].at);
    }
}

/* ---- parcels --------------------------------------------------------------------------- */

int32_t dr_row_value_head(const dr_row *row, int32_t member, int32_t head)
{
    if (!row->tiled)
        return member * row->heads + head;
    return head / row->key_heads * row->all_key_heads + member * row->key_heads + head % row->key_heads;
}

static int32_t head_of(const dr_row *row, const dr_field *f, int32_t member, int32_t head)
{
    return f->value_heads ? dr_row_value_head(row, member, head) : member * f->heads + head;
}

/* n elements along the last axis of t, from element (i, j, k, 0). An absent tensor is packed as zero
 * and takes nothing. */
static void move(const dr_tensor *t, int64_t i, int64_t j, int64_t k, int64_t n, float *parcel, bool pack)
{
    const size_t bytes = (size_t)n * sizeof *parcel;
    if (t->data == NULL) {
        if (pack)
            memset(parcel, 0, bytes);
        return;
    }
    void *at = dr_at(t, i, j, k, 0);
    const int64_t stride = n == 1 ? 0 : t->stride[3];
    if (t->dtype == DR_F32 && (n == 1 || stride == 1)) {
        memcpy(pack ? parcel : at, pack ? at : parcel, bytes);
        return;
    }
    for (int64_t x = 0; x < n; x++)
        if (pack)
            parcel[x] = (float)dr_get(at, t->dtype, x * stride);
        else
            dr_put(at, t->dtype, x * stride, parcel[x]);
}

void dr_parcel_span(const dr_row *row, dr_parcel_kind kind, int32_t member, const dr_spans *span,
                    float *parcel, bool pack)
{
    const dr_parcel *p = &row->parcel[kind];
    for (int i = 0; i < DR_PARCEL_FIELDS; i++) {
        const dr_field *f = &p->field[i];
        for (int64_t t = 0; f->width > 0 && t < row->member_tokens[row->u]; t++)
            for (int32_t h = 0; h < f->heads; h++, parcel += f->width)
                move(&span->field[i], 0, t, head_of(row, f, member, h), f->width, parcel, pack);
    }
    for (int64_t s = 0; s < p->n_states; s++)
        for (int32_t h = 0; p->states[s].member == row->u && h < row->heads; h++)
            for (int32_t k = 0; k < row->K; k++, parcel += row->V)
                move(&span->state, p->states[s].piece, dr_row_value_head(row, member, h), k, row->V,
                     parcel, pack);
}

static void copy(float *data, float *parcel, int64_t n, bool pack)
{
    memcpy(pack ? parcel : data, pack ? data : parcel, (size_t)n * sizeof *data);
}

void dr_parcel_row(const dr_row *row, dr_parcel_kind kind, int32_t member, const dr_row_data *data,
                   float *parcel, bool pack)
{
    const dr_parcel *p = &row->parcel[kind];
    const int64_t size = (int64_t)row->heads * row->K * row->V;
    for (int i = 0; i < DR_PARCEL_FIELDS; i++) {
        const int64_t n = (int64_t)p->field[i].heads * p->field[i].width;
        for (int64_t r = 0; n > 0 && r < row->n_runs; r++) {
            const dr_run *run = &row->runs[r];
            if (run->member == member)
                copy(data->field[i] + run->at_row * n, parcel + run->at_member * n, run->tokens * n, pack);
        }
        parcel += row->member_tokens[member] * n;
    }
    for (int64_t s = 0; s < p->n_states; s++)
        if (p->states[s].member == member) {
            copy(data->state + p->states[s].at_row * size, parcel, size, pack);
            parcel += size;
        }
}
