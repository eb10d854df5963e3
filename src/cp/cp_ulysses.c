/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_ulysses.c - the engine that exchanges tokens for heads. The members of a row send each other one
 * parcel each; then every member has all tokens of the row for its heads and runs the delta rule
 * there: alone where the row is the whole stream, or with another protocol along its column. One
 * parcel each brings the results back. The adjoint does the same with gradients; what
 * the forward received stays in saved, so that nothing is sent twice.
 */
#include "base/half.h"
#include "cp/cp_agree.h"
#include "cp/cp_ulysses.h"

typedef struct ulysses {
    dr_row row;
    dr_plan *alone;        /* one of these two */
    dr_cp_plan *along;
    dr_comm *column;       /* of along */
    int64_t n_states;      /* of the row */
    size_t saved, scratch; /* of the plan within */
} ulysses;

/* The batches of a trip. Both receives are posted before anything else is done. */
enum { RECEIVE_IN, RECEIVE_OUT, SEND_IN, SEND_OUT, BATCHES };

typedef struct trip {
    const dr_cp_plan *plan;
    const ulysses *own;
    int dir;
    bool keep;             /* there is room in saved */
    dr_parcel_kind in, out;
    dr_row_data inputs, from, to; /* the inputs; what arrives; what is sent back */
    float *params, *dparams;      /* a_log [heads], dt_bias [heads, gate width] */
    float *parcels[BATCHES];
    dr_transfer *transfers;
    dr_batch *batch[BATCHES];
    dr_buffers within;
} trip;

/* ---- memory ---------------------------------------------------------------------------- */

static void take_row(const ulysses *own, dr_arena *arena, dr_parcel_kind kind, dr_row_data *out)
{
    const dr_row *row = &own->row;
    for (int i = 0; i < DR_PARCEL_FIELDS; i++) {
        const dr_field *f = &row->parcel[kind].field[i];
        out->field[i] = DR_TAKE(arena, float, row->tokens, (int64_t)f->heads * f->width);
    }
    out->state = DR_TAKE(arena, float, own->n_states, (int64_t)row->heads * row->K * row->V);
}

static void carve(trip *x, const dr_cp_plan *plan, int dir, bool keep, dr_arena *saved, dr_arena *scratch)
{
    const ulysses *own = plan->own;
    const dr_row *row = &own->row;
    const int64_t params = (int64_t)row->heads * (1 + dr_gate_width(&plan->inner->problem));
    *x = (trip){.plan = plan, .own = own, .dir = dir, .keep = keep, .within = DR_BUFFERS_INIT,
                .in = dir > 0 ? DR_PARCEL_INPUTS : DR_PARCEL_OUTPUTS,
                .out = dir > 0 ? DR_PARCEL_OUTPUTS : DR_PARCEL_INPUTS};
    take_row(own, keep ? saved : scratch, DR_PARCEL_INPUTS, &x->inputs);
    if (keep) {
        x->within.saved = DR_TAKE(saved, char, own->saved, 1);
        x->within.saved_bytes = own->saved;
    }
    x->within.scratch = DR_TAKE(scratch, char, own->scratch, 1);
    x->within.scratch_bytes = own->scratch;
    x->from = x->inputs;
    if (dir < 0)
        take_row(own, scratch, x->in, &x->from);
    take_row(own, scratch, x->out, &x->to);
    x->params = DR_TAKE(scratch, float, params, 1);
    x->dparams = DR_TAKE(scratch, float, params, 1);
    x->parcels[RECEIVE_IN] = DR_TAKE(scratch, float, row->parcel[x->in].at[row->U], 1);
    x->parcels[RECEIVE_OUT] = DR_TAKE(scratch, float, dr_parcel_floats(row, x->out, row->u), row->U);
    x->parcels[SEND_IN] = DR_TAKE(scratch, float, dr_parcel_floats(row, x->in, row->u), row->U);
    x->parcels[SEND_OUT] = DR_TAKE(scratch, float, row->parcel[x->out].at[row->U], 1);
    x->transfers = DR_TAKE(scratch, dr_transfer, row->U, 1);
}

/* Without room in saved the inputs are in scratch: a forward is measured both ways. */
static dr_status measure(dr_cp_plan *plan)
{
    static const struct { int dir; bool keep; } trips[] = {{+1, true}, {+1, false}, {-1, true}};
    for (size_t i = 0; i < DR_COUNT(trips); i++) {
        dr_arena saved = {0}, scratch = {0};
        trip x;
        carve(&x, plan, trips[i].dir, trips[i].keep, &saved, &scratch);
        DR_TRY(dr_cp_plan_fit(plan, &saved, &scratch));
    }
    return DR_OK;
}

/* ---- plan ------------------------------------------------------------------------------ */

static dr_status check_heads(const char *name, int32_t heads, int32_t U)
{
    if (heads % U == 0)
        return DR_OK;
    return dr_fail(DR_ERR_SUPPORT, "%s: must be a multiple of the %d ranks that exchange heads under "
                   "ulysses, got %d", name, U, heads);
}

static dr_status build(dr_cp_plan *plan, const dr_problem *problem, const dr_partition *partition)
{
    const int32_t ranks = plan->comm->size, U = plan->spec.width > 0 ? plan->spec.width : ranks;
    dr_cp_spec rest;
    if (ranks % U != 0)
        return dr_fail(DR_ERR_ARG, "protocol: the width of ulysses must divide the number of ranks (%d), got %d",
                       ranks, U);
    if (plan->spec.rest != NULL)
        DR_TRY(dr_cp_spec_parse(plan->spec.rest, &rest));
    else if (U != ranks)
        return dr_fail(DR_ERR_ARG, "protocol: ulysses:%d on %d ranks needs a second protocol, as in "
                       "\"ulysses:%d+p2p\", got none", U, ranks, U);
    DR_TRY(check_heads("heads", problem->heads, U));
    DR_TRY(check_heads("value_heads", problem->value_heads, U));
    ulysses *own = plan->own = dr_alloc(sizeof *own);
    if (own == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %zu bytes", sizeof *own);
    own->row.U = U;
    return dr_row_build(&own->row, plan, problem, partition);
}

/* Rows instead of ranks; neighbours in the stream become one fragment. */
static dr_status join_along(dr_cp_plan *plan, const dr_problem *problem)
{
    ulysses *own = plan->own;
    const dr_route *route = &plan->route;
    const int32_t U = own->row.U, R = plan->comm->size / U;
    dr_fragment *fragments = dr_alloc((size_t)dr_max(route->n_slots, 1) * sizeof *fragments);
    if (fragments == NULL) {
        dr_comm_abort(plan->comm, "no memory for a partition");
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %lld fragments", (long long)route->n_slots);
    }
    int64_t n = 0;
    for (int64_t s = 0; s < route->n_slots; s++) {
        const dr_slot *slot = &route->slots[s];
        if (n > 0 && fragments[n - 1].rank == slot->rank / U)
            fragments[n - 1].end = slot->end;
        else
            fragments[n++] = (dr_fragment){slot->begin, slot->end, slot->rank / U};
    }
    dr_partition partition = DR_PARTITION_INIT;
    partition.ranks = R;
    partition.count = n;
    partition.fragments = fragments;
    dr_status status = dr_column_create(plan->comm, own->row.u, U, R, &own->column);
    if (status == DR_OK)
        status = dr_cp_plan_create(plan->ctx, own->column, problem, &partition, plan->spec.rest, &own->along);
    else
        dr_comm_abort(plan->comm, "no memory for a column");
    dr_free(fragments);
    return status;
}

/* Puts the row's pieces in the place of the sequences in the parcels' tables. */
static dr_status place_states(ulysses *own, int64_t sequences)
{
    dr_status status = DR_OK;
    int64_t *place = dr_alloc((size_t)dr_max(sequences, 1) * sizeof *place);
    if (place == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %lld sequences", (long long)sequences);
    for (int kind = 0; kind < DR_PARCEL_KINDS; kind++) {
        for (int64_t n = 0; status == DR_OK && n < own->n_states; n++) {
            dr_cp_piece piece = {.sequence = n, .starts = 1, .ends = 1};
            if (own->along != NULL)
                status = dr_cp_plan_piece(own->along, n, &piece);
            if (kind == DR_PARCEL_INPUTS ? piece.starts : piece.ends)
                place[piece.sequence] = n;
        }
        dr_parcel *p = &own->row.parcel[kind];
        for (int64_t s = 0; s < p->n_states; s++)
            p->states[s].at_row = place[p->states[s].at_row];
    }
    dr_free(place);
    return status;
}

static dr_status join_row(dr_cp_plan *plan, const dr_problem *problem)
{
    ulysses *own = plan->own;
    dr_problem local = *problem;
    local.heads = own->row.key_heads;
    local.value_heads = own->row.heads;
    local.state_v_first = 0;
    if (plan->spec.rest != NULL) {
        dr_cp_info info = DR_CP_INFO_INIT;
        DR_TRY(join_along(plan, &local));
        DR_TRY(dr_cp_plan_describe(own->along, &info));
        own->n_states = info.pieces;
        own->saved = info.saved_bytes;
        own->scratch = info.scratch_bytes;
    } else {
        DR_TRY(dr_plan_create(plan->ctx, &local, &own->alone));
        own->n_states = own->alone->n_pieces;
        own->saved = own->alone->saved;
        own->scratch = dr_plan_fused_scratch(own->alone);
    }
    DR_TRY(place_states(own, problem->offsets != NULL ? problem->sequences : 1));
    return measure(plan);
}

/* What one column finds wrong, the others have to know. */
static dr_status join(dr_cp_plan *plan, const dr_problem *problem, const dr_partition *partition)
{
    static const char *const nothing[DR_AGREED] = {NULL};
    dr_agreement mine = {0};
    (void)partition; /* the route has it */
    dr_agreement_set(&mine, join_row(plan, problem));
    if (mine.status != DR_OK && plan->comm->health != DR_OK) /* no longer able to tell them */
        return dr_fail((dr_status)mine.status, "%s", mine.sentence);
    return dr_cp_agree(plan->comm, &mine, nothing);
}

static void clear(dr_cp_plan *plan)
{
    ulysses *own = plan->own;
    if (own == NULL)
        return;
    dr_plan_destroy(own->alone);
    dr_cp_plan_destroy(own->along);
    dr_comm_close(own->column);
    dr_row_clear(&own->row);
    dr_free(own);
}

static void describe(const dr_cp_plan *plan, dr_cp_info *info)
{
    const ulysses *own = plan->own;
    const dr_row *row = &own->row;
    dr_cp_info along = DR_CP_INFO_INIT;
    if (own->along != NULL && dr_cp_plan_describe(own->along, &along) != DR_OK)
        return;
    for (int d = 0; d < 2; d++) {
        const dr_parcel_kind in = d == 0 ? DR_PARCEL_INPUTS : DR_PARCEL_OUTPUTS;
        info->sends[d] += along.sends[d];
        info->send_bytes[d] += along.send_bytes[d];
        for (int32_t m = 0; m < row->U; m++) {
            const int64_t there = dr_parcel_floats(row, in, row->u);
            const int64_t back = dr_parcel_floats(row, (dr_parcel_kind)(1 - (int)in), m);
            if (m == row->u)
                continue;
            info->sends[d] += (there > 0) + (back > 0);
            info->send_bytes[d] += (there + back) * (int64_t)sizeof(float);
        }
    }
}

/* ---- exchange -------------------------------------------------------------------------- */

/* Of a batch, the parcel from or for a member. What comes in and what is sent back carries the tokens
 * of that member, the others carry those of this rank. */
static float *parcel_of(const trip *x, int batch, int32_t m, int64_t *floats)
{
    const dr_row *row = &x->own->row;
    const dr_parcel_kind kind = batch == RECEIVE_IN || batch == SEND_IN ? x->in : x->out;
    const bool theirs = batch == RECEIVE_IN || batch == SEND_OUT;
    *floats = dr_parcel_floats(row, kind, theirs ? m : row->u);
    return x->parcels[batch] + (theirs ? row->parcel[kind].at[m] : m * *floats);
}

static dr_status post(trip *x, int batch)
{
    const dr_row *row = &x->own->row;
    int32_t n = 0;
    for (int32_t m = 0; m < row->U; m++) {
        int64_t floats;
        float *parcel = parcel_of(x, batch, m, &floats);
        if (m != row->u)
            x->transfers[n++] = (dr_transfer){row->first + m, batch >= SEND_IN, parcel,
                                              (size_t)floats * sizeof(float)};
    }
    return dr_comm_post(x->plan->comm, x->transfers, n, &x->batch[batch]);
}

static dr_status wait(trip *x, int batch)
{
    dr_batch *b = x->batch[batch];
    x->batch[batch] = NULL; /* freed, whatever wait returns */
    return b != NULL ? dr_comm_wait(b) : DR_OK;
}

/* What this rank keeps does not travel: it is packed where it would arrive. */
static float *packed_at(const trip *x, int send, int receive, int32_t m)
{
    int64_t floats;
    return parcel_of(x, m == x->own->row.u ? receive : send, m, &floats);
}

static dr_status bring_in(trip *x, const dr_spans *spans)
{
    const dr_row *row = &x->own->row;
    int64_t floats;
    DR_TRY(post(x, RECEIVE_IN));
    DR_TRY(post(x, RECEIVE_OUT));
    for (int32_t m = 0; m < row->U; m++)
        dr_parcel_span(row, x->in, m, spans, packed_at(x, SEND_IN, RECEIVE_IN, m), true);
    DR_TRY(post(x, SEND_IN));
    /* pieces entered or left elsewhere have no state in any parcel */
    memset(x->from.state, 0, (size_t)(x->own->n_states * row->heads * row->K * row->V) * sizeof(float));
    DR_TRY(wait(x, RECEIVE_IN));
    for (int32_t m = 0; m < row->U; m++)
        dr_parcel_row(row, x->in, m, &x->from, parcel_of(x, RECEIVE_IN, m, &floats), false);
    return DR_OK;
}

static dr_status bring_back(trip *x)
{
    const dr_row *row = &x->own->row;
    for (int32_t m = 0; m < row->U; m++)
        dr_parcel_row(row, x->out, m, &x->to, packed_at(x, SEND_OUT, RECEIVE_OUT, m), true);
    DR_TRY(post(x, SEND_OUT));
    for (int batch = 0; batch < BATCHES; batch++)
        DR_TRY(wait(x, batch));
    return DR_OK;
}

/* ---- calls ----------------------------------------------------------------------------- */

/* Reads, or writes back, the rows of the parameters that belong to this rank's heads. */
static void load_params(const trip *x, const dr_io *normal)
{
    const dr_row *row = &x->own->row;
    const int32_t w = dr_gate_width(&x->plan->inner->problem);
    const dr_tensor *a = &normal->a_log, *b = &normal->dt_bias;
    for (int32_t h = 0; h < row->heads; h++) {
        const int32_t j = dr_row_value_head(row, row->u, h);
        if (a->data != NULL)
            x->params[h] = (float)dr_get(dr_at(a, j, 0, 0, 0), a->dtype, 0);
        for (int32_t i = 0; b->data != NULL && i < w; i++)
            x->params[row->heads + h * w + i] = (float)dr_get(dr_at(b, j, i, 0, 0), b->dtype, 0);
    }
}

static void store_params(const trip *x, const dr_io *normal)
{
    const dr_row *row = &x->own->row;
    const int32_t w = dr_gate_width(&x->plan->inner->problem);
    const dr_tensor *a = &normal->da_log, *b = &normal->ddt_bias;
    for (int32_t m = 0; m < row->U; m++)
        for (int32_t h = 0; h < row->heads; h++) {
            const int32_t j = dr_row_value_head(row, m, h);
            const float *d = m == row->u ? x->dparams : NULL; /* others sum the others */
            if (a->data != NULL)
                dr_put(dr_at(a, j, 0, 0, 0), a->dtype, 0, d != NULL ? d[h] : 0);
            for (int32_t i = 0; b->data != NULL && i < w; i++)
                dr_put(dr_at(b, j, i, 0, 0), b->dtype, 0, d != NULL ? d[row->heads + h * w + i] : 0);
        }
}

/* The tensors of the plan within. */
static dr_io row_io(const trip *x, const dr_io *normal)
{
    const dr_row *row = &x->own->row;
    const dr_problem *p = &x->plan->inner->problem;
    const int64_t T = row->tokens, H = row->key_heads, HV = row->heads, K = row->K, V = row->V;
    const int64_t N = x->own->n_states, w = dr_gate_width(p);
    const int32_t channels = dr_variant_find(p->variant)->gate_per_channel ? 1 : 0;
    const dr_tensor q = dr_tensor_make(NULL, DR_F32, 4, 1, T, H, K);
    const dr_tensor v = dr_tensor_make(NULL, DR_F32, 4, 1, T, HV, V);
    const dr_tensor g = dr_tensor_make(NULL, DR_F32, 3 + channels, 1, T, HV, w);
    const dr_tensor beta = dr_tensor_make(NULL, DR_F32, 3, 1, T, HV, 0);
    const dr_tensor state = dr_tensor_make(NULL, DR_F32, 4, N, HV, K, V);
    const dr_tensor a_log = dr_tensor_make(NULL, DR_F32, 1, HV, 0, 0, 0);
    const dr_tensor bias = dr_tensor_make(NULL, DR_F32, 1 + channels, HV, w, 0, 0);
    const bool gate = p->gate != DR_GATE_NONE, back = x->dir < 0;
    dr_io io = DR_IO_INIT;
    const struct { dr_tensor *to; const dr_tensor *form; float *data; bool present; } rows[] = {
        {&io.q, &q, x->inputs.field[0], true},
        {&io.k, &q, x->inputs.field[1], true},
        {&io.v, &v, x->inputs.field[2], true},
        {&io.g, &g, x->inputs.field[3], gate},
        {&io.beta, &beta, x->inputs.field[4], true},
        {&io.initial_state, &state, x->inputs.state, true},
        {&io.a_log, &a_log, x->params, normal->a_log.data != NULL},
        {&io.dt_bias, &bias, x->params + HV, normal->dt_bias.data != NULL},
        {&io.o, &v, x->to.field[0], !back},
        {&io.final_state, &state, x->to.state, !back},
        {&io.d_o, &v, x->from.field[0], back},
        {&io.d_final_state, &state, x->from.state, back},
        {&io.dq, &q, x->to.field[0], back},
        {&io.dk, &q, x->to.field[1], back},
        {&io.dv, &v, x->to.field[2], back},
        {&io.dg, &g, x->to.field[3], back && gate},
        {&io.dbeta, &beta, x->to.field[4], back},
        {&io.d_initial_state, &state, x->to.state, back},
        {&io.da_log, &a_log, x->dparams, normal->da_log.data != NULL},
        {&io.ddt_bias, &bias, x->dparams + HV, normal->ddt_bias.data != NULL},
    };
    for (size_t i = 0; i < DR_COUNT(rows); i++)
        if (rows[i].present) {
            *rows[i].to = *rows[i].form;
            rows[i].to->data = rows[i].data;
        }
    return io;
}

static dr_status compute(const trip *x, const dr_io *normal)
{
    const ulysses *own = x->own;
    load_params(x, normal);
    const dr_io io = row_io(x, normal);
    if (own->along != NULL)
        return x->dir > 0 ? dr_cp_forward(own->along, &io, &x->within)
                          : dr_cp_backward(own->along, &io, &x->within);
    return x->dir > 0 ? dr_forward(own->alone, &io, &x->within)
                      : dr_backward(own->alone, &io, &x->within);
}

static dr_status go(trip *x, const dr_io *n)
{
    const dr_spans inputs = {{n->q, n->k, n->v, n->g, n->beta}, n->initial_state};
    const dr_spans outputs = {{n->o}, n->final_state}, d_outputs = {{n->d_o}, n->d_final_state};
    const dr_spans d_inputs = {{n->dq, n->dk, n->dv, n->dg, n->dbeta}, n->d_initial_state};
    const dr_spans *in = x->dir > 0 ? &inputs : &d_outputs, *out = x->dir > 0 ? &outputs : &d_inputs;
    const dr_row *row = &x->own->row;
    int64_t floats;
    if (n->chunk_states.data != NULL)
        return dr_fail(DR_ERR_SUPPORT, "chunk_states: must be absent under ulysses, whose chunks are those of "
                       "a row of ranks");
    DR_TRY(bring_in(x, in));
    DR_TRY(compute(x, n));
    DR_TRY(bring_back(x));
    dr_tensor_zero_tail(&out->state, 0); /* pieces that end (start) no sequence are in no parcel */
    for (int32_t m = 0; m < row->U; m++)
        dr_parcel_span(row, x->out, m, out, parcel_of(x, RECEIVE_OUT, m, &floats), false);
    if (x->dir < 0)
        store_params(x, n);
    return DR_OK;
}

static dr_status run(const dr_cp_plan *plan, int dir, const dr_io *io, const dr_io *normal,
                     const dr_buffers *buffers)
{
    dr_arena saved = {.base = buffers->saved, .size = plan->saved};
    dr_arena scratch = {.base = buffers->scratch, .size = plan->scratch};
    trip x;
    (void)io; /* only the normalised form is packed */
    carve(&x, plan, dir, buffers->saved != NULL, &saved, &scratch);
    const dr_status status = dr_cp_settle(plan->comm, go(&x, normal), x.batch, BATCHES);
    dr_arena_done(&saved);
    dr_arena_done(&scratch);
    return status;
}

static const dr_cp_engine engine = {build, join, clear, describe, run};

const dr_cp_protocol dr_cp_ulysses = {
    .name = "ulysses", .about = "tokens exchanged for heads, alone or with another protocol on top",
    .width = DR_CP_MAY_WIDTH, .takes_rest = true, .engine = &engine};
