/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ops_conv.c - the convolution of backend cpu: against backend ref over widths, dilations,
 * element types, strides, packed sequences and states; by hand where a value is known.
 */
#include "ops_trial.h"

static dr_status conv_forward(const dr_context *c, const void *args) { return dr_conv(c, args); }
static dr_status conv_backward(const dr_context *c, const void *args)
{
    return dr_conv_backward(c, args);
}

typedef struct conv_case {
    int64_t B, T, D, W;
    int32_t dilation;
    const int64_t *offsets;
    int64_t sequences;
    dr_activation activation;
    bool bias, initial, final, wide_initial, wide_final, dy, d_final;
    dr_dtype dtype, state_dtype, weight_dtype;
    layout how;
    bool channel_major; /* of the tensors of tokens */
} conv_case;

#define ADD(slot, use, dtype, rank, a, b, c, d) \
    trial_add(&x, #slot, offsetof(dr_conv_args, slot), use, dtype, rank, a, b, c, d)

static void check_conv(const conv_case *k, rng *r)
{
    dr_conv_args a = DR_CONV_ARGS_INIT;
    a.activation = k->activation;
    a.dilation = k->dilation;
    a.offsets = k->offsets;
    a.sequences = k->offsets ? k->sequences : 0;
    int64_t B = k->B, T = k->T, D = k->D, W = k->W, N = k->offsets ? k->sequences : B;
    int64_t halo = (W - 1) * k->dilation, wi = halo + k->wide_initial, wf = halo + k->wide_final;
    trial x = {.forward = conv_forward, .backward = conv_backward, .args = &a, .how = k->how};
    snprintf(x.what, sizeof x.what,
             "conv B %lld T %lld D %lld W %lld dilation %d N %lld act %d bias %d states %d%d "
             "wide %d%d %s layout %d", (long long)B, (long long)T, (long long)D, (long long)W,
             k->dilation, (long long)N,
             (int)k->activation, k->bias, k->initial, k->final, k->wide_initial, k->wide_final,
             dr_dtype_name(k->dtype), (int)k->how);
    ADD(x, INPUT, k->dtype, 3, B, T, D, 0);
    ADD(weight, INPUT, k->weight_dtype, 2, D, W, 0, 0)->spread = 1 / sqrt((double)W);
    ADD(y, OUTPUT, k->dtype, 3, B, T, D, 0);
    ADD(dx, OUTPUT, k->dtype, 3, B, T, D, 0);
    ADD(dweight, OUTPUT, k->weight_dtype, 2, D, W, 0, 0);
    if (k->dy)
        ADD(dy, INPUT, k->dtype, 3, B, T, D, 0);
    if (k->bias) {
        ADD(bias, INPUT, k->weight_dtype, 1, D, 0, 0, 0);
        ADD(dbias, OUTPUT, k->weight_dtype, 1, D, 0, 0, 0);
    }
    if (k->initial) {
        ADD(initial_state, INPUT, k->state_dtype, 3, N, D, wi, 0);
        ADD(d_initial_state, OUTPUT, k->state_dtype, 3, N, D, wi, 0);
    }
    if (k->final)
        ADD(final_state, OUTPUT, k->state_dtype, 3, N, D, wf, 0);
    if (k->final && k->d_final)
        ADD(d_final_state, INPUT, k->state_dtype, 3, N, D, wf, 0);
    for (int i = 0; i < x.n; i++)
        x.arg[i].swap = k->channel_major && x.arg[i].rank == 3 && x.arg[i].shape[2] == D &&
                        x.arg[i].shape[1] == T;
    check_trial(&x, r);
}

static conv_case draw_conv(rng *r)
{
    conv_case k = {.B = 1 + rng_below(r, 3), .T = rng_below(r, 20), .D = 1 + rng_below(r, 40),
                   .W = 1 + rng_below(r, 6), .dilation = (int32_t)(1 + rng_below(r, 3))};
    k.activation = rng_below(r, 2) ? DR_ACT_SILU : DR_ACT_NONE;
    bool *flags[] = {&k.bias, &k.initial, &k.final, &k.wide_initial, &k.wide_final, &k.d_final};
    for (size_t i = 0; i < DR_COUNT(flags); i++)
        *flags[i] = rng_below(r, 2) == 1;
    k.dy = rng_below(r, 8) != 0;
    k.dtype = RNG_PICK(r, dtypes);
    k.state_dtype = RNG_PICK(r, dtypes);
    k.weight_dtype = RNG_PICK(r, dtypes);
    k.how = (layout)rng_below(r, LAYOUT_ANY + 1);
    return k;
}

static void test_conv_random(void **state)
{
    (void)state;
    static const int64_t packed[][6] = {
        {0, 1, 1, 9, 13, 15}, {0, 0, 0, 7, 7, 8}, {0, 2, 5, 5, 6, 6}};
    for (uint64_t seed = 0; seed < 200; seed++) {
        rng r = {seed};
        conv_case k = draw_conv(&r);
        if (seed % 2) {
            k.B = 1;
            k.offsets = packed[seed / 2 % 3];
            k.sequences = 5;
            k.T = k.offsets[5] + rng_below(&r, 4);
        }
        check_conv(&k, &r);
    }
}

/* All widths, dilations, layouts of interest with everything on; then sizes at which work is
 * cut: blocks of tokens, of channels, groups of taps. */
static void test_conv_sizes(void **state)
{
    (void)state;
    static const int64_t packed[] = {0, 1, 1, 6, 11, 13};
    static const int64_t long_packed[] = {0, 3, 255, 257, 257, 700};
    const conv_case full = {.B = 1, .T = 14, .D = 19, .activation = DR_ACT_SILU, .bias = true,
                            .initial = true, .final = true, .dy = true, .d_final = true,
                            .dtype = DR_F32, .state_dtype = DR_F32, .weight_dtype = DR_F32};
    rng r = {1};
    for (int64_t W = 1; W <= 6; W++)
        for (int32_t dilation = 1; dilation <= 3; dilation++)
            for (int packing = 0; packing < 2; packing++) {
                conv_case k = full;
                k.W = W;
                k.dilation = dilation;
                k.offsets = packing ? packed : NULL;
                k.sequences = 5;
                k.B = packing ? 1 : 2;
                check_conv(&k, &r);
                k.wide_initial = k.wide_final = true;
                k.dtype = DR_BF16;
                check_conv(&k, &r);
            }
    const struct {
        int64_t T, D, W;
        int32_t dilation;
        const int64_t *offsets;
        layout how;
    } sizes[] = {
        {703, 24, 4, 1, long_packed, LAYOUT_DENSE},  {600, 16, 4, 1, NULL, LAYOUT_TURNED},
        {40, 700, 4, 1, NULL, LAYOUT_DENSE},         {300, 17, 4, 2, NULL, LAYOUT_PADDED},
        {90, 5, 40, 1, NULL, LAYOUT_DENSE},
        {300, 40, 70, 2, long_packed + 1, LAYOUT_DENSE},
        {20, 33, 3, 50, NULL, LAYOUT_DENSE},
    };
    /* Channel-major: by lines, in tiles where the width or the sequences forbid it. */
    static const int64_t many[] = {0, 1, 1, 600, 1030, 2100};
    const struct {
        int64_t B, T, W;
        int32_t dilation;
        bool packed, bf16;
    } turned[] = {
        {2, 1100, 4, 1, false, false}, {1, 2103, 4, 1, true, true},   {1, 2103, 3, 2, true, false},
        {1, 2100, 4, 80, true, false}, {2, 70, 4, 20, false, true},   {1, 70, 40, 1, false, false},
        {3, 20, 4, 1, false, false},   {1, 1100, 30, 10, false, true},
    };
    for (size_t i = 0; i < DR_COUNT(turned); i++)
        for (int act = 0; act < 2; act++) {
            conv_case k = full;
            k.B = turned[i].B, k.T = turned[i].T, k.D = 5, k.W = turned[i].W;
            k.dilation = turned[i].dilation;
            k.offsets = turned[i].packed ? many : NULL;
            k.sequences = 5;
            k.activation = act ? DR_ACT_SILU : DR_ACT_NONE;
            k.dtype = turned[i].bf16 ? DR_BF16 : DR_F32;
            k.wide_initial = act;
            k.channel_major = true;
            check_conv(&k, &r);
        }
    for (size_t i = 0; i < DR_COUNT(sizes); i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            static const int64_t two[] = {0, 255, 290};
            conv_case k = full;
            k.T = sizes[i].T, k.D = sizes[i].D, k.W = sizes[i].W;
            k.dilation = sizes[i].dilation;
            k.offsets = sizes[i].offsets == long_packed + 1 ? two : sizes[i].offsets;
            k.sequences = k.offsets == two ? 2 : 5;
            k.how = sizes[i].how;
            k.dtype = bf16 ? DR_BF16 : DR_F32;
            check_conv(&k, &r);
        }
}

/* Boundaries hold, nothing leaks from before a sequence. */
static void test_conv_by_hand(void **state)
{
    (void)state;
    const int64_t two[] = {0, 2, 5};
    float x[] = {1, 2, 3, 4, 5}, w[] = {1, 10, 100, 1000}, y[5];
    dr_conv_args a = DR_CONV_ARGS_INIT;
    a.x = f32(x, 3, 1, 5, 1);
    a.weight = f32(w, 2, 1, 4, 0);
    a.y = f32(y, 3, 1, 5, 1);
    a.offsets = two;
    a.sequences = 2;
    MUST(dr_conv(cpu[0], &a));
    EXPECT(y, 1000, 2100, 3000, 4300, 5430);

    const int64_t skip[] = {0, 2, 5}; /* two tokens of padding as a sequence of their own */
    float padded[] = {9, 9, 1, 2, 3};
    a.x = f32(padded, 3, 1, 5, 1);
    a.offsets = skip;
    MUST(dr_conv(cpu[0], &a));
    const float real[] = {y[2], y[3], y[4]};
    EXPECT(real, 1000, 2100, 3210);
}

/* init = (a, b, c) and all combinations of states: the same y, dx, dw, d_init. */
static void test_conv_states(void **state)
{
    (void)state;
    for (int final = 0; final < 2; final++)
        for (int initial = 0; initial < 2; initial++) {
            float x[] = {5, 7}, w[] = {1, 2, 3, 4}, init[] = {2, 3, 11}, out[3] = {0}, y[2], dx[2];
            float dw[4], d_init[] = {0, 0, 0}, one[] = {1, 1};
            dr_conv_args a = DR_CONV_ARGS_INIT;
            a.x = f32(x, 3, 1, 2, 1);
            a.weight = f32(w, 2, 1, 4, 0);
            a.y = f32(y, 3, 1, 2, 1);
            a.dy = f32(one, 3, 1, 2, 1);
            a.dx = f32(dx, 3, 1, 2, 1);
            a.dweight = f32(dw, 2, 1, 4, 0);
            if (initial) {
                a.initial_state = f32(init, 3, 1, 1, 3);
                a.d_initial_state = f32(d_init, 3, 1, 1, 3);
            }
            if (final)
                a.final_state = f32(out, 3, 1, 1, 3);
            MUST(dr_conv(cpu[0], &a));
            MUST(dr_conv_backward(cpu[0], &a));
            EXPECT(dx, 7, 4);
            if (initial) {
                EXPECT(y, 2 + 6 + 33 + 20, 3 + 22 + 15 + 28);
                EXPECT(d_init, 1, 3, 5);
                EXPECT(dw, 5, 14, 16, 12);
            } else {
                EXPECT(y, 20, 15 + 28);
                EXPECT(dw, 0, 0, 5, 12);
            }
            if (final && initial)
                EXPECT(out, 11, 5, 7);
            if (final && !initial)
                EXPECT(out, 0, 5, 7);
        }
}

/* Pools: slots by index, -1 starts from zero and stores nothing; in place as if apart. */
static void test_conv_pool(void **state)
{
    (void)state;
    enum { N = 4, SLOTS = 6, D = 21, W = 4 };
    const int32_t index[N] = {5, -1, 0, 3};
    rng r = {3};
    for (int wide = 0; wide < 2; wide++)
        for (int64_t T = 0; T < 6; T++) {
            const int64_t columns = W - 1 + wide;
            float x[N * 5 * D], w[D * W], y[2][N * 5 * D], pool[2][SLOTS * D * W];
            for (size_t i = 0; i < DR_COUNT(x); i++)
                x[i] = (float)rng_normal(&r);
            for (size_t i = 0; i < DR_COUNT(w); i++)
                w[i] = (float)rng_normal(&r);
            for (size_t i = 0; i < DR_COUNT(pool[0]); i++)
                pool[0][i] = pool[1][i] = (float)rng_normal(&r);
            float before[SLOTS * D * W];
            memcpy(before, pool[0], sizeof before);
            dr_conv_args a = DR_CONV_ARGS_INIT;
            a.activation = DR_ACT_SILU;
            a.x = f32(x, 3, N, T, D);
            a.weight = f32(w, 2, D, W, 0);
            a.initial_state = f32(before, 3, SLOTS, D, columns);
            a.final_state = f32(pool[0], 3, SLOTS, D, columns);
            a.y = f32(y[0], 3, N, T, D);
            a.state_index = index;
            MUST(dr_conv_step(cpu[1], &a));
            a.initial_state = a.final_state = f32(pool[1], 3, SLOTS, D, columns);
            a.y = f32(y[1], 3, N, T, D);
            MUST(dr_conv_step(cpu[2], &a));
            assert_memory_equal(pool[0], pool[1], sizeof pool[0]);
            assert_memory_equal(y[0], y[1], (size_t)(N * T * D) * sizeof(float));
            /* Slots 1, 2 and 4 belong to nobody. */
            for (int slot = 1; slot <= 4; slot += slot == 1 ? 1 : 2)
                assert_memory_equal(pool[0] + slot * D * columns, before + slot * D * columns,
                                    (size_t)(D * columns) * sizeof(float));
            for (int64_t d = 0; d < D && T > 0; d++) { /* the padding sequence saw zeros before */
                double p = (double)w[d * W + W - 1] * x[T * D + d], want = p / (1 + exp(-p));
                assert_true(fabs(y[0][T * D + d] - want) <= 1e-6 * fabs(want));
            }
            if (T == 1) /* the state moved by one column */
                assert_true(pool[0][5 * D * columns] == before[5 * D * columns + 1] &&
                            pool[0][5 * D * columns + columns - 1] == x[0]);
        }
}

/* One call against three, states handed on. */
static void test_conv_in_pieces(void **state)
{
    (void)state;
    enum { T = 200, D = 40, W = 4 };
    static float x[T * D], w[D * W], whole[T * D], parts[T * D], last[D * 3], carried[D * 3];
    const int64_t cuts[] = {0, 97, 100, 200};
    rng r = {4};
    for (int i = 0; i < T * D; i++)
        x[i] = (float)rng_normal(&r);
    for (int i = 0; i < D * W; i++)
        w[i] = (float)rng_normal(&r);
    dr_conv_args a = DR_CONV_ARGS_INIT;
    a.activation = DR_ACT_SILU;
    a.weight = f32(w, 2, D, W, 0);
    a.x = f32(x, 3, 1, T, D);
    a.y = f32(whole, 3, 1, T, D);
    a.final_state = f32(last, 3, 1, D, 3);
    MUST(dr_conv(cpu[0], &a));
    memset(carried, 0, sizeof carried);
    a.initial_state = a.final_state = f32(carried, 3, 1, D, 3);
    for (int i = 0; i < 3; i++) {
        a.x = f32(x + cuts[i] * D, 3, 1, cuts[i + 1] - cuts[i], D);
        a.y = f32(parts + cuts[i] * D, 3, 1, cuts[i + 1] - cuts[i], D);
        MUST(dr_conv(cpu[0], &a));
    }
    assert_memory_equal(whole, parts, sizeof whole);
    assert_memory_equal(last, carried, sizeof last);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conv_by_hand),
        cmocka_unit_test(test_conv_states),
        cmocka_unit_test(test_conv_pool),
        cmocka_unit_test(test_conv_in_pieces),
        cmocka_unit_test(test_conv_sizes),
        cmocka_unit_test(test_conv_random),
    };
    return cmocka_run_group_tests(tests, contexts_open, contexts_close);
}
