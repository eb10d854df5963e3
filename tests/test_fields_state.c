/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fields_state.c - the second part of test_fields.c: states that are handed on, and
 * gradients and options that are easy to miss.
 */
#include "fields.h"

/* ---- A14, A15: handing states over
 * ------------------------------------------------------------------- */

static void test_A14_conv_state_options(void **state)
{
    (void)state;
    for (int b = 0; b < BACKENDS; b++) {
        float x[] = {2, 7}, w[] = {1, 2, 3, 4}, init[] = {5, 6, 8}, dy[] = {1, 1};
        float first_dx[2] = {0}, first_dw[2][4] = {{0}}, first_d_init[3] = {0},
              first_y[2][2] = {{0}};
        for (int code = 0; code < 8; code++) { /* with or without a start, an end, a d_end; twice */
            float y[2], final[3], dx[2], dw[4], d_init[3], d_final[3] = {0};
            bool given = code & 1, wanted = code & 2;
            dr_conv_args a = DR_CONV_ARGS_INIT;
            a.x = f32(x, 3, 1, 2, 1, 0);
            a.weight = f32(w, 2, 1, 4, 0, 0);
            a.y = f32(y, 3, 1, 2, 1, 0);
            a.dy = f32(dy, 3, 1, 2, 1, 0);
            a.dx = f32(dx, 3, 1, 2, 1, 0);
            a.dweight = f32(dw, 2, 1, 4, 0, 0);
            a.d_initial_state = f32(d_init, 3, 1, 1, 3, 0);
            if (given)
                a.initial_state = f32(init, 3, 1, 1, 3, 0);
            if (wanted)
                a.final_state = f32(final, 3, 1, 1, 3, 0);
            if (code & 4)
                a.d_final_state = f32(d_final, 3, 1, 1, 3, 0);
            MUST(dr_conv(ctx[b], &a));
            MUST(dr_conv_backward(ctx[b], &a));
            assert_true(d_init[0] == 1 && d_init[1] == 3 && d_init[2] == 5 && dx[0] == 7 &&
                        dx[1] == 4);
            if (wanted)
                assert_true(final[0] == (given ? 8 : 0) && final[1] == 2 && final[2] == 7);
            if (code < 2) {
                memcpy(first_y[given], y, sizeof y);
                memcpy(first_dw[given], dw, sizeof dw);
                memcpy(first_dx, dx, sizeof dx);
                memcpy(first_d_init, d_init, sizeof d_init);
                assert_true(y[0] == (given ? 5 + 12 + 24 + 8 : 8));
                assert_true(dw[0] == (given ? 11 : 0) && dw[3] == 9);
            }
            assert_memory_equal(y, first_y[given], sizeof y);
            assert_memory_equal(dw, first_dw[given], sizeof dw);
            assert_memory_equal(dx, first_dx, sizeof dx);
            assert_memory_equal(d_init, first_d_init, sizeof d_init);
        }
        float rolling[] = {5, 6, 8}, y[1]; /* in place, once per call */
        for (int t = 0; t < 2; t++) {
            dr_conv_args a = DR_CONV_ARGS_INIT;
            a.x = f32(x + t, 3, 1, 1, 1, 0);
            a.weight = f32(w, 2, 1, 4, 0, 0);
            a.y = f32(y, 3, 1, 1, 1, 0);
            a.initial_state = a.final_state = f32(rolling, 3, 1, 1, 3, 0);
            MUST(dr_conv_step(ctx[b], &a));
            assert_true(y[0] == (t ? 6 + 16 + 6 + 28 : 5 + 12 + 24 + 8));
        }
        assert_true(rolling[0] == 8 && rolling[1] == 2 && rolling[2] == 7);
    }
}

/* One call against pieces, states passed on: to rounding, and bitwise at chunk edges. */
static void test_A15_later_pieces(void **state)
{
    (void)state;
    static const int64_t cuts[][4] = {{0, 97, 100, 200}, {0, 64, 128, 200}};
    for (int b = 0; b < BACKENDS; b++)
        for (int code = 0; code < 4; code++) {
            spec s = {.p = problem_make(variants[code % 2], 200, 1, 2, 16, 24)};
            s.state_dtype = b == REF ? DR_F64 : DR_F32;
            trial x = trial_make(&s);
            how h = {.forward_only = true, .unwanted = BIT(chunk_states)};
            result whole = trial_run(ctx[b], &x, h), piece = {0};
            int64_t size = 2 * 16 * 24;
            double *carried = view_read(&x.io.initial_state);
            for (int i = 0; i < 3; i++) {
                int64_t from = cuts[code / 2][i], to = cuts[code / 2][i + 1];
                trial y = trial_cut(&x, 0, from, to, 0);
                put(&x, S_initial_state, carried);
                piece = trial_run(ctx[b], &y, h);
                const double *ours = whole.value[S_o] + from * 2 * 24;
                if (code / 2 == 1)
                    assert_memory_equal(piece.value[S_o], ours,
                                        sizeof *ours * (size_t)piece.count[S_o]);
                else
                    expect_near("piece", piece.value[S_o], ours, piece.count[S_o], BUDGET);
                memcpy(carried, piece.value[S_final_state], sizeof *carried * (size_t)size);
                result_free(&piece);
            }
            if (code / 2 == 1)
                assert_memory_equal(carried, whole.value[S_final_state],
                                    sizeof *carried * (size_t)size);
            free(carried);
            result_free(&whole);
            trial_free(&x);
        }
}

/* ---- A16 to A19: easy to miss
 * ----------------------------------------------------------------------- */

/* The activation that a weight's gradient sees is the one that went forward. */
static void test_A16_recomputed_activation(void **state)
{
    (void)state;
    for (int b = 0; b < BACKENDS; b++)
        for (int act = DR_ACT_SILU; act <= DR_ACT_SIGMOID; act++) {
            float x[] = {3, 4}, gate[] = {0, 1}, weight[] = {1, 1}, y[2], p[] = {2, 5}, dy[2];
            float one[] = {1}, dx[2], dgate[2], dweight[2], dp[2];
            dr_norm_args n = DR_NORM_ARGS_INIT;
            n.activation = (dr_activation)act;
            n.x = f32(x, 2, 1, 2, 0, 0);
            n.gate = f32(gate, 2, 1, 2, 0, 0);
            n.weight = f32(weight, 1, 2, 0, 0, 0);
            n.y = f32(y, 2, 1, 2, 0, 0);
            MUST(dr_gated_norm(ctx[b], &n));
            double rms = sqrt(12.5 + 1e-6), s = 1 / (1 + exp(-1.0)),
                   a[2] = {act == DR_ACT_SILU ? 0 : 0.5, s};
            for (int i = 0; i < 2; i++)
                assert_true(fabs(y[i] - x[i] / rms * a[i]) < 1e-6);
            dr_matmul_args m = DR_MATMUL_ARGS_INIT; /* d projection [1,2] = dout^T y */
            m.a = f32(one, 2, 1, 1, 0, 0);
            m.b = n.y;
            m.out = f32(dp, 2, 1, 2, 0, 0);
            MUST(dr_matmul(ctx[b], &m));
            assert_memory_equal(dp, y, sizeof y);
            m.b = f32(p, 2, 1, 2, 0, 0); /* dy = dout p */
            m.out = f32(dy, 2, 1, 2, 0, 0);
            MUST(dr_matmul(ctx[b], &m));
            n.dy = m.out;
            n.dx = f32(dx, 2, 1, 2, 0, 0);
            n.dgate = f32(dgate, 2, 1, 2, 0, 0);
            n.dweight = f32(dweight, 1, 2, 0, 0, 0);
            MUST(dr_gated_norm_backward(ctx[b], &n));
            for (int i = 0; i < 2; i++) {
                double sigma = 1 / (1 + exp(-gate[i]));
                double slope =
                    act == DR_ACT_SILU ? sigma * (1 + gate[i] * (1 - sigma)) : sigma * (1 - sigma);
                assert_true(fabs(dweight[i] - dy[i] * x[i] / rms * a[i]) < 1e-5);
                assert_true(fabs(dgate[i] - dy[i] * x[i] / rms * slope) < 1e-5);
            }
            assert_true(dgate[0] != 0);
        }
}

/* The branch without a gate, and rows past the end, are written too. */
static void test_A17_gateless_and_padded_rows(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 64, 65};
    for (int b = 0; b < BACKENDS; b++)
        for (int code = 0; code < 4; code++) {
            spec s = {.p = problem_make(variants[code % 2], 65, 1, 2, 16, 24), .decay = DECAY_ZERO};
            s.p.offsets = code / 2 ? offsets : NULL;
            s.p.sequences = code / 2 ? 2 : 0;
            trial x = trial_make(&s), y = x;
            y.p.gate = DR_GATE_NONE;
            y.io.g.data = NULL;
            result zero = trial_run(ctx[b], &x, (how){0}), none = trial_run(ctx[b], &y, (how){0});
            expect_close("no gate against g = 0", &none, &zero, 2e-6, NULL);
            expect_finite(&none);
            expect_finite(&zero);
            result_free(&zero);
            result_free(&none);
            trial_free(&x);
        }
    for (int fade = DECAY_MILD; fade <= DECAY_ZERO; fade++) { /* dg on its own */
        spec s = {.p = problem_make(fade % 2 ? DR_GDN : DR_KDA, 65, 1, 2, 16, 24),
                  .decay = (decay)fade};
        trial x = trial_make(&s);
        expect_backends_agree("dg", &x);
        trial_free(&x);
    }
}

/* A struct from another version of the headers is refused, whatever it is. */
static void test_A18_sized_structs(void **state)
{
    (void)state;
    for (int b = 0; b < BACKENDS; b++) {
        spec s = tiny(DR_GDN, 4, 2, 2);
        rig r = rig_make(names[b], &s);
        dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
        dr_context *other;
        options.size++;
        REFUSED(dr_context_create(names[b], &options, &other), DR_ERR_ARG,
                "options.size: must be ");
        dr_problem p = s.p;
        dr_plan *plan;
        p.size = 0;
        REFUSED(dr_plan_create(ctx[b], &p, &plan), DR_ERR_ARG, "problem.size: must be ");
        REFUSED(dr_supports(ctx[b], &p), DR_ERR_ARG, "problem.size: must be ");
        dr_plan_info info = DR_PLAN_INFO_INIT;
        info.size -= 4;
        REFUSED(dr_plan_describe(r.plan, &info), DR_ERR_ARG, "info.size: must be ");
        dr_io io = r.io;
        io.size = 4;
        dr_buffers buffers = r.b.b;
        buffers.size = 0;
        for (size_t i = 0; i < DR_COUNT(rig_entries); i++) {
            assert_int_equal(rig_entries[i].call(&r, &io, &r.b.b), DR_ERR_ARG);
            assert_non_null(strstr(dr_last_error(), "io.size: must be "));
            assert_int_equal(rig_entries[i].call(&r, &r.io, &buffers), DR_ERR_ARG);
            assert_non_null(strstr(dr_last_error(), "buffers.size: must be "));
        }
        rig_untouched(&r);
        rig_free(&r);
    }
}

static void test_A19_key_width_for_value_width(void **state)
{
    (void)state;
    static const int32_t dims[][2] = {{16, 48}, {48, 16}};
    for (size_t i = 0; i < 4; i++) {
        spec s = {.p = problem_make(variants[i % 2], 65, 1, 2, dims[i / 2][0], dims[i / 2][1])};
        trial x = trial_make(&s);
        for (int b = 0; b < BACKENDS; b++)
            expect_recurrence("K is not V", b, &x);
        expect_backends_agree("K is not V", &x);
        trial_free(&x);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_A14_conv_state_options),
        cmocka_unit_test(test_A15_later_pieces),
        cmocka_unit_test(test_A16_recomputed_activation),
        cmocka_unit_test(test_A17_gateless_and_padded_rows),
        cmocka_unit_test(test_A18_sized_structs),
        cmocka_unit_test(test_A19_key_width_for_value_width),
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
