/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ref_rows.c - row operations of backend ref against numbers that can be computed by
 * hand. Their gradients are in test_finite_rows.c.
 */
#include "test.h"

#include <deltarule/ops.h>

static dr_context *ctx;

static dr_tensor row(double *data, int32_t rank, int64_t a, int64_t b, int64_t c)
{
    return dr_tensor_make(data, DR_F64, rank, a, b, c, 0);
}

#define EXPECT(got, ...)                                                     \
    do {                                                                     \
        const double expect_want[] = {__VA_ARGS__};                          \
        assert_int_equal(DR_COUNT(expect_want), DR_COUNT(got));              \
        expect_near(#got, (got), expect_want, DR_COUNT(expect_want), 1e-15); \
    } while (0)

static void test_conv_by_hand(void **state)
{
    (void)state;
    const int64_t two[] = {0, 2, 5};
    double in[] = {1, 2, 3, 4, 5}, w[] = {1, 10, 100, 1000}, out[5];
    dr_conv_args a = DR_CONV_ARGS_INIT;
    a.x = row(in, 3, 1, 5, 1);
    a.weight = row(w, 2, 1, 4, 0);
    a.y = row(out, 3, 1, 5, 1);
    a.offsets = two;
    a.sequences = 2;
    MUST(dr_conv(ctx, &a));
    EXPECT(out, 1000, 2100, 3000, 4300, 5430);

    double two_taps[] = {1, 10};
    a = (dr_conv_args)DR_CONV_ARGS_INIT;
    a.dilation = 3;
    a.x = row(in, 3, 1, 5, 1);
    a.weight = row(two_taps, 2, 1, 2, 0);
    a.y = row(out, 3, 1, 5, 1);
    MUST(dr_conv(ctx, &a));
    EXPECT(out, 10, 20, 30, 41, 52);

    /* Fewer tokens than the halo: the new state keeps a part of the old one. */
    double state3[] = {7, 8, 9}, dx[2], d_state3[3], up[] = {1, 2, 3, 4}, ones[] = {1, 1};
    double state4[] = {6, 7, 8, 9};
    a = (dr_conv_args)DR_CONV_ARGS_INIT;
    a.x = row(in, 3, 1, 2, 1);
    a.weight = row(up, 2, 1, 4, 0);
    a.y = row(out, 3, 1, 2, 1);
    a.initial_state = a.final_state = row(state3, 3, 1, 1, 3);
    MUST(dr_conv_step(ctx, &a));
    EXPECT(state3, 9, 1, 2);
    const double narrow[] = {out[0], out[1]};
    EXPECT(narrow, 7 + 16 + 27 + 4, 8 + 18 + 3 + 8);
    a.initial_state = a.final_state = row(state4, 3, 1, 1, 4);
    MUST(dr_conv_step(ctx, &a));
    EXPECT(state4, 8, 9, 1, 2);
    assert_true(out[0] == narrow[0] && out[1] == narrow[1]);

    a.y.data = NULL;
    a.initial_state = row(state3, 3, 1, 1, 3);
    a.final_state.data = NULL;
    a.dy = row(ones, 3, 1, 2, 1);
    a.dx = row(dx, 3, 1, 2, 1);
    a.d_initial_state = row(d_state3, 3, 1, 1, 3);
    MUST(dr_conv_backward(ctx, &a));
    EXPECT(dx, 7, 4);
    EXPECT(d_state3, 1, 3, 5);
}

static void test_rows_by_hand(void **state)
{
    (void)state;
    double raw[] = {0, 0}, g[2], logit[] = {0, log(3)}, beta[2], zero[] = {0, 0}, one[] = {1, 1};
    double dx[2];
    dr_gate_args gate = DR_GATE_ARGS_INIT;
    gate.gate = DR_GATE_SOFTPLUS;
    gate.x = row(raw, 3, 1, 2, 1);
    gate.g = row(g, 3, 1, 2, 1);
    gate.a_log = row(zero, 1, 1, 0, 0);
    MUST(dr_gate_activate(ctx, &gate));
    EXPECT(g, -log(2), -log(2));
    gate.gate = DR_GATE_LOWER_BOUND;
    gate.lower_bound = -5;
    MUST(dr_gate_activate(ctx, &gate));
    EXPECT(g, -2.5, -2.5);

    dr_beta_args b = DR_BETA_ARGS_INIT;
    b.scale = 2;
    b.x = row(logit, 1, 2, 0, 0);
    b.beta = row(beta, 1, 2, 0, 0);
    MUST(dr_beta_sigmoid(ctx, &b));
    EXPECT(beta, 1, 1.5);

    dr_l2norm_args l = DR_L2NORM_ARGS_INIT; /* a zero row */
    l.x = row(zero, 1, 2, 0, 0);
    l.y = row(g, 1, 2, 0, 0);
    l.dy = row(one, 1, 2, 0, 0);
    l.dx = row(dx, 1, 2, 0, 0);
    MUST(dr_l2norm(ctx, &l));
    MUST(dr_l2norm_backward(ctx, &l));
    assert_true(g[0] == 0 && g[1] == 0);
    EXPECT(dx, 1000, 1000);
}

/* Transposed operands are views; bf16 in, f64 out. */
static void test_matmul(void **state)
{
    (void)state;
    double a[] = {1, 2, 3, 4, 5, 6}, out[] = {100, 200, 300, 400};
    uint16_t b[6];
    for (int i = 0; i < 6; i++)
        b[i] = dr_f32_to_bf16((float)(i + 1));
    dr_matmul_args m = DR_MATMUL_ARGS_INIT;
    m.a = row(a, 2, 2, 3, 0);
    m.b = (dr_tensor){b, DR_BF16, 2, {3, 2, 0, 0}, {1, 3, 0, 0}};
    m.out = row(out, 2, 2, 2, 0);
    m.alpha = 2;
    m.accumulate = 1;
    MUST(dr_matmul(ctx, &m));
    EXPECT(out, 128, 264, 364, 554);
}

static int setup(void **state)
{
    (void)state;
    return dr_context_create("ref", NULL, &ctx) == DR_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    dr_context_destroy(ctx);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conv_by_hand),
        cmocka_unit_test(test_rows_by_hand),
        cmocka_unit_test(test_matmul),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
