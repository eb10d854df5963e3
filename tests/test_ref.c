/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ref.c - backend ref against numbers that can be computed by hand, and against
 * itself where two options must mean the same. Its gradients are in test_finite.c, its
 * stages and state pools in test_ref_paths.c, its row operations in test_ref_rows.c.
 */
#include "test.h"

static dr_context *ctx;

static dr_tensor f64(const double *x, int32_t rank, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return dr_tensor_make((void *)x, DR_F64, rank, a, b, c, d);
}

/* One problem of a few tokens; scale 1, gate and beta as values. */
static dr_problem problem(dr_variant variant, dr_gate gate, int64_t T, int32_t K, int32_t V)
{
    dr_problem p = DR_PROBLEM_INIT;
    p.variant = variant;
    p.gate = gate;
    p.beta = DR_BETA_VALUE;
    p.tokens = T;
    p.key_dim = K;
    p.value_dim = V;
    p.scale = 1;
    return p;
}

/* Tensors [T,heads,..] of a problem with one batch row. */
static dr_io inputs(const dr_problem *p, const double *q, const double *k, const double *v,
                    const double *g, const double *beta)
{
    int64_t T = p->tokens, H = p->heads, HV = p->value_heads ? p->value_heads : H;
    dr_io io = DR_IO_INIT;
    io.q = f64(q, 3, T, H, p->key_dim, 0);
    io.k = f64(k, 3, T, H, p->key_dim, 0);
    io.v = f64(v, 3, T, HV, p->value_dim, 0);
    io.beta = f64(beta, 2, T, HV, 0, 0);
    if (g != NULL)
        io.g = f64(g, p->variant == DR_KDA ? 3 : 2, T, HV, p->key_dim, 0);
    return io;
}

static dr_tensor state_of(const dr_problem *p, const double *x)
{
    int64_t N = p->offsets ? p->sequences : p->batch;
    int64_t HV = p->value_heads ? p->value_heads : p->heads;
    return p->state_v_first ? f64(x, 4, N, HV, p->value_dim, p->key_dim)
                            : f64(x, 4, N, HV, p->key_dim, p->value_dim);
}

/* Forward, and the adjoint if wanted, in poisoned buffers of the exact size. */
static void run(const dr_problem *p, const dr_io *io, bool adjoint)
{
    dr_plan *plan;
    dr_plan_info info = DR_PLAN_INFO_INIT;
    MUST(dr_plan_create(ctx, p, &plan));
    MUST(dr_plan_describe(plan, &info));
    fenced_buffers forward = buffers_make(info.saved_bytes, info.forward_scratch, UNWRITTEN);
    MUST(dr_forward(plan, io, &forward.b));
    if (adjoint) {
        fenced_buffers backward = buffers_make(0, info.backward_scratch, UNWRITTEN);
        dr_buffers b = backward.b;
        b.saved = forward.b.saved;
        b.saved_bytes = forward.b.saved_bytes;
        MUST(dr_backward(plan, io, &b));
        buffers_free(&backward);
    }
    buffers_free(&forward);
    dr_plan_destroy(plan);
}

#define EXPECT(got, ...)                                                     \
    do {                                                                     \
        const double expect_want[] = {__VA_ARGS__};                          \
        assert_int_equal(DR_COUNT(expect_want), DR_COUNT(got));              \
        expect_near(#got, (got), expect_want, DR_COUNT(expect_want), 1e-14); \
    } while (0)

/* ---- by hand ----------------------------------------------------------------------------- */

/* R = .5, r = 3 - .5 at the second token. */
static void test_gdn_by_hand(void **state)
{
    (void)state;
    dr_problem p = problem(DR_GDN, DR_GATE_LOG, 2, 1, 1);
    const double ones[] = {1, 1}, v[] = {2, 3}, g[] = {0, log(0.5)}, beta[] = {.5, .5};
    double o[2], last[1], dq[2], dk[2], dv[2], dg[2], db[2], dh0[1];
    dr_io io = inputs(&p, ones, ones, v, g, beta);
    io.o = f64(o, 3, 2, 1, 1, 0);
    io.final_state = state_of(&p, last);
    io.d_o = f64(ones, 3, 2, 1, 1, 0);
    io.dq = f64(dq, 3, 2, 1, 1, 0);
    io.dk = f64(dk, 3, 2, 1, 1, 0);
    io.dv = f64(dv, 3, 2, 1, 1, 0);
    io.dg = f64(dg, 2, 2, 1, 0, 0);
    io.dbeta = f64(db, 2, 2, 1, 0, 0);
    io.d_initial_state = state_of(&p, dh0);
    run(&p, &io, true);
    EXPECT(o, 1, 1.75);
    EXPECT(last, 1.75);
    EXPECT(dq, 1, 1.75);
    EXPECT(dk, 1.25, 1);
    EXPECT(dv, .625, .5);
    EXPECT(dg, 0, .25);
    EXPECT(db, 2.5, 2.5);
    EXPECT(dh0, .625);
}

/* Channels decay differently: states (8,8) -> (5,2) -> (1,3). */
static void test_kda_by_hand(void **state)
{
    (void)state;
    dr_problem p = problem(DR_KDA, DR_GATE_FACTOR, 2, 2, 1);
    const double q[] = {1, 1, 2, 1}, k[] = {1, 0, 0, 1}, v[] = {6, 3}, beta[] = {.5, 1};
    const double factor[] = {.5, .25, .2, .5}, start[] = {8, 8}, d_o[] = {0, 1};
    double o[2], last[2], dq[4], dk[4], dv[2], dg[4], db[2], dh0[2];
    dr_io io = inputs(&p, q, k, v, factor, beta);
    io.initial_state = state_of(&p, start);
    io.o = f64(o, 3, 2, 1, 1, 0);
    io.final_state = state_of(&p, last);
    io.d_o = f64(d_o, 3, 2, 1, 1, 0);
    io.dq = f64(dq, 3, 2, 1, 2, 0);
    io.dk = f64(dk, 3, 2, 1, 2, 0);
    io.dv = f64(dv, 3, 2, 1, 1, 0);
    io.dg = f64(dg, 3, 2, 1, 2, 0);
    io.dbeta = f64(db, 2, 2, 1, 0, 0);
    io.d_initial_state = state_of(&p, dh0);
    run(&p, &io, true);
    EXPECT(o, 7, 5);
    EXPECT(last, 1, 3);
    EXPECT(dq, 0, 0, 1, 3);
    EXPECT(dk, -.4, -.4, 3, 1);
    EXPECT(dv, .2, 1);
    EXPECT(dg, 1.6, 0, 10, 0);
    EXPECT(db, .8, 2);
    EXPECT(dh0, .1, 0);
}

/* ---- decay of any strength ----------------------------------------------------------------- */

/* With k = q of unit norm and beta = 1 every token reads back its own v, whatever decayed. */
static void test_strong_decay(void **state)
{
    (void)state;
    enum { T = 64 };
    static const double strengths[][2] = {{-30, -30}, {-1000, -1000}, {-1000, 0}, {-INFINITY, 0}};
    for (size_t i = 0; i < DR_COUNT(strengths); i++) {
        double k[2 * T], v[T], g[2 * T], beta[T], o[T];
        double dq[2 * T], dk[2 * T], dv[T], dg[2 * T], db[T];
        for (int t = 0; t < T; t++) {
            k[2 * t] = k[2 * t + 1] = sqrt(0.5);
            g[2 * t] = strengths[i][0];
            g[2 * t + 1] = strengths[i][1];
            v[t] = t;
            beta[t] = 1;
        }
        dr_problem p = problem(DR_KDA, DR_GATE_LOG, T, 2, 1);
        dr_io io = inputs(&p, k, k, v, g, beta);
        io.o = f64(o, 3, T, 1, 1, 0);
        io.d_o = f64(v, 3, T, 1, 1, 0);
        io.dq = f64(dq, 3, T, 1, 2, 0);
        io.dk = f64(dk, 3, T, 1, 2, 0);
        io.dv = f64(dv, 3, T, 1, 1, 0);
        io.dg = f64(dg, 3, T, 1, 2, 0);
        io.dbeta = f64(db, 2, T, 1, 0, 0);
        run(&p, &io, true);
        expect_near("o", o, v, T, 1e-14);
        for (int t = 0; t < 2 * T; t++)
            assert_true(isfinite(dq[t]) && isfinite(dk[t]) && isfinite(dg[t]) &&
                        isfinite(dv[t / 2]) && isfinite(db[t / 2]));
    }
}

/* Random inputs and room for every result of a problem with one head. */
enum { T_MAX = 129, WIDE = 16, ROOM = T_MAX * WIDE };
typedef struct single {
    double q[ROOM], k[ROOM], v[ROOM], beta[T_MAX], g[ROOM], d_o[ROOM];
    double o[ROOM], dq[ROOM], dk[ROOM], dv[ROOM], dbeta[T_MAX];
} single;

static void single_fill(single *s)
{
    rng r = {1};
    for (int i = 0; i < ROOM; i++) {
        s->q[i] = rng_normal(&r);
        s->k[i] = rng_normal(&r) / 4;
        s->v[i] = rng_normal(&r);
        s->d_o[i] = rng_normal(&r);
        s->g[i] = 0;
    }
    for (int i = 0; i < T_MAX; i++)
        s->beta[i] = rng_uniform(&r, 0.1, 0.9);
}

static void single_run(single *s, const dr_problem *p)
{
    int64_t T = p->tokens, D = WIDE;
    dr_io io = inputs(p, s->q, s->k, s->v, p->gate == DR_GATE_NONE ? NULL : s->g, s->beta);
    io.o = f64(s->o, 3, T, 1, D, 0);
    io.d_o = f64(s->d_o, 3, T, 1, D, 0);
    io.dq = f64(s->dq, 3, T, 1, D, 0);
    io.dk = f64(s->dk, 3, T, 1, D, 0);
    io.dv = f64(s->dv, 3, T, 1, D, 0);
    io.dbeta = f64(s->dbeta, 2, T, 1, 0, 0);
    run(p, &io, true);
}

static void single_compare(const single *a, const single *b, int64_t T)
{
    expect_near("o", a->o, b->o, T * WIDE, 1e-14);
    expect_near("dq", a->dq, b->dq, T * WIDE, 1e-14);
    expect_near("dk", a->dk, b->dk, T * WIDE, 1e-14);
    expect_near("dv", a->dv, b->dv, T * WIDE, 1e-14);
    expect_near("dbeta", a->dbeta, b->dbeta, T, 1e-14);
}

/* g = 0 is no gate; a gate of -1000 cuts the sequence as a document boundary would. */
static void test_zero_and_cutting_gates(void **state)
{
    (void)state;
    static single a, b;
    static const int64_t lengths[] = {7, 50, 65, 129};
    for (size_t i = 0; i < DR_COUNT(lengths); i++) {
        int64_t T = lengths[i], offsets[T_MAX + 1] = {0}, n = 0;
        single_fill(&a);
        single_fill(&b);
        dr_problem gated = problem(DR_GDN, DR_GATE_LOG, T, WIDE, WIDE), plain = gated;
        plain.gate = DR_GATE_NONE;
        single_run(&a, &gated);
        single_run(&b, &plain);
        single_compare(&a, &b, T);
        for (int64_t t = 1; t < T; t += 2) {
            a.g[t] = -1000;
            offsets[++n] = t;
        }
        offsets[++n] = T;
        plain.offsets = offsets;
        plain.sequences = n;
        single_run(&a, &gated);
        single_run(&b, &plain);
        single_compare(&a, &b, T);
    }
}

/* Growth is computed as asked; a document of NaN stays among itself. */
static void test_domain(void **state)
{
    (void)state;
    const double ones[] = {1, 1}, v[] = {1, 9}, g[] = {0, 5}, beta[] = {1, 0};
    double o[2];
    dr_problem p = problem(DR_GDN, DR_GATE_LOG, 2, 1, 1);
    dr_io io = inputs(&p, ones, ones, v, g, beta);
    io.o = f64(o, 3, 2, 1, 1, 0);
    run(&p, &io, false);
    EXPECT(o, 1, exp(5));

    const double bad[] = {1, NAN}, ok[] = {0, NAN};
    const int64_t offsets[] = {0, 1, 2};
    double dq[2], dk[2], dv[2], dg[2], db[2];
    p.offsets = offsets;
    p.sequences = 2;
    io = inputs(&p, bad, bad, bad, ok, bad);
    io.o = f64(o, 3, 2, 1, 1, 0);
    io.d_o = f64(bad, 3, 2, 1, 1, 0);
    io.dq = f64(dq, 3, 2, 1, 1, 0);
    io.dk = f64(dk, 3, 2, 1, 1, 0);
    io.dv = f64(dv, 3, 2, 1, 1, 0);
    io.dg = f64(dg, 2, 2, 1, 0, 0);
    io.dbeta = f64(db, 2, 2, 1, 0, 0);
    run(&p, &io, true);
    const double got[] = {o[0], dq[0], dk[0], dv[0], dg[0], db[0]};
    EXPECT(got, 1, 1, 1, 1, 0, 1);
    assert_true(isnan(o[1]));
}

/* ---- options ------------------------------------------------------------------------------- */

static void test_l2norm_flag(void **state)
{
    (void)state;
    const double k[] = {2, 2, 2, 2, 2, 2, 2, 2}, zero[8] = {0}, one[] = {1, 1, 1, 1, 1, 1, 1, 1};
    double last[1];
    dr_problem p = problem(DR_GDN, DR_GATE_LOG, 8, 1, 1);
    dr_io io = inputs(&p, k, k, zero, zero, one);
    io.initial_state = state_of(&p, one);
    io.final_state = state_of(&p, last);
    run(&p, &io, false);
    EXPECT(last, 6561);
    p.l2norm = 1;
    run(&p, &io, false);
    assert_true(fabs(last[0]) < 1e-6);
}

/* The same half as a log, as a factor, and from x = 0 by both activations. */
static void test_gate_forms(void **state)
{
    (void)state;
    static const struct {
        dr_gate gate;
        double g, lower_bound, o;
    } rows[] = {
        {DR_GATE_LOG, -0.69314718055994530942, 0, 4},
        {DR_GATE_FACTOR, 0.5, 0, 4},
        {DR_GATE_SOFTPLUS, 0, 0, 4},
        {DR_GATE_LOWER_BOUND, 0, -5, 8 * 0.082084998623898795170},
    };
    const double one[] = {1}, zero[] = {0}, start[] = {8};
    for (size_t i = 0; i < DR_COUNT(rows); i++) {
        double o[1], g[] = {rows[i].g};
        dr_problem p = problem(DR_GDN, rows[i].gate, 1, 1, 1);
        p.lower_bound = rows[i].lower_bound;
        dr_io io = inputs(&p, one, one, one, g, zero);
        io.initial_state = state_of(&p, start);
        io.o = f64(o, 3, 1, 1, 1, 0);
        if (rows[i].gate >= DR_GATE_SOFTPLUS) {
            io.a_log = f64(zero, 1, 1, 0, 0, 0);
            io.dt_bias = f64(zero, 1, 1, 0, 0, 0);
        }
        run(&p, &io, false);
        EXPECT(o, rows[i].o);
    }
    dr_problem none = problem(DR_GDN, (dr_gate)0, 1, 1, 1);
    REFUSED(dr_supports(ctx, &none), DR_ERR_ARG, "no default");
}

static void test_head_maps(void **state)
{
    (void)state;
    const double q[] = {1, 0, 0, 3}, k[] = {1, 0, 0, 1}, v[] = {10, 20, 30, 40};
    const double zero[4] = {0}, one[] = {1, 1, 1, 1};
    double o[4];
    dr_problem p = problem(DR_GDN, DR_GATE_LOG, 1, 2, 1);
    p.heads = 2;
    p.value_heads = 4;
    dr_io io = inputs(&p, q, k, v, zero, one);
    io.o = f64(o, 3, 1, 4, 1, 0);
    run(&p, &io, false);
    EXPECT(o, 10, 20, 90, 120);
    p.head_map = DR_HEADS_TILED;
    run(&p, &io, false);
    EXPECT(o, 10, 60, 30, 120);
}

static void test_state_layout(void **state)
{
    (void)state;
    enum { T = 65 };
    double q[2 * T], k[2 * T], zero[2 * T] = {0}, half[T], o[2 * T], want[2 * T], last[4];
    for (int t = 0; t < T; t++) {
        q[2 * t] = k[2 * t + 1] = 0;
        q[2 * t + 1] = k[2 * t] = 1;
        half[t] = 0.5;
        want[2 * t] = 3;
        want[2 * t + 1] = 4;
    }
    const double k_first[] = {1, 2, 3, 4}, v_first[] = {1, 3, 2, 4}, tiny = ldexp(1, -T);
    dr_problem p = problem(DR_GDN, DR_GATE_LOG, T, 2, 2);
    dr_io io = inputs(&p, q, k, zero, zero, half);
    io.o = f64(o, 3, T, 1, 2, 0);
    io.initial_state = state_of(&p, k_first);
    io.final_state = state_of(&p, last);
    run(&p, &io, false);
    expect_near("o", o, want, 2 * T, 0);
    EXPECT(last, tiny, 2 * tiny, 3, 4);
    p.state_v_first = 1;
    io.initial_state = state_of(&p, v_first);
    run(&p, &io, false);
    expect_near("o, v first", o, want, 2 * T, 0);
    EXPECT(last, tiny, 3, 2 * tiny, 4);
}

/* Outputs are linear in one factor, so its gradient is a difference, also at 0. */
static void test_factor_zero(void **state)
{
    (void)state;
    enum { T = 3, K = 2 };
    rng r = {5};
    double q[T * K], k[T * K], v[T * K], d_o[T * K], o[T * K], dg[T * K], beta[T] = {.3, .6, .9};
    double factor[T * K], start[K * K], loss[2];
    for (int i = 0; i < T * K; i++) {
        q[i] = rng_normal(&r);
        k[i] = rng_normal(&r);
        v[i] = rng_normal(&r);
        d_o[i] = rng_normal(&r);
        factor[i] = 0.5;
        start[i % (K * K)] = v[i];
    }
    dr_problem p = problem(DR_KDA, DR_GATE_FACTOR, T, K, K);
    dr_io io = inputs(&p, q, k, v, factor, beta);
    io.initial_state = state_of(&p, start);
    io.o = f64(o, 3, T, 1, K, 0);
    io.d_o = f64(d_o, 3, T, 1, K, 0);
    io.dg = f64(dg, 3, T, 1, K, 0);
    for (int i = 0; i < T * K; i++) {
        for (int at = 1; at >= 0; at--) {
            factor[i] = at;
            run(&p, &io, at == 0);
            loss[at] = 0;
            for (int j = 0; j < T * K; j++)
                loss[at] += o[j] * d_o[j];
        }
        assert_true(fabs(dg[i] - (loss[1] - loss[0])) < 1e-13 * (1 + fabs(dg[i])));
        factor[i] = 0.5;
    }
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
        cmocka_unit_test(test_gdn_by_hand),
        cmocka_unit_test(test_kda_by_hand),
        cmocka_unit_test(test_strong_decay),
        cmocka_unit_test(test_zero_and_cutting_gates),
        cmocka_unit_test(test_domain),
        cmocka_unit_test(test_l2norm_flag),
        cmocka_unit_test(test_gate_forms),
        cmocka_unit_test(test_head_maps),
        cmocka_unit_test(test_state_layout),
        cmocka_unit_test(test_factor_zero),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
