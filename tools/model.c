/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.c - see model.h. Every matrix product goes through dr_matmul, every token-mixing
 * layer through dr_layer_*, the rest is lm_ops.c.
 */
#include "model.h"

#include "lm_ops.h"

#include <deltarule/comm.h>
#include <deltarule/cp.h>

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NORM_EPS 1e-6f

static const struct {
    const char *word;
    dr_layer_kind kind;
} kinds[] = {{"gdn", DR_LAYER_GDN}, {"kda", DR_LAYER_KDA}};

dr_status dr_lm_config_arch(const char *arch, dr_lm_config *config)
{
    dr_layer_kind pattern[DR_LM_MAX_LAYERS];
    int32_t n = 0;
    for (const char *at = arch;; at++) {
        size_t length = strcspn(at, ","), k = 0;
        while (k < LM_COUNT(kinds) &&
               (strlen(kinds[k].word) != length || strncmp(kinds[k].word, at, length) != 0))
            k++;
        if (k == LM_COUNT(kinds))
            return dr_lm_fail(DR_ERR_ARG, "arch: must be gdn, kda, or several of them separated by "
                              "commas, got \"%s\"", arch);
        if (n == config->layers)
            return dr_lm_fail(DR_ERR_ARG, "arch: the pattern \"%s\" is longer than the %d layers",
                              arch, config->layers);
        pattern[n++] = kinds[k].kind;
        at += length;
        if (*at == '\0')
            break;
    }
    for (int32_t l = 0; l < config->layers; l++)
        config->kind[l] = pattern[l % n];
    return DR_OK;
}

void dr_lm_config_arch_text(const dr_lm_config *config, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int32_t l = 0; l < config->layers && used < size; l++)
        for (size_t k = 0; k < LM_COUNT(kinds); k++)
            if (kinds[k].kind == config->kind[l])
                used += (size_t)snprintf(text + used, size - used, "%s%s", l ? "," : "",
                                         kinds[k].word);
}

/* ------------------------------------------------------------------------ */
/* Parameters                                                               */
/* ------------------------------------------------------------------------ */

/* Appends a parameter; 64-byte alignment of each keeps vectors whole. */
static dr_status add_param(dr_lm_model *m, int32_t rank, const int64_t *shape, dr_init init,
                           double scale, int32_t *index, const char *format, ...)
    __attribute__((format(printf, 7, 8)));

static dr_status add_param(dr_lm_model *m, int32_t rank, const int64_t *shape, dr_init init,
                           double scale, int32_t *index, const char *format, ...)
{
    dr_lm_param *moved = realloc(m->params, (size_t)(m->n_params + 1) * sizeof *moved);
    if (moved == NULL)
        return dr_lm_fail(DR_ERR_MEMORY, "model: no memory for parameter %d", m->n_params);
    m->params = moved;
    dr_lm_param *p = &m->params[m->n_params];
    *p = (dr_lm_param){.rank = rank, .at = m->size, .count = 1, .init = init, .scale = scale};
    va_list args;
    va_start(args, format);
    vsnprintf(p->name, sizeof p->name, format, args);
    va_end(args);
    for (int32_t i = 0; i < rank; i++) {
        p->shape[i] = shape[i];
        p->count *= shape[i];
    }
    p->decays = rank == 2 && init == DR_INIT_LINEAR;
    m->size += (p->count + 15) / 16 * 16;
    m->n_weights += p->count;
    *index = m->n_params++;
    return DR_OK;
}

static dr_status add_layer(dr_lm_model *m, int32_t l)
{
    const dr_layer *layer = m->layers[m->config.kind[l]];
    int32_t n = dr_layer_param_count(layer), index;
    m->blocks[l].layer = m->n_params;
    for (int32_t i = 0; i < n; i++) {
        dr_param_info info;
        LM_LIBRARY(dr_layer_param(layer, i, &info));
        LM_TRY(add_param(m, info.rank, info.shape, info.init, 1, &index,
                         "model.layers.%d.linear_attn.%s", l, info.name));
    }
    return DR_OK;
}

static dr_status add_params(dr_lm_model *m)
{
    const int64_t D = m->config.hidden, F = m->config.inner, width[] = {D};
    const int64_t embed[] = {DR_LM_SYMBOLS, D}, head[] = {DR_LM_BYTES, D};
    const int64_t gate_up[] = {2 * F, D}, down[] = {D, F};
    LM_TRY(add_param(m, 2, embed, DR_INIT_ZEROS, 1, &m->embed, "model.embed_tokens.weight"));
    for (int32_t l = 0; l < m->config.layers; l++) {
        dr_lm_block *b = &m->blocks[l];
        LM_TRY(add_param(m, 1, width, DR_INIT_ONES, 0, &b->norm, "model.layers.%d.input_layernorm.weight",
                         l));
        LM_TRY(add_layer(m, l));
        LM_TRY(add_param(m, 1, width, DR_INIT_ONES, 0, &b->mlp_norm,
                         "model.layers.%d.post_attention_layernorm.weight", l));
        LM_TRY(add_param(m, 2, gate_up, DR_INIT_LINEAR, 1, &b->gate_up,
                         "model.layers.%d.mlp.gate_up_proj.weight", l));
        LM_TRY(add_param(m, 2, down, DR_INIT_LINEAR, 1, &b->down, "model.layers.%d.mlp.down_proj.weight",
                         l));
    }
    LM_TRY(add_param(m, 1, width, DR_INIT_ONES, 0, &m->norm, "model.norm.weight"));
    return add_param(m, 2, head, DR_INIT_ZEROS, 0, &m->head, "lm_head.weight");
}

static dr_status create_layers(dr_lm_model *m)
{
    const dr_lm_config *c = &m->config;
    for (int32_t l = 0; l < c->layers; l++) {
        dr_layer_config layer = DR_LAYER_CONFIG_INIT;
        layer.kind = c->kind[l];
        layer.hidden = c->hidden;
        layer.heads = c->heads;
        layer.key_dim = c->head_dim;
        if (layer.kind == DR_LAYER_KDA) {
            layer.gate = DR_GATE_LOWER_BOUND;
            layer.lower_bound = -5;
            layer.gate_rank = c->head_dim;
        }
        if (m->layers[layer.kind] == NULL)
            LM_LIBRARY(dr_layer_create(m->ctx, &layer, &m->layers[layer.kind]));
    }
    return DR_OK;
}

static dr_status create_model(dr_lm_model *m)
{
    LM_TRY(create_layers(m));
    LM_TRY(add_params(m));
    m->weights = dr_lm_alloc(m->size, sizeof *m->weights, "model");
    m->views = dr_lm_alloc(m->n_params, sizeof *m->views, "model");
    if (m->weights == NULL || m->views == NULL)
        return DR_ERR_MEMORY;
    dr_lm_model_views(m, m->weights, m->views);
    return DR_OK;
}

dr_status dr_lm_model_create(const dr_context *ctx, const dr_lm_config *config, dr_lm_model *out)
{
    *out = (dr_lm_model){.ctx = ctx, .threads = dr_context_threads(ctx), .config = *config};
    dr_status status = create_model(out);
    if (status != DR_OK)
        dr_lm_model_free(out);
    return status;
}

void dr_lm_model_free(dr_lm_model *model)
{
    for (size_t k = 0; k < LM_COUNT(model->layers); k++)
        dr_layer_destroy(model->layers[k]);
    free(model->params);
    free(model->weights);
    free(model->views);
    *model = (dr_lm_model){0};
}

void dr_lm_model_views(const dr_lm_model *m, float *block, dr_tensor *views)
{
    for (int32_t i = 0; i < m->n_params; i++) {
        const dr_lm_param *p = &m->params[i];
        views[i] = dr_tensor_make(block + p->at, DR_F32, p->rank, p->shape[0], p->shape[1],
                                  p->shape[2], p->shape[3]);
    }
}

void dr_lm_model_init(dr_lm_model *m, uint64_t seed)
{
    for (int32_t i = 0; i < m->n_params; i++) {
        const dr_lm_param *p = &m->params[i];
        dr_lm_random r = {dr_lm_hash_text(seed, p->name)};
        float *w = m->weights + p->at;
        double range = p->scale / sqrt((double)(p->count / p->shape[0]));
        for (int64_t k = 0; k < p->count; k++) {
            switch (p->init) {
            case DR_INIT_LINEAR: w[k] = (float)dr_lm_uniform(&r, -range, range); break;
            case DR_INIT_ONES: w[k] = 1; break;
            case DR_INIT_ZEROS: w[k] = (float)(p->scale * dr_lm_normal(&r)); break;
            case DR_INIT_A_LOG: w[k] = (float)log(dr_lm_uniform(&r, 0.01, 16)); break;
            }
        }
    }
}

/* ------------------------------------------------------------------------ */
/* Memory of a pass                                                         */
/* ------------------------------------------------------------------------ */

dr_status dr_lm_states_create(const dr_lm_model *m, dr_lm_states *out)
{
    const dr_lm_config *c = &m->config;
    int64_t HV = c->heads, K = c->head_dim, taps = 3, at = 0, size = 0;
    dr_lm_states s = {0};
    for (int32_t l = 0; l < c->layers; l++)
        size += dr_layer_conv_channels(m->layers[c->kind[l]]) * taps + HV * K * K;
    s.memory = dr_lm_alloc(size, sizeof *s.memory, "states");
    if (s.memory == NULL)
        return DR_ERR_MEMORY;
    for (int32_t l = 0; l < c->layers; l++) {
        int64_t channels = dr_layer_conv_channels(m->layers[c->kind[l]]);
        s.conv[l] = dr_tensor_make(s.memory + at, DR_F32, 3, 1, channels, taps, 0);
        at += channels * taps;
        s.state[l] = dr_tensor_make(s.memory + at, DR_F32, 4, 1, HV, K, K);
        at += HV * K * K;
    }
    *out = s;
    return DR_OK;
}

void dr_lm_states_free(dr_lm_states *states)
{
    free(states->memory);
    states->memory = NULL;
}

/* Hands out parts of run->memory; with memory NULL it only counts. */
typedef struct carver {
    float *base;
    int64_t used;
} carver;

static float *carve(carver *c, int64_t rows, int64_t width)
{
    float *part = c->base != NULL ? c->base + c->used : NULL;
    c->used += (rows * width + 15) / 16 * 16;
    return part;
}

static void carve_norm(carver *c, int64_t T, int64_t D, float **x, float **rstd, float **normed)
{
    *x = carve(c, T, D);
    *rstd = carve(c, T, 1);
    *normed = carve(c, T, D);
}

/* Without a backward pass to come, all blocks share the memory of one. */
static int64_t carve_run(dr_lm_run *r, float *base)
{
    const int64_t T = r->room, D = r->model->config.hidden, F = r->model->config.inner;
    const int32_t L = r->model->config.layers;
    carver c = {base, 0};
    for (int32_t l = 0; l <= L; l++) {
        dr_lm_values *v = &r->values[l];
        if (l > 0 && !r->training) {
            void *saved = v->saved;
            *v = r->values[0];
            v->saved = saved;
            continue;
        }
        carve_norm(&c, T, D, &v->x, &v->rstd, &v->normed);
        if (l == L)
            break;
        carve_norm(&c, T, D, &v->mlp_x, &v->mlp_rstd, &v->mlp_normed);
        v->gate_up = carve(&c, T, 2 * F);
        v->inner = carve(&c, T, F);
    }
    r->y = carve(&c, T, D);
    r->logits = carve(&c, T, DR_LM_BYTES);
    if (r->training) {
        r->dx = carve(&c, T, D);
        r->dnormed = carve(&c, T, D);
        r->partial = carve(&c, DR_LM_BLOCKS, D);
    }
    return c.used;
}

dr_status dr_lm_run_create(const dr_lm_model *model, int64_t room, bool training, dr_lm_run *out)
{
    dr_lm_run r = {.model = model, .room = room, .training = training, .sequences = -1};
    r.memory = dr_lm_alloc(carve_run(&r, NULL), sizeof *r.memory, "activations");
    r.rows = dr_lm_alloc(room, sizeof *r.rows, "activations");
    r.order = dr_lm_alloc(room + DR_LM_SYMBOLS + 1, sizeof *r.order, "activations");
    r.offsets = dr_lm_alloc(room + 1, sizeof *r.offsets, "activations");
    r.gradient_views = dr_lm_alloc(model->n_params, sizeof *r.gradient_views, "activations");
    if (r.memory == NULL || r.rows == NULL || r.order == NULL || r.offsets == NULL ||
        r.gradient_views == NULL) {
        dr_lm_run_free(&r);
        return DR_ERR_MEMORY;
    }
    carve_run(&r, r.memory);
    *out = r;
    return DR_OK;
}

static void free_plans(dr_lm_run *r)
{
    for (size_t k = 0; k < LM_COUNT(r->plans); k++) {
        dr_layer_plan_destroy(r->plans[k]);
        r->plans[k] = NULL;
    }
    r->sequences = -1;
}

void dr_lm_run_free(dr_lm_run *run)
{
    free_plans(run);
    for (size_t l = 0; l < LM_COUNT(run->values); l++)
        free(run->values[l].saved);
    free(run->memory);
    free(run->rows);
    free(run->order);
    free(run->offsets);
    free(run->gradient_views);
    free(run->scratch);
    *run = (dr_lm_run){0};
}

/* At least so many bytes, with some room for the batches to come. */
static dr_status enlarge(void **memory, size_t *bytes, size_t wanted)
{
    if (wanted <= *bytes)
        return DR_OK;
    free(*memory);
    *memory = dr_lm_alloc((int64_t)(wanted + wanted / 8), 1, "layers");
    *bytes = *memory != NULL ? wanted + wanted / 8 : 0;
    return *memory != NULL ? DR_OK : DR_ERR_MEMORY;
}

static bool same_arrangement(const dr_lm_run *r, const dr_lm_batch *b)
{
    return r->sequences == b->sequences &&
           memcmp(r->offsets, b->offsets, (size_t)(b->sequences + 1) * sizeof *b->offsets) == 0;
}

dr_status dr_lm_run_share(dr_lm_run *run, struct dr_comm *comm, const char *protocol, int64_t tokens)
{
    free(run->offsets);
    run->offsets = dr_lm_alloc(tokens + 1, sizeof *run->offsets, "activations");
    run->comm = comm;
    run->protocol = protocol;
    return run->offsets != NULL ? DR_OK : DR_ERR_MEMORY;
}

static dr_status plan_layer(const dr_lm_run *r, const dr_layer *layer, const dr_layer_layout *packing,
                            dr_layer_plan **out)
{
    dr_partition partition = DR_PARTITION_INIT;
    if (r->comm == NULL) {
        LM_LIBRARY(dr_layer_plan_create(layer, packing, out));
        return DR_OK;
    }
    dr_fragment *shares = dr_lm_alloc(r->comm->size, sizeof *shares, "ranks");
    if (shares == NULL)
        return DR_ERR_MEMORY;
    partition.ranks = r->comm->size;
    partition.count = r->comm->size;
    partition.fragments = shares;
    dr_status status = dr_partition_contiguous(packing->tokens, r->comm->size, shares);
    if (status == DR_OK)
        status = dr_layer_cp_plan_create(layer, r->comm, packing, &partition, r->protocol, out);
    free(shares);
    return status != DR_OK ? dr_lm_fail(status, "%s", dr_last_error()) : DR_OK;
}

/* Plans for this batch, and buffers large enough for them. */
static dr_status arrange(dr_lm_run *r, const dr_lm_batch *part)
{
    const dr_lm_batch *b = r->comm != NULL ? r->whole : part;
    const dr_lm_model *m = r->model;
    size_t most_saved = 0, most_scratch = 0;
    if (same_arrangement(r, b))
        return DR_OK;
    free_plans(r);
    dr_layer_layout packing = DR_LAYER_LAYOUT_INIT;
    packing.tokens = b->tokens;
    packing.offsets = b->offsets;
    packing.sequences = b->sequences;
    for (size_t k = 0; k < LM_COUNT(r->plans); k++) {
        size_t saved, scratch;
        if (m->layers[k] == NULL)
            continue;
        LM_TRY(plan_layer(r, m->layers[k], &packing, &r->plans[k]));
        LM_LIBRARY(dr_layer_plan_sizes(r->plans[k], &saved, &scratch));
        most_saved = saved > most_saved ? saved : most_saved;
        most_scratch = scratch > most_scratch ? scratch : most_scratch;
    }
    LM_TRY(enlarge(&r->scratch, &r->scratch_bytes, most_scratch));
    size_t bytes = r->saved_bytes;
    for (int32_t l = 0; r->training && l < m->config.layers; l++) {
        bytes = r->saved_bytes;
        LM_TRY(enlarge(&r->values[l].saved, &bytes, most_saved));
    }
    r->saved_bytes = bytes;
    r->sequences = b->sequences;
    memcpy(r->offsets, b->offsets, (size_t)(b->sequences + 1) * sizeof *b->offsets);
    return DR_OK;
}

/* ------------------------------------------------------------------------ */
/* Passes                                                                   */
/* ------------------------------------------------------------------------ */

static dr_tensor matrix(const float *data, int64_t rows, int64_t columns)
{
    return dr_tensor_make((float *)data, DR_F32, 2, rows, columns, 0, 0);
}

static dr_tensor turned(dr_tensor t)
{
    dr_tensor x = t;
    x.shape[0] = t.shape[1], x.shape[1] = t.shape[0];
    x.stride[0] = t.stride[1], x.stride[1] = t.stride[0];
    return x;
}

static dr_status multiply(const dr_lm_model *m, dr_tensor a, dr_tensor b, dr_tensor out)
{
    dr_matmul_args args = DR_MATMUL_ARGS_INIT;
    args.a = a;
    args.b = b;
    args.out = out;
    LM_LIBRARY(dr_matmul(m->ctx, &args));
    return DR_OK;
}

/* y [T,out] = x [T,in] w^T, w [out,in] */
static dr_status linear(const dr_lm_model *m, int64_t T, int32_t param, const float *x, float *y)
{
    const dr_tensor w = m->views[param];
    return multiply(m, matrix(x, T, w.shape[1]), turned(w), matrix(y, T, w.shape[0]));
}

/* dw = dy^T x, then dx = dy w; dx may be x. */
static dr_status linear_backward(dr_lm_run *r, int64_t T, int32_t param, const float *x,
                                 const float *dy, float *dx)
{
    const dr_lm_model *m = r->model;
    const dr_tensor w = m->views[param], g = matrix(dy, T, w.shape[0]);
    LM_TRY(multiply(m, turned(g), matrix(x, T, w.shape[1]), r->gradient_views[param]));
    return multiply(m, g, w, matrix(dx, T, w.shape[1]));
}

static dr_layer_io layer_io(const dr_lm_run *r, int32_t l, int64_t T)
{
    const int64_t D = r->model->config.hidden;
    dr_layer_io io = DR_LAYER_IO_INIT;
    io.params = r->model->views + r->model->blocks[l].layer;
    io.x = dr_tensor_make(r->values[l].normed, DR_F32, 3, 1, T, D, 0);
    return io;
}

static dr_buffers layer_buffers(const dr_lm_run *r, int32_t l)
{
    dr_buffers b = DR_BUFFERS_INIT;
    b.saved = r->values[l].saved;
    b.saved_bytes = r->training ? r->saved_bytes : 0;
    b.scratch = r->scratch;
    b.scratch_bytes = r->scratch_bytes;
    return b;
}

/* y = the layer's output. A few tokens are faster one by one. */
static dr_status layer_forward(dr_lm_run *r, int32_t l, int64_t T, dr_lm_states *states)
{
    enum { FEW = 4 };
    const dr_lm_model *m = r->model;
    const dr_layer_plan *plan = r->plans[m->config.kind[l]];
    const dr_buffers buffers = layer_buffers(r, l);
    dr_layer_io io = layer_io(r, l, T);
    io.y = dr_tensor_make(r->y, DR_F32, 3, 1, T, m->config.hidden, 0);
    if (states != NULL) {
        io.conv_in = io.conv_out = states->conv[l];
        io.state_in = io.state_out = states->state[l];
    }
    if (states != NULL && T <= FEW)
        LM_LIBRARY(dr_layer_step(plan, &io, &buffers));
    else
        LM_LIBRARY(dr_layer_forward(plan, &io, &buffers));
    return DR_OK;
}

dr_status dr_lm_run_forward(dr_lm_run *r, const dr_lm_batch *b, dr_lm_states *states)
{
    const dr_lm_model *m = r->model;
    const int64_t T = b->tokens, D = m->config.hidden, F = m->config.inner;
    const int threads = m->threads;
    dr_lm_values *v = r->values;
    LM_TRY(arrange(r, b));
    dr_lm_embed(threads, T, D, b->input, m->views[m->embed].data, v->x);
    for (int32_t l = 0; l < m->config.layers; l++, v++) {
        const dr_lm_block *p = &m->blocks[l];
        /* The sum that the norm forms first belongs to the step before it. */
        dr_lm_norm(threads, T, D, NORM_EPS, l > 0 ? v[-1].mlp_x : v->x, l > 0 ? r->y : NULL,
                   m->views[p->norm].data, v->x, v->rstd, v->normed);
        LM_TRY(layer_forward(r, l, T, states));
        dr_lm_norm(threads, T, D, NORM_EPS, v->x, r->y, m->views[p->mlp_norm].data, v->mlp_x,
                   v->mlp_rstd, v->mlp_normed);
        LM_TRY(linear(m, T, p->gate_up, v->mlp_normed, v->gate_up));
        dr_lm_swiglu(threads, T, F, v->gate_up, v->inner);
        LM_TRY(linear(m, T, p->down, v->inner, r->y));
    }
    dr_lm_norm(threads, T, D, NORM_EPS, v[-1].mlp_x, r->y, m->views[m->norm].data, v->x, v->rstd,
               v->normed);
    return linear(m, T, m->head, v->normed, r->logits);
}

double dr_lm_run_loss(dr_lm_run *r, const dr_lm_batch *b)
{
    const int64_t whole = r->comm != NULL ? r->whole->tokens : b->tokens;
    return dr_lm_cross_entropy(r->model->threads, b->tokens, whole, DR_LM_BYTES, r->logits, b->target,
                               r->training, r->rows);
}

/* dx += the gradient that comes through a norm. */
static void norm_backward(dr_lm_run *r, int64_t T, int32_t param, const float *x, const float *rstd)
{
    const dr_lm_model *m = r->model;
    dr_lm_norm_backward(m->threads, T, m->config.hidden, x, m->views[param].data, rstd, r->dnormed,
                        r->dx, r->gradient_views[param].data, r->partial);
}

static dr_status layer_backward(dr_lm_run *r, int32_t l, int64_t T)
{
    const dr_lm_model *m = r->model;
    const dr_buffers buffers = layer_buffers(r, l);
    dr_layer_io io = layer_io(r, l, T);
    io.dy = dr_tensor_make(r->dx, DR_F32, 3, 1, T, m->config.hidden, 0);
    io.dx = dr_tensor_make(r->dnormed, DR_F32, 3, 1, T, m->config.hidden, 0);
    io.grads = r->gradient_views + m->blocks[l].layer;
    LM_LIBRARY(dr_layer_backward(r->plans[m->config.kind[l]], &io, &buffers));
    return DR_OK;
}

dr_status dr_lm_run_backward(dr_lm_run *r, const dr_lm_batch *b, float *gradients)
{
    const dr_lm_model *m = r->model;
    const int64_t T = b->tokens, D = m->config.hidden, F = m->config.inner;
    const dr_lm_values *v = r->values + m->config.layers;
    dr_lm_model_views(m, gradients, r->gradient_views);
    LM_TRY(linear_backward(r, T, m->head, v->normed, r->logits, r->dnormed));
    memset(r->dx, 0, (size_t)(T * D) * sizeof *r->dx);
    norm_backward(r, T, m->norm, v->x, v->rstd);
    for (int32_t l = m->config.layers - 1; l >= 0; l--) {
        const dr_lm_block *p = &m->blocks[l];
        v--;
        /* The values inside the SwiGLU end as their own gradients. */
        LM_TRY(linear_backward(r, T, p->down, v->inner, r->dx, v->inner));
        dr_lm_swiglu_backward(m->threads, T, F, v->gate_up, v->inner, v->gate_up);
        LM_TRY(linear_backward(r, T, p->gate_up, v->mlp_normed, v->gate_up, r->dnormed));
        norm_backward(r, T, p->mlp_norm, v->mlp_x, v->mlp_rstd);
        LM_TRY(layer_backward(r, l, T));
        norm_backward(r, T, p->norm, v->x, v->rstd);
    }
    dr_lm_embed_backward(m->threads, T, D, DR_LM_SYMBOLS, b->input, r->dx,
                         r->gradient_views[m->embed].data, r->order);
    return DR_OK;
}
