/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_layer_cp.c - a layer whose stream is cut over ranks equals the layer on one rank: outputs, states
 * and every gradient, for both kinds, every protocol and partitions down to single tokens and ranks
 * without any. Parameter gradients go through dr_comm_sum, whose bits must be those of all ranks.
 */
#include "layer_trial.h"

#include <deltarule/comm.h>
#include <deltarule/cp.h>

#include <pthread.h>

enum { T = 40, N = 5, RANKS = 4, MAX_F = 12, MAX_P = N + MAX_F, HIDDEN = 10 };

/* All tensors of a call; states for as many pieces as there can be. */
typedef struct side {
    float *x, *dy, *y, *dx, *conv_in, *conv_out, *d_conv_in, *d_conv_out;
    float *state_in, *state_out, *d_state_in, *d_state_out;
} side;

typedef struct cut {
    const char *name;
    int64_t n, offsets[N + 1];
    int64_t count;
    dr_fragment fragments[MAX_F];
} cut;

static const cut cuts[] = {
    {"even", 1, {0, T}, 4, {{0, 10, 0}, {10, 20, 1}, {20, 30, 2}, {30, 40, 3}}},
    {"short", 3, {0, 18, 23, T}, 6,
     {{0, 17, 0}, {17, 19, 1}, {19, 20, 2}, {20, 21, 3}, {21, 22, 2}, {22, 40, 1}}},
    {"zig-zag", 2, {0, 33, T}, 8, {{0, 5, 0}, {5, 10, 1}, {10, 15, 2}, {15, 20, 3}, {20, 25, 3}, {25, 30, 2},
                                   {30, 35, 1}, {35, 40, 0}}},
    {"empty rank, empty sequence", 4, {0, 2, 2, 20, T}, 4, {{30, 40, 3}, {0, 1, 0}, {1, 3, 1}, {3, 30, 0}}},
    {"at documents", 4, {0, 10, 20, 30, T}, 4, {{0, 10, 0}, {10, 20, 1}, {20, 30, 2}, {30, 40, 3}}},
};

static int64_t conv_size, state_size; /* of one piece */

static side side_make(rng *r, int64_t tokens, int64_t pieces)
{
    side s;
    float **const t[] = {&s.x, &s.dy, &s.conv_in, &s.d_conv_out, &s.state_in, &s.d_state_out,
                         &s.y, &s.dx, &s.conv_out, &s.d_conv_in, &s.state_out, &s.d_state_in};
    const int64_t n[] = {tokens * HIDDEN, tokens * HIDDEN, pieces * conv_size, pieces * conv_size,
                         pieces * state_size, pieces * state_size};
    static const int like[] = {0, 1, 2, 3, 4, 5, 0, 0, 2, 2, 4, 4};
    for (int i = 0; i < 12; i++)
        *t[i] = r != NULL && i < 6 ? drawn(r, n[like[i]], 0.5) : floats(n[like[i]], NAN);
    return s;
}

static dr_layer_io io_of(const block *b, const side *s, int64_t tokens, int64_t pieces, const dr_tensor *grads)
{
    dr_layer_io io = DR_LAYER_IO_INIT;
    const dr_layer_config *c = &b->c;
    float *const rows[] = {s->x, s->dy, s->y, s->dx};
    dr_tensor *const to_rows[] = {&io.x, &io.dy, &io.y, &io.dx};
    float *const conv[] = {s->conv_in, s->conv_out, s->d_conv_in, s->d_conv_out};
    dr_tensor *const to_conv[] = {&io.conv_in, &io.conv_out, &io.d_conv_in, &io.d_conv_out};
    float *const state[] = {s->state_in, s->state_out, s->d_state_in, s->d_state_out};
    dr_tensor *const to_state[] = {&io.state_in, &io.state_out, &io.d_state_in, &io.d_state_out};
    for (int i = 0; i < 4; i++) {
        *to_rows[i] = dr_tensor_make(rows[i], DR_F32, 3, 1, tokens, HIDDEN, 0);
        *to_conv[i] = dr_tensor_make(conv[i], DR_F32, 3, pieces, dr_layer_conv_channels(b->layer),
                                     c->conv_width - 1, 0);
        *to_state[i] = dr_tensor_make(state[i], DR_F32, 4, pieces, c->value_heads, c->key_dim, c->value_dim);
    }
    io.params = b->params;
    io.grads = grads;
    return io;
}

/* Gradients of all parameters in one array, with views. */
static int64_t views_of(const block *b, float *data, dr_tensor *views)
{
    int64_t at = 0;
    for (int32_t i = 0; i < b->n; i++) {
        views[i] = b->params[i];
        views[i].data = data + at;
        at += b->count[i];
    }
    return at;
}

static dr_status both_ways(dr_layer_plan *plan, const dr_layer_io *io)
{
    dr_buffers buffers = DR_BUFFERS_INIT;
    dr_status status = dr_layer_buffers_create(plan, &buffers);
    if (status == DR_OK)
        status = dr_layer_forward(plan, io, &buffers);
    if (status == DR_OK)
        status = dr_layer_backward(plan, io, &buffers);
    dr_buffers_destroy(&buffers);
    return status;
}

typedef struct rank_work {
    const block *b;
    const cut *l;
    const char *protocol;
    const side *whole;
    side mine;  /* of this rank */
    side *out;  /* gathered */
    float *grads;
    dr_comm *comm;
    dr_status status;
    char error[200];
} rank_work;

static dr_status compute(rank_work *w)
{
    dr_partition partition = DR_PARTITION_INIT;
    dr_layer_layout packing = DR_LAYER_LAYOUT_INIT;
    dr_layer_plan *plan;
    dr_cp_plan *pieces;
    dr_tensor views[MAX_PARAMS];
    dr_cp_piece piece[MAX_P];
    dr_cp_info info = DR_CP_INFO_INIT;
    dr_problem p = DR_PROBLEM_INIT; /* a small one, to learn the pieces */
    const cut *l = w->l;
    partition.ranks = RANKS;
    partition.count = l->count;
    partition.fragments = l->fragments;
    packing.tokens = p.tokens = T;
    packing.offsets = p.offsets = l->offsets;
    packing.sequences = p.sequences = l->n;
    p.variant = DR_GDN;
    p.heads = p.key_dim = p.value_dim = 1;
    p.gate = DR_GATE_LOG;
    p.beta = DR_BETA_VALUE;
    DR_TRY(dr_cp_plan_create(w->b->ctx, w->comm, &p, &partition, "p2p", &pieces));
    dr_cp_plan_describe(pieces, &info);
    for (int64_t n = 0; n < info.pieces; n++)
        dr_cp_plan_piece(pieces, n, &piece[n]);
    dr_cp_plan_destroy(pieces);
    side *s = &w->mine;
    int64_t at = 0;
    for (int64_t i = 0; i < l->count; i++) {
        const dr_fragment *f = &l->fragments[i];
        const size_t bytes = (size_t)(f->end - f->begin) * HIDDEN * sizeof(float);
        if (f->rank != w->comm->rank)
            continue;
        memcpy(s->x + at * HIDDEN, w->whole->x + f->begin * HIDDEN, bytes);
        memcpy(s->dy + at * HIDDEN, w->whole->dy + f->begin * HIDDEN, bytes);
        at += f->end - f->begin;
    }
    const size_t conv = (size_t)conv_size * sizeof(float), state = (size_t)state_size * sizeof(float);
    for (int64_t n = 0; n < info.pieces; n++) { /* what must not be read stays NaN */
        const int64_t q = piece[n].sequence;
        if (piece[n].starts) {
            memcpy(s->conv_in + n * conv_size, w->whole->conv_in + q * conv_size, conv);
            memcpy(s->state_in + n * state_size, w->whole->state_in + q * state_size, state);
        }
        if (piece[n].ends) {
            memcpy(s->d_conv_out + n * conv_size, w->whole->d_conv_out + q * conv_size, conv);
            memcpy(s->d_state_out + n * state_size, w->whole->d_state_out + q * state_size, state);
        }
    }
    const int64_t count = views_of(w->b, w->grads, views);
    DR_TRY(dr_layer_cp_plan_create(w->b->layer, w->comm, &packing, &partition, w->protocol, &plan));
    const dr_layer_io io = io_of(w->b, s, info.tokens, info.pieces, views);
    dr_status status = both_ways(plan, &io);
    dr_layer_plan_destroy(plan);
    DR_TRY(status);
    DR_TRY(dr_comm_sum(w->comm, w->grads, count));
    at = 0;
    for (int64_t i = 0; i < l->count; i++) {
        const dr_fragment *f = &l->fragments[i];
        const size_t bytes = (size_t)(f->end - f->begin) * HIDDEN * sizeof(float);
        if (f->rank != w->comm->rank)
            continue;
        memcpy(w->out->y + f->begin * HIDDEN, s->y + at * HIDDEN, bytes);
        memcpy(w->out->dx + f->begin * HIDDEN, s->dx + at * HIDDEN, bytes);
        at += f->end - f->begin;
    }
    for (int64_t n = 0; n < info.pieces; n++) {
        const int64_t q = piece[n].sequence;
        if (piece[n].ends) {
            memcpy(w->out->conv_out + q * conv_size, s->conv_out + n * conv_size, conv);
            memcpy(w->out->state_out + q * state_size, s->state_out + n * state_size, state);
        }
        if (piece[n].starts) {
            memcpy(w->out->d_conv_in + q * conv_size, s->d_conv_in + n * conv_size, conv);
            memcpy(w->out->d_state_in + q * state_size, s->d_state_in + n * state_size, state);
        }
    }
    return DR_OK;
}

static void *rank_main(void *arg)
{
    rank_work *w = arg;
    w->status = compute(w);
    snprintf(w->error, sizeof w->error, "%s", dr_last_error());
    if (w->status != DR_OK)
        dr_comm_abort(w->comm, w->error);
    return NULL;
}

static void agree(const char *what, const char *part, const float *a, const float *b, int64_t n)
{
    double num = 0, den = 1e-30;
    for (int64_t i = 0; i < n; i++) {
        num += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        den += (double)b[i] * b[i];
    }
    if (!(num <= 1e-10 * den))
        fail_msg("%s: %s is off by %g", what, part, sqrt(num / den));
}

static void one_case(const block *b, const cut *l, const char *protocol, rng *r)
{
    char what[120];
    rank_work works[RANKS];
    pthread_t threads[RANKS];
    dr_comm *comms[RANKS];
    dr_layer_plan *plan;
    dr_tensor views[MAX_PARAMS];
    int64_t count = 0;
    snprintf(what, sizeof what, "kind %d, %s, %s", (int)b->c.kind, l->name, protocol);
    for (int32_t i = 0; i < b->n; i++)
        count += b->count[i];
    side whole = side_make(r, T, l->n), out = side_make(NULL, T, l->n);
    float *grads = floats(count, NAN);
    MUST(dr_comm_threads_create(RANKS, comms));
    for (int i = 0; i < RANKS; i++) {
        works[i] = (rank_work){.b = b, .l = l, .protocol = protocol, .whole = &whole, .out = &out,
                               .mine = side_make(NULL, T, MAX_P), .grads = floats(count, NAN),
                               .comm = comms[i]};
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &works[i]), 0);
    }
    for (int i = 0; i < RANKS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < RANKS; i++) {
        if (works[i].status != DR_OK)
            fail_msg("%s: rank %d: %s", what, i, works[i].error);
        dr_comm_close(comms[i]);
        assert_memory_equal(works[i].grads, works[0].grads, (size_t)count * sizeof(float));
    }
    dr_layer_layout packing = DR_LAYER_LAYOUT_INIT;
    packing.tokens = T;
    packing.offsets = l->offsets;
    packing.sequences = l->n;
    views_of(b, grads, views);
    MUST(dr_layer_plan_create(b->layer, &packing, &plan));
    const dr_layer_io io = io_of(b, &whole, T, l->n, views);
    MUST(both_ways(plan, &io));
    dr_layer_plan_destroy(plan);
    agree(what, "y", out.y, whole.y, T * HIDDEN);
    agree(what, "dx", out.dx, whole.dx, T * HIDDEN);
    agree(what, "conv_out", out.conv_out, whole.conv_out, l->n * conv_size);
    agree(what, "state_out", out.state_out, whole.state_out, l->n * state_size);
    agree(what, "d_conv_in", out.d_conv_in, whole.d_conv_in, l->n * conv_size);
    agree(what, "d_state_in", out.d_state_in, whole.d_state_in, l->n * state_size);
    for (int32_t i = 0; i < b->n; i++) {
        dr_param_info info;
        MUST(dr_layer_param(b->layer, i, &info));
        const int64_t at = (float *)views[i].data - grads;
        agree(what, info.name, works[0].grads + at, grads + at, b->count[i]);
    }
}

static void equals_one_rank(void **state)
{
    static const char *const protocols[] = {"p2p", "allgather", "grouped:2", "doubling"};
    static const struct {
        dr_layer_kind kind;
        int32_t width;
    } kinds[] = {{DR_LAYER_GDN, 4}, {DR_LAYER_KDA, 4}, {DR_LAYER_GDN, 1}, {DR_LAYER_KDA, 2}};
    dr_context_options one = DR_CONTEXT_OPTIONS_INIT;
    dr_context *ctx;
    rng r = {7};
    one.threads = 1;
    MUST(dr_context_create("cpu", &one, &ctx));
    for (size_t k = 0; k < DR_COUNT(kinds); k++)
        for (size_t i = 0; i < DR_COUNT(cuts); i++)
            for (size_t p = 0; p < DR_COUNT(protocols); p++) {
                dr_layer_config c = config_of(kinds[k].kind);
                c.conv_width = kinds[k].width;
                block b = block_make(ctx, &c, &r);
                conv_size = (int64_t)dr_layer_conv_channels(b.layer) * (c.conv_width - 1);
                state_size = (int64_t)c.value_heads * c.key_dim * c.value_dim;
                one_case(&b, &cuts[i], protocols[p], &r);
                dr_layer_destroy(b.layer);
                forget(state);
            }
    dr_context_destroy(ctx);
}

static void refusals(void **state)
{
    const dr_fragment all = {0, T, 0};
    const uint8_t mask[T] = {1};
    dr_partition partition = DR_PARTITION_INIT;
    dr_layer_layout packing = DR_LAYER_LAYOUT_INIT;
    dr_layer_config c = config_of(DR_LAYER_GDN);
    dr_context *ctx;
    dr_comm *comm;
    dr_layer_plan *plan;
    rng r = {9};
    partition.ranks = 1;
    partition.count = 1;
    partition.fragments = &all;
    packing.tokens = T;
    c.conv_width = 4;
    MUST(dr_context_create("cpu", NULL, &ctx));
    MUST(dr_comm_self_create(&comm));
    block b = block_make(ctx, &c, &r);
    packing.batch = 2;
    assert_int_equal(dr_layer_cp_plan_create(b.layer, comm, &packing, &partition, "p2p", &plan), DR_ERR_SHAPE);
    assert_non_null(strstr(dr_last_error(), "batch: must be 1"));
    packing.batch = 1;
    assert_int_equal(dr_layer_cp_plan_create(b.layer, comm, &packing, &partition, "swift", &plan), DR_ERR_ARG);
    assert_non_null(strstr(dr_last_error(), "protocol"));
    MUST(dr_layer_cp_plan_create(b.layer, comm, &packing, &partition, "p2p", &plan)); /* comm is still whole */
    conv_size = (int64_t)dr_layer_conv_channels(b.layer) * 3;
    state_size = (int64_t)c.value_heads * c.key_dim * c.value_dim;
    side s = side_make(&r, T, 1);
    dr_buffers buffers;
    MUST(dr_layer_buffers_create(plan, &buffers));
    dr_layer_io io = io_of(&b, &s, T, 1, NULL);
    const int32_t index = 0;
    io.state_index = &index;
    assert_int_equal(dr_layer_step(plan, &io, &buffers), DR_ERR_ARG);
    assert_non_null(strstr(dr_last_error(), "one rank"));
    assert_int_equal(dr_layer_forward(plan, &io, &buffers), DR_ERR_ARG);
    assert_non_null(strstr(dr_last_error(), "state_index: must be NULL"));
    io.state_index = NULL; /* peers have been told */
    assert_int_equal(dr_layer_forward(plan, &io, &buffers), DR_ERR_COMM);
    dr_layer_plan_destroy(plan);
    packing.mask = mask;
    assert_int_equal(dr_layer_cp_plan_create(b.layer, comm, &packing, &partition, "p2p", &plan), DR_ERR_ARG);
    assert_non_null(strstr(dr_last_error(), "mask"));
    assert_int_equal(dr_comm_sum(comm, NULL, 3), DR_ERR_ARG);
    dr_buffers_destroy(&buffers);
    dr_layer_destroy(b.layer);
    dr_comm_close(comm);
    dr_context_destroy(ctx);
    forget(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_one_rank),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
