/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_layer_args.c - what a layer asks for and what it refuses: the parameter lists of both
 * kinds, and every wrong argument with its sentence, without a byte written.
 */
#include "layer_trial.h"

static dr_context *ctx;

static int setup(void **state)
{
    (void)state;
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = 1;
    return dr_context_create("ref", &options, &ctx) == DR_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    dr_context_destroy(ctx);
    return 0;
}

/* ---- parameters --------------------------------------------------------------------- */

typedef struct wanted {
    const char *name;
    int32_t rank;
    int64_t shape[3];
    dr_init init;
} wanted;

static void expect_params(const dr_layer_config *c, const wanted *list, int32_t n)
{
    dr_layer *layer;
    dr_param_info info;
    MUST(dr_layer_create(ctx, c, &layer));
    assert_int_equal(dr_layer_param_count(layer), n);
    for (int32_t i = 0; i < n; i++) {
        MUST(dr_layer_param(layer, i, &info));
        assert_string_equal(info.name, list[i].name);
        assert_int_equal(info.rank, list[i].rank);
        for (int32_t a = 0; a < info.rank; a++)
            assert_int_equal(info.shape[a], list[i].shape[a]);
        assert_int_equal(info.init, list[i].init);
    }
    assert_int_equal(dr_layer_conv_channels(layer), 2 * 2 * 5 + 4 * 3);
    REFUSED(dr_layer_param(layer, n, &info), DR_ERR_ARG, "index");
    REFUSED(dr_layer_param(layer, -1, &info), DR_ERR_ARG, "index");
    REFUSED(dr_layer_param(layer, 0, NULL), DR_ERR_ARG, "info");
    dr_layer_destroy(layer);
}

/* hidden 10, H 2, HV 4, K 5, V 3, gate_rank 3 */
static void test_params_gdn(void **state)
{
    (void)state;
    static const wanted list[] = {
        {"in_proj_qkv.weight", 2, {32, 10}, DR_INIT_LINEAR},
        {"in_proj_z.weight", 2, {12, 10}, DR_INIT_LINEAR},
        {"in_proj_b.weight", 2, {4, 10}, DR_INIT_LINEAR},
        {"in_proj_a.weight", 2, {4, 10}, DR_INIT_LINEAR},
        {"conv1d.weight", 3, {32, 1, 4}, DR_INIT_LINEAR},
        {"conv1d.bias", 1, {32}, DR_INIT_ZEROS},
        {"A_log", 1, {4}, DR_INIT_A_LOG},
        {"dt_bias", 1, {4}, DR_INIT_ONES},
        {"norm.weight", 1, {3}, DR_INIT_ONES},
        {"out_proj.weight", 2, {10, 12}, DR_INIT_LINEAR},
    };
    dr_layer_config c = config_of(DR_LAYER_GDN);
    expect_params(&c, list, DR_COUNT(list));
}

static void test_params_kda(void **state)
{
    (void)state;
    static const wanted pair[] = {
        {"q_proj.weight", 2, {10, 10}, DR_INIT_LINEAR},
        {"k_proj.weight", 2, {10, 10}, DR_INIT_LINEAR},
        {"v_proj.weight", 2, {12, 10}, DR_INIT_LINEAR},
        {"q_conv1d.weight", 3, {10, 1, 4}, DR_INIT_LINEAR},
        {"q_conv1d.bias", 1, {10}, DR_INIT_ZEROS},
        {"k_conv1d.weight", 3, {10, 1, 4}, DR_INIT_LINEAR},
        {"k_conv1d.bias", 1, {10}, DR_INIT_ZEROS},
        {"v_conv1d.weight", 3, {12, 1, 4}, DR_INIT_LINEAR},
        {"v_conv1d.bias", 1, {12}, DR_INIT_ZEROS},
        {"f_a_proj.weight", 2, {3, 10}, DR_INIT_LINEAR},
        {"f_b_proj.weight", 2, {20, 3}, DR_INIT_LINEAR},
        {"b_proj.weight", 2, {4, 10}, DR_INIT_LINEAR},
        {"g_a_proj.weight", 2, {3, 10}, DR_INIT_LINEAR},
        {"g_b_proj.weight", 2, {12, 3}, DR_INIT_LINEAR},
        {"A_log", 1, {4}, DR_INIT_A_LOG},
        {"dt_bias", 1, {20}, DR_INIT_ONES},
        {"o_norm.weight", 1, {3}, DR_INIT_ONES},
        {"o_proj.weight", 2, {10, 12}, DR_INIT_LINEAR},
    };
    static const wanted full[] = {
        {"q_proj.weight", 2, {10, 10}, DR_INIT_LINEAR},
        {"k_proj.weight", 2, {10, 10}, DR_INIT_LINEAR},
        {"v_proj.weight", 2, {12, 10}, DR_INIT_LINEAR},
        {"q_conv1d.weight", 3, {10, 1, 4}, DR_INIT_LINEAR},
        {"k_conv1d.weight", 3, {10, 1, 4}, DR_INIT_LINEAR},
        {"v_conv1d.weight", 3, {12, 1, 4}, DR_INIT_LINEAR},
        {"f_proj.weight", 2, {20, 10}, DR_INIT_LINEAR},
        {"b_proj.weight", 2, {4, 10}, DR_INIT_LINEAR},
        {"g_proj.weight", 2, {12, 10}, DR_INIT_LINEAR},
        {"A_log", 1, {4}, DR_INIT_A_LOG},
        {"dt_bias", 1, {20}, DR_INIT_ONES},
        {"o_norm.weight", 1, {3}, DR_INIT_ONES},
        {"o_proj.weight", 2, {10, 12}, DR_INIT_LINEAR},
    };
    dr_layer_config c = config_of(DR_LAYER_KDA);
    expect_params(&c, pair, DR_COUNT(pair));
    c.gate_rank = 0;
    c.conv_bias = 0;
    expect_params(&c, full, DR_COUNT(full));
}

/* ---- configurations and layouts ------------------------------------------------------- */

static void refuse_config(dr_layer_kind kind, size_t at, const void *value, size_t bytes,
                          dr_status status, const char *text)
{
    dr_layer_config c = config_of(kind);
    dr_layer *layer = (dr_layer *)ctx;
    memcpy((char *)&c + at, value, bytes);
    REFUSED(dr_layer_create(ctx, &c, &layer), status, text);
    assert_null(layer);
}

#define BAD(kind, field, bad, status, text)                                                 \
    do {                                                                                    \
        dr_layer_config one = DR_LAYER_CONFIG_INIT;                                         \
        one.field = (bad);                                                                  \
        refuse_config(kind, offsetof(dr_layer_config, field), &one.field, sizeof one.field, \
                      status, text);                                                        \
    } while (0)

static void test_bad_configs(void **state)
{
    (void)state;
    for (dr_layer_kind kind = DR_LAYER_GDN; kind <= DR_LAYER_KDA; kind++) {
        BAD(kind, size, 8, DR_ERR_ARG, "config.size");
        BAD(kind, kind, (dr_layer_kind)3, DR_ERR_ARG, "kind");
        BAD(kind, hidden, 0, DR_ERR_SHAPE, "hidden");
        BAD(kind, heads, 0, DR_ERR_SHAPE, "heads");
        BAD(kind, value_heads, 3, DR_ERR_SHAPE, "value_heads");
        BAD(kind, value_heads, -4, DR_ERR_SHAPE, "value_heads");
        BAD(kind, key_dim, 0, DR_ERR_SHAPE, "key_dim");
        BAD(kind, key_dim, 257, DR_ERR_SHAPE, "key_dim");
        BAD(kind, value_dim, 257, DR_ERR_SHAPE, "value_dim");
        BAD(kind, conv_width, -1, DR_ERR_SHAPE, "conv_width");
        BAD(kind, gate, DR_GATE_LOG, DR_ERR_ARG, "gate");
        BAD(kind, gate_rank, -1, DR_ERR_ARG, "gate_rank");
        BAD(kind, beta_scale, 1.5, DR_ERR_ARG, "beta_scale");
        BAD(kind, norm_eps, -1e-6, DR_ERR_ARG, "norm_eps");
        BAD(kind, norm_eps, NAN, DR_ERR_ARG, "norm_eps");
        BAD(kind, keep, (dr_keep)7, DR_ERR_ARG, "keep");
    }
    BAD(DR_LAYER_GDN, gate, DR_GATE_LOWER_BOUND, DR_ERR_ARG, "gate");
    BAD(DR_LAYER_GDN, gate_rank, 4, DR_ERR_ARG, "gate_rank");
    BAD(DR_LAYER_GDN, lower_bound, -5, DR_ERR_ARG, "lower_bound");
    BAD(DR_LAYER_KDA, gate, (dr_gate)0, DR_ERR_ARG, "no default");
    BAD(DR_LAYER_KDA, gate, DR_GATE_SOFTPLUS, DR_ERR_ARG, "lower_bound");
    BAD(DR_LAYER_KDA, lower_bound, 0, DR_ERR_ARG, "lower_bound");
    dr_layer_config c = config_of(DR_LAYER_GDN);
    dr_layer *layer;
    REFUSED(dr_layer_create(NULL, &c, &layer), DR_ERR_ARG, "ctx");
    REFUSED(dr_layer_create(ctx, NULL, &layer), DR_ERR_ARG, "config");
    REFUSED(dr_layer_create(ctx, &c, NULL), DR_ERR_ARG, "out");
}

static void refuse_layout(const dr_layer *layer, const dr_layer_layout *l, dr_status status,
                          const char *text)
{
    dr_layer_plan *plan = (dr_layer_plan *)ctx;
    REFUSED(dr_layer_plan_create(layer, l, &plan), status, text);
    assert_null(plan);
}

static void test_bad_layouts(void **state)
{
    (void)state;
    static const int64_t good[] = {0, 3, 8}, late[] = {1, 3, 8}, unsorted[] = {0, 5, 3},
                         far[] = {0, 3, 9};
    static const uint8_t ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    dr_layer_config c = config_of(DR_LAYER_KDA);
    dr_layer *layer;
    dr_layer_plan *plan;
    MUST(dr_layer_create(ctx, &c, &layer));
    dr_layer_layout l = packed(8, good, 2);
    l.mask = ones; /* the pair is refused even where the mask hides nothing */
    refuse_layout(layer, &l, DR_ERR_ARG, "mask");
    l = packed(8, late, 2);
    refuse_layout(layer, &l, DR_ERR_ARG, "offsets[0]");
    l = packed(8, unsorted, 2);
    refuse_layout(layer, &l, DR_ERR_ARG, "offsets[2]");
    l = packed(8, far, 2);
    refuse_layout(layer, &l, DR_ERR_ARG, "offsets[2]");
    l = packed(8, good, 0);
    refuse_layout(layer, &l, DR_ERR_ARG, "sequences");
    l = packed(8, NULL, 2);
    refuse_layout(layer, &l, DR_ERR_ARG, "sequences");
    l = packed(8, good, 2);
    l.batch = 2;
    refuse_layout(layer, &l, DR_ERR_SHAPE, "batch");
    l = dense(0, 8);
    refuse_layout(layer, &l, DR_ERR_SHAPE, "batch");
    l = dense(1, -1);
    refuse_layout(layer, &l, DR_ERR_SHAPE, "tokens");
    l = dense((int64_t)1 << 40, (int64_t)1 << 40);
    refuse_layout(layer, &l, DR_ERR_SHAPE, "batch x tokens");
    l.size = 4;
    refuse_layout(layer, &l, DR_ERR_ARG, "layout.size");
    l = dense(1, 8);
    REFUSED(dr_layer_plan_create(NULL, &l, &plan), DR_ERR_ARG, "layer");
    REFUSED(dr_layer_plan_create(layer, NULL, &plan), DR_ERR_ARG, "layout");
    REFUSED(dr_layer_plan_create(layer, &l, NULL), DR_ERR_ARG, "out");
    dr_layer_plan_destroy(NULL);
    dr_layer_destroy(NULL);
    dr_layer_destroy(layer);
}

/* ---- calls ------------------------------------------------------------------------------ */

/* A call with every tensor given, to be spoilt one field at a time. */
typedef struct call {
    block b;
    trial t;
    dr_layer_plan *plan;
    fenced_buffers buffers;
    dr_layer_io io;
    dr_tensor params[MAX_PARAMS], grads[MAX_PARAMS];
} call;

static void call_make(call *c, dr_layer_kind kind, const dr_layer_layout *l, bool states)
{
    rng r = {61};
    dr_layer_config config = config_of(kind);
    size_t saved, scratch;
    c->b = block_make(ctx, &config, &r);
    c->t = trial_make(&c->b, l, states, &r);
    MUST(dr_layer_plan_create(c->b.layer, l, &c->plan));
    MUST(dr_layer_plan_sizes(c->plan, &saved, &scratch));
    c->buffers = buffers_make(saved, scratch, UNWRITTEN);
    c->io = io_inputs(&c->t);
    add_outputs(&c->t, ROLE_OUTPUT, &c->io);
    add_outputs(&c->t, ROLE_GRADIENT, &c->io);
    memcpy(c->params, c->b.params, sizeof c->params);
    for (int32_t i = 0; i < c->b.n; i++) {
        c->grads[i] = c->params[i];
        c->t.grad[i] = c->grads[i].data = floats(c->b.count[i], NAN);
    }
    c->io.params = c->params;
    c->io.grads = c->grads;
}

/* Outputs of both directions still hold the NaN they were made with. */
static void call_free(call *c)
{
    for (int i = 0; i < SLOTS; i++)
        for (int64_t j = 0; slots[i].role != ROLE_INPUT && j < c->t.n[i]; j++)
            if (c->t.v[i] != NULL && !isnan(c->t.v[i][j]))
                fail_msg("a refused call wrote %s[%lld]", slots[i].name, (long long)j);
    for (int32_t i = 0; i < c->b.n; i++)
        for (int64_t j = 0; j < c->b.count[i]; j++)
            assert_true(isnan(c->t.grad[i][j]));
    buffers_free(&c->buffers);
    dr_layer_plan_destroy(c->plan);
    dr_layer_destroy(c->b.layer);
}

enum { FORWARD = 1, BACKWARD = 2, STEP = 4, ALL = 7 };

static void refuse_call(const call *c, int calls, dr_status status, const char *text)
{
    if (calls & FORWARD)
        REFUSED(dr_layer_forward(c->plan, &c->io, &c->buffers.b), status, text);
    if (calls & STEP)
        REFUSED(dr_layer_step(c->plan, &c->io, &c->buffers.b), status, text);
    if (calls & BACKWARD)
        REFUSED(dr_layer_backward(c->plan, &c->io, &c->buffers.b), status, text);
}

/* Spoils an lvalue, expects a refusal, and puts it back. */
#define SPOILT(c, field, bad, calls, status, text)   \
    do {                                             \
        __typeof__(field) good_value = (field);      \
        (field) = (bad);                             \
        refuse_call((c), (calls), (status), (text)); \
        (field) = good_value;                        \
    } while (0)

/* Every way to spoil one tensor. */
static void spoil_tensor(call *c, dr_tensor *t, int calls, const char *name)
{
    if (t->data == NULL)
        return;
    SPOILT(c, t->dtype, DR_BF16, calls, DR_ERR_SHAPE, name);
    SPOILT(c, t->dtype, DR_F64, calls, DR_ERR_SHAPE, name);
    SPOILT(c, t->dtype, (dr_dtype)9, calls, DR_ERR_SHAPE, name);
    SPOILT(c, t->rank, 0, calls, DR_ERR_SHAPE, name);
    SPOILT(c, t->rank, 5, calls, DR_ERR_SHAPE, name);
    SPOILT(c, t->shape[t->rank - 1], t->shape[t->rank - 1] + 1, calls, DR_ERR_SHAPE, name);
    SPOILT(c, t->shape[0], t->shape[0] + 1, calls, DR_ERR_SHAPE, name);
    SPOILT(c, t->stride[t->rank - 1], 2, calls, DR_ERR_SHAPE, name);
    SPOILT(c, t->data, (char *)t->data + 2, calls, DR_ERR_ARG, name);
}

static void test_bad_tensors(void **state)
{
    (void)state;
    dr_layer_layout l = dense(2, 5);
    for (dr_layer_kind kind = DR_LAYER_GDN; kind <= DR_LAYER_KDA; kind++) {
        call c;
        call_make(&c, kind, &l, true);
        for (int32_t i = 0; i < c.b.n; i++) {
            spoil_tensor(&c, &c.params[i], ALL, param_name(&c.b, i));
            spoil_tensor(&c, &c.grads[i], BACKWARD, param_name(&c.b, i));
        }
        static const struct {
            int slot, calls;
        } used[] = {{S_x, ALL},
                    {S_y, FORWARD | STEP},
                    {S_conv_in, ALL},
                    {S_conv_out, FORWARD | STEP},
                    {S_state_in, ALL},
                    {S_state_out, FORWARD | STEP},
                    {S_dy, BACKWARD},
                    {S_dx, BACKWARD},
                    {S_d_conv_in, BACKWARD},
                    {S_d_conv_out, BACKWARD},
                    {S_d_state_in, BACKWARD},
                    {S_d_state_out, BACKWARD}};
        for (size_t i = 0; i < DR_COUNT(used); i++)
            spoil_tensor(&c, io_slot(&c.io, used[i].slot), used[i].calls, slots[used[i].slot].name);
        call_free(&c);
    }
}

static void test_missing(void **state)
{
    (void)state;
    dr_layer_layout l = dense(2, 5);
    for (dr_layer_kind kind = DR_LAYER_GDN; kind <= DR_LAYER_KDA; kind++) {
        call c;
        call_make(&c, kind, &l, true);
        SPOILT(&c, c.io.params, NULL, ALL, DR_ERR_ARG, "params");
        dr_tensor last = c.params[c.b.n - 1];
        c.params[c.b.n - 1].data = NULL; /* two at once, both named */
        SPOILT(&c, c.params[0].data, NULL, ALL, DR_ERR_ARG, param_name(&c.b, 0));
        SPOILT(&c, c.params[0].data, NULL, ALL, DR_ERR_ARG, param_name(&c.b, c.b.n - 1));
        c.params[c.b.n - 1] = last;
        SPOILT(&c, c.io.x.data, NULL, ALL, DR_ERR_ARG, "x:");
        SPOILT(&c, c.io.y.data, NULL, FORWARD | STEP, DR_ERR_ARG, "y:");
        SPOILT(&c, c.io.dy.data, NULL, BACKWARD, DR_ERR_ARG, "dy:");
        SPOILT(&c, c.io.conv_in.data, NULL, STEP, DR_ERR_ARG, "conv_in");
        SPOILT(&c, c.io.conv_out.data, NULL, STEP, DR_ERR_ARG, "conv_out");
        SPOILT(&c, c.io.state_in.data, NULL, STEP, DR_ERR_ARG, "state_in");
        SPOILT(&c, c.io.state_out.data, NULL, STEP, DR_ERR_ARG, "state_out");
        SPOILT(&c, c.io.size, 16, ALL, DR_ERR_ARG, "io.size");
        REFUSED(dr_layer_forward(NULL, &c.io, &c.buffers.b), DR_ERR_ARG, "plan");
        REFUSED(dr_layer_forward(c.plan, NULL, &c.buffers.b), DR_ERR_ARG, "io");
        REFUSED(dr_layer_forward(c.plan, &c.io, NULL), DR_ERR_ARG, "buffers");
        call_free(&c);
    }
}

static void test_bad_state_index(void **state)
{
    (void)state;
    static const int32_t twice[] = {1, 1}, far[] = {0, 2}, low[] = {-2, 0}, good[] = {1, 0};
    dr_layer_layout l = dense(2, 5);
    call c;
    call_make(&c, DR_LAYER_KDA, &l, true);
    SPOILT(&c, c.io.state_index, twice, FORWARD | STEP, DR_ERR_ARG, "state_index");
    SPOILT(&c, c.io.state_index, far, FORWARD | STEP, DR_ERR_ARG, "state_index");
    SPOILT(&c, c.io.state_index, low, FORWARD | STEP, DR_ERR_ARG, "state_index");
    SPOILT(&c, c.io.state_index, good, BACKWARD, DR_ERR_ARG, "state_index");
    c.io.state_index = good; /* all pools have as many slots as the first */
    SPOILT(&c, c.io.conv_in.shape[0], 3, FORWARD | STEP, DR_ERR_SHAPE, "conv_out");
    c.io.conv_in.data = c.io.conv_out.data = c.io.state_in.data = c.io.state_out.data = NULL;
    refuse_call(&c, FORWARD, DR_ERR_ARG, "state_index");
    call_free(&c);
}

static void test_mask_refuses_states(void **state)
{
    (void)state;
    static const uint8_t mask[] = {0, 1, 1, 1, 1, 1, 1, 1, 1, 0};
    static const int32_t index[] = {0, 1};
    dr_layer_layout l = dense(2, 5);
    call c;
    l.mask = mask;
    call_make(&c, DR_LAYER_GDN, &l, false);
    trial with = trial_plain(&c.b, &l, true);
    float *data = floats(with.n[S_state_in] + with.n[S_conv_in], 0);
    refuse_call(&c, STEP, DR_ERR_ARG, "mask");
    for (int i = 0; i < SLOTS; i++) {
        if (slots[i].kind == 'x')
            continue;
        bool backward = i == S_d_conv_out || i == S_d_state_out || slots[i].role == ROLE_GRADIENT;
        bool both = i == S_conv_in || i == S_state_in;
        SPOILT(&c, *io_slot(&c.io, i), slot_view(&with, i, data),
               both       ? FORWARD | BACKWARD
               : backward ? BACKWARD
                          : FORWARD,
               DR_ERR_ARG, slots[i].name);
    }
    SPOILT(&c, c.io.state_index, index, FORWARD, DR_ERR_ARG, "state_index");
    call_free(&c);
}

static void test_bad_buffers(void **state)
{
    (void)state;
    dr_layer_layout l = dense(2, 5), longer = dense(2, 6);
    for (dr_layer_kind kind = DR_LAYER_GDN; kind <= DR_LAYER_KDA; kind++) {
        call c;
        call_make(&c, kind, &l, true);
        dr_buffers *b = &c.buffers.b;
        size_t saved, scratch;
        refuse_call(&c, BACKWARD, DR_ERR_BUFFER, "saved"); /* no forward yet */
        SPOILT(&c, b->size, 3, ALL, DR_ERR_ARG, "buffers.size");
        SPOILT(&c, b->saved_bytes, b->saved_bytes - 1, FORWARD | BACKWARD, DR_ERR_BUFFER, "saved");
        SPOILT(&c, b->saved, NULL, BACKWARD, DR_ERR_BUFFER, "saved");
        SPOILT(&c, b->scratch, NULL, ALL, DR_ERR_BUFFER, "scratch");
        SPOILT(&c, b->scratch_bytes, 64, ALL, DR_ERR_BUFFER, "scratch");
        SPOILT(&c, b->saved, (char *)b->saved + 4, FORWARD | BACKWARD, DR_ERR_BUFFER, "aligned");
        SPOILT(&c, b->scratch, (char *)b->scratch + 4, ALL, DR_ERR_BUFFER, "aligned");
        REFUSED(dr_layer_plan_sizes(c.plan, NULL, &scratch), DR_ERR_ARG, "saved");
        REFUSED(dr_layer_plan_sizes(c.plan, &saved, NULL), DR_ERR_ARG, "scratch");
        REFUSED(dr_layer_plan_sizes(NULL, &saved, &scratch), DR_ERR_ARG, "plan");
        REFUSED(dr_layer_buffers_create(NULL, b), DR_ERR_ARG, "plan");
        REFUSED(dr_layer_buffers_create(c.plan, NULL), DR_ERR_ARG, "out");

        /* what a forward of another layout left is not taken either */
        dr_layer_plan *other;
        dr_buffers large;
        MUST(dr_layer_plan_create(c.b.layer, &longer, &other));
        MUST(dr_layer_buffers_create(other, &large));
        rng r = {62};
        trial t = trial_make(&c.b, &longer, true, &r);
        dr_layer_io io = io_inputs(&t);
        add_outputs(&t, ROLE_OUTPUT, &io);
        MUST(dr_layer_forward(other, &io, &large));
        REFUSED(dr_layer_backward(c.plan, &c.io, &large), DR_ERR_BUFFER, "saved");
        dr_buffers_destroy(&large);
        dr_layer_plan_destroy(other);
        call_free(&c);
    }
}

/* Extents of 1 may come and go: A_log as published, convolution weights without their middle
 * axis, a batch of one without its axis. */
static void test_shapes_as_published(void **state)
{
    (void)state;
    dr_layer_layout l = dense(1, 5);
    call c;
    call_make(&c, DR_LAYER_KDA, &l, false);
    MUST(dr_layer_forward(c.plan, &c.io, &c.buffers.b));
    float *want = c.t.v[S_y], *got = floats(c.t.n[S_y], NAN);
    for (int32_t i = 0; i < c.b.n; i++) {
        dr_tensor *t = &c.params[i];
        if (strcmp(param_name(&c.b, i), "A_log") == 0)
            *t = dr_tensor_make(t->data, DR_F32, 4, 1, 1, t->shape[0], 1);
        else if (t->rank == 3)
            *t = dr_tensor_make(t->data, DR_F32, 2, t->shape[0], t->shape[2], 0, 0);
    }
    c.io.x = dr_tensor_make(c.io.x.data, DR_F32, 2, 5, c.b.c.hidden, 0, 0);
    c.io.y = dr_tensor_make(got, DR_F32, 2, 5, c.b.c.hidden, 0, 0);
    MUST(dr_layer_forward(c.plan, &c.io, &c.buffers.b));
    expect_bits("as published", "y", got, want, c.t.n[S_y]);
    for (int64_t i = 0; i < c.t.n[S_y]; i++)
        want[i] = NAN;
    call_free(&c);
}

#define TEST(test)                      \
    {                                   \
#test, test, NULL, forget, NULL \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_params_gdn),          TEST(test_params_kda),          TEST(test_bad_configs),
        TEST(test_bad_layouts),         TEST(test_bad_tensors),         TEST(test_missing),
        TEST(test_bad_state_index),     TEST(test_mask_refuses_states), TEST(test_bad_buffers),
        TEST(test_shapes_as_published),
    };
    return cmocka_run_group_tests_name("layer arguments", tests, setup, teardown);
}
