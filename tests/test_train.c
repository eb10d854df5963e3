/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_train.c - the language model of tools/: its operations and a whole tiny model against
 * finite differences, the data, and the commands train and generate as a user runs them:
 * learning, resuming bit for bit, the same bits at any thread count, damaged checkpoints,
 * interruption.
 */
#include "test.h"

#include "checkpoint.c"
#include "data.c"
#include "lm.c"
#include "lm_ops.c"
#include "model.c"

#define LM_MUST(call)                                                                        \
    do {                                                                                     \
        dr_status lm_must_status = (call);                                                   \
        if (lm_must_status != DR_OK)                                                         \
            fail_msg("%s: %s: %s", #call, dr_status_text(lm_must_status), dr_lm_error());    \
    } while (0)

/* ---- gradients -------------------------------------------------------------------------- */

static void fill(rng *r, float *x, int64_t n, double size)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)(size * rng_normal(r));
}

static double dot(const float *a, const float *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* The derivative of fn along a direction, from four values of it. */
typedef double value_fn(void *arg);

static double slope(float *x, const float *direction, int64_t n, double h, value_fn *fn, void *arg)
{
    static const double at[] = {1, -1, 2, -2}, weight[] = {8, -8, -1, 1};
    double sum = 0;
    float *kept = malloc((size_t)n * sizeof *x);
    assert_non_null(kept);
    memcpy(kept, x, (size_t)n * sizeof *x);
    for (size_t i = 0; i < DR_COUNT(at); i++) {
        for (int64_t k = 0; k < n; k++)
            x[k] = (float)((double)kept[k] + at[i] * h * (double)direction[k]);
        sum += weight[i] * fn(arg);
    }
    memcpy(x, kept, (size_t)n * sizeof *x);
    free(kept);
    return sum / (12 * h);
}

/* Curvature asks for small differences, fp32 for large ones: the two neighbours that agree
 * best are believed. */
static double best_slope(float *x, const float *direction, int64_t n, value_fn *fn, void *arg)
{
    double best = 0, agreement = INFINITY, before = NAN;
    for (double h = 1e-2; h > 5e-4; h /= 3) {
        double here = slope(x, direction, n, h, fn, arg);
        if (fabs(here - before) < agreement) {
            agreement = fabs(here - before);
            best = here;
        }
        before = here;
    }
    return best;
}

/* |got - want| against the sizes of gradient and direction, so that a slope that happens to
 * be small is no harder to meet. */
static void expect_slope(const char *what, double got, double want, const float *gradient,
                         const float *direction, int64_t n, double budget)
{
    double size = sqrt(dot(gradient, gradient, n) * dot(direction, direction, n) / (double)n);
    if (!(fabs(got - want) <= budget * (fabs(want) + size) + 5e-5)) /* fp32 differences */
        fail_msg("%s: slope %.7g by differences, %.7g by the gradient", what, want, got);
}

enum { T = 70, D = 24, F = 10, S = 9 };

typedef struct op_case {
    float x[T * 2 * F + T * D], w[D], add[T * D], weight[T * D], sum[T * D], rstd[T], y[T * D];
    float table[S * D];
    int32_t symbols[T];
    int which;
} op_case;

/* <weight, op(x)> */
static double op_value(void *arg)
{
    op_case *c = arg;
    double rows[T];
    float logits[T * S];
    switch (c->which) {
    case 0: dr_lm_embed(2, T, D, c->symbols, c->table, c->y); return dot(c->y, c->weight, T * D);
    case 1:
        dr_lm_norm(2, T, D, 1e-6f, c->x, c->add, c->w, c->sum, c->rstd, c->y);
        return dot(c->y, c->weight, T * D) + dot(c->sum, c->add, T * D);
    case 2: dr_lm_swiglu(2, T, F, c->x, c->y); return dot(c->y, c->weight, T * F);
    default:
        memcpy(logits, c->x, sizeof logits);
        return dr_lm_cross_entropy(2, T, S, logits, c->symbols, 0, rows);
    }
}

static void test_op_gradients(void **state)
{
    (void)state;
    rng r = {1};
    static op_case c;
    static float dx[T * D], dw[D], du[T * 2 * F], direction[T * D], partial[DR_LM_BLOCKS * D];
    int64_t order[T + S + 1];
    double rows[T];
    fill(&r, c.x, T * D, 1);
    fill(&r, c.w, D, 1);
    fill(&r, c.add, T * D, 1);
    fill(&r, c.weight, T * D, 1);
    fill(&r, c.table, S * D, 1);
    fill(&r, direction, T * D, 1);
    for (int t = 0; t < T; t++)
        c.symbols[t] = (int32_t)rng_below(&r, S - 1); /* the last one never occurs */

    c.which = 0;
    static float dtable[S * D];
    memset(dtable, 0xff, sizeof dtable);
    dr_lm_embed_backward(2, T, D, S, c.symbols, c.weight, dtable, order);
    expect_slope("embed", dot(dtable, direction, S * D), slope(c.table, direction, S * D, 1, op_value, &c),
                 dtable, direction, S * D, 1e-5);
    for (int k = 0; k < D; k++)
        assert_true(dtable[(S - 1) * D + k] == 0);

    c.which = 1;
    op_value(&c);
    memcpy(dx, c.add, sizeof dx); /* the sum's own gradient, which is added to */
    dr_lm_norm_backward(2, T, D, c.sum, c.w, c.rstd, c.weight, dx, dw, partial);
    expect_slope("norm x", dot(dx, direction, T * D), slope(c.x, direction, T * D, 1e-2, op_value, &c),
                 dx, direction, T * D, 1e-4);
    expect_slope("norm w", dot(dw, direction, D), slope(c.w, direction, D, 1e-1, op_value, &c), dw,
                 direction, D, 1e-4);

    c.which = 2;
    fill(&r, c.x, T * 2 * F, 2);
    memcpy(du, c.x, sizeof du);
    dr_lm_swiglu_backward(2, T, F, du, c.weight, du); /* in place */
    expect_slope("swiglu", dot(du, direction, T * 2 * F),
                 slope(c.x, direction, T * 2 * F, 1e-2, op_value, &c), du, direction, T * 2 * F, 1e-4);

    c.which = 3;
    memcpy(dx, c.x, sizeof(float) * T * S);
    dr_lm_cross_entropy(2, T, S, dx, c.symbols, 1, rows);
    expect_slope("cross-entropy", dot(dx, direction, T * S),
                 slope(c.x, direction, T * S, 1e-2, op_value, &c), dx, direction, T * S, 1e-4);
}

/* Values far out of range, and the exponential itself. */
static void test_extremes(void **state)
{
    (void)state;
    double worst = 0, rows[2];
    for (double x = -87; x < 88; x += 0.00731)
        worst = fmax(worst, fabs((double)exp_of((float)x) / exp((double)(float)x) - 1));
    if (worst > 3e-7)
        fail_msg("exp: relative error %.3g", worst);
    assert_true(exp_of(-200) == 0 && isinf(exp_of(200)));
    float logits[] = {-1e4f, 1e4f, 0, 1000, 1000, 1000};
    const int32_t target[] = {1, 0};
    double loss = dr_lm_cross_entropy(1, 2, 3, logits, target, 1, rows);
    assert_true(fabs(loss - log(3) / 2) < 1e-6);
    for (int i = 0; i < 6; i++)
        assert_true(isfinite(logits[i]));
    float u[] = {-1e30f, 1e30f, 2, 2}, h[2], dh[] = {1, 1}, du[4];
    dr_lm_swiglu(1, 1, 2, u, h);
    assert_true(h[0] == 0 && h[1] == 2e30f);
    dr_lm_swiglu_backward(1, 1, 2, u, dh, du);
    assert_true(du[0] == 0 && du[1] == 2 && du[2] == 0 && du[3] == 1e30f);
    float nan_logits[] = {NAN, 0, 0};
    assert_true(isnan(dr_lm_cross_entropy(1, 1, 3, nan_logits, target, 0, rows)));
}

/* AdamW against its definition in fp64. */
static void test_adamw(void **state)
{
    (void)state;
    enum { N = 100, STEPS = 5 };
    rng r = {2};
    float w[N], g[N], m[N] = {0}, v[N] = {0};
    double W[N], M[N] = {0}, V[N] = {0};
    fill(&r, w, N, 1);
    for (int k = 0; k < N; k++)
        W[k] = w[k];
    dr_lm_adamw how = {.rate = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .decay = 0.1,
                       .gradient_scale = 0.5};
    for (how.step = 1; how.step <= STEPS; how.step++) {
        fill(&r, g, N, 1);
        dr_lm_adamw_step(2, N, &how, g, w, m, v);
        for (int k = 0; k < N; k++) {
            double d = 0.5 * (double)g[k];
            M[k] = 0.9 * M[k] + 0.1 * d;
            V[k] = 0.95 * V[k] + 0.05 * d * d;
            double mean = M[k] / (1 - pow(0.9, (double)how.step));
            double square = V[k] / (1 - pow(0.95, (double)how.step));
            W[k] -= 0.01 * (mean / (sqrt(square) + 1e-8) + 0.1 * W[k]);
        }
    }
    double got[N];
    for (int k = 0; k < N; k++)
        got[k] = w[k];
    expect_near("adamw", got, W, N, 1e-6);
    double square = dr_lm_square_sum(2, N, w);
    assert_true(fabs(square / dot(w, w, N) - 1) < 1e-12);
}

/* ---- a whole tiny model ----------------------------------------------------------------- */

static dr_context *context(const char *backend, int32_t threads)
{
    dr_context *ctx;
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    MUST(dr_context_create(backend, &options, &ctx));
    return ctx;
}

typedef struct tiny {
    dr_context *ctx;
    dr_lm_model model;
    dr_lm_run run;
    dr_lm_batch batch;
    float *gradients;
} tiny;

/* Two layers, one of each kind, and a packed batch with an empty and a one-token sequence. */
static void tiny_create(tiny *t, const char *backend, int32_t threads, bool training)
{
    static const int64_t offsets[] = {0, 9, 9, 10, 24, 26};
    dr_lm_config config = {.layers = 2, .hidden = 12, .heads = 2, .head_dim = 6, .inner = 20};
    rng r = {3};
    t->ctx = context(backend, threads);
    LM_MUST(dr_lm_config_arch("gdn,kda", &config));
    LM_MUST(dr_lm_model_create(t->ctx, &config, &t->model));
    dr_lm_model_init(&t->model, 7);
    for (int32_t i = 0; i < t->model.n_params; i++) { /* every gradient shall count */
        const dr_lm_param *p = &t->model.params[i];
        float *w = t->model.weights + p->at;
        if (p->rank == 2)
            fill(&r, w, p->count, i == t->model.embed ? 1 : 0.3);
        for (int64_t k = 0; p->init == DR_INIT_A_LOG && k < p->count; k++)
            w[k] = -2;
    }
    LM_MUST(dr_lm_run_create(&t->model, 64, training, &t->run));
    LM_MUST(dr_lm_batch_create(64, &t->batch));
    t->gradients = dr_lm_alloc(t->model.size, sizeof(float), "test");
    assert_non_null(t->gradients);
    t->batch.sequences = DR_COUNT(offsets) - 1;
    t->batch.tokens = offsets[t->batch.sequences];
    memcpy(t->batch.offsets, offsets, sizeof offsets);
    for (int64_t i = 0; i < t->batch.tokens; i++) {
        t->batch.target[i] = (int32_t)rng_below(&r, 256);
        t->batch.input[i] = (int32_t)rng_below(&r, 257);
    }
}

static void tiny_free(tiny *t)
{
    free(t->gradients);
    dr_lm_batch_free(&t->batch);
    dr_lm_run_free(&t->run);
    dr_lm_model_free(&t->model);
    dr_context_destroy(t->ctx);
}

static double tiny_loss(void *arg)
{
    tiny *t = arg;
    LM_MUST(dr_lm_run_forward(&t->run, &t->batch, NULL));
    return dr_lm_run_loss(&t->run, &t->batch);
}

static void test_model_gradients(void **state)
{
    (void)state;
    tiny t;
    rng r = {4};
    tiny_create(&t, "ref", 1, true);
    float *direction = calloc((size_t)t.model.size, sizeof *direction);
    assert_non_null(direction);
    tiny_loss(&t);
    LM_MUST(dr_lm_run_backward(&t.run, &t.batch, t.gradients));
    for (int32_t i = 0; i < t.model.n_params; i++) {
        const dr_lm_param *p = &t.model.params[i];
        const float *g = t.gradients + p->at;
        fill(&r, direction, p->count, 1);
        double want = best_slope(t.model.weights + p->at, direction, p->count, tiny_loss, &t);
        expect_slope(p->name, dot(g, direction, p->count), want, g, direction, p->count, 2e-3);
    }
    free(direction);
    tiny_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_op_gradients),
        cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_model_gradients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
