/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fields_layers.c - the fourth part of test_fields.c: the kinds of fault that show in
 * whole layers and in files of weights. Layers of both kinds, on both backends.
 */
#include "layer_trial.h"

#include <deltarule/weights.h>

#include <pthread.h>

static const dr_layer_kind kinds[] = {DR_LAYER_GDN, DR_LAYER_KDA};
static const char *const names[] = {"cpu", "ref"};
static dr_context *ctx[2];

#define FOR_EACH_LAYER(b, kind) \
    for (int b = 0; b < 2; b++) \
        for (const dr_layer_kind *kind = kinds; kind < kinds + DR_COUNT(kinds); kind++)

static block layer_of(int b, dr_layer_kind kind, rng *r)
{
    dr_layer_config c = config_of(kind);
    return block_make(ctx[b], &c, r);
}

/* Rows [from, from + t->layout.tokens) of another run's tokens as the inputs of t. */
static void take_rows(trial *t, const trial *whole, int64_t from)
{
    static const int both[] = {S_x, S_dy};
    for (int i = 0; i < 2; i++) {
        t->v[both[i]] = floats(t->n[both[i]], 0);
        memcpy(t->v[both[i]], whole->v[both[i]] + from * t->b->c.hidden,
               sizeof(float) * (size_t)t->n[both[i]]);
    }
}

/* A document alone against its rows of the packed run: the same bits on "ref"; on "cpu" a BLAS
 * may round a row by how many others there are. */
static void expect_rows(const trial *alone, const trial *whole, int64_t from, int b)
{
    static const int both[] = {S_y, S_dx};
    for (int i = 0; i < 2; i++) {
        const float *rows = whole->v[both[i]] + from * alone->b->c.hidden;
        int64_t n = alone->n[both[i]];
        if (strcmp(names[b], "ref") == 0)
            expect_bits("document", slots[both[i]].name, alone->v[both[i]], rows, n);
        else
            expect_close("document", slots[both[i]].name, alone->v[both[i]], doubles_of(rows, n), n,
                         1e-5);
    }
}

/* The boundaries are given once and reach every stage. */
static void test_A09_layers_know_their_documents(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 5, 5, 9, 40};
    FOR_EACH_LAYER(b, kind)
    {
        rng r = {91};
        block layer = layer_of(b, *kind, &r);
        dr_layer_layout all = packed(40, offsets, 4), none = dense(1, 40);
        trial whole = trial_make(&layer, &all, false, &r),
              leaky = trial_plain(&layer, &none, false);
        trial_run(&whole);
        for (int n = 0; n < 4; n++) {
            dr_layer_layout one = dense(1, offsets[n + 1] - offsets[n]);
            trial alone = trial_plain(&layer, &one, false);
            if (one.tokens == 0)
                continue;
            take_rows(&alone, &whole, offsets[n]);
            trial_run(&alone);
            expect_rows(&alone, &whole, offsets[n], b);
        }
        take_rows(&leaky, &whole, 0); /* without boundaries it would not be so */
        trial_run(&leaky);
        assert_true(fabs(leaky.v[S_y][5 * layer.c.hidden] - whole.v[S_y][5 * layer.c.hidden]) >
                    1e-4);
        dr_layer_destroy(layer.layer);
    }
}

/* A packed call leaves nothing on the layer that a plain call would find. */
static void test_A10_boundaries_left_over(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 3, 8};
    FOR_EACH_LAYER(b, kind)
    {
        rng r = {92};
        block used = layer_of(b, *kind, &r), fresh = used;
        dr_layer_layout spread = packed(8, offsets, 2);
        trial t = trial_make(&used, &spread, true, &r);
        trial_run(&t);
        MUST(dr_layer_create(ctx[b], &used.c, &fresh.layer));
        for (int64_t T = 8; T <= 9; T++) {
            dr_layer_layout plain = dense(1, T);
            trial a = trial_make(&used, &plain, true, &r), z = a;
            z.b = &fresh;
            trial_run(&a);
            trial_run(&z);
            expect_same("after a packed call", &a, &z, 0);
        }
        dr_layer_destroy(fresh.layer);
        dr_layer_destroy(used.layer);
    }
}

/* A mask and boundaries together are refused: neither can quietly win. */
static void test_A11_mask_and_boundaries(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 3, 8};
    static const uint8_t ones[] = {1, 1, 1, 1, 1, 1, 1, 1};
    FOR_EACH_LAYER(b, kind)
    {
        rng r = {93};
        block layer = layer_of(b, *kind, &r);
        dr_layer_layout both = packed(8, offsets, 2);
        both.mask = ones;
        dr_layer_plan *plan;
        REFUSED(dr_layer_plan_create(layer.layer, &both, &plan), DR_ERR_ARG, "mask");
        assert_null(plan);
        dr_layer_destroy(layer.layer);
    }
}

/* A row with 0, 1 and 5 left pads, alone and in a batch: real tokens as if the padding were not
 * there, nothing from the padding itself although it holds NaN. */
static void test_A13_padding(void **state)
{
    (void)state;
    enum { REAL = 6, MOST = 11 };
    static const int pads[] = {0, 1, 5};
    FOR_EACH_LAYER(b, kind)
    for (int batch = 1; batch <= 3; batch += 2) {
        rng r = {94};
        block layer = layer_of(b, *kind, &r);
        int64_t hidden = layer.c.hidden;
        for (size_t i = 0; i < DR_COUNT(pads); i++) {
            uint8_t mask[3 * MOST] = {0};
            int64_t T = REAL + pads[i], offsets[] = {0, REAL, 2 * REAL, 3 * REAL};
            dr_layer_layout with = dense(batch, T), without = packed(batch * REAL, offsets, batch);
            if (batch == 1)
                without = dense(1, REAL);
            with.mask = mask;
            trial want = trial_make(&layer, &without, false, &r),
                  got = trial_plain(&layer, &with, false);
            got.v[S_x] = floats(got.n[S_x], NAN);
            got.v[S_dy] = floats(got.n[S_dy], NAN);
            for (int64_t m = 0; m < batch * T; m++) {
                int64_t row = m / T * REAL + m % T - pads[i];
                mask[m] = m % T >= pads[i];
                if (!mask[m])
                    continue;
                memcpy(got.v[S_x] + m * hidden, want.v[S_x] + row * hidden,
                       sizeof(float) * (size_t)hidden);
                memcpy(got.v[S_dy] + m * hidden, want.v[S_dy] + row * hidden,
                       sizeof(float) * (size_t)hidden);
            }
            trial_run(&want);
            trial_run(&got);
            for (int64_t m = 0; m < batch * T; m++) {
                int64_t row = m / T * REAL + m % T - pads[i];
                const float *zero = floats(hidden, 0);
                const float *y = mask[m] ? want.v[S_y] + row * hidden : zero;
                const float *dx = mask[m] ? want.v[S_dx] + row * hidden : zero;
                expect_bits("padding", "y", got.v[S_y] + m * hidden, y, hidden);
                expect_bits("padding", "dx", got.v[S_dx] + m * hidden, dx, hidden);
            }
            for (int32_t m = 0; m < layer.n; m++)
                expect_bits("padding", param_name(&layer, m), got.grad[m], want.grad[m],
                            layer.count[m]);
        }
        dr_layer_destroy(layer.layer);
    }
}

/* 200 tokens at once against 97, 3 and 100, both states handed on. */
static void test_A15_later_windows(void **state)
{
    (void)state;
    static const int64_t cuts[] = {0, 97, 100, 200};
    FOR_EACH_LAYER(b, kind)
    {
        rng r = {95};
        block layer = layer_of(b, *kind, &r);
        dr_layer_layout all = dense(1, 200);
        trial whole = trial_make(&layer, &all, true, &r);
        trial_run(&whole);
        float *conv = whole.v[S_conv_in], *recurrent = whole.v[S_state_in];
        trial part;
        for (int i = 0; i < 3; i++) {
            dr_layer_layout some = dense(1, cuts[i + 1] - cuts[i]);
            part = trial_make(&layer, &some, true, &r);
            take_rows(&part, &whole, cuts[i]);
            part.v[S_conv_in] = conv;
            part.v[S_state_in] = recurrent;
            trial_run(&part);
            expect_close("window", "y", part.v[S_y],
                         doubles_of(whole.v[S_y] + cuts[i] * layer.c.hidden, part.n[S_y]),
                         part.n[S_y], 1e-5);
            conv = part.v[S_conv_out];
            recurrent = part.v[S_state_out];
        }
        expect_close("window", "conv_out", conv,
                     doubles_of(whole.v[S_conv_out], part.n[S_conv_out]), part.n[S_conv_out], 1e-5);
        expect_close("window", "state_out", recurrent,
                     doubles_of(whole.v[S_state_out], part.n[S_state_out]), part.n[S_state_out],
                     1e-5);
        dr_layer_destroy(layer.layer);
    }
}

/* <y, dy> in fp64. */
static double loss(trial *t)
{
    double sum = 0;
    trial_run(t);
    for (int64_t i = 0; i < t->n[S_y]; i++)
        sum += (double)t->v[S_y][i] * t->v[S_dy][i];
    return sum;
}

/* Every parameter's gradient against central differences, so that what is recomputed on the way
 * back is what went forward. */
static void test_A16_gradients_of_parameters(void **state)
{
    (void)state;
    FOR_EACH_LAYER(b, kind)
    {
        rng r = {96};
        block layer = layer_of(b, *kind, &r);
        dr_layer_layout some = dense(1, 7);
        trial t = trial_make(&layer, &some, false, &r);
        trial_run(&t);
        float *grad[MAX_PARAMS];
        memcpy(grad, t.grad, sizeof grad);
        for (int32_t i = 0; i < layer.n; i++) {
            float *p = layer.params[i].data, *kept_values = drawn(&r, layer.count[i], 0);
            float *along = drawn(&r, layer.count[i], 1);
            memcpy(kept_values, p, sizeof *p * (size_t)layer.count[i]);
            double side[2], want, got = 0, size = 0, h = 2e-3;
            for (int s = 0; s < 2; s++) {
                for (int64_t m = 0; m < layer.count[i]; m++)
                    p[m] = kept_values[m] + (float)(s ? -h : h) * along[m];
                side[s] = loss(&t);
            }
            memcpy(p, kept_values, sizeof *p * (size_t)layer.count[i]);
            want = (side[0] - side[1]) / (2 * h);
            for (int64_t m = 0; m < layer.count[i]; m++) {
                got += (double)grad[i][m] * along[m];
                size += (double)grad[i][m] * grad[i][m];
            }
            size = sqrt(size * (double)layer.count[i]);
            if (!(fabs(got - want) <= 5e-3 * size + 1e-3))
                fail_msg("%s: %g by differences, %g by the adjoint", param_name(&layer, i), want,
                         got);
            assert_true(size > 0);
        }
        dr_layer_destroy(layer.layer);
    }
}

typedef struct caller {
    pthread_t thread;
    trial t;
    const dr_layer_plan *plan;
    float *y;
    dr_status status;
} caller;

static void *call_forward(void *arg)
{
    caller *c = arg;
    dr_layer_io io = io_inputs(&c->t);
    dr_buffers buffers;
    c->status = dr_layer_buffers_create(c->plan, &buffers);
    if (c->status != DR_OK)
        return NULL;
    io.y = slot_view(&c->t, S_y, c->y);
    for (int n = 0; n < 10 && c->status == DR_OK; n++)
        c->status = dr_layer_forward(c->plan, &io, &buffers);
    dr_buffers_destroy(&buffers);
    return NULL;
}

/* Eight host threads in one layer at once, matrix products and all. */
static void test_A36_many_callers(void **state)
{
    (void)state;
    enum { CALLERS = 8 };
    FOR_EACH_LAYER(b, kind)
    {
        rng r = {97};
        dr_layer_config c = config_of(*kind);
        c.heads = c.value_heads = 3;
        c.hidden = 64;
        block layer = block_make(ctx[b], &c, &r);
        dr_layer_layout some = dense(1, 50);
        trial t = trial_make(&layer, &some, false, &r);
        dr_layer_plan *plan;
        MUST(dr_layer_plan_create(layer.layer, &some, &plan));
        caller callers[CALLERS + 1];
        for (int i = 0; i <= CALLERS; i++)
            callers[i] = (caller){.t = t, .plan = plan, .y = floats(t.n[S_y], NAN)};
        call_forward(&callers[CALLERS]);
        for (int i = 0; i < CALLERS; i++)
            assert_int_equal(pthread_create(&callers[i].thread, NULL, call_forward, &callers[i]),
                             0);
        for (int i = 0; i < CALLERS; i++)
            pthread_join(callers[i].thread, NULL);
        for (int i = 0; i <= CALLERS; i++) {
            assert_int_equal(callers[i].status, DR_OK);
            expect_bits("many callers", "y", callers[i].y, callers[CALLERS].y, t.n[S_y]);
        }
        dr_layer_plan_destroy(plan);
        dr_layer_destroy(layer.layer);
    }
}

/* Forms that look alike are told apart by name, and there is no default where models differ. */
static void test_A39_forms(void **state)
{
    (void)state;
    dr_layer *layer;
    dr_layer_config c = config_of(DR_LAYER_KDA);
    c.gate = (dr_gate)0;
    c.lower_bound = 0;
    REFUSED(dr_layer_create(ctx[0], &c, &layer), DR_ERR_ARG, "gate");
    c.gate = DR_GATE_LOWER_BOUND;
    REFUSED(dr_layer_create(ctx[0], &c, &layer), DR_ERR_ARG, "lower_bound");
    c = config_of(DR_LAYER_GDN);
    c.gate = DR_GATE_LOWER_BOUND;
    c.lower_bound = -5;
    REFUSED(dr_layer_create(ctx[0], &c, &layer), DR_ERR_ARG, "gate");
    FOR_EACH_LAYER(b, kind)
    { /* without a gate's logits, SiLU (GDN) closes it and sigmoid (KDA) leaves it half open */
        rng r = {98};
        block made = layer_of(b, *kind, &r);
        for (int32_t i = 0; i < made.n; i++) {
            const char *name = param_name(&made, i);
            bool output_gate = *kind == DR_LAYER_GDN ? strstr(name, "in_proj_z") != NULL
                                                     : strncmp(name, "g_", 2) == 0;
            if (output_gate)
                memset(made.params[i].data, 0, sizeof(float) * (size_t)made.count[i]);
        }
        dr_layer_layout some = dense(1, 4);
        trial t = trial_make(&made, &some, false, &r);
        trial_run(&t);
        double size = 0;
        for (int64_t i = 0; i < t.n[S_y]; i++)
            size += fabs((double)t.v[S_y][i]);
        assert_true(*kind == DR_LAYER_GDN ? size == 0 : size > 0.1);
        dr_layer_destroy(made.layer);
    }
}

static unsigned char *read_file(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    unsigned char *data = malloc(1 << 20);
    assert_non_null(data);
    *size = fread(data, 1, 1 << 20, f);
    fclose(f);
    return data;
}

/* Load and save is the identity, A_log and dt_bias included; a norm weight shared by all heads
 * gets the sum of the gradients of any split of the heads. */
static void test_A40_loading_and_shared_weights(void **state)
{
    (void)state;
    char first[] = "/tmp/dr_fields_XXXXXX", second[64];
    int fd = mkstemp(first);
    assert_true(fd >= 0);
    close(fd);
    snprintf(second, sizeof second, "%s.again", first);
    FOR_EACH_LAYER(b, kind)
    {
        rng r = {99};
        block layer = layer_of(b, *kind, &r);
        dr_weights_entry entries[MAX_PARAMS], again[MAX_PARAMS];
        for (int32_t i = 0; i < layer.n; i++)
            entries[i] = (dr_weights_entry){param_name(&layer, i), layer.params[i]};
        MUST(dr_weights_write(first, entries, layer.n, NULL, 0));
        dr_weights *w;
        MUST(dr_weights_open(first, &w));
        assert_int_equal(dr_weights_count(w), layer.n);
        for (int32_t i = 0; i < layer.n; i++) {
            again[i].name = entries[i].name;
            MUST(dr_weights_find(w, entries[i].name, &again[i].tensor));
            assert_memory_equal(again[i].tensor.data, layer.params[i].data,
                                sizeof(float) * (size_t)layer.count[i]);
        }
        MUST(dr_weights_write(second, again, layer.n, NULL, 0));
        size_t n1, n2;
        unsigned char *one = read_file(first, &n1), *two = read_file(second, &n2);
        assert_int_equal(n1, n2);
        assert_memory_equal(one, two, n1);
        free(one);
        free(two);
        dr_weights_close(w);
        dr_layer_destroy(layer.layer);
    }
    unlink(first);
    unlink(second);
    for (int b = 0; b < 2; b++) {
        enum { T = 5, HV = 4, V = 6 };
        rng r = {100};
        float *x = drawn(&r, T * HV * V, 1), *z = drawn(&r, T * HV * V, 1),
              *dy = drawn(&r, T * HV * V, 1);
        float w[V] = {1, 2, 3, 4, 5, 6}, whole[V], part[2][V];
        for (int i = 0; i < 3; i++) { /* all heads, the first half, the second half */
            int from = i == 2 ? HV / 2 : 0, heads = i == 0 ? HV : HV / 2;
            dr_norm_args a = DR_NORM_ARGS_INIT;
            a.activation = DR_ACT_SILU;
            dr_tensor *all[] = {&a.x, &a.gate, &a.dy};
            float *const data[] = {x, z, dy};
            for (int m = 0; m < 3; m++)
                *all[m] = view_cut(dr_tensor_make(data[m], DR_F32, 3, T, HV, V, 0), 1, from,
                                   from + heads);
            a.weight = dr_tensor_make(w, DR_F32, 1, V, 0, 0, 0);
            a.dweight = dr_tensor_make(i == 0 ? whole : part[i - 1], DR_F32, 1, V, 0, 0, 0);
            MUST(dr_gated_norm_backward(ctx[b], &a));
        }
        for (int v = 0; v < V; v++)
            assert_true(fabs(whole[v] - part[0][v] - part[1][v]) < 1e-5);
    }
}

static int open_contexts(void **state)
{
    (void)state;
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    for (int b = 0; b < 2; b++)
        if (dr_context_create(names[b], &options, &ctx[b]) != DR_OK)
            return 1;
    return 0;
}

static int close_contexts(void **state)
{
    (void)state;
    for (int b = 0; b < 2; b++)
        dr_context_destroy(ctx[b]);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_A09_layers_know_their_documents, forget),
        cmocka_unit_test_teardown(test_A10_boundaries_left_over, forget),
        cmocka_unit_test_teardown(test_A11_mask_and_boundaries, forget),
        cmocka_unit_test_teardown(test_A13_padding, forget),
        cmocka_unit_test_teardown(test_A15_later_windows, forget),
        cmocka_unit_test_teardown(test_A16_gradients_of_parameters, forget),
        cmocka_unit_test_teardown(test_A36_many_callers, forget),
        cmocka_unit_test_teardown(test_A39_forms, forget),
        cmocka_unit_test_teardown(test_A40_loading_and_shared_weights, forget),
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
