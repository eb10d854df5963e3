/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fields_use.c - the third part of test_fields.c: heads and layouts, element types,
 * offsets and strides, hangs and races, the same bits whoever asks, memory and start-up.
 */
#include "alloc_watch.h"
#include "fields.h"

#include <pthread.h>

/* ---- A20 to A22: heads and layouts
 * ------------------------------------------------------------------- */

static void test_A20_head_mapping(void **state)
{
    (void)state;
    static const double q[] = {1, 0, 0, 3}, k[] = {1, 0, 0, 1}, v[] = {10, 20, 30, 40};
    static const double want[][4] = {{10, 20, 90, 120}, {10, 60, 30, 120}};
    for (int b = 0; b < BACKENDS; b++)
        for (int code = 0; code < 8; code++) {
            spec s = {.p = problem_make(variants[code % 2], 1, 2, 4, 2, 1)};
            s.p.scale = 1;
            s.p.head_map = (dr_head_map)(code / 2 % 2);
            trial x = trial_make(&s);
            put(&x, S_q, q);
            put(&x, S_k, k);
            put(&x, S_v, v);
            fill(&x, S_beta, 1);
            fill(&x, S_g, 0);
            fill(&x, S_initial_state, 0);
            how h = {.form = code / 4 ? FORM_STEP : FORM_CALL, .forward_only = true};
            result r = trial_run(ctx[b], &x, h);
            expect_values("o", r.value[S_o], want[s.p.head_map], 4, 0);
            result_free(&r);
            trial_free(&x);
        }
}

/* Everything that has a state is sized by value heads; a wrong size is not stretched. */
static void test_A21_sizes_by_value_head(void **state)
{
    (void)state;
    for (int b = 0; b < BACKENDS; b++)
        for (size_t i = 0; i < DR_COUNT(variants); i++) {
            spec s = {.p = problem_make(variants[i], 20, 2, 4, 8, 8)};
            trial x = trial_make(&s);
            expect_recurrence("HV = 2 H", b, &x);
            trial_free(&x);
            s.p.gate = DR_GATE_SOFTPLUS;
            rig r = rig_make(names[b], &s);
            static const int sized[] = {S_g, S_beta, S_a_log, S_dt_bias, S_initial_state, S_v};
            for (size_t m = 0; m < DR_COUNT(sized); m++) {
                dr_io io = r.io;
                dr_tensor *t = io_slot(&io, sized[m]);
                const char *axis = strchr(slots[sized[m]].letters, 'J');
                t->shape[axis - slots[sized[m]].letters] = 2; /* as if sized by H */
                assert_int_equal(dr_forward(r.plan, &io, &r.b.b), DR_ERR_SHAPE);
                assert_int_equal(
                    strncmp(dr_last_error(), slots[sized[m]].name, strlen(slots[sized[m]].name)),
                    0);
                assert_non_null(strstr(dr_last_error(), ": expected ["));
            }
            rig_untouched(&r);
            rig_free(&r);
        }
}

static void test_A22_state_layout(void **state)
{
    (void)state;
    static const double S[2][4] = {{1, 2, 3, 4}, {1, 3, 2, 4}}; /* [K,V], and [V,K] of the same */
    for (int b = 0; b < BACKENDS; b++)
        for (int code = 0; code < 8; code++) {
            bool v_first = code / 2 % 2, step = code / 4;
            spec s = tiny(variants[code % 2], 65, 2, 2);
            s.absent = BIT(chunk_states);
            s.p.state_v_first = v_first;
            trial x = trial_make(&s);
            double q[130], k[130];
            for (int m = 0; m < 130; m++) {
                q[m] = m % 2;
                k[m] = 1 - m % 2;
            }
            put(&x, S_q, q);
            put(&x, S_k, k);
            fill(&x, S_v, 0);
            fill(&x, S_beta, .5);
            fill(&x, S_g, 0);
            put(&x, S_initial_state, S[v_first]);
            result r = trial_run(ctx[b], &x, (how){.form = step ? FORM_STEP : FORM_CALL});
            for (int t = 0; t < 65; t++)
                assert_true(fabs(r.value[S_o][2 * t] - 3) < 1e-6 &&
                            fabs(r.value[S_o][2 * t + 1] - 4) < 1e-6);
            const double *F = r.value[S_final_state];
            assert_true(fabs(F[v_first ? 1 : 2] - 3) < 1e-6 && fabs(F[3] - 4) < 1e-6);
            if (!step) { /* the same gradients, laid out the same way */
                x.p.state_v_first = !v_first;
                dr_tensor *both[] = {&x.io.initial_state, &x.io.d_final_state};
                for (int m = 0; m < 2; m++) {
                    int64_t kept = both[m]->stride[2];
                    both[m]->stride[2] = both[m]->stride[3];
                    both[m]->stride[3] = kept;
                }
                result y = trial_run(ctx[b], &x, (how){0});
                assert_memory_equal(y.value[S_dk], r.value[S_dk], sizeof q);
                assert_true(y.value[S_d_initial_state][1] == r.value[S_d_initial_state][2] &&
                            y.value[S_d_initial_state][2] == r.value[S_d_initial_state][1]);
                result_free(&y);
            }
            result_free(&r);
            trial_free(&x);
        }
    for (int code = 0; code < 8; code++) { /* saved by one backend, resumed by the other */
        int first = code % 2, v_first = code / 2 % 2;
        spec s = {.p = problem_make(variants[code / 4], 130, 1, 2, 16, 24)};
        s.p.state_v_first = v_first;
        trial x = trial_make(&s), a = trial_cut(&x, 0, 0, 70, 0), c = trial_cut(&x, 0, 70, 130, 0);
        how h = {.forward_only = true, .unwanted = BIT(chunk_states)};
        result whole = trial_run(ctx[REF], &x, h), begun = trial_run(ctx[first], &a, h);
        put(&x, S_initial_state, begun.value[S_final_state]);
        result rest = trial_run(ctx[!first], &c, h);
        expect_near("resumed elsewhere", rest.value[S_o], whole.value[S_o] + 70 * 2 * 24,
                    rest.count[S_o], BUDGET);
        expect_near("resumed elsewhere", rest.value[S_final_state], whole.value[S_final_state],
                    rest.count[S_final_state], BUDGET);
        result_free(&whole);
        result_free(&begun);
        result_free(&rest);
        trial_free(&x);
    }
}

/* ---- A23 to A25: types, offsets, strides
 * ------------------------------------------------------------- */

static void test_A23_silent_casts(void **state)
{
    (void)state;
    for (int b = 0; b < BACKENDS; b++)
        for (size_t i = 0; i < DR_COUNT(variants); i++)
            for (int dtype = DR_F32; dtype <= DR_F16; dtype++) {
                spec s = tiny(variants[i], 4096, 1, 1);
                s.dtype = (dr_dtype)dtype;
                s.absent = 0;
                trial x = trial_make(&s);
                fill(&x, S_g, -1e-4);
                fill(&x, S_beta, 0);
                fill(&x, S_initial_state, 1);
                result r = trial_run(ctx[b], &x, (how){.unwanted = BIT(chunk_states)});
                assert_true(fabs(r.value[S_final_state][0] - 0.66392) < 1e-5);
                assert_int_equal(r.dtype[S_o], dtype);
                assert_int_equal(r.dtype[S_final_state], DR_F32);
                result_free(&r);
                trial_free(&x);
            }
    spec s = tiny(DR_GDN, 4, 2, 2);
    rig r = rig_make("cpu", &s);
    double wide[8] = {0};
    dr_io io = r.io;
    io.v = dr_tensor_make(wide, DR_F64, 4, 1, 4, 1, 2);
    REFUSED(dr_forward(r.plan, &io, &r.b.b), DR_ERR_SUPPORT,
            "v: backend cpu does not take dtype f64");
    rig_untouched(&r);
    rig_free(&r);
    for (int b = 0; b < BACKENDS; b++) { /* fp16 state, bf16 activations */
        uint16_t x[2] = {dr_f32_to_bf16(2), dr_f32_to_bf16(7)}, y[2], h[3], init[3];
        float w[] = {1, 2, 3, 4};
        for (int i = 0; i < 3; i++)
            init[i] = dr_f32_to_f16((float)(i + 1));
        dr_conv_args a = DR_CONV_ARGS_INIT;
        a.x = dr_tensor_make(x, DR_BF16, 3, 1, 2, 1, 0);
        a.y = dr_tensor_make(y, DR_BF16, 3, 1, 2, 1, 0);
        a.weight = f32(w, 2, 1, 4, 0, 0);
        a.initial_state = dr_tensor_make(init, DR_F16, 3, 1, 1, 3, 0);
        a.final_state = dr_tensor_make(h, DR_F16, 3, 1, 1, 3, 0);
        MUST(dr_conv(ctx[b], &a));
        assert_true(dr_bf16_to_f32(y[0]) == 22 && dr_bf16_to_f32(y[1]) == 42);
        assert_true(dr_f16_to_f32(h[0]) == 3 && dr_f16_to_f32(h[1]) == 2 &&
                    dr_f16_to_f32(h[2]) == 7);
    }
}

/* t with its elements in a sparse mapping, `axis` more than 2^31 elements apart. */
typedef struct far_tensor {
    dr_tensor view;
    void *map;
    size_t bytes;
} far_tensor;

static bool far_make(const dr_tensor *t, int32_t axis, far_tensor *out)
{
    size_t size = dr_dtype_size(t->dtype);
    int64_t stride = (1ll << 31) + 77;
    *out = (far_tensor){.view = *t, .bytes = (size_t)(stride * (t->shape[axis] - 1) + 4096) * size};
    out->map = mmap(NULL, out->bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (out->map == MAP_FAILED)
        return false;
    out->view.data = out->map;
    out->view.stride[axis] = stride;
    return true;
}

/* Rows of memory more than 2^31 elements apart are found, for every operand in its turn. */
static void test_A24_wide_offsets(void **state)
{
    (void)state;
    for (int b = 0; b < BACKENDS; b++)
        for (size_t v = 0; v < DR_COUNT(variants); v++) {
            spec s = {.p = problem_make(variants[v], 2, 2, 2, 8, 8)};
            s.p.batch = 2;
            rig r = rig_make(names[b], &s);
            MUST(dr_forward(r.plan, &r.io, &r.b.b));
            MUST(dr_backward(r.plan, &r.io, &r.b.b));
            double *want[SLOTS] = {0};
            for (int i = 0; i < SLOTS; i++)
                if (r.made[i].view.data != NULL)
                    want[i] = view_read(&r.made[i].view);
            for (int i = 0; i < SLOTS; i++)
                for (int32_t axis = 0; axis < 3; axis++) {
                    dr_io io = r.io;
                    dr_tensor *t = io_slot(&io, i);
                    far_tensor far;
                    if (t->data == NULL || axis >= t->rank)
                        continue;
                    if (!far_make(t, axis, &far)) {
                        print_message("no address space for sparse mappings: skipped\n");
                        skip();
                    }
                    double *values = view_read(t);
                    view_write(&far.view, values);
                    free(values);
                    *t = far.view;
                    MUST(dr_forward(r.plan, &io, &r.b.b));
                    MUST(dr_backward(r.plan, &io, &r.b.b));
                    for (int m = 0; m < SLOTS; m++) {
                        if (want[m] == NULL)
                            continue;
                        double *got = view_read(io_slot(&io, m));
                        assert_memory_equal(got, want[m],
                                            sizeof *got * (size_t)view_count(io_slot(&io, m)));
                        free(got);
                    }
                    munmap(far.map, far.bytes);
                }
            for (int i = 0; i < SLOTS; i++)
                free(want[i]);
            rig_free(&r);
        }
}

/* Slices of one projection, the middle third of a gradient, every other row of a batch. */
static void test_A25_slices(void **state)
{
    (void)state;
    enum { B = 2, T = 33, H = 2, D = 8, ROW = 3 * H * D + H };
    for (int b = 0; b < BACKENDS; b++)
        for (size_t v = 0; v < DR_COUNT(variants); v++) {
            spec s = {.p = problem_make(variants[v], T, H, H, D, D)};
            s.p.batch = B;
            trial x = trial_make(&s), y = x;
            result want = trial_run(ctx[b], &x, (how){0});
            float *one = malloc(sizeof *one * 4 * T * ROW),
                  *dy = malloc(sizeof *dy * B * T * 3 * H * D);
            assert_true(one != NULL && dy != NULL);
            for (int64_t i = 0; i < 4 * T * ROW; i++)
                one[i] = NAN;
            for (int64_t i = 0; i < B * T * 3 * H * D; i++)
                dy[i] = NAN;
            static const int parts[] = {S_q, S_k, S_v, S_beta, S_d_o};
            for (size_t i = 0; i < DR_COUNT(parts); i++) {
                dr_tensor *t = io_slot(&y.io, parts[i]);
                double *values = view_read(t);
                bool last = parts[i] == S_d_o;
                t->data = last ? dy + H * D : one + i * H * D;
                t->stride[0] = last ? T * 3 * H * D : 2 * T * ROW;
                t->stride[1] = last ? 3 * H * D : ROW;
                t->stride[2] = parts[i] == S_beta ? 1 : D;
                view_write(t, values);
                free(values);
            }
            result got = trial_run(ctx[b], &y, (how){0});
            expect_same("slices", &got, &want, 0);
            result_free(&got);
            result_free(&want);
            free(one);
            free(dy);
            trial_free(&x);
        }
}

/* ---- A33 to A36: hangs, races, the same bits
 * ----------------------------------------------------------- */

static void test_A33_long_tail(void **state)
{
    (void)state;
    int64_t offsets[65] = {0, 4096};
    for (int i = 2; i <= 64; i++)
        offsets[i] = offsets[i - 1] + 1 + i % 3;
    alarm(120); /* a hang ends the process */
    for (int b = 0; b < BACKENDS; b++)
        for (int code = 0; code < 8; code++) {
            spec s = {.p = problem_make(variants[code & 1], offsets[64], 1, 1, 8, 8)};
            s.p.offsets = offsets;
            s.p.sequences = 64;
            s.absent = BIT(chunk_states) | (code & 2 ? BIT(initial_state) : 0) |
                       (code & 4 ? BIT(final_state) : 0);
            trial x = trial_make(&s);
            result r = trial_run(ctx[b], &x, (how){0});
            expect_finite(&r);
            result_free(&r);
            trial_free(&x);
        }
    alarm(0);
}

static void test_A34_repeats(void **state)
{
    (void)state;
    for (size_t i = 0; i < DR_COUNT(variants); i++) {
        spec s = {.p = problem_make(variants[i], 70, 4, 8, 128, 32), .absent = BIT(chunk_states)};
        trial x = trial_make(&s);
        result want = trial_run(ctx[0], &x, (how){0});
        for (int n = 0; n < 50; n++) {
            result got = trial_run(ctx[0], &x, (how){0});
            expect_same("again", &got, &want, 0);
            result_free(&got);
        }
        result_free(&want);
        trial_free(&x);
    }
}

/* A row gets the same bits alone and among four, without a state and with a zero one, dense and
 * packed, on one thread and on three. */
static void test_A35_same_row_same_bits(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 100};
    for (int b = 0; b < BACKENDS; b++)
        for (size_t i = 0; i < DR_COUNT(variants); i++) {
            spec s = {.p = problem_make(variants[i], 100, 1, 2, 64, 32),
                      .absent = BIT(chunk_states)};
            trial x = trial_make(&s);
            fill(&x, S_initial_state, 0);
            trial four = x;
            result want = trial_run(ctx[b], &x, (how){0});
            four.p.batch = four.s.p.batch = four.N = 4;
            for (int m = 0; m < SLOTS; m++) {
                dr_tensor *t = io_slot(&four.io, m);
                if (t->data != NULL && strchr("BN", slots[m].letters[0])) {
                    t->shape[0] = 4;
                    t->stride[0] = 0; /* four times the same row */
                }
            }
            result all = trial_run(ctx[b], &four, (how){0});
            for (int m = 0; m < SLOTS; m++)
                for (int row = 0; row < 4 && all.value[m] != NULL; row++)
                    assert_memory_equal(all.value[m] + row * want.count[m], want.value[m],
                                        sizeof(double) * (size_t)want.count[m]);
            for (int code = 0; code < 3; code++) {
                trial y = x;
                dr_context *other = ctx[b], *three = NULL;
                dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
                options.threads = 3;
                if (code == 0)
                    y.io.initial_state.data = NULL;
                if (code == 1) {
                    y.p.offsets = offsets;
                    y.p.sequences = 1;
                }
                if (code == 2) {
                    MUST(dr_context_create(names[b], &options, &three));
                    other = three;
                }
                result got = trial_run(other, &y, (how){0});
                expect_same("the same row", &got, &want, 0);
                result_free(&got);
                dr_context_destroy(three);
            }
            result_free(&all);
            result_free(&want);
            trial_free(&x);
        }
}

typedef struct caller {
    pthread_t thread;
    const dr_context *ctx;
    const dr_plan *plan;
    dr_io io;
    dr_buffers b;
    float g[3];
    dr_status status;
} caller;

static void *call_all(void *arg)
{
    caller *c = arg;
    float x[3] = {-1, 0, 2}, a[3] = {0};
    dr_gate_args gate = DR_GATE_ARGS_INIT;
    gate.gate = DR_GATE_SOFTPLUS;
    gate.x = f32(x, 3, 1, 1, 3, 0);
    gate.a_log = f32(a, 1, 3, 0, 0, 0);
    gate.g = f32(c->g, 3, 1, 1, 3, 0);
    for (int n = 0; n < 5 && c->status == DR_OK; n++) {
        c->status = dr_forward(c->plan, &c->io, &c->b);
        if (c->status == DR_OK)
            c->status = dr_backward(c->plan, &c->io, &c->b);
        if (c->status == DR_OK)
            c->status = dr_gate_activate(c->ctx, &gate);
    }
    return NULL;
}

/* Eight host threads on one context and one plan, library threads on top. */
static void test_A36_many_callers(void **state)
{
    (void)state;
    enum { CALLERS = 8 };
    for (int b = 0; b < BACKENDS; b++) {
        spec s = {.p = problem_make(DR_KDA, 80, 1, 3, 32, 16)};
        rig r = rig_make(names[b], &s);
        caller callers[CALLERS + 1] = {0};
        fenced_buffers buffers[CALLERS + 1];
        tensor made[CALLERS + 1][SLOTS];
        memset(made, 0, sizeof made);
        for (int i = 0; i <= CALLERS; i++) {
            buffers[i] = buffers_make(r.info.saved_bytes, r.b.b.scratch_bytes, UNWRITTEN);
            callers[i] = (caller){.ctx = r.ctx, .plan = r.plan, .io = r.io, .b = buffers[i].b};
            for (int m = 0; m < SLOTS; m++)
                if (r.made[m].view.data != NULL) {
                    made[i][m] = tensor_make(&r.x.random, LAYOUT_DENSE, DR_F32, r.made[m].view.rank,
                                             r.made[m].view.shape);
                    *io_slot(&callers[i].io, m) = made[i][m].view;
                }
        }
        call_all(&callers[CALLERS]); /* alone */
        for (int i = 0; i < CALLERS; i++)
            assert_int_equal(pthread_create(&callers[i].thread, NULL, call_all, &callers[i]), 0);
        for (int i = 0; i < CALLERS; i++)
            pthread_join(callers[i].thread, NULL);
        for (int i = 0; i <= CALLERS; i++) {
            assert_int_equal(callers[i].status, DR_OK);
            assert_memory_equal(callers[i].g, callers[CALLERS].g, sizeof callers[i].g);
            for (int m = 0; m < SLOTS; m++)
                if (made[i][m].view.data != NULL)
                    assert_memory_equal(made[i][m].memory.data, made[CALLERS][m].memory.data,
                                        made[i][m].memory.bytes);
        }
        for (int i = 0; i <= CALLERS; i++) {
            for (int m = 0; m < SLOTS; m++)
                tensor_free(&made[i][m]);
            buffers_free(&buffers[i]);
        }
        rig_free(&r);
    }
}

/* ---- A37 to A39: memory, start-up, forms
 * ---------------------------------------------------------------- */

static void test_A37_workspace(void **state)
{
    (void)state;
    const int64_t T = 4096, H = 16, HV = 32, D = 128;
    for (int b = 0; b < BACKENDS; b++)
        for (size_t i = 0; i < DR_COUNT(variants); i++) {
            int64_t bytes[3], inner = b == REF ? 8 : 4;
            for (int keep = DR_KEEP_FACTORS; keep <= DR_KEEP_STATES; keep++) {
                dr_problem p =
                    problem_make(variants[i], T, (int32_t)H, (int32_t)HV, (int32_t)D, (int32_t)D);
                p.keep = (dr_keep)keep;
                dr_plan *plan;
                MUST(dr_plan_create(ctx[b], &p, &plan));
                dr_plan_info info = DR_PLAN_INFO_INIT;
                MUST(dr_plan_describe(plan, &info));
                size_t scratch = info.forward_scratch > info.backward_scratch
                                     ? info.forward_scratch
                                     : info.backward_scratch;
                bytes[keep] = (int64_t)(info.saved_bytes + scratch);
                int64_t states = info.chunks * HV * D * D * inner;
                int64_t per_token = T * (HV * D + H * D) * inner;
                print_message("%s %s keep %d: %.0f MiB saved, %.0f MiB scratch\n", names[b],
                              i ? "kda" : "gdn", keep, (double)info.saved_bytes / 0x1p20,
                              (double)scratch / 0x1p20);
                assert_true(bytes[keep] <= states + 6 * per_token + (256 << 20));
                dr_plan_destroy(plan);
            }
            assert_true(bytes[DR_KEEP_INPUTS] <= bytes[DR_KEEP_FACTORS]);
            assert_true(bytes[DR_KEEP_INPUTS] < bytes[DR_KEEP_STATES]);
        }
}

/* A new length costs the plan's few blocks and nothing else. */
static void test_A38_every_length(void **state)
{
    (void)state;
    spec s = tiny(DR_GDN, 1100, 4, 4);
    rig r = rig_make("cpu", &s);
    long per_plan = -1;
    for (int64_t T = 1000; T < 1100; T++) {
        trial y = trial_cut(&r.x, 0, 0, T, 0);
        dr_io io = r.io;
        for (int i = 0; i < SLOTS; i++) {
            dr_tensor *t = io_slot(&io, i);
            if (t->data != NULL && slots[i].letters[0] == 'B')
                *t = view_cut(*t, 1, 0, T);
        }
        io.chunk_states.data = NULL;
        long before = allocs.calls;
        dr_plan *plan;
        MUST(dr_plan_create(r.ctx, &y.p, &plan));
        long made = allocs.calls - before;
        assert_true(per_plan < 0 || made == per_plan);
        per_plan = made;
        MUST(dr_forward(plan, &io, &r.b.b));
        MUST(dr_backward(plan, &io, &r.b.b));
        assert_int_equal(allocs.calls - before, per_plan);
        dr_plan_destroy(plan);
    }
    assert_true(per_plan <= 8);
    rig_free(&r);
}

static void test_A39_gate_forms(void **state)
{
    (void)state;
    for (int b = 0; b < BACKENDS; b++) {
        float x[1] = {0}, zero[1] = {0}, g[1];
        dr_gate_args a = DR_GATE_ARGS_INIT;
        a.x = f32(x, 3, 1, 1, 1, 0);
        a.a_log = f32(zero, 1, 1, 0, 0, 0);
        a.dt_bias = f32(zero, 1, 1, 0, 0, 0);
        a.g = f32(g, 3, 1, 1, 1, 0);
        REFUSED(dr_gate_activate(ctx[b], &a), DR_ERR_ARG, "there is no default), got 0");
        a.gate = DR_GATE_SOFTPLUS;
        MUST(dr_gate_activate(ctx[b], &a));
        assert_true(fabs(g[0] + 0.69314718) < 1e-6);
        a.gate = DR_GATE_LOWER_BOUND;
        REFUSED(dr_gate_activate(ctx[b], &a), DR_ERR_ARG,
                "lower_bound: must be finite and below 0, got 0");
        a.lower_bound = -5;
        MUST(dr_gate_activate(ctx[b], &a));
        assert_true(g[0] == -2.5);
        a.gate = DR_GATE_LOG;
        REFUSED(dr_gate_activate(ctx[b], &a), DR_ERR_ARG, "gate: must be DR_GATE_SOFTPLUS (4)");
        dr_norm_args n = DR_NORM_ARGS_INIT;
        n.x = n.gate = n.y = f32(x, 1, 1, 0, 0, 0);
        n.weight = f32(zero, 1, 1, 0, 0, 0);
        REFUSED(dr_gated_norm(ctx[b], &n), DR_ERR_ARG, "activation: must be DR_ACT_SILU (1) or");
        for (int gate = DR_GATE_SOFTPLUS; gate <= DR_GATE_LOWER_BOUND;
             gate++) { /* fused, the same */
            spec s = tiny(DR_KDA, 1, 1, 1);
            s.absent = 0;
            s.p.gate = (dr_gate)gate;
            s.p.lower_bound = gate == DR_GATE_LOWER_BOUND ? -5 : 0;
            trial t = trial_make(&s);
            static const int zeroed[] = {S_g, S_a_log, S_dt_bias, S_beta};
            for (size_t i = 0; i < DR_COUNT(zeroed); i++)
                fill(&t, zeroed[i], 0);
            fill(&t, S_initial_state, 1);
            result r = trial_run(ctx[b], &t, (how){0});
            assert_true(fabs(r.value[S_final_state][0] -
                             exp(gate == DR_GATE_SOFTPLUS ? -log(2) : -2.5)) < 1e-6);
            result_free(&r);
            trial_free(&t);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_A20_head_mapping),
        cmocka_unit_test(test_A21_sizes_by_value_head),
        cmocka_unit_test(test_A22_state_layout),
        cmocka_unit_test(test_A23_silent_casts),
        cmocka_unit_test(test_A24_wide_offsets),
        cmocka_unit_test(test_A25_slices),
        cmocka_unit_test(test_A33_long_tail),
        cmocka_unit_test(test_A34_repeats),
        cmocka_unit_test(test_A35_same_row_same_bits),
        cmocka_unit_test(test_A36_many_callers),
        cmocka_unit_test(test_A37_workspace),
        cmocka_unit_test(test_A38_every_length),
        cmocka_unit_test(test_A39_gate_forms),
    };
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}
