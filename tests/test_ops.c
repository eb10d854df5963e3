/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ops.c - the row operations of backend cpu against backend ref over widths, element
 * types and strides; past 2^31 elements; and from many threads at once. The convolution by
 * itself: test_ops_conv.c. Refused arguments: test_arguments.c.
 */
#include "ops_trial.h"

#include <pthread.h>

/* ---- rows --------------------------------------------------------------------------- */

#define CALL(name, fn) \
    static dr_status name(const dr_context *c, const void *args) { return fn(c, args); }
CALL(gate_forward, dr_gate_activate)
CALL(gate_backward, dr_gate_backward)
CALL(beta_forward, dr_beta_sigmoid)
CALL(beta_backward, dr_beta_backward)
CALL(l2norm_forward, dr_l2norm)
CALL(l2norm_backward, dr_l2norm_backward)
CALL(norm_forward, dr_gated_norm)
CALL(norm_backward, dr_gated_norm_backward)

static void check_gate(rng *r, int64_t B, int64_t T, int64_t HV, int64_t K, layout how)
{
    dr_gate_args a = DR_GATE_ARGS_INIT;
    bool lower = rng_below(r, 2), log = !lower || rng_below(r, 2), bias = rng_below(r, 4) != 0;
    dr_dtype dtype = RNG_PICK(r, dtypes), param = RNG_PICK(r, dtypes);
    a.gate = lower ? DR_GATE_LOWER_BOUND : DR_GATE_SOFTPLUS;
    a.lower_bound = lower ? -5 : 0;
    int32_t rank = K > 1 || rng_below(r, 2) ? 4 : 3;
    double sums = B * T * HV < 300 ? 10 * BUDGET : BUDGET; /* a few terms may cancel */
    trial x = {.forward = gate_forward, .backward = gate_backward, .args = &a, .how = how};
    snprintf(x.what, sizeof x.what, "gate %d B %lld T %lld HV %lld K %lld layout %d", (int)a.gate,
             (long long)B, (long long)T, (long long)HV, (long long)K, (int)how);
#define ADD(slot, use, dtype, rank, a, b, c, d) \
    trial_add(&x, #slot, offsetof(dr_gate_args, slot), use, dtype, rank, a, b, c, d)
    ADD(x, INPUT, dtype, rank, B, T, HV, K)->spread = 4;
    ADD(dg, INPUT, dtype, rank, B, T, HV, K);
    ADD(g, OUTPUT, dtype, rank, B, T, HV, K);
    ADD(dx, OUTPUT, dtype, rank, B, T, HV, K);
    if (log) {
        ADD(a_log, INPUT, param, 1, HV, 0, 0, 0)->spread = 0.5;
        ADD(da_log, OUTPUT, param, 1, HV, 0, 0, 0)->budget = sums;
    }
    if (bias) {
        bool flat = rng_below(r, 2);
        ADD(dt_bias, INPUT, param, flat ? 1 : 2, flat ? HV * K : HV, K, 0, 0)->shift = -1;
        ADD(ddt_bias, OUTPUT, param, flat ? 1 : 2, flat ? HV * K : HV, K, 0, 0)->budget = sums;
    }
#undef ADD
    check_trial(&x, r);
}

static void test_gate(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 120; seed++) {
        rng r = {seed};
        static const int64_t heads[] = {1, 2, 3, 8, 17}, widths[] = {1, 1, 2, 7, 16, 33};
        check_gate(&r, 1 + rng_below(&r, 2), rng_below(&r, 30), RNG_PICK(&r, heads),
                   RNG_PICK(&r, widths), (layout)rng_below(&r, LAYOUT_ANY + 1));
    }
    rng r = {1};
    check_gate(&r, 1, 700, 3, 1, LAYOUT_DENSE); /* 3 heads; many tokens */
    check_gate(&r, 2, 300, 40, 1, LAYOUT_DENSE);
    check_gate(&r, 1, 300, 2, 128, LAYOUT_DENSE);
    check_gate(&r, 1, 3, 2, 1100, LAYOUT_DENSE);
}

/* Every element by itself, far into both tails: relative error, not the tensor's norm. */
static void test_gate_tails(void **state)
{
    (void)state;
    enum { T = 240, HV = 3 };
    static float x[T * HV], g[T * HV];
    float log[HV] = {0, -1.5f, 2}, bias[HV] = {-4.6f, 0.3f, 7.7f};
    for (int i = 0; i < T * HV; i++)
        x[i] = (float)(i / HV - 80) * 0.997f;
    dr_gate_args a = DR_GATE_ARGS_INIT;
    a.gate = DR_GATE_SOFTPLUS;
    a.x = f32(x, 3, 1, T, HV);
    a.g = f32(g, 3, 1, T, HV);
    a.a_log = f32(log, 1, HV, 0, 0);
    a.dt_bias = f32(bias, 1, HV, 0, 0);
    MUST(dr_gate_activate(cpu[0], &a));
    for (int i = 0; i < T * HV; i++) {
        double z = (double)x[i] + bias[i % HV];
        double want = -exp(log[i % HV]) * (fmax(z, 0) + log1p(exp(-fabs(z))));
        if (fabs(g[i] - want) > 1e-6 * fabs(want))
            fail_msg("z = %g: got %.9g, expected %.9g", z, g[i], want);
    }
    const float ends[] = {INFINITY, -INFINITY, NAN};
    memcpy(x, ends, sizeof ends);
    memset(bias, 0, sizeof bias);
    a.x = a.g = f32(x, 3, 1, 1, HV); /* in place */
    MUST(dr_gate_activate(cpu[0], &a));
    assert_true(x[0] == -INFINITY && x[1] == 0 && isnan(x[2]));
}

static void test_beta(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 80; seed++) {
        rng r = {seed};
        dr_beta_args a = DR_BETA_ARGS_INIT;
        dr_dtype dtype = RNG_PICK(&r, dtypes), out = RNG_PICK(&r, dtypes);
        int32_t rank = (int32_t)(1 + rng_below(&r, 4));
        int64_t n[4];
        for (int i = 0; i < 4; i++)
            n[i] = rng_below(&r, 12);
        if (rank == 1 && seed % 2)
            n[0] = 40000;
        a.scale = (double)(seed % 3);
        trial x = {.what = "beta", .forward = beta_forward, .backward = beta_backward, .args = &a,
                   .how = (layout)rng_below(&r, LAYOUT_ANY + 1)};
#define ADD(slot, use, dtype) \
    trial_add(&x, #slot, offsetof(dr_beta_args, slot), use, dtype, rank, n[0], n[1], n[2], n[3])
        ADD(x, INPUT, dtype)->spread = 5;
        ADD(dbeta, INPUT, out);
        ADD(beta, OUTPUT, out);
        ADD(dx, OUTPUT, dtype);
#undef ADD
        check_trial(&x, &r);
    }
}

static void draw_rows(rng *r, int32_t *rank, int64_t *n)
{
    static const int64_t widths[] = {1, 2, 7, 16, 64, 100, 128, 256, 513, 2100};
    *rank = (int32_t)(1 + rng_below(r, 4));
    for (int i = 0; i < 4; i++)
        n[i] = 1 + rng_below(r, i == 2 ? 70 : 4);
    if (rng_below(r, 20) == 0)
        n[0] = 0;
    n[*rank - 1] = RNG_PICK(r, widths);
}

static void test_l2norm(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 80; seed++) {
        rng r = {seed};
        dr_l2norm_args a = DR_L2NORM_ARGS_INIT;
        dr_dtype dtype = RNG_PICK(&r, dtypes);
        int32_t rank;
        int64_t n[4];
        draw_rows(&r, &rank, n);
        a.eps = seed % 2 ? 0 : 1e-3;
        trial x = {.forward = l2norm_forward, .backward = l2norm_backward, .args = &a,
                   .how = (layout)rng_below(&r, LAYOUT_ANY + 1)};
        snprintf(x.what, sizeof x.what, "l2norm seed %d", (int)seed);
#define ADD(slot, use, dtype) \
    trial_add(&x, #slot, offsetof(dr_l2norm_args, slot), use, dtype, rank, n[0], n[1], n[2], n[3])
        ADD(x, INPUT, dtype);
        ADD(dy, INPUT, dtype);
        ADD(y, OUTPUT, dtype);
        ADD(dx, OUTPUT, dtype);
#undef ADD
        if (n[rank - 1] == 1)
            continue; /* the gradient of a sign: all cancellation */
        check_trial(&x, &r);
    }
    float zero[5] = {0}, one[] = {1, 1, 1, 1, 1}, y[5], dx[5];
    dr_l2norm_args a = DR_L2NORM_ARGS_INIT;
    a.x = f32(zero, 1, 5, 0, 0);
    a.y = f32(y, 1, 5, 0, 0);
    a.dy = f32(one, 1, 5, 0, 0);
    a.dx = f32(dx, 1, 5, 0, 0);
    MUST(dr_l2norm(cpu[0], &a));
    MUST(dr_l2norm_backward(cpu[0], &a));
    EXPECT(y, 0, 0, 0, 0, 0);
    EXPECT(dx, 1000, 1000, 1000, 1000, 1000);
}

static void check_norm(rng *r, dr_activation act, int32_t rank, const int64_t *n, layout how)
{
    dr_norm_args a = DR_NORM_ARGS_INIT;
    dr_dtype dtype = RNG_PICK(r, dtypes), param = RNG_PICK(r, dtypes);
    a.activation = act;
    trial x = {.forward = norm_forward, .backward = norm_backward, .args = &a, .how = how};
    snprintf(x.what, sizeof x.what, "gated norm act %d width %lld layout %d", (int)act,
             (long long)n[rank - 1], (int)how);
#define ADD(slot, use, dtype, ...) \
    trial_add(&x, #slot, offsetof(dr_norm_args, slot), use, dtype, __VA_ARGS__)
    ADD(x, INPUT, dtype, rank, n[0], n[1], n[2], n[3]);
    ADD(gate, INPUT, dtype, rank, n[0], n[1], n[2], n[3])->spread = 2;
    ADD(weight, INPUT, param, 1, n[rank - 1], 0, 0, 0)->shift = 1;
    ADD(dy, INPUT, dtype, rank, n[0], n[1], n[2], n[3]);
    ADD(y, OUTPUT, dtype, rank, n[0], n[1], n[2], n[3]);
    ADD(dx, OUTPUT, dtype, rank, n[0], n[1], n[2], n[3]);
    ADD(dgate, OUTPUT, dtype, rank, n[0], n[1], n[2], n[3]);
    ADD(dweight, OUTPUT, param, 1, n[rank - 1], 0, 0, 0);
#undef ADD
    check_trial(&x, r);
}

static void test_norm(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 80; seed++) {
        rng r = {seed};
        int32_t rank;
        int64_t n[4];
        draw_rows(&r, &rank, n);
        if (n[rank - 1] > 1)
            check_norm(&r, seed % 2 ? DR_ACT_SILU : DR_ACT_SIGMOID, rank, n,
                       (layout)rng_below(&r, LAYOUT_ANY + 1));
    }
    rng r = {1};
    const int64_t tall[] = {2, 500, 8, 128};
    check_norm(&r, DR_ACT_SILU, 4, tall, LAYOUT_DENSE);
}

/* ---- matmul ------------------------------------------------------------------------- */

static void test_matmul(void **state)
{
    (void)state;
    static const int64_t sizes[][3] = {{1, 1, 1},   {3, 5, 7},    {16, 16, 16}, {1, 300, 70},
                                       {65, 33, 1}, {130, 40, 64}, {4, 0, 5},   {0, 3, 4},
                                       {600, 1100, 33}};
    for (size_t i = 0; i < DR_COUNT(sizes) * 8; i++) {
        rng r = {i};
        int64_t m = sizes[i / 8][0], n = sizes[i / 8][1], k = sizes[i / 8][2];
        double *want = malloc(sizeof *want * (size_t)(m * n + 1));
        float *data[3], *first = NULL;
        int64_t count[] = {m * k, k * n, m * n}, rows[] = {m, k, m}, cols[] = {k, n, n};
        dr_matmul_args a = DR_MATMUL_ARGS_INIT, b;
        dr_tensor *t[] = {&a.a, &a.b, &a.out};
        a.alpha = i % 3 ? -0.5 : 0;
        a.accumulate = (int32_t)(i / 3 % 2);
        for (int x = 0; x < 3; x++) {
            bool turned = i >> x & 1;
            int64_t gap = rng_below(&r, 3), ld = dr_max(turned ? rows[x] : cols[x], 1) + gap;
            count[x] = (turned ? cols[x] : rows[x]) * ld;
            data[x] = malloc(sizeof(float) * (size_t)(count[x] + 1));
            for (int64_t e = 0; e < count[x]; e++)
                data[x][e] = (float)rng_normal(&r);
            *t[x] = (dr_tensor){data[x], DR_F32, 2, {rows[x], cols[x], 0, 0},
                                {turned ? 1 : ld, turned ? ld : 1, 0, 0}};
        }
        b = a;
        b.out = dr_tensor_make(want, DR_F64, 2, m, n, 0, 0);
        for (int64_t e = 0; e < m * n; e++)
            want[e] = *(float *)dr_at(&a.out, n > 0 ? e / n : 0, n > 0 ? e % n : 0, 0, 0);
        float *before = malloc(sizeof(float) * (size_t)(count[2] + 1));
        memcpy(before, data[2], sizeof(float) * (size_t)count[2]);
        MUST(dr_matmul(ref, &b));
        for (int c = 0; c < THREADS; c++) {
            memcpy(data[2], before, sizeof(float) * (size_t)count[2]);
            MUST(dr_matmul(cpu[c], &a));
            double *got = view_read(&a.out);
            expect_near("matmul", got, want, m * n, 1e-6);
            free(got);
            if (c == 0) {
                first = malloc(sizeof(float) * (size_t)(count[2] + 1));
                memcpy(first, data[2], sizeof(float) * (size_t)count[2]);
            }
            assert_memory_equal(first, data[2], sizeof(float) * (size_t)count[2]);
        }
        for (int x = 0; x < 3; x++)
            free(data[x]);
        free(first);
        free(before);
        free(want);
    }
}

/* What CBLAS cannot take is refused by name. */
static void test_matmul_refuses(void **state)
{
    (void)state;
    float data[64] = {0};
    uint16_t half[16] = {0};
    dr_matmul_args a = DR_MATMUL_ARGS_INIT;
    a.a = f32(data, 2, 4, 4, 0);
    a.b = f32(data + 16, 2, 4, 4, 0);
    a.out = f32(data + 32, 2, 4, 4, 0);
    MUST(dr_matmul(cpu[0], &a));
    dr_tensor *all[] = {&a.a, &a.b, &a.out};
    static const char *const names[] = {"a", "b", "out"};
    for (int i = 0; i < 3; i++) {
        const dr_tensor good = *all[i];
        char text[96];
        *all[i] = dr_tensor_make(half, DR_BF16, 2, 4, 4, 0, 0);
        snprintf(text, sizeof text, "%s: the cpu backend multiplies f32 matrices, got bf16",
                 names[i]);
        REFUSED(dr_matmul(cpu[0], &a), DR_ERR_SUPPORT, text);
        *all[i] = good;
        all[i]->shape[0] = all[i]->shape[1] = 4;
        all[i]->stride[0] = 8;
        all[i]->stride[1] = 2;
        snprintf(text, sizeof text, "%s: the cpu backend needs stride 1 on one axis", names[i]);
        REFUSED(dr_matmul(cpu[0], &a), DR_ERR_SUPPORT, text);
        all[i]->stride[0] = INT64_C(1) << 33;
        all[i]->stride[1] = 1;
        snprintf(text, sizeof text, "%s: the cpu backend takes strides up to", names[i]);
        REFUSED(dr_matmul(cpu[0], &a), DR_ERR_SUPPORT, text);
        *all[i] = good;
    }
    a.a.stride[0] = 2; /* rows that overlap */
    REFUSED(dr_matmul(cpu[0], &a), DR_ERR_SUPPORT, "a: the cpu backend needs stride 1");
}

/* ---- far apart, and all at once ------------------------------------------------------ */

/* A sparse mapping: element `far` is past 2^31, only two pages of it exist. */
static float *far_memory(size_t elements)
{
    void *p = mmap(NULL, elements * sizeof(float), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        skip();
    return p;
}

static void test_far_offsets(void **state)
{
    (void)state;
    enum { D = 24, T = 3 };
    const int64_t far = (INT64_C(1) << 31) + 12345;
    float w[D * 4], near_x[T * D], near_y[T * D], near_dx[T * D], near_dw[D * 4];
    size_t all = (size_t)(far * (T - 1) + D);
    float *x = far_memory(all), *y = far_memory(all);
    rng r = {8};
    for (int i = 0; i < D * 4; i++)
        w[i] = (float)rng_normal(&r);
    for (int t = 0; t < T; t++)
        for (int d = 0; d < D; d++)
            x[t * far + d] = near_x[t * D + d] = (float)rng_normal(&r);
    dr_tensor wide = {x, DR_F32, 3, {1, T, D, 0}, {0, far, 1, 0}}, wide_y = wide;
    wide_y.data = y;
    dr_conv_args c = DR_CONV_ARGS_INIT;
    c.activation = DR_ACT_SILU;
    c.weight = f32(w, 2, D, 4, 0);
    c.dweight = f32(near_dw, 2, D, 4, 0);
    for (int pass = 0; pass < 2; pass++) {
        float dw[D * 4];
        c.x = c.dy = pass ? wide : f32(near_x, 3, 1, T, D);
        c.y = pass ? wide_y : f32(near_y, 3, 1, T, D);
        MUST(dr_conv(cpu[1], &c));
        for (int i = 0; pass && i < T * D; i++)
            assert_true(y[i / D * far + i % D] == near_y[i]);
        c.dx = pass ? wide_y : f32(near_dx, 3, 1, T, D);
        c.dweight = f32(pass ? dw : near_dw, 2, D, 4, 0);
        MUST(dr_conv_backward(cpu[1], &c));
        for (int i = 0; pass && i < T * D; i++)
            assert_true(y[i / D * far + i % D] == near_dx[i]);
        if (pass)
            assert_memory_equal(dw, near_dw, sizeof dw);
    }
    float log[D] = {0}, g[T * D], da[2][D];
    dr_gate_args a = DR_GATE_ARGS_INIT;
    a.gate = DR_GATE_SOFTPLUS;
    a.a_log = f32(log, 1, D, 0, 0);
    for (int pass = 0; pass < 2; pass++) {
        a.x = a.dg = pass ? wide : f32(near_x, 3, 1, T, D);
        a.g = pass ? wide_y : f32(g, 3, 1, T, D);
        a.da_log = f32(da[pass], 1, D, 0, 0);
        MUST(dr_gate_activate(cpu[1], &a));
        MUST(dr_gate_backward(cpu[1], &a));
        for (int i = 0; pass && i < T * D; i++)
            assert_true(y[i / D * far + i % D] == g[i]);
    }
    assert_memory_equal(da[0], da[1], sizeof da[0]);
    munmap(x, all * sizeof(float));
    munmap(y, all * sizeof(float));
}

enum { CALLERS = 8, ROWS = 70, COLS = 96 };

typedef struct caller {
    float x[ROWS * COLS], y[ROWS * COLS], w[COLS * 4], product[ROWS * ROWS];
    dr_status status;
} caller;

static void *call_many(void *arg)
{
    caller *k = arg;
    dr_conv_args c = DR_CONV_ARGS_INIT;
    c.x = f32(k->x, 3, 1, ROWS, COLS);
    c.y = f32(k->y, 3, 1, ROWS, COLS);
    c.weight = f32(k->w, 2, COLS, 4, 0);
    dr_matmul_args m = DR_MATMUL_ARGS_INIT;
    m.a = f32(k->x, 2, ROWS, COLS, 0);
    m.b = (dr_tensor){k->x, DR_F32, 2, {COLS, ROWS, 0, 0}, {1, COLS, 0, 0}};
    m.out = f32(k->product, 2, ROWS, ROWS, 0);
    for (int i = 0; i < 20 && k->status == DR_OK; i++) {
        k->status = dr_conv(cpu[2], &c);
        if (k->status == DR_OK)
            k->status = dr_matmul(cpu[2], &m);
    }
    return NULL;
}

static void test_many_callers(void **state)
{
    (void)state;
    static caller callers[CALLERS], alone;
    pthread_t thread[CALLERS];
    rng r = {9};
    for (int i = 0; i < ROWS * COLS; i++)
        alone.x[i] = (float)rng_normal(&r);
    for (int i = 0; i < COLS * 4; i++)
        alone.w[i] = (float)rng_normal(&r);
    for (int i = 0; i < CALLERS; i++)
        callers[i] = alone;
    call_many(&alone);
    for (int i = 0; i < CALLERS; i++)
        assert_int_equal(pthread_create(&thread[i], NULL, call_many, &callers[i]), 0);
    for (int i = 0; i < CALLERS; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < CALLERS; i++)
        assert_memory_equal(&callers[i], &alone, sizeof alone);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gate),
        cmocka_unit_test(test_gate_tails),
        cmocka_unit_test(test_beta),
        cmocka_unit_test(test_l2norm),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_matmul_refuses),
        cmocka_unit_test(test_far_offsets),
        cmocka_unit_test(test_many_callers),
    };
    return cmocka_run_group_tests(tests, contexts_open, contexts_close);
}
