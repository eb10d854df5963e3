/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer.c - layer objects and layer plans: the parameter list from the kind's table, the rows
 * that count (params.h) from offsets or a mask, the plan of the delta rule, and the one
 * function that lays out the memory of every call. Nothing here runs; see layer_run.c.
 */
#include "layer/params.h"

#include <math.h>

/* ---- layers ------------------------------------------------------------------------ */

static const dr_layer_type *const types[] = {&dr_layer_gdn, &dr_layer_kda};

static const dr_layer_type *find_type(dr_layer_kind kind)
{
    for (size_t i = 0; i < DR_COUNT(types); i++)
        if (types[i]->kind == kind)
            return types[i];
    return NULL;
}

static dr_status complete_config(const dr_layer_type *type, dr_layer_config *c)
{
    if (c->hidden < 1)
        return dr_fail(DR_ERR_SHAPE, "hidden: must be 1 or more, got %d", c->hidden);
    if (c->value_heads == 0)
        c->value_heads = c->heads;
    if (c->value_dim == 0)
        c->value_dim = c->key_dim;
    if (c->conv_width == 0)
        c->conv_width = 4;
    if (c->conv_width < 1)
        return dr_fail(DR_ERR_SHAPE, "conv_width: must be 1 or more, got %d", c->conv_width);
    if (c->norm_eps == 0)
        c->norm_eps = type->norm_eps;
    if (!(c->norm_eps > 0) || !isfinite(c->norm_eps))
        return dr_fail(DR_ERR_ARG, "norm_eps: must be finite and above 0, got %g", c->norm_eps);
    return type->complete(c);
}

static dr_problem delta_problem(const dr_layer_type *type, const dr_layer_config *c)
{
    dr_problem p = DR_PROBLEM_INIT;
    p.variant = type->variant;
    p.heads = c->heads;
    p.value_heads = c->value_heads;
    p.key_dim = c->key_dim;
    p.value_dim = c->value_dim;
    p.gate = c->gate;
    p.lower_bound = c->lower_bound;
    p.beta = DR_BETA_LOGIT;
    p.beta_scale = c->beta_scale;
    p.l2norm = 1;
    p.keep = c->keep;
    return p;
}

/* The dimensions have passed the checks of the delta rule: D stays below 2^26. */
static void place_parts(dr_layer *layer)
{
    const dr_layer_config *c = &layer->config;
    int64_t HK = (int64_t)c->heads * c->key_dim, HV = c->value_heads, VD = HV * c->value_dim;
    int64_t decay = layer->type->variant == DR_KDA ? HV * c->key_dim : HV;
    const dr_layer_section place[DR_PARTS] = {
        [DR_PART_X] = {DR_PART_X, 0, c->hidden},
        [DR_PART_QKV] = {DR_PART_QKV, 0, 2 * HK + VD},
        [DR_PART_Q] = {DR_PART_QKV, 0, HK},
        [DR_PART_K] = {DR_PART_QKV, HK, HK},
        [DR_PART_V] = {DR_PART_QKV, 2 * HK, VD},
        [DR_PART_DECAY_IN] = {DR_PART_DECAY_IN, 0, c->gate_rank},
        [DR_PART_DECAY] = {DR_PART_DECAY, 0, decay},
        [DR_PART_BETA] = {DR_PART_BETA, 0, HV},
        [DR_PART_GATE_IN] = {DR_PART_GATE_IN, 0, c->gate_rank},
        [DR_PART_GATE] = {DR_PART_GATE, 0, VD},
        [DR_PART_NORMED] = {DR_PART_NORMED, 0, VD},
        [DR_PART_Y] = {DR_PART_Y, 0, c->hidden},
    };
    memcpy(layer->part, place, sizeof place);
}

static bool row_applies(const dr_layer_row *row, const dr_layer_config *c)
{
    const bool applies[] = {
        [DR_WHEN_ALWAYS] = true,
        [DR_WHEN_CONV_BIAS] = c->conv_bias != 0,
        [DR_WHEN_FULL] = c->gate_rank == 0,
        [DR_WHEN_PAIR] = c->gate_rank > 0,
    };
    return applies[row->when];
}

static dr_param_info describe_row(const dr_layer *layer, const dr_layer_row *row)
{
    const dr_layer_config *c = &layer->config;
    const int64_t to = layer->part[row->to].width, from = layer->part[row->from].width;
    const dr_param_info by_use[DR_USES] = {
        [DR_USE_LINEAR] = {NULL, 2, {to, from, 0, 0}, DR_INIT_LINEAR},
        [DR_USE_CONV] = {NULL, 3, {to, 1, c->conv_width, 0}, DR_INIT_LINEAR},
        [DR_USE_CONV_BIAS] = {NULL, 1, {to, 0, 0, 0}, DR_INIT_ZEROS},
        [DR_USE_A_LOG] = {NULL, 1, {c->value_heads, 0, 0, 0}, DR_INIT_A_LOG},
        [DR_USE_DT_BIAS] = {NULL, 1, {to, 0, 0, 0}, DR_INIT_ONES},
        [DR_USE_NORM] = {NULL, 1, {c->value_dim, 0, 0, 0}, DR_INIT_ONES},
    };
    dr_param_info info = by_use[row->use];
    info.name = row->name;
    return info;
}

static void list_params(dr_layer *layer)
{
    for (int32_t r = 0; r < layer->type->n_rows; r++) {
        const dr_layer_row *row = &layer->type->rows[r];
        if (!row_applies(row, &layer->config))
            continue;
        assert(layer->n_params < DR_LAYER_MAX_PARAMS);
        dr_layer_param_entry *entry = &layer->params[layer->n_params++];
        entry->row = row;
        entry->info = describe_row(layer, row);
        entry->count = 1;
        for (int32_t i = 0; i < entry->info.rank; i++)
            entry->count *= entry->info.shape[i];
    }
}

dr_status dr_layer_create(const dr_context *ctx, const dr_layer_config *config, dr_layer **out)
{
    if (out == NULL)
        return dr_fail(DR_ERR_ARG, "out: must not be NULL");
    *out = NULL;
    if (ctx == NULL || config == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", ctx == NULL ? "ctx" : "config");
    if (config->size != sizeof *config)
        return dr_fail(DR_ERR_ARG, "config.size: must be %zu (DR_LAYER_CONFIG_INIT), got %u",
                       sizeof *config, config->size);
    const dr_layer_type *type = find_type(config->kind);
    if (type == NULL)
        return dr_fail(DR_ERR_ARG, "kind: must be DR_LAYER_GDN (1) or DR_LAYER_KDA (2), got %d",
                       (int)config->kind);
    dr_layer_config complete = *config;
    DR_TRY(complete_config(type, &complete));
    dr_problem problem = delta_problem(type, &complete);
    DR_TRY(dr_supports(ctx, &problem));
    dr_layer *layer = dr_alloc(sizeof *layer);
    if (layer == NULL)
        return dr_fail(DR_ERR_MEMORY, "layer: no memory for %zu bytes", sizeof *layer);
    layer->ctx = ctx;
    layer->type = type;
    layer->config = complete;
    layer->problem = problem;
    place_parts(layer);
    list_params(layer);
    *out = layer;
    return DR_OK;
}

void dr_layer_destroy(dr_layer *layer) { dr_free(layer); }

int32_t dr_layer_param_count(const dr_layer *layer) { return layer->n_params; }

int32_t dr_layer_conv_channels(const dr_layer *layer)
{
    return (int32_t)layer->part[DR_PART_QKV].width;
}

dr_status dr_layer_param(const dr_layer *layer, int32_t index, dr_param_info *info)
{
    if (layer == NULL || info == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", layer == NULL ? "layer" : "info");
    if (index < 0 || index >= layer->n_params)
        return dr_fail(DR_ERR_ARG, "index: must be 0 to %d, got %d", layer->n_params - 1, index);
    *info = layer->params[index].info;
    return DR_OK;
}

int32_t dr_layer_find_use(const dr_layer *layer, dr_layer_use use)
{
    int32_t i = 0;
    while (layer->params[i].row->use != use)
        i++;
    return i;
}

/* ---- memory of a call -------------------------------------------------------------- */

static void take_parts(const dr_layer_plan *plan, dr_arena *arena, const dr_layer_part *parts,
                       size_t n, float **at)
{
    for (size_t i = 0; i < n; i++)
        at[parts[i]] = DR_TAKE(arena, float, plan->rows, plan->layer->part[parts[i]].width);
}

/*
 * Saved are what the projections and the delta rule made. The convolved q|k|v and the normed
 * rows are computed again in the backward pass, from the same inputs by the same calls: that
 * costs little beside the matrix products and saves D + HV*V floats a token. So a token keeps
 * D + 2*HV*V + HV floats, its decays (HV or HV*K) and its two inner rows of gate_rank, next to
 * what the delta rule keeps. Blocks whose lives do not overlap share memory; HV*V never exceeds D.
 */
void dr_layer_layout_blocks(const dr_layer_plan *plan, dr_layer_trip trip, dr_arena *saved,
                            dr_arena *scratch, dr_layer_blocks *out)
{
    static const dr_layer_part kept[] = {DR_PART_QKV, DR_PART_DECAY_IN, DR_PART_DECAY, DR_PART_BETA,
                                         DR_PART_GATE_IN, DR_PART_GATE};
    static const dr_layer_part grads[] = {DR_PART_DECAY_IN, DR_PART_DECAY, DR_PART_BETA,
                                          DR_PART_GATE_IN, DR_PART_GATE};
    const dr_layer_section *part = plan->layer->part;
    const int64_t M = plan->rows, D = part[DR_PART_QKV].width, VD = part[DR_PART_GATE].width;
    const int64_t hidden = part[DR_PART_X].width;
    const bool masked = plan->run_start != NULL;
    const dr_buffers no_buffers = DR_BUFFERS_INIT;
    memset(out, 0, sizeof *out);
    out->core = no_buffers;

    dr_arena *home = trip == DR_TRIP_FORWARD_ALONE ? scratch : saved;
    if (home == saved) {
        out->stamp = DR_TAKE(saved, dr_layer_stamp, 1, 1);
        out->core.saved_bytes = plan->core_info.saved_bytes;
        out->core.saved = DR_TAKE(saved, char, out->core.saved_bytes, 1);
    }
    take_parts(plan, home, kept, DR_COUNT(kept), out->value);
    out->o = DR_TAKE(home, float, M, VD);
    dr_layer_cp_layout(plan, trip, home, scratch, out);

    out->order = DR_TAKE(scratch, int32_t, plan->n_sequences, 1);
    out->core.scratch_bytes = trip == DR_TRIP_BACKWARD ? plan->core_info.backward_scratch
                                                       : plan->core_info.forward_scratch;
    out->core.scratch = DR_TAKE(scratch, char, out->core.scratch_bytes, 1);
    if (masked)
        out->value[DR_PART_X] = DR_TAKE(scratch, float, M, hidden);
    out->act = DR_TAKE(scratch, float, M, D);
    if (trip != DR_TRIP_BACKWARD) {
        out->value[DR_PART_NORMED] = out->act; /* q, k, v have been read by then */
        out->value[DR_PART_Y] = out->value[DR_PART_X];
        return;
    }
    if (masked)
        out->grad[DR_PART_Y] = DR_TAKE(scratch, float, M, hidden);
    out->grad[DR_PART_X] = out->grad[DR_PART_Y]; /* dy is read by the first step only */
    out->value[DR_PART_NORMED] = DR_TAKE(scratch, float, M, VD);
    out->d_o = out->value[DR_PART_NORMED];
    out->d_act = DR_TAKE(scratch, float, M, D);
    out->grad[DR_PART_NORMED] = out->d_act; /* ends where d_act begins */
    out->grad[DR_PART_QKV] = out->act;
    take_parts(plan, scratch, grads, DR_COUNT(grads), out->grad);
    for (int32_t i = 0; i < plan->layer->n_params; i++)
        if (plan->layer->params[i].row->use != DR_USE_LINEAR)
            out->d_param[i] = DR_TAKE(scratch, float, plan->layer->params[i].count, 1);
}

static dr_status measure(dr_layer_plan *plan)
{
    for (int trip = DR_TRIP_FORWARD; trip <= DR_TRIP_BACKWARD; trip++) {
        dr_arena saved = {0}, scratch = {0};
        dr_layer_blocks blocks;
        dr_layer_layout_blocks(plan, (dr_layer_trip)trip, &saved, &scratch, &blocks);
        if (saved.overflow || scratch.overflow)
            return dr_fail(DR_ERR_MEMORY,
                           "plan: the working memory of this layout exceeds 2^62 bytes");
        plan->saved = (size_t)dr_max((int64_t)plan->saved, (int64_t)saved.used);
        plan->scratch[trip] = scratch.used;
    }
    return DR_OK;
}

/* ---- plans ------------------------------------------------------------------------- */

/* Runs of real tokens, never across two batch rows: counts them, and writes them where
 * room is given. */
static int64_t cut_runs(const dr_layer_layout *layout, int64_t *offsets, int64_t *run_start)
{
    int64_t runs = 0, real = 0, T = layout->tokens;
    for (int64_t i = 0; i < layout->batch * T; i++) {
        if (layout->mask[i] == 0)
            continue;
        if (i % T == 0 || layout->mask[i - 1] == 0) {
            if (run_start != NULL) {
                offsets[runs] = real;
                run_start[runs] = i;
            }
            runs++;
        }
        real++;
    }
    if (offsets != NULL)
        offsets[runs] = real;
    return runs;
}

static dr_status check_layout(const dr_layer_layout *layout)
{
    if (layout->size != sizeof *layout)
        return dr_fail(DR_ERR_ARG, "layout.size: must be %zu (DR_LAYER_LAYOUT_INIT), got %u",
                       sizeof *layout, layout->size);
    if (layout->batch < 1 || layout->tokens < 0)
        return dr_fail(DR_ERR_SHAPE, "batch, tokens: must be at least 1 and 0, got %lld, %lld",
                       (long long)layout->batch, (long long)layout->tokens);
    int64_t rows;
    if (!dr_mul(layout->batch, layout->tokens, &rows) || rows > INT32_MAX)
        return dr_fail(DR_ERR_SHAPE, "batch x tokens: must be at most %d, got %lld x %lld",
                       INT32_MAX, (long long)layout->batch, (long long)layout->tokens);
    if (layout->mask != NULL && layout->offsets != NULL)
        return dr_fail(DR_ERR_ARG, "mask: must be NULL when offsets are given, which alone say "
                       "which tokens belong together");
    return dr_offsets_check("offsets", layout->offsets, layout->sequences, layout->batch,
                            layout->tokens);
}

static dr_status cut_rows(dr_layer_plan *plan, const dr_layer_layout *layout)
{
    plan->outer_batch = plan->batch = layout->batch;
    plan->outer_tokens = plan->tokens = layout->tokens;
    plan->n_sequences = layout->offsets != NULL ? layout->sequences : layout->batch;
    if (layout->mask != NULL) /* at least one sequence, if only an empty one */
        plan->n_sequences = dr_max(cut_runs(layout, NULL, NULL), 1);
    if (layout->mask != NULL || layout->offsets != NULL) {
        size_t bytes = (size_t)(plan->n_sequences + 1) * sizeof(int64_t);
        plan->offsets = dr_alloc(bytes);
        if (plan->offsets == NULL)
            return dr_fail(DR_ERR_MEMORY, "plan: no memory for %zu bytes of offsets", bytes);
        if (layout->offsets != NULL)
            memcpy(plan->offsets, layout->offsets, bytes);
        plan->batch = 1;
    }
    if (layout->mask != NULL) {
        plan->run_start = dr_alloc((size_t)plan->n_sequences * sizeof(int64_t));
        if (plan->run_start == NULL)
            return dr_fail(DR_ERR_MEMORY, "plan: no memory for %lld runs",
                           (long long)plan->n_sequences);
        cut_runs(layout, plan->offsets, plan->run_start);
    }
    if (plan->offsets != NULL)
        plan->tokens = plan->offsets[plan->n_sequences];
    plan->rows = plan->batch * plan->tokens;
    return DR_OK;
}

static uint64_t mix(uint64_t h, const void *data, size_t bytes)
{
    const unsigned char *c = data;
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ c[i]) * 0x100000001b3u;
    return h;
}

/* Digest of what a saved buffer depends on; field by field, since structs have holes. */
static uint64_t plan_digest(const dr_layer_plan *plan)
{
    const dr_layer_config *c = &plan->layer->config;
    const int64_t ints[] = {(int64_t)c->kind, c->hidden, c->heads, c->value_heads, c->key_dim,
                            c->value_dim, c->conv_width, c->conv_bias != 0, (int64_t)c->gate,
                            c->gate_rank, (int64_t)c->keep, plan->batch, plan->tokens,
                            plan->n_sequences, plan->core_info.chunk};
    const double reals[] = {c->lower_bound, c->beta_scale, c->norm_eps};
    uint64_t h = mix(0xcbf29ce484222325u, ints, sizeof ints);
    h = mix(h, reals, sizeof reals);
    if (plan->offsets != NULL)
        h = mix(h, plan->offsets, (size_t)(plan->n_sequences + 1) * sizeof *plan->offsets);
    return h;
}

dr_status dr_layer_plan_finish(dr_layer_plan *plan)
{
    plan->digest = plan_digest(plan);
    return measure(plan);
}

static dr_status fill_plan(dr_layer_plan *plan, const dr_layer_layout *layout)
{
    const dr_plan_info info = DR_PLAN_INFO_INIT;
    DR_TRY(cut_rows(plan, layout));
    dr_problem problem = plan->layer->problem;
    problem.batch = plan->batch;
    problem.tokens = plan->tokens;
    problem.offsets = plan->offsets;
    problem.sequences = plan->offsets != NULL ? plan->n_sequences : 0;
    DR_TRY(dr_plan_create(plan->layer->ctx, &problem, &plan->core));
    plan->core_info = info;
    DR_TRY(dr_plan_describe(plan->core, &plan->core_info));
    return dr_layer_plan_finish(plan);
}

dr_status dr_layer_plan_create(const dr_layer *layer, const dr_layer_layout *layout,
                               dr_layer_plan **out)
{
    if (out == NULL)
        return dr_fail(DR_ERR_ARG, "out: must not be NULL");
    *out = NULL;
    if (layer == NULL || layout == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", layer == NULL ? "layer" : "layout");
    DR_TRY(check_layout(layout));
    dr_layer_plan *plan = dr_alloc(sizeof *plan);
    if (plan == NULL)
        return dr_fail(DR_ERR_MEMORY, "plan: no memory for %zu bytes", sizeof *plan);
    plan->layer = layer;
    dr_status status = fill_plan(plan, layout);
    if (status != DR_OK) {
        dr_layer_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return DR_OK;
}

void dr_layer_plan_destroy(dr_layer_plan *plan)
{
    if (plan == NULL)
        return;
    dr_layer_cp_clear(plan);
    dr_plan_destroy(plan->core);
    dr_free(plan->offsets);
    dr_free(plan->run_start);
    dr_free(plan);
}

static size_t largest_scratch(const dr_layer_plan *plan)
{
    size_t most = 0;
    for (size_t i = 0; i < DR_COUNT(plan->scratch); i++)
        most = plan->scratch[i] > most ? plan->scratch[i] : most;
    return most;
}

dr_status dr_layer_plan_sizes(const dr_layer_plan *plan, size_t *saved, size_t *scratch)
{
    if (plan == NULL || saved == NULL || scratch == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL",
                       plan == NULL ? "plan" : saved == NULL ? "saved" : "scratch");
    *saved = plan->saved;
    *scratch = largest_scratch(plan);
    return DR_OK;
}

dr_status dr_layer_buffers_create(const dr_layer_plan *plan, dr_buffers *out)
{
    if (plan == NULL || out == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", plan == NULL ? "plan" : "out");
    return dr_buffers_alloc(plan->saved, largest_scratch(plan), out);
}
