/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ref_paths.c - many ways to one result on backend ref: threads, kept states, chunk
 * lengths, stages, windows, maps, state pools, the step.
 */
#include "test.h"

#include "backend.h"

#include <deltarule/cp.h>

/* V is wider than one window of state columns (which start at multiples of 32). */
enum { T = 23, H = 2, HV = 4, K = 5, V = 40, N = 4 };
enum { STATE = HV * K * V, MAP = HV * (V + K) * K }; /* of one sequence */
static const int64_t offsets[] = {0, 9, 9, 10, T};

static dr_context *ctx, *three; /* one thread and three */

/* Inputs and results of one case. */
typedef struct numbers {
    double q[T * H * K], k[T * H * K], v[T * HV * V], g[T * HV * K], beta[T * HV];
    double d_o[T * HV * V], start[N * STATE], d_last[N * STATE];
    struct results {
        double o[T * HV * V], last[N * STATE];
        double dq[T * H * K], dk[T * H * K], dv[T * HV * V], dg[T * HV * K], dbeta[T * HV];
        double d_start[N * STATE];
    } out;
} numbers;
static numbers x, y;

static void fill(numbers *s)
{
    rng r = {3};
    double *all[] = {s->q, s->k, s->v, s->d_o, s->start, s->d_last};
    const size_t n[] = {DR_COUNT(s->q), DR_COUNT(s->k), DR_COUNT(s->v), DR_COUNT(s->d_o),
                        DR_COUNT(s->start), DR_COUNT(s->d_last)};
    for (size_t i = 0; i < DR_COUNT(all); i++)
        for (size_t e = 0; e < n[i]; e++)
            all[i][e] = rng_normal(&r);
    for (size_t e = 0; e < DR_COUNT(s->g); e++)
        s->g[e] = rng_uniform(&r, -0.6, 0);
    for (size_t e = 0; e < DR_COUNT(s->beta); e++)
        s->beta[e] = rng_uniform(&r, 0.1, 0.9);
    memset(&s->out, UNWRITTEN, sizeof s->out);
}

static dr_problem problem(void)
{
    dr_problem p = DR_PROBLEM_INIT;
    p.variant = DR_KDA;
    p.tokens = T;
    p.heads = H;
    p.value_heads = HV;
    p.key_dim = K;
    p.value_dim = V;
    p.offsets = offsets;
    p.sequences = N;
    p.gate = DR_GATE_LOG;
    p.beta = DR_BETA_VALUE;
    p.l2norm = 1;
    p.chunk = 4;
    return p;
}

static dr_tensor f64(double *data, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return dr_tensor_make(data, DR_F64, 4, a, b, c, d);
}

/* All tensors in the form that backends see. */
static dr_io io_of(numbers *s)
{
    dr_io io = DR_IO_INIT;
    io.q = f64(s->q, 1, T, H, K);
    io.k = f64(s->k, 1, T, H, K);
    io.v = f64(s->v, 1, T, HV, V);
    io.g = f64(s->g, 1, T, HV, K);
    io.beta = f64(s->beta, 1, T, HV, 1);
    io.d_o = f64(s->d_o, 1, T, HV, V);
    io.initial_state = f64(s->start, N, HV, K, V);
    io.d_final_state = f64(s->d_last, N, HV, K, V);
    io.o = f64(s->out.o, 1, T, HV, V);
    io.final_state = f64(s->out.last, N, HV, K, V);
    io.dq = f64(s->out.dq, 1, T, H, K);
    io.dk = f64(s->out.dk, 1, T, H, K);
    io.dv = f64(s->out.dv, 1, T, HV, V);
    io.dg = f64(s->out.dg, 1, T, HV, K);
    io.dbeta = f64(s->out.dbeta, 1, T, HV, 1);
    io.d_initial_state = f64(s->out.d_start, N, HV, K, V);
    return io;
}

/* The same for the public calls, where beta has rank 3. */
static dr_io public_io(numbers *s)
{
    dr_io io = io_of(s);
    io.beta.rank = io.dbeta.rank = 3;
    return io;
}

static void run(const dr_context *on, const dr_problem *p, numbers *s)
{
    dr_plan *plan;
    dr_buffers b;
    dr_io io = public_io(s);
    MUST(dr_plan_create(on, p, &plan));
    MUST(dr_buffers_create(plan, &b));
    memset(b.saved, UNWRITTEN, b.saved_bytes);
    memset(b.scratch, UNWRITTEN, b.scratch_bytes);
    MUST(dr_forward(plan, &io, &b));
    MUST(dr_backward(plan, &io, &b));
    dr_buffers_destroy(&b);
    dr_plan_destroy(plan);
}

/* Threads, kept states and chunk lengths change no bit. */
static void test_same_bits(void **state)
{
    (void)state;
    fill(&x);
    dr_problem p = problem();
    run(ctx, &p, &x);
    for (int i = 0; i < 12; i++) {
        fill(&y);
        p.keep = (dr_keep)(i % 3);
        p.chunk = i % 4 == 0 ? 0 : i % 4 == 1 ? 1 : 7 * i;
        run(i % 2 ? three : ctx, &p, &y);
        assert_memory_equal(&x.out, &y.out, sizeof x.out);
    }
}

static double dot(const double *a, const double *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* Outputs are linear in v and the entry state together. */
static void test_linearity(void **state)
{
    (void)state;
    fill(&x);
    dr_problem p = problem();
    run(ctx, &p, &x);
    double forward = dot(x.d_o, x.out.o, DR_COUNT(x.d_o)) + dot(x.d_last, x.out.last, N * STATE);
    double adjoint = dot(x.out.dv, x.v, DR_COUNT(x.v)) + dot(x.out.d_start, x.start, N * STATE);
    assert_true(fabs(forward - adjoint) < 1e-12 * fabs(forward));
}

/* A copy of a dense tensor in another layout and dtype; the original is rounded along. */
static void scatter(rng *r, dr_tensor *t, dr_dtype dtype, tensor *copy)
{
    *copy = tensor_make(r, LAYOUT_ANY, dtype, t->rank, t->shape);
    view_write(&copy->view, t->data);
    double *rounded = view_read(&copy->view);
    view_write(t, rounded);
    free(rounded);
    *t = copy->view;
}

/* Any strides and element types give the bits of dense fp64 inputs of the same values. */
static void test_layouts(void **state)
{
    (void)state;
    static const dr_dtype dtypes[] = {DR_F32, DR_BF16, DR_F16, DR_F64};
    for (size_t i = 0; i < 12; i++) {
        rng r = {i};
        tensor copies[16];
        dr_problem p = problem();
        dr_plan *plan;
        dr_buffers b;
        fill(&x);
        dr_io io = public_io(&x);
        dr_tensor *in[] = {&io.q, &io.k, &io.v, &io.g, &io.beta, &io.d_o, &io.initial_state,
                           &io.d_final_state};
        dr_tensor *out[] = {&io.o, &io.final_state, &io.dq, &io.dk, &io.dv, &io.dg, &io.dbeta,
                            &io.d_initial_state};
        for (size_t e = 0; e < DR_COUNT(in); e++)
            scatter(&r, in[e], RNG_PICK(&r, dtypes), &copies[e]);
        run(ctx, &p, &x); /* dense, the rounded values */
        dr_tensor dense[DR_COUNT(out)];
        for (size_t e = 0; e < DR_COUNT(out); e++) {
            dense[e] = *out[e];
            tensor *copy = &copies[DR_COUNT(in) + e];
            *copy = tensor_make(&r, LAYOUT_ANY, DR_F64, out[e]->rank, out[e]->shape);
            *out[e] = copy->view;
            tensor_remember(copy);
        }
        MUST(dr_plan_create(ctx, &p, &plan));
        MUST(dr_buffers_create(plan, &b));
        MUST(dr_forward(plan, &io, &b));
        MUST(dr_backward(plan, &io, &b));
        dr_buffers_destroy(&b);
        dr_plan_destroy(plan);
        for (size_t e = 0; e < DR_COUNT(out); e++) {
            double *got = view_read(out[e]);
            assert_memory_equal(got, dense[e].data, sizeof *got * (size_t)view_count(out[e]));
            free(got);
        }
        for (size_t e = 0; e < DR_COUNT(copies); e++) {
            tensor_check(&copies[e], "tensor", true);
            tensor_free(&copies[e]);
        }
    }
}

/* ---- stages and windows ---------------------------------------------------------------- */

/* A pass made by hand, with memory of the exact size. */
typedef struct trip {
    dr_plan plan;
    dr_device *dev;
    dr_io io;
    fenced_buffers memory[2]; /* forward and adjoint scratch; both use the first one's saved */
    float entry[N * STATE], exit[N * STATE], maps[N * MAP];
    const int32_t *places;
} trip;

static dr_pass trip_pass(trip *t, int dir)
{
    fenced_buffers *m = &t->memory[dir < 0];
    return (dr_pass){
        .dev = t->dev,
        .plan = &t->plan,
        .io = &t->io,
        .dir = dir,
        .staged = true,
        .head1 = HV,
        .col1 = V,
        .piece1 = t->plan.n_pieces,
        .saved = {.base = t->memory[0].b.saved, .size = t->memory[0].b.saved_bytes},
        .scratch = {.base = m->b.scratch, .size = m->b.scratch_bytes},
    };
}

static void trip_open(trip *t, numbers *s, dr_keep keep)
{
    dr_problem p = problem(), completed;
    p.keep = keep;
    MUST(dr_problem_complete(&p, &completed));
    MUST(dr_plan_cut(&t->plan, &completed));
    MUST(dr_backend_ref.open(&(dr_pool){.threads = 2}, &t->dev));
    t->io = io_of(s);
    for (int i = 0; i < 2; i++) {
        dr_pass p0 = trip_pass(t, i == 0 ? 1 : -1);
        MUST((i == 0 ? dr_backend_ref.forward : dr_backend_ref.adjoint).layout(&p0));
        t->memory[i] = buffers_make(p0.saved.used, p0.scratch.used, UNWRITTEN);
    }
}

static void trip_close(trip *t)
{
    buffers_free(&t->memory[0]);
    buffers_free(&t->memory[1]);
    dr_backend_ref.close(t->dev);
    dr_plan_clear(&t->plan);
    free(t);
}

typedef struct window {
    int32_t head0, head1, col0, col1;
} window;
static const window whole[] = {{0, HV, 0, V}};
static const window windows[] = {{2, 4, 32, V}, {0, 2, 0, 32}, {2, 4, 0, 32}, {0, 2, 32, V}};
static const window groups[] = {{2, 4, 0, V}, {0, 2, 0, V}};

/* Runs one stage window by window. */
static void in_windows(trip *t, int dir, dr_stage *stage, const window *w, size_t n, bool given)
{
    for (size_t i = 0; i < n; i++) {
        dr_pass p = trip_pass(t, dir);
        p.head0 = w[i].head0;
        p.head1 = w[i].head1;
        p.col0 = w[i].col0;
        p.col1 = w[i].col1;
        p.maps = t->maps;
        p.entry = given ? t->entry : NULL;
        p.entry_of = p.map_of = t->places;
        p.exit = t->exit;
        MUST(stage(&p));
        assert_false(p.saved.overflow || p.scratch.overflow);
        dr_arena_done(&p.saved);
        dr_arena_done(&p.scratch);
    }
}

static void expect_state(const char *what, const float *v_major, const double *state)
{
    double got[STATE];
    for (int64_t j = 0; j < HV; j++)
        for (int64_t i = 0; i < K; i++)
            for (int64_t c = 0; c < V; c++)
                got[(j * K + i) * V + c] = v_major[(j * V + c) * K + i];
    expect_near(what, got, state, STATE, 1e-7);
}

/* Places of the sequences when not all are given: entries of the others are the io's own,
 * their maps not wanted. */
static const int32_t places[N] = {2, -1, 0, 1}, in_order[N] = {0, 1, 2, 3};
static const int32_t backwards[N] = {3, 2, 1, 0};

/* States go where `at` says; those without a place only stay in `from`, the others leave it. */
static void give(trip *t, double *from, const int32_t *at, bool given)
{
    for (int64_t n = 0; n < N; n++)
        for (int64_t e = 0; at[n] >= 0 && e < STATE; e++) {
            int64_t j = e / (K * V), i = e / V % K, c = e % V;
            t->entry[at[n] * STATE + (j * V + c) * K + i] = (float)from[n * STATE + e];
            if (given)
                from[n * STATE + e] = NAN;
        }
}

/* The plain passes, taken apart: every stage in windows, entries partly given by the caller
 * (fp32) or all from io, and the exits also as the maps predict them. */
static void staged(dr_keep keep, bool given)
{
    fill(&x);
    fill(&y);
    for (size_t i = 0; i < DR_COUNT(x.start); i++) { /* fp32, so that all see the same numbers */
        x.start[i] = y.start[i] = (float)x.start[i];
        x.d_last[i] = y.d_last[i] = (float)x.d_last[i];
    }
    dr_problem p = problem();
    run(ctx, &p, &x);
    trip *t = calloc(1, sizeof *t);
    assert_non_null(t);
    trip_open(t, &y, keep);
    const int32_t *at = t->places = given ? places : in_order;
    if (given) { /* a pool turned round, with which given entries have nothing to do */
        t->io.initial_state = f64(y.start + (N - 1) * STATE, N, HV, K, V);
        t->io.final_state = f64(y.out.last + (N - 1) * STATE, N, HV, K, V);
        t->io.initial_state.stride[0] = t->io.final_state.stride[0] = -STATE;
        t->io.state_index = backwards;
    }
    for (int dir = 1; dir >= -1; dir -= 2) {
        const dr_stages *s = dir > 0 ? &dr_backend_ref.forward : &dr_backend_ref.adjoint;
        const double *to = dir > 0 ? x.out.last : x.out.d_start;
        give(t, dir > 0 ? y.start : y.d_last, at, given);
        memset(t->maps, UNWRITTEN, sizeof t->maps);
        in_windows(t, dir, s->prepare, whole, 1, given);
        in_windows(t, dir, s->summarize, windows, DR_COUNT(windows), given);
        for (int64_t n = 0; n < N; n++) {
            if (at[n] < 0)
                continue;
            MUST(dr_backend_ref.apply(t->dev, HV, K, V, V, t->entry + at[n] * STATE,
                                      t->maps + at[n] * MAP, t->exit));
            expect_state("exit by the map", t->exit, to + n * STATE);
        }
        assert_true(!given || isnan(t->maps[(N - 1) * MAP])); /* the place of nobody */
        memset(t->exit, UNWRITTEN, sizeof t->exit);
        in_windows(t, dir, s->recur, windows, DR_COUNT(windows), given);
        for (int64_t n = 0; n < N; n++)
            expect_state("exit", t->exit + n * STATE, to + n * STATE);
        in_windows(t, dir, s->output, dir > 0 ? windows : groups, 1, given);
        assert_true(isnan(dir > 0 ? y.out.o[0] : y.out.dv[0])); /* of another window */
        if (dir > 0)
            in_windows(t, dir, s->output, windows + 1, DR_COUNT(windows) - 1, given);
        else
            in_windows(t, dir, s->output, groups + 1, DR_COUNT(groups) - 1, given);
    }
    assert_memory_equal(&x.out, &y.out, sizeof x.out);
    dr_pass part = trip_pass(t, -1);
    part.col1 = 32;
    REFUSED(dr_backend_ref.adjoint.output(&part), DR_ERR_SUPPORT, "columns");
    trip_close(t);
}

static void test_stages(void **state)
{
    (void)state;
    for (dr_keep keep = DR_KEEP_FACTORS; keep <= DR_KEEP_STATES; keep++) {
        staged(keep, false);
        staged(keep, true);
    }
}

/* No state: the bias itself, and a NaN of the transition does not spread. */
static void test_apply_nothing(void **state)
{
    (void)state;
    float map[2 * 3] = {1, 2, NAN, NAN, NAN, NAN}, out[2];
    MUST(dr_map_apply(ctx, 1, 2, 1, NULL, map, out));
    assert_true(out[0] == 1 && out[1] == 2);
}

/* ---- states ------------------------------------------------------------------------------ */

/* Updating a pool in place, by forward and by step: sequence n from and to its slot, the
 * padding sequence from zero to nowhere. */
static void test_pool(void **state)
{
    (void)state;
    enum { SLOTS = 7 };
    static const int32_t slots[N] = {5, 2, -1, 0};
    static double pool[SLOTS * STATE];
    const size_t one = STATE;
    fill(&x);
    memset(x.start + 2 * one, 0, one * sizeof *x.start);
    dr_problem p = problem();
    run(ctx, &p, &x);
    for (int step = 0; step < 2; step++) {
        fill(&y);
        memset(pool, UNWRITTEN, sizeof pool);
        for (int n = 0; n < N; n++)
            if (slots[n] >= 0)
                memcpy(pool + slots[n] * one, x.start + n * one, one * sizeof *pool);
        dr_plan *plan;
        dr_buffers b;
        dr_io io = public_io(&y);
        io.initial_state = io.final_state = f64(pool, SLOTS, HV, K, V);
        io.state_index = slots;
        MUST(dr_plan_create(three, &p, &plan));
        MUST(dr_buffers_create(plan, &b));
        MUST((step ? dr_step : dr_forward)(plan, &io, &b));
        dr_buffers_destroy(&b);
        dr_plan_destroy(plan);
        assert_memory_equal(x.out.o, y.out.o, sizeof x.out.o);
        for (int n = 0; n < N; n++)
            if (slots[n] >= 0)
                assert_memory_equal(pool + slots[n] * one, x.out.last + n * one,
                                    one * sizeof *pool);
        assert_true(isnan(pool[one]) && isnan(pool[6 * one])); /* slots of nobody */
    }
}

/* States entering each chunk are the final states of what came before. */
static void test_chunk_states(void **state)
{
    (void)state;
    fill(&x);
    fill(&y);
    dr_problem p = problem(), head = p;
    p.chunk = 8;
    const int64_t cut[] = {0, 8, 8, 8, 8}; /* the first chunk of the first sequence */
    head.offsets = cut;
    run(ctx, &head, &y);
    static double states[4 * STATE]; /* 2 + 0 + 1 + 2 chunks, the last not needed */
    dr_plan *plan;
    dr_buffers b;
    dr_io io = public_io(&x);
    static double all[5 * STATE];
    io.chunk_states = f64(all, 5, HV, K, V);
    MUST(dr_plan_create(ctx, &p, &plan));
    MUST(dr_buffers_create(plan, &b));
    MUST(dr_forward(plan, &io, &b));
    dr_buffers_destroy(&b);
    dr_plan_destroy(plan);
    const size_t one = STATE;
    memcpy(states, x.start, one * sizeof *states);
    memcpy(states + one, y.out.last, one * sizeof *states);
    memcpy(states + 2 * one, x.start + 2 * one, 2 * one * sizeof *states);
    assert_memory_equal(all, states, sizeof states);
}

static int setup(void **state)
{
    (void)state;
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = 1;
    if (dr_context_create("ref", &options, &ctx) != DR_OK)
        return -1;
    options.threads = 3;
    return dr_context_create("ref", &options, &three) == DR_OK ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    dr_context_destroy(ctx);
    dr_context_destroy(three);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits), cmocka_unit_test(test_linearity),
        cmocka_unit_test(test_layouts),   cmocka_unit_test(test_stages),
        cmocka_unit_test(test_pool),      cmocka_unit_test(test_apply_nothing),
        cmocka_unit_test(test_chunk_states),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
