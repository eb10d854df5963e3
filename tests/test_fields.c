/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fields.c - faults that libraries of this field have had, one test for each kind, on
 * every backend: what once overflowed, leaked between documents, was ignored or left unwritten.
 * The numbers are small enough to check by hand, or judged by the recurrence of fields.h. The
 * kinds are counted A01, A02, ...: here those of gates, tails and documents; in
 * test_fields_state.c states and gradients; in test_fields_use.c heads, layouts, memory,
 * threads; in test_fields_layers.c whole layers and files; in test_cp.c splitting over ranks.
 */
#include "fields.h"

/* ---- A01 to A06: gates and ranges -------------------------------------------------------------
 */

/* A decay split into two factors overflows although their product is at most 1. */
static void test_A01_factorised_decay(void **state)
{
    (void)state;
    static const double strong[] = {-5, -16, -30, -32, -1000};
    double rising[64], alone[64];
    for (int t = 0; t < 64; t++) {
        rising[t] = t;
        alone[t] = 1;
    }
    for (int b = 0; b < BACKENDS; b++)
        for (size_t i = 0; i < DR_COUNT(strong); i++) {
            spec s = tiny(DR_KDA, 64, 1, 1);
            trial x = trial_make(&s);
            put(&x, S_q, alone);
            put(&x, S_k, alone);
            put(&x, S_beta, alone);
            put(&x, S_v, rising);
            fill(&x, S_g, strong[i]);
            result r = trial_run(ctx[b], &x, (how){0});
            expect_values("o", r.value[S_o], rising, 64, i > 0 ? 0 : 1e-6);
            expect_finite(&r);
            result_free(&r);
            trial_free(&x);
            /* one channel fades, the others do not; the key has length 1 */
            s = tiny(DR_KDA, 64, 4, 1);
            x = trial_make(&s);
            double g[64 * 4];
            for (int m = 0; m < 64 * 4; m++)
                g[m] = m % 4 == 1 ? strong[i] : 0;
            fill(&x, S_q, 0.5);
            fill(&x, S_k, 0.5);
            fill(&x, S_beta, 1);
            put(&x, S_v, rising);
            put(&x, S_g, g);
            r = trial_run(ctx[b], &x, (how){0});
            expect_values("o", r.value[S_o], rising, 64, 1e-5);
            expect_finite(&r);
            result_free(&r);
            trial_free(&x);
            /* the same strength through the bounded gate */
            s = tiny(DR_KDA, 64, 16, 16);
            s.p.gate = DR_GATE_LOWER_BOUND;
            s.p.lower_bound = strong[i];
            x = trial_make(&s);
            fill(&x, S_g, 30);
            r = trial_run(ctx[b], &x, (how){0});
            expect_finite(&r);
            result_free(&r);
            trial_free(&x);
        }
}

/* An exponential that drops terms it thinks unsafe. */
static void test_A02_dropped_terms(void **state)
{
    (void)state;
    static const int64_t tokens[] = {7, 50, 65, 129};
    for (int b = 0; b < BACKENDS; b++)
        for (int code = 0; code < 8; code++) {
            spec s = {.p = problem_make(variants[code % 2], tokens[code / 2], 1, 2, 16, 16)};
            s.decay = DECAY_ZERO;
            trial x = trial_make(&s), y = x;
            y.p.gate = DR_GATE_NONE;
            y.io.g.data = NULL;
            result zero = trial_run(ctx[b], &x, (how){0}), none = trial_run(ctx[b], &y, (how){0});
            expect_close("no gate against g = 0", &none, &zero, 2e-6, NULL);
            expect_recurrence("g = 0", b, &x);
            result_free(&zero);
            result_free(&none);
            trial_free(&x);
            s.decay = DECAY_ALTERNATE;
            x = trial_make(&s);
            expect_recurrence("g = 0 and -1000 in turn", b, &x);
            trial_free(&x);
        }
}

/* The domain of g and beta; and a NaN stays in its document and in its row. */
static void test_A03_domain_and_nan(void **state)
{
    (void)state;
    static const double v[] = {1, 9}, beta[] = {1, 0}, g[] = {0, 5}, want[] = {1, 148.4131591};
    static const int64_t offsets[] = {0, 40, 80};
    for (int b = 0; b < BACKENDS; b++)
        for (size_t i = 0; i < DR_COUNT(variants); i++) {
            spec s = tiny(variants[i], 2, 1, 1);
            trial x = trial_make(&s);
            fill(&x, S_q, 1);
            fill(&x, S_k, 1);
            put(&x, S_v, v);
            put(&x, S_beta, beta);
            put(&x, S_g, g);
            result r = trial_run(ctx[b], &x, (how){0});
            expect_values("o with a growing state", r.value[S_o], want, 2, 1e-5);
            result_free(&r);
            trial_free(&x);
            for (int batch = 0; batch < 2; batch++) { /* the second document, or row, is NaN */
                s = (spec){.p = problem_make(variants[i], batch ? 40 : 80, 1, 2, 16, 8)};
                s.p.batch = batch ? 2 : 1;
                s.p.offsets = batch ? NULL : offsets;
                s.p.sequences = batch ? 0 : 2;
                x = trial_make(&s);
                result clean = trial_run(ctx[b], &x, (how){0});
                for (int m = 0; m < SLOTS; m++) {
                    if (x.io.q.data == NULL || x.t[m].view.data == NULL)
                        continue;
                    int64_t n = view_count(&x.t[m].view);
                    double *values = view_read(&x.t[m].view);
                    for (int64_t k = n / 2; k < n; k++)
                        values[k] = NAN;
                    put(&x, m, values);
                    free(values);
                }
                r = trial_run(ctx[b], &x, (how){0});
                for (int m = 0; m < SLOTS; m++)
                    if (r.value[m] != NULL && m != S_chunk_states)
                        assert_memory_equal(r.value[m], clean.value[m],
                                            sizeof(double) * (size_t)(r.count[m] / 2));
                result_free(&r);
                result_free(&clean);
                trial_free(&x);
            }
        }
}

/* Masks that multiply, and elements that nobody writes. */
static void test_A04_unwritten_elements(void **state)
{
    (void)state;
    for (int b = 0; b < BACKENDS; b++) {
        for (size_t i = 0; i < DR_COUNT(variants); i++) {
            spec s = {.p = problem_make(variants[i], 65, 1, 2, 16, 24), .decay = DECAY_MIXED};
            trial x = trial_make(&s);
            result clean = trial_run(ctx[b], &x, (how){.clean = true});
            result dirty = trial_run(ctx[b], &x, (how){0});
            expect_same("poisoned memory", &dirty, &clean, 0);
            expect_finite(&dirty);
            result_free(&clean);
            result_free(&dirty);
            trial_free(&x);
        }
        fence out = fence_make(3 * sizeof(float), sizeof(float), UNWRITTEN);
        float x[3] = {0, 1, -1}, zero[3] = {0}, *y = (float *)out.data;
        dr_gate_args gate = DR_GATE_ARGS_INIT;
        gate.gate = DR_GATE_SOFTPLUS;
        gate.x = f32(x, 3, 1, 1, 3, 0);
        gate.a_log = f32(zero, 1, 3, 0, 0, 0);
        gate.g = f32(y, 3, 1, 1, 3, 0);
        MUST(dr_gate_activate(ctx[b], &gate));
        for (int m = 0; m < 3; m++)
            assert_true(fabs(y[m] + log1p(exp(x[m]))) < 1e-6);
        memset(out.data, UNWRITTEN, out.bytes);
        dr_beta_args beta = DR_BETA_ARGS_INIT;
        beta.x = f32(x, 1, 3, 0, 0, 0);
        beta.beta = f32(y, 1, 3, 0, 0, 0);
        MUST(dr_beta_sigmoid(ctx[b], &beta));
        for (int m = 0; m < 3; m++)
            assert_true(fabs(y[m] - 1 / (1 + exp(-x[m]))) < 1e-6);
        fence_check(&out, "three elements");
        fence_free(&out);
    }
}

/* The flag of q/k normalisation is honoured everywhere. */
static void test_A05_l2norm_flag(void **state)
{
    (void)state;
    for (int b = 0; b < BACKENDS; b++)
        for (int step = 0; step < 2; step++)
            for (size_t i = 0; i < DR_COUNT(variants); i++)
                for (int norm = 0; norm < 2; norm++) {
                    spec s = tiny(variants[i], 8, 1, 1);
                    s.absent = 0;
                    trial x = trial_make(&s);
                    x.p.l2norm = norm;
                    fill(&x, S_q, 1);
                    fill(&x, S_k, 2);
                    fill(&x, S_v, 0);
                    fill(&x, S_beta, 1);
                    fill(&x, S_g, 0);
                    fill(&x, S_initial_state, 1);
                    how h = {.form = step ? FORM_STEP : FORM_CALL, .forward_only = true};
                    result r = trial_run(ctx[b], &x, h);
                    if (norm)
                        assert_true(fabs(r.value[S_o][0]) < 1e-6 &&
                                    fabs(r.value[S_final_state][0]) < 1e-6);
                    else
                        assert_true(r.value[S_final_state][0] == 6561 && r.value[S_o][0] == -3);
                    result_free(&r);
                    trial_free(&x);
                }
}

/* A log decay is not a factor; both have names. */
static void test_A06_log_or_factor(void **state)
{
    (void)state;
    static const struct {
        dr_gate gate;
        double g;
    } rows[] = {{DR_GATE_LOG, -0.69314718055994531}, {DR_GATE_FACTOR, 0.5}, {DR_GATE_SOFTPLUS, 0}};
    for (int b = 0; b < BACKENDS; b++)
        for (int step = 0; step < 2; step++)
            for (size_t i = 0; i < DR_COUNT(rows); i++) {
                spec s = tiny(i % 2 ? DR_KDA : DR_GDN, 1, 1, 1);
                s.absent = BIT(dt_bias);
                s.p.gate = rows[i].gate;
                trial x = trial_make(&s);
                fill(&x, S_q, 1);
                fill(&x, S_k, 1);
                fill(&x, S_beta, 0);
                fill(&x, S_g, rows[i].g);
                fill(&x, S_initial_state, 8);
                if (x.io.a_log.data != NULL)
                    fill(&x, S_a_log, 0);
                how h = {.form = step ? FORM_STEP : FORM_CALL, .forward_only = true};
                result r = trial_run(ctx[b], &x, h);
                assert_true(fabs(r.value[S_o][0] - 4) < 1e-5);
                result_free(&r);
                trial_free(&x);
            }
}

/* A factor of exactly 0 cuts the past, and its gradient is not a division by it. */
static void test_A06_factor_zero(void **state)
{
    (void)state;
    for (size_t i = 0; i < DR_COUNT(variants); i++) {
        spec s = {.p = problem_make(variants[i], 70, 1, 2, 16, 16)};
        s.p.gate = DR_GATE_FACTOR;
        trial x = trial_make(&s);
        int64_t n = view_count(&x.t[S_g].view);
        double *g = view_read(&x.t[S_g].view);
        for (int64_t m = 0; m < n; m += 5)
            g[m] = 0;
        put(&x, S_g, g);
        free(g);
        expect_backends_agree("decay factor 0", &x);
        trial_free(&x);
    }
}

/* ---- A07, A08: tails, empty and short -----------------------------------------------------------
 */

static void test_A07_tails(void **state)
{
    (void)state;
    static const int64_t tokens[] = {1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129};
    static const int32_t dims[][2] = {{16, 16}, {32, 32}, {64, 64}, {128, 128}, {16, 48}, {48, 16}};
    static const int32_t chunks[] = {0, 16, 32, 64, 128};
    for (int b = 0; b < BACKENDS; b++)
        for (size_t t = 0; t < DR_COUNT(tokens); t++)
            for (size_t d = 0; d < DR_COUNT(dims); d++) {
                if (dims[d][0] == 128 && tokens[t] != 65)
                    continue; /* the recurrence is slow */
                spec s = {.p = problem_make(variants[(t + d) % 2], tokens[t], 1, 1, dims[d][0],
                                            dims[d][1])};
                trial x = trial_make(&s);
                for (size_t c = 0; c < DR_COUNT(chunks); c++) {
                    x.p.chunk = chunks[c];
                    if (dr_supports(ctx[b], &x.p) == DR_OK)
                        expect_recurrence("tail", b, &x);
                }
                trial_free(&x);
            }
}

static void test_A08_empty_and_short(void **state)
{
    (void)state;
    static const int64_t mixed[] = {0, 1, 1, 65, 66}, nothing[] = {0, 0};
    static const struct {
        const int64_t *offsets;
        int64_t N, T;
    } rows[] = {{mixed, 4, 66}, {nothing, 1, 0}, {nothing, 1, 3}, {NULL, 0, 1}, {NULL, 0, 0}};
    for (int b = 0; b < BACKENDS; b++)
        for (size_t i = 0; i < DR_COUNT(rows) * 2; i++) {
            spec s = {.p = problem_make(variants[i % 2], rows[i / 2].T, 1, 2, 16, 8)};
            s.p.offsets = rows[i / 2].offsets;
            s.p.sequences = rows[i / 2].N;
            s.state_dtype = b == REF ? DR_F64 : DR_F32;
            trial x = trial_make(&s);
            result r = trial_run(ctx[b], &x, (how){0});
            double *S = view_read(&x.io.initial_state), *dS = view_read(&x.io.d_final_state);
            for (int64_t n = 0; n < x.N; n++) {
                int64_t from = s.p.offsets ? s.p.offsets[n] : 0, size = 2 * 16 * 8;
                int64_t to = s.p.offsets ? s.p.offsets[n + 1] : s.p.tokens;
                if (from == to) { /* states pass through, bit for bit */
                    assert_memory_equal(r.value[S_final_state] + n * size, S + n * size,
                                        sizeof *S * (size_t)size);
                    assert_memory_equal(r.value[S_d_initial_state] + n * size, dS + n * size,
                                        sizeof *S * (size_t)size);
                    continue;
                }
                trial y = trial_cut(&x, 0, from, to, n);
                result alone = trial_run(ctx[b], &y, (how){0});
                assert_memory_equal(alone.value[S_o], r.value[S_o] + from * 2 * 8,
                                    sizeof *S * (size_t)alone.count[S_o]);
                assert_memory_equal(alone.value[S_final_state], r.value[S_final_state] + n * size,
                                    sizeof *S * (size_t)size);
                result_free(&alone);
            }
            free(S);
            free(dS);
            result_free(&r);
            trial_free(&x);
        }
}

/* ---- A09, A12: packed documents
 * -------------------------------------------------------------------- */

static void conv_of(const dr_context *c, float *x, float *w, float *y, int64_t T,
                    const int64_t *offsets, int64_t N)
{
    dr_conv_args a = DR_CONV_ARGS_INIT;
    a.x = f32(x, 3, 1, T, 1, 0);
    a.weight = f32(w, 2, 1, 4, 0, 0);
    a.y = f32(y, 3, 1, T, 1, 0);
    a.offsets = offsets;
    a.sequences = N;
    MUST(dr_conv(c, &a));
}

static void test_A09_leaks_between_documents(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 2, 5}, ones[] = {0, 1, 2}, short_of_all[] = {0, 2, 4};
    static const double v[] = {8, 0}, beta[] = {1, .5}, right[] = {8, 0}, leak[] = {8, 4};
    float x[] = {1, 2, 3, 4, 5}, w[] = {1, 10, 100, 1000}, y[5];
    const float want[] = {1000, 2100, 3000, 4300, 5430};
    for (int b = 0; b < BACKENDS; b++) {
        conv_of(ctx[b], x, w, y, 5, offsets, 2);
        assert_memory_equal(y, want, sizeof want);
        conv_of(ctx[b], x, w, y, 5, NULL, 0);
        assert_true(y[2] == 3210);
        float dy[] = {1, 1, 1, 1, 1}, dx[] = {7, 7, 7, 7, 7};
        dr_conv_args a = DR_CONV_ARGS_INIT; /* the fifth token is nobody's */
        a.x = f32(x, 3, 1, 5, 1, 0);
        a.weight = f32(w, 2, 1, 4, 0, 0);
        a.y = f32(y, 3, 1, 5, 1, 0);
        a.dy = f32(dy, 3, 1, 5, 1, 0);
        a.dx = f32(dx, 3, 1, 5, 1, 0);
        a.offsets = short_of_all;
        a.sequences = 2;
        MUST(dr_conv(ctx[b], &a));
        MUST(dr_conv_backward(ctx[b], &a));
        assert_true(y[3] == 4300 && y[4] == 0 && dx[3] == 1000 && dx[4] == 0);
        for (size_t i = 0; i < DR_COUNT(variants); i++)
            for (int apart = 0; apart < 2; apart++) {
                spec s = tiny(variants[i], 2, 1, 1);
                s.p.offsets = apart ? ones : NULL;
                s.p.sequences = apart ? 2 : 0;
                trial t = trial_make(&s);
                fill(&t, S_q, 1);
                fill(&t, S_k, 1);
                fill(&t, S_g, 0);
                put(&t, S_v, v);
                put(&t, S_beta, beta);
                result r = trial_run(ctx[b], &t, (how){0});
                expect_values("o", r.value[S_o], apart ? right : leak, 2, 1e-6);
                result_free(&r);
                trial_free(&t);
            }
    }
}

/* Packed calls leave nothing behind on the handles that they used. */
static void test_A10_boundaries_left_over(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 3, 8};
    for (int b = 0; b < BACKENDS; b++) {
        dr_context *fresh;
        MUST(dr_context_create(names[b], NULL, &fresh));
        spec s = {.p = problem_make(DR_KDA, 8, 1, 2, 16, 8)}, longer = s;
        longer.p.tokens = 9;
        trial x = trial_make(&s), y = trial_make(&longer), z = x;
        z.p.offsets = offsets;
        z.p.sequences = 2;
        z.s.absent = BIT(initial_state) | BIT(d_final_state);
        z.io.initial_state.data = z.io.d_final_state.data = NULL;
        z.N = 2;
        result packed = trial_run(ctx[b], &z, (how){0});
        result r1 = trial_run(ctx[b], &x, (how){0}), r2 = trial_run(ctx[b], &y, (how){0});
        result w1 = trial_run(fresh, &x, (how){0}), w2 = trial_run(fresh, &y, (how){0});
        expect_same("after a packed call", &r1, &w1, 0);
        expect_same("after a packed call", &r2, &w2, 0);
        result *all[] = {&packed, &r1, &r2, &w1, &w2};
        for (size_t i = 0; i < DR_COUNT(all); i++)
            result_free(all[i]);
        trial_free(&x);
        trial_free(&y);
        dr_context_destroy(fresh);
    }
}

static void test_A12_boundary_tables(void **state)
{
    (void)state;
    static const int64_t good[] = {0, 64, 65, 130, 194};
    static const struct {
        int64_t offsets[3];
        const char *text;
    } bad[] = {
        {{1, 5, 8}, "offsets[0]: must be 0, got 1"},
        {{0, 5, 4}, "offsets[2]: must not be below the one before (5), got 4"},
        {{0, 5, 9}, "offsets[2]: must be at most the number of tokens (8), got 9"},
    };
    for (int b = 0; b < BACKENDS; b++) {
        spec s = {.p = problem_make(DR_GDN, 194, 1, 1, 16, 16)};
        s.p.offsets = good;
        s.p.sequences = 4;
        s.p.chunk = 64;
        if (dr_supports(ctx[b], &s.p) == DR_OK) {
            dr_plan *plan;
            MUST(dr_plan_create(ctx[b], &s.p, &plan));
            dr_plan_info info = DR_PLAN_INFO_INIT;
            MUST(dr_plan_describe(plan, &info));
            assert_int_equal(info.chunks, 5);
            assert_int_equal(info.sequences, 4);
            dr_plan_destroy(plan);
        }
        s.p.chunk = 0;
        trial x = trial_make(&s);
        expect_recurrence("packed", b, &x);
        trial_free(&x);
        for (size_t i = 0; i < DR_COUNT(bad); i++) {
            dr_plan *plan;
            dr_problem p = problem_make(DR_GDN, 8, 1, 1, 4, 4);
            p.offsets = bad[i].offsets;
            p.sequences = 2;
            REFUSED(dr_plan_create(ctx[b], &p, &plan), DR_ERR_ARG, bad[i].text);
            assert_null(plan);
            float v[8] = {0}, w[4] = {0}, y[8];
            dr_conv_args a = DR_CONV_ARGS_INIT;
            a.x = f32(v, 3, 1, 8, 1, 0);
            a.weight = f32(w, 2, 1, 4, 0, 0);
            a.y = f32(y, 3, 1, 8, 1, 0);
            a.offsets = bad[i].offsets;
            a.sequences = 2;
            REFUSED(dr_conv(ctx[b], &a), DR_ERR_ARG, bad[i].text);
        }
    }
}

static void test_A13_padding_enters_the_window(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 2, 5};
    float x[] = {9, 9, 1, 2, 3}, w[] = {1, 10, 100, 1000}, y[5];
    const float right[] = {1000, 2100, 3210}, wrong[] = {1990, 2199, 3219};
    for (int b = 0; b < BACKENDS; b++) {
        conv_of(ctx[b], x, w, y, 5, offsets, 2);
        assert_memory_equal(y + 2, right, sizeof right);
        conv_of(ctx[b], x, w, y, 5, NULL, 0);
        assert_memory_equal(y + 2, wrong, sizeof wrong);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_A01_factorised_decay),
        cmocka_unit_test(test_A02_dropped_terms),
        cmocka_unit_test(test_A03_domain_and_nan),
        cmocka_unit_test(test_A04_unwritten_elements),
        cmocka_unit_test(test_A05_l2norm_flag),
        cmocka_unit_test(test_A06_log_or_factor),
        cmocka_unit_test(test_A06_factor_zero),
        cmocka_unit_test(test_A07_tails),
        cmocka_unit_test(test_A08_empty_and_short),
        cmocka_unit_test(test_A09_leaks_between_documents),
        cmocka_unit_test(test_A10_boundaries_left_over),
        cmocka_unit_test(test_A12_boundary_tables),
        cmocka_unit_test(test_A13_padding_enters_the_window),
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
