/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_finite_rows.c - every gradient of the row operations on backend ref, both states of
 * the convolution among them, against differences (finite.h).
 */
#include "finite.h"

#include <deltarule/ops.h>

/* ---- convolution -------------------------------------------------------------------- */

static double conv_loss(void *op)
{
    const dr_conv_args *a = op;
    MUST(dr_conv(ctx, a));
    return share(&a->y, &a->dy) + share(&a->final_state, &a->d_final_state);
}

typedef struct conv_row {
    int64_t width;
    int32_t dilation;
    dr_activation activation;
    int64_t extra; /* columns of the states beyond the halo */
    bool bias, packed, states;
} conv_row;

static void check_conv(const conv_row *row)
{
    char what[96];
    snprintf(what, sizeof what, "conv width %lld, dilation %d, activation %d, extra %lld%s",
             (long long)row->width, row->dilation, (int)row->activation, (long long)row->extra,
             row->packed ? ", packed" : "");
    rng r = {(uint64_t)row->width};
    int64_t D = 3, B = row->packed ? 1 : 2, N = row->packed ? SEQUENCES : B;
    int64_t W = row->width, halo = (W - 1) * row->dilation + row->extra;
    dr_conv_args a = DR_CONV_ARGS_INIT;
    a.activation = row->activation;
    a.dilation = row->dilation;
    if (row->packed) {
        a.offsets = packed_offsets;
        a.sequences = N;
    }
    a.x = f64(normals(&r, B * T * D), 3, B, T, D, 0);
    a.weight = f64(normals(&r, D * W), 2, D, W, 0, 0);
    if (row->bias)
        a.bias = f64(normals(&r, D), 1, D, 0, 0, 0);
    a.y = f64(unwritten(B * T * D), 3, B, T, D, 0);
    a.dy = f64(normals(&r, B * T * D), 3, B, T, D, 0);
    if (row->states) {
        a.initial_state = f64(normals(&r, N * D * halo), 3, N, D, halo, 0);
        a.final_state = f64(unwritten(N * D * halo), 3, N, D, halo, 0);
        a.d_final_state = f64(normals(&r, N * D * halo), 3, N, D, halo, 0);
    }
    a.dx = gradient_of(&a.x);
    a.dweight = gradient_of(&a.weight);
    a.dbias = gradient_of(&a.bias);
    a.d_initial_state = gradient_of(&a.initial_state);
    MUST(dr_conv_backward(ctx, &a));
    const leaf leaves[] = {
        leaf_of("dx", &a.x, &a.dx),
        leaf_of("dweight", &a.weight, &a.dweight),
        leaf_of("dbias", &a.bias, &a.dbias),
        leaf_of("d_initial_state", &a.initial_state, &a.d_initial_state),
    };
    check_leaves(what, leaves, DR_COUNT(leaves), conv_loss, &a);
    arrays_free();
}

static void test_conv(void **state)
{
    (void)state;
    static const conv_row rows[] = {
        {4, 1, DR_ACT_SILU, 0, true, false, true},  {4, 1, DR_ACT_SILU, 1, true, true, true},
        {4, 1, DR_ACT_NONE, 0, false, true, true},  {4, 1, DR_ACT_SILU, 0, false, true, false},
        {3, 2, DR_ACT_SILU, 1, true, true, true},   {3, 5, DR_ACT_SILU, 1, true, false, true},
        {3, 5, DR_ACT_NONE, 0, true, true, true},   {2, 3, DR_ACT_SILU, 0, true, true, true},
        {1, 1, DR_ACT_SILU, 1, true, true, true},   {5, 1, DR_ACT_SILU, 0, true, false, false},
        {12, 1, DR_ACT_SILU, 0, true, false, true}, {12, 1, DR_ACT_SILU, 1, false, true, true},
    };
    for (size_t i = 0; i < DR_COUNT(rows); i++)
        check_conv(&rows[i]);
}

/* ---- the other rows ----------------------------------------------------------------- */

static double gate_loss(void *op)
{
    const dr_gate_args *a = op;
    MUST(dr_gate_activate(ctx, a));
    return share(&a->g, &a->dg);
}

static void check_gate(const gate_row *row, int64_t width)
{
    rng r = {(uint64_t)width};
    int32_t rank = width > 1 ? 4 : 3;
    dr_gate_args a = DR_GATE_ARGS_INIT;
    a.gate = row->gate;
    a.lower_bound = row->gate == DR_GATE_LOWER_BOUND ? -5 : 0;
    a.x = f64(normals(&r, 2 * T * HV * width), rank, 2, T, HV, width);
    if (row->a_log)
        a.a_log = f64(uniforms(&r, HV, -1, 1), 1, HV, 0, 0, 0);
    if (row->dt_bias)
        a.dt_bias = f64(normals(&r, HV * width), rank - 2, HV, width, 0, 0);
    a.g = gradient_of(&a.x);
    a.dg = f64(normals(&r, count(&a.x)), rank, 2, T, HV, width);
    a.dx = gradient_of(&a.x);
    a.da_log = gradient_of(&a.a_log);
    a.ddt_bias = gradient_of(&a.dt_bias);
    MUST(dr_gate_backward(ctx, &a));
    const leaf leaves[] = {
        leaf_of("dx", &a.x, &a.dx),
        leaf_of("da_log", &a.a_log, &a.da_log),
        leaf_of("ddt_bias", &a.dt_bias, &a.ddt_bias),
    };
    check_leaves(row->name, leaves, DR_COUNT(leaves), gate_loss, &a);
    arrays_free();
}

static void test_gate(void **state)
{
    (void)state;
    for (size_t i = 0; i < DR_COUNT(gates); i++)
        for (int64_t width = 1; gates[i].gate >= DR_GATE_SOFTPLUS && width <= K; width += K - 1)
            check_gate(&gates[i], width);
}

static double beta_loss(void *op)
{
    const dr_beta_args *a = op;
    MUST(dr_beta_sigmoid(ctx, a));
    return share(&a->beta, &a->dbeta);
}

static void test_beta(void **state)
{
    (void)state;
    for (int scale = 1; scale <= 2; scale++) {
        rng r = {7};
        dr_beta_args a = DR_BETA_ARGS_INIT;
        a.scale = scale;
        a.x = f64(normals(&r, T * HV), 2, T, HV, 0, 0);
        a.beta = gradient_of(&a.x);
        a.dbeta = f64(normals(&r, T * HV), 2, T, HV, 0, 0);
        a.dx = gradient_of(&a.x);
        MUST(dr_beta_backward(ctx, &a));
        const leaf leaves[] = {leaf_of("dx", &a.x, &a.dx)};
        check_leaves("beta", leaves, 1, beta_loss, &a);
        arrays_free();
    }
}

static double l2norm_loss(void *op)
{
    const dr_l2norm_args *a = op;
    MUST(dr_l2norm(ctx, a));
    return share(&a->y, &a->dy);
}

static void test_l2norm(void **state)
{
    (void)state;
    rng r = {8};
    dr_l2norm_args a = DR_L2NORM_ARGS_INIT;
    a.eps = 0.1; /* large, so that it counts */
    a.x = f64(normals(&r, T * H * K), 3, T, H, K, 0);
    a.y = gradient_of(&a.x);
    a.dy = f64(normals(&r, T * H * K), 3, T, H, K, 0);
    a.dx = gradient_of(&a.x);
    MUST(dr_l2norm_backward(ctx, &a));
    const leaf leaves[] = {leaf_of("dx", &a.x, &a.dx)};
    check_leaves("l2norm", leaves, 1, l2norm_loss, &a);
    arrays_free();
}

static double norm_loss(void *op)
{
    const dr_norm_args *a = op;
    MUST(dr_gated_norm(ctx, a));
    return share(&a->y, &a->dy);
}

static void test_norm(void **state)
{
    (void)state;
    for (dr_activation act = DR_ACT_SILU; act <= DR_ACT_SIGMOID; act++) {
        rng r = {9};
        int64_t D = 67; /* more than one block of channels */
        dr_norm_args a = DR_NORM_ARGS_INIT;
        a.activation = act;
        a.x = f64(normals(&r, 4 * D), 2, 4, D, 0, 0);
        a.gate = f64(normals(&r, 4 * D), 2, 4, D, 0, 0);
        a.weight = f64(normals(&r, D), 1, D, 0, 0, 0);
        a.y = gradient_of(&a.x);
        a.dy = f64(normals(&r, 4 * D), 2, 4, D, 0, 0);
        a.dx = gradient_of(&a.x);
        a.dgate = gradient_of(&a.gate);
        a.dweight = gradient_of(&a.weight);
        MUST(dr_gated_norm_backward(ctx, &a));
        const leaf leaves[] = {
            leaf_of("dx", &a.x, &a.dx),
            leaf_of("dgate", &a.gate, &a.dgate),
            leaf_of("dweight", &a.weight, &a.dweight),
        };
        check_leaves(act == DR_ACT_SILU ? "norm, silu" : "norm, sigmoid", leaves, DR_COUNT(leaves),
                     norm_loss, &a);
        arrays_free();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conv),
        cmocka_unit_test(test_gate),
        cmocka_unit_test(test_beta),
        cmocka_unit_test(test_l2norm),
        cmocka_unit_test(test_norm),
    };
    return cmocka_run_group_tests(tests, finite_setup, finite_teardown);
}
