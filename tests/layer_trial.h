/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer_trial.h - a layer with drawn parameters, one arrangement of tokens on it, and all that
 * goes in and comes out. A run uses buffers of exactly the promised sizes, fenced and full of
 * NaN, and outputs full of NaN, so what is not written or read too early shows.
 */
#ifndef DR_LAYER_TRIAL_H
#define DR_LAYER_TRIAL_H

#include "test.h"

#include <deltarule/layer.h>

#define MAX_PARAMS 24

/* Memory that lives until the end of the test. */
static void *kept[4096];
static size_t n_kept;

static inline float *floats(int64_t n, float fill)
{
    float *f = malloc(sizeof *f * (size_t)(n + 1));
    assert_non_null(f);
    assert_true(n_kept < DR_COUNT(kept));
    kept[n_kept++] = f;
    for (int64_t i = 0; i < n; i++)
        f[i] = fill;
    return f;
}

static inline float *drawn(rng *r, int64_t n, double size)
{
    float *f = floats(n, 0);
    for (int64_t i = 0; i < n; i++)
        f[i] = (float)(size * rng_normal(r));
    return f;
}

static inline int forget(void **state)
{
    (void)state;
    while (n_kept > 0)
        free(kept[--n_kept]);
    return 0;
}

/* ---- a layer with parameters ------------------------------------------------------------- */

typedef struct block {
    const dr_context *ctx;
    dr_layer_config c;
    dr_layer *layer;
    int32_t n;
    dr_tensor params[MAX_PARAMS];
    int64_t count[MAX_PARAMS];
} block;

static inline dr_layer_config config_of(dr_layer_kind kind)
{
    dr_layer_config c = DR_LAYER_CONFIG_INIT;
    c.kind = kind;
    c.hidden = 10;
    c.heads = 2;
    c.value_heads = 4;
    c.key_dim = 5;
    c.value_dim = 3;
    c.gate = kind == DR_LAYER_KDA ? DR_GATE_LOWER_BOUND : DR_GATE_SOFTPLUS;
    c.lower_bound = kind == DR_LAYER_KDA ? -5 : 0;
    c.gate_rank = kind == DR_LAYER_KDA ? 3 : 0;
    c.conv_bias = 1;
    return c;
}

/* Parameters are drawn around values that keep decays moderate and norms away from zero. */
static inline block block_make(const dr_context *ctx, const dr_layer_config *c, rng *r)
{
    block b = {.ctx = ctx, .c = *c};
    MUST(dr_layer_create(ctx, c, &b.layer));
    b.n = dr_layer_param_count(b.layer);
    assert_in_range(b.n, 1, MAX_PARAMS);
    for (int32_t i = 0; i < b.n; i++) {
        dr_param_info info;
        MUST(dr_layer_param(b.layer, i, &info));
        b.count[i] = 1;
        for (int32_t a = 0; a < info.rank; a++)
            b.count[i] *= info.shape[a];
        float *data = drawn(r, b.count[i], 0.5);
        for (int64_t j = 0; j < b.count[i] && info.init != DR_INIT_LINEAR; j++)
            data[j] += info.init == DR_INIT_ONES ? 0.5f : -0.5f;
        b.params[i] = dr_tensor_make(data, DR_F32, info.rank, info.shape[0], info.shape[1],
                                     info.shape[2], info.shape[3]);
    }
    return b;
}

/* ---- one arrangement of tokens ------------------------------------------------------------ */

#define SLOT_LIST(X)            \
    X(x, 'x', INPUT)            \
    X(dy, 'x', INPUT)           \
    X(conv_in, 'c', INPUT)      \
    X(state_in, 's', INPUT)     \
    X(d_conv_out, 'c', INPUT)   \
    X(d_state_out, 's', INPUT)  \
    X(y, 'x', OUTPUT)           \
    X(conv_out, 'c', OUTPUT)    \
    X(state_out, 's', OUTPUT)   \
    X(dx, 'x', GRADIENT)        \
    X(d_conv_in, 'c', GRADIENT) \
    X(d_state_in, 's', GRADIENT)

typedef enum slot_role { ROLE_INPUT, ROLE_OUTPUT, ROLE_GRADIENT } slot_role;
enum {
#define SLOT_ENUM(name, kind, role) S_##name,
    SLOT_LIST(SLOT_ENUM)
#undef SLOT_ENUM
        SLOTS
};

static const struct {
    const char *name;
    char kind; /* x: rows, c: convolution states, s: recurrent states */
    slot_role role;
    size_t at; /* in dr_layer_io */
} slots[SLOTS] = {
#define SLOT_ROW(name, kind, role) {#name, kind, ROLE_##role, offsetof(dr_layer_io, name)},
    SLOT_LIST(SLOT_ROW)
#undef SLOT_ROW
};

typedef struct trial {
    const block *b;
    dr_layer_layout layout;
    bool states;
    int64_t N;
    int64_t n[SLOTS];
    float *v[SLOTS];
    float *grad[MAX_PARAMS];
} trial;

static inline dr_tensor *io_slot(dr_layer_io *io, int i)
{
    return (dr_tensor *)((char *)io + slots[i].at);
}

static inline dr_tensor slot_view(const trial *t, int i, float *data)
{
    const dr_layer_config *c = &t->b->c;
    const int32_t HV = c->value_heads ? c->value_heads : c->heads;
    const int32_t W = c->conv_width ? c->conv_width : 4;
    if (slots[i].kind == 'x')
        return dr_tensor_make(data, DR_F32, 3, t->layout.batch, t->layout.tokens, c->hidden, 0);
    if (slots[i].kind == 'c')
        return dr_tensor_make(data, DR_F32, 3, t->N, dr_layer_conv_channels(t->b->layer), W - 1, 0);
    return dr_tensor_make(data, DR_F32, 4, t->N, HV, c->key_dim,
                          c->value_dim ? c->value_dim : c->key_dim);
}

/* No data yet. */
static inline trial trial_plain(const block *b, const dr_layer_layout *spread, bool states)
{
    trial t = {.b = b, .layout = *spread, .states = states};
    t.N = spread->offsets ? spread->sequences : spread->batch;
    for (int i = 0; i < SLOTS; i++) {
        dr_tensor view = slot_view(&t, i, NULL);
        t.n[i] = slots[i].kind == 'x' || states ? view_count(&view) : 0;
    }
    return t;
}

static inline trial trial_make(const block *b, const dr_layer_layout *spread, bool states, rng *r)
{
    trial t = trial_plain(b, spread, states);
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].role == ROLE_INPUT && (slots[i].kind == 'x' || states))
            t.v[i] = drawn(r, t.n[i], 1);
    return t;
}

static inline dr_layer_layout dense(int64_t batch, int64_t tokens)
{
    dr_layer_layout l = DR_LAYER_LAYOUT_INIT;
    l.batch = batch;
    l.tokens = tokens;
    return l;
}

static inline dr_layer_layout packed(int64_t tokens, const int64_t *offsets, int64_t sequences)
{
    dr_layer_layout l = dense(1, tokens);
    l.offsets = offsets;
    l.sequences = sequences;
    return l;
}

static inline dr_layer_io io_inputs(const trial *t)
{
    dr_layer_io io = DR_LAYER_IO_INIT;
    io.params = t->b->params;
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].role == ROLE_INPUT && t->v[i] != NULL)
            *io_slot(&io, i) = slot_view(t, i, t->v[i]);
    return io;
}

static inline void add_outputs(trial *t, slot_role role, dr_layer_io *io)
{
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].role == role && (slots[i].kind == 'x' || t->states)) {
            t->v[i] = floats(t->n[i], NAN);
            *io_slot(io, i) = slot_view(t, i, t->v[i]);
        }
}

/* Forward and backward on a given plan. */
static inline void trial_run_on(trial *t, const dr_layer_plan *plan)
{
    size_t saved, scratch;
    MUST(dr_layer_plan_sizes(plan, &saved, &scratch));
    fenced_buffers buffers = buffers_make(saved, scratch, UNWRITTEN);
    dr_layer_io io = io_inputs(t);
    dr_tensor grads[MAX_PARAMS];
    add_outputs(t, ROLE_OUTPUT, &io);
    MUST(dr_layer_forward(plan, &io, &buffers.b));
    memset(buffers.b.scratch, UNWRITTEN, scratch);
    add_outputs(t, ROLE_GRADIENT, &io);
    for (int32_t i = 0; i < t->b->n; i++) {
        t->grad[i] = floats(t->b->count[i], NAN);
        grads[i] = t->b->params[i];
        grads[i].data = t->grad[i];
    }
    io.grads = grads;
    MUST(dr_layer_backward(plan, &io, &buffers.b));
    buffers_free(&buffers);
}

static inline void trial_run(trial *t)
{
    dr_layer_plan *plan;
    MUST(dr_layer_plan_create(t->b->layer, &t->layout, &plan));
    trial_run_on(t, plan);
    dr_layer_plan_destroy(plan);
}

/* ---- comparing ------------------------------------------------------------------------------ */

static inline double *doubles_of(const float *f, int64_t n)
{
    double *d = (double *)floats(2 * n + 2, 0);
    for (int64_t i = 0; i < n; i++)
        d[i] = f[i];
    return d;
}

static inline double expect_close(const char *what, const char *name, const float *got,
                                  const double *want, int64_t n, double budget)
{
    difference d = compare(doubles_of(got, n), want, n, DR_F32, budget, 0);
    if (!d.allowed)
        fail_msg("%s: %s: relative L2 error %.3g, largest %.3g, allowed %.3g", what, name, d.l2,
                 d.max, budget);
    return d.l2;
}

static inline void expect_bits(const char *what, const char *name, const float *got,
                               const float *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&got[i], &want[i], sizeof *got) != 0)
            fail_msg("%s: %s[%lld]: %.9g is not %.9g", what, name, (long long)i, got[i], want[i]);
}

static inline const char *param_name(const block *b, int32_t i)
{
    dr_param_info info;
    MUST(dr_layer_param(b->layer, i, &info));
    return info.name;
}

/* Everything that came out of two runs; budget 0: the same bits. */
static inline void expect_same(const char *what, const trial *got, const trial *want, double budget)
{
    for (int i = 0; i < SLOTS; i++) {
        if (slots[i].role == ROLE_INPUT || got->v[i] == NULL || want->v[i] == NULL)
            continue;
        if (budget == 0)
            expect_bits(what, slots[i].name, got->v[i], want->v[i], want->n[i]);
        else
            expect_close(what, slots[i].name, got->v[i], doubles_of(want->v[i], want->n[i]),
                         want->n[i], budget);
    }
    for (int32_t i = 0; i < got->b->n; i++) {
        const char *name = param_name(got->b, i);
        if (budget == 0)
            expect_bits(what, name, got->grad[i], want->grad[i], got->b->count[i]);
        else
            expect_close(what, name, got->grad[i], doubles_of(want->grad[i], got->b->count[i]),
                         got->b->count[i], budget);
    }
}

#endif
