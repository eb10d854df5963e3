/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_train.c - the language model of tools/: its operations and a whole tiny model against
 * finite differences, the data, and the commands train and generate as a user runs them:
 * learning, resuming bit for bit, the same bits at any thread count, damaged checkpoints,
 * interruption.
 */
#include "test.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

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
        return dr_lm_cross_entropy(2, T, T, S, logits, c->symbols, 0, rows);
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
    dr_lm_cross_entropy(2, T, T, S, dx, c.symbols, 1, rows);
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
    assert_true(exp_of(-1e30f) == 0 && exp_of(1e30f) > 1e38f && isfinite(exp_of(NAN)));
    float logits[] = {-1e4f, 1e4f, 0, 1000, 1000, 1000};
    const int32_t target[] = {1, 0};
    double loss = dr_lm_cross_entropy(1, 2, 2, 3, logits, target, 1, rows);
    assert_true(fabs(loss - log(3) / 2) < 1e-6);
    for (int i = 0; i < 6; i++)
        assert_true(isfinite(logits[i]));
    float u[] = {-1e30f, 1e30f, 2, 2}, h[2], dh[] = {1, 1}, du[4];
    dr_lm_swiglu(1, 1, 2, u, h);
    assert_true(fabsf(h[0]) < 1e-7f && h[1] == 2e30f);
    dr_lm_swiglu_backward(1, 1, 2, u, dh, du);
    assert_true(fabsf(du[0]) < 1e-7f && du[1] == 2 && fabsf(du[2]) < 1e-7f && du[3] == 1e30f);
    float nan_logits[] = {NAN, 0, 0};
    assert_true(isnan(dr_lm_cross_entropy(1, 1, 1, 3, nan_logits, target, 0, rows)));
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

/* One pass over the text, and a prompt followed by single bytes, predict the same. */
static void test_decoding(void **state)
{
    (void)state;
    tiny t;
    dr_lm_states states;
    dr_lm_batch some;
    tiny_create(&t, "cpu", 2, false);
    const int64_t n = t.batch.tokens;
    float *want = malloc((size_t)(n * DR_LM_BYTES) * sizeof *want);
    assert_non_null(want);
    t.batch.sequences = 1;
    t.batch.offsets[1] = n;
    LM_MUST(dr_lm_run_forward(&t.run, &t.batch, NULL));
    memcpy(want, t.run.logits, (size_t)(n * DR_LM_BYTES) * sizeof *want);
    LM_MUST(dr_lm_states_create(&t.model, &states));
    LM_MUST(dr_lm_batch_create(64, &some));
    for (int64_t at = 0, step = 15; at < n; at += step, step = 1) {
        some.sequences = 1;
        some.tokens = some.offsets[1] = step;
        memcpy(some.input, t.batch.input + at, (size_t)step * sizeof *some.input);
        LM_MUST(dr_lm_run_forward(&t.run, &some, &states));
        for (int64_t k = 0; k < DR_LM_BYTES; k++) {
            double got = t.run.logits[(step - 1) * DR_LM_BYTES + k];
            double expected = want[(at + step - 1) * DR_LM_BYTES + k];
            if (!(fabs(got - expected) < 1e-4 * (1 + fabs(expected))))
                fail_msg("token %lld, byte %lld: %g instead of %g", (long long)(at + step - 1),
                         (long long)k, got, expected);
        }
    }
    free(want);
    dr_lm_batch_free(&some);
    dr_lm_states_free(&states);
    tiny_free(&t);
}

static void test_same_bits(void **state)
{
    (void)state;
    tiny a, b;
    tiny_create(&a, "cpu", 1, true);
    tiny_create(&b, "cpu", 3, true);
    assert_true(tiny_loss(&a) == tiny_loss(&b));
    LM_MUST(dr_lm_run_backward(&a.run, &a.batch, a.gradients));
    LM_MUST(dr_lm_run_backward(&b.run, &b.batch, b.gradients));
    assert_memory_equal(a.gradients, b.gradients, (size_t)a.model.size * sizeof(float));
    tiny_free(&a);
    tiny_free(&b);
}

static void test_arch(void **state)
{
    (void)state;
    dr_lm_config c = {.layers = 5};
    char text[64];
    LM_MUST(dr_lm_config_arch("gdn,kda,kda", &c));
    dr_lm_config_arch_text(&c, text, sizeof text);
    assert_string_equal(text, "gdn,kda,kda,gdn,kda");
    static const char *const wrong[] = {"", "gdn,", ",gdn", "gd", "gdnx", "GDN", "gdn kda",
                                        "gdn,gdn,gdn,gdn,gdn,gdn"};
    for (size_t i = 0; i < DR_COUNT(wrong); i++)
        assert_int_equal(dr_lm_config_arch(wrong[i], &c), DR_ERR_ARG);
}

/* ---- data ------------------------------------------------------------------------------- */

static char folder[64];

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/deltarule-train-XXXXXX");
    return mkdtemp(folder) != NULL ? 0 : -1;
}

static void remove_below(const char *path)
{
    DIR *dir = opendir(path);
    for (struct dirent *e; dir != NULL && (e = readdir(dir)) != NULL;) {
        char name[600];
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        if (unlink(name) != 0)
            remove_below(name);
    }
    if (dir != NULL)
        closedir(dir);
    rmdir(path);
}

static int remove_folder(void **state)
{
    (void)state;
    remove_below(folder);
    return 0;
}

/* A path in the folder of the test; the same one again for the same name. */
static char *below(const char *name)
{
    static char paths[128][128];
    static int used;
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    for (int i = 0; i < 128; i++)
        if (strcmp(paths[i], path) == 0)
            return paths[i];
    return strcpy(paths[used++ % 128], path);
}

static void put_file(const char *path, const void *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* A folder "text" of documents whose words repeat: easy to learn. */
static void put_text(int documents)
{
    static const char *const words[] = {"delta ", "rule ", "state ", "of ", "the ", "key\n"};
    rng r = {5};
    assert_int_equal(mkdir(below("text"), 0700), 0);
    for (int i = 0; i < documents; i++) {
        char text[2000] = "", name[32];
        int n = 20 + (int)rng_below(&r, 200);
        for (int k = 0; k < n; k++)
            strcat(text, words[rng_below(&r, 6)]);
        snprintf(name, sizeof name, "text/%c%d.txt", 'a' + i % 3, i);
        put_file(below(name), text, strlen(text));
    }
}

static void test_data(void **state)
{
    (void)state;
    dr_lm_data d, again;
    put_text(30);
    put_file(below("text/empty.txt"), "", 0);
    put_file(below("text/binary.txt"), "a\0b", 3);
    put_file(below("text/other.bin"), "not asked for", 13);
    assert_int_equal(mkdir(below("text/sub"), 0700), 0);
    put_file(below("text/sub/z.txt"), "below", 5);
    assert_int_equal(symlink("..", below("text/loop")), 0);
    LM_MUST(dr_lm_data_load(below("text"), "*.txt", 1 << 20, &d));
    assert_int_equal(d.n_documents, 31);
    assert_int_equal(d.skipped, 2);
    assert_true(d.n_held_out >= 1 && d.n_held_out < 6);
    assert_string_equal(d.documents[30].name, "sub/z.txt");
    for (int64_t i = 1; i < d.n_documents; i++)
        assert_true(strcmp(d.documents[i - 1].name, d.documents[i].name) < 0);

    /* Held out is who has the smallest hash, so one file more changes little. */
    uint64_t highest = 0, lowest = UINT64_MAX;
    for (int64_t i = 0; i < d.n_documents; i++) {
        const dr_lm_document *doc = &d.documents[i];
        if (doc->held_out && doc->hash > highest)
            highest = doc->hash;
        if (!doc->held_out && doc->hash < lowest)
            lowest = doc->hash;
    }
    assert_true(highest < lowest);
    LM_MUST(dr_lm_data_load(below("text"), "*.txt", 1 << 20, &again));
    assert_true(again.digest == d.digest);
    dr_lm_data_free(&again);
    LM_MUST(dr_lm_data_load(below("text"), "*.txt", 10, &again));
    assert_int_equal(again.held_out_bytes, 10);
    dr_lm_data_free(&again);
    put_file(below("text/sub/z.txt"), "beloW", 5);
    LM_MUST(dr_lm_data_load(below("text"), "*.txt", 1 << 20, &again));
    assert_true(again.digest != d.digest);
    dr_lm_data_free(&again);
    dr_lm_data_free(&d);

    LM_MUST(dr_lm_data_load(below("text/a0.txt"), NULL, 1 << 20, &d)); /* a file alone */
    assert_int_equal(d.n_documents, 2);
    assert_int_equal(d.held_out_bytes, (d.held_out_bytes + d.train_bytes) / 10);
    dr_lm_data_free(&d);
    static const struct {
        const char *path, *glob, *sentence;
    } wrong[] = {{"text", "*.none", "no readable text: of 0 files that match *.none"},
                 {"text", "binary*", "no readable text: of 1 files"},
                 {"absent", NULL, "cannot be read"}};
    for (size_t i = 0; i < DR_COUNT(wrong); i++) {
        assert_int_equal(dr_lm_data_load(below(wrong[i].path), wrong[i].glob, 100, &d), DR_ERR_ARG);
        if (strstr(dr_lm_error(), wrong[i].sentence) == NULL)
            fail_msg("\"%s\"", dr_lm_error());
    }
}

/* One epoch shows every byte of the training documents once, each after the byte before it. */
static void test_feed(void **state)
{
    (void)state;
    enum { CONTEXT = 50, ROOM = 128 };
    dr_lm_data d;
    dr_lm_feed f, g;
    dr_lm_batch b, c;
    put_text(20);
    LM_MUST(dr_lm_data_load(below("text"), NULL, 1 << 20, &d));
    LM_MUST(dr_lm_feed_create(&d, true, CONTEXT, 9, &f));
    LM_MUST(dr_lm_feed_create(&d, true, CONTEXT, 9, &g));
    LM_MUST(dr_lm_batch_create(ROOM, &b));
    LM_MUST(dr_lm_batch_create(ROOM, &c));
    int64_t seen[256] = {0}, starts = 0, tokens = 0, wanted[256] = {0};
    for (int64_t i = 0; i < d.n_documents; i++)
        for (int64_t k = 0; !d.documents[i].held_out && k < d.documents[i].length; k++)
            wanted[d.bytes[d.documents[i].begin + k]]++;
    while (tokens < d.train_bytes) {
        dr_lm_cursor before = f.cursor;
        dr_lm_feed_next(&f, &b);
        assert_int_equal(b.tokens, ROOM);
        assert_int_equal(b.offsets[0], 0);
        assert_int_equal(b.offsets[b.sequences], ROOM);
        LM_MUST(dr_lm_feed_seek(&g, before)); /* the same from the place alone */
        dr_lm_feed_next(&g, &c);
        assert_memory_equal(b.input, c.input, ROOM * sizeof *b.input);
        assert_int_equal(b.sequences, c.sequences);
        for (int64_t n = 0; n < b.sequences; n++) {
            assert_true(b.offsets[n + 1] > b.offsets[n]);
            assert_true(b.offsets[n + 1] - b.offsets[n] <= CONTEXT);
            for (int64_t t = b.offsets[n] + 1; t < b.offsets[n + 1]; t++)
                assert_int_equal(b.input[t], b.target[t - 1]);
        }
        for (int64_t t = 0; t < ROOM && tokens < d.train_bytes; t++, tokens++) {
            seen[b.target[t]]++;
            starts += b.input[t] == DR_LM_START;
        }
    }
    assert_memory_equal(seen, wanted, sizeof seen);
    assert_int_equal(starts, d.n_documents - d.n_held_out);
    assert_int_equal(f.cursor.epoch, 1);
    assert_int_equal(dr_lm_feed_seek(&g, (dr_lm_cursor){0, g.n_pieces, 0}), DR_ERR_FORMAT);
    assert_int_equal(dr_lm_feed_seek(&g, (dr_lm_cursor){0, 0, CONTEXT}), DR_ERR_FORMAT);
    dr_lm_feed_free(&f);
    LM_MUST(dr_lm_feed_create(&d, false, CONTEXT, 0, &f));
    for (tokens = 0; dr_lm_feed_next(&f, &b), b.tokens > 0; tokens += b.tokens)
        ;
    assert_int_equal(tokens, d.held_out_bytes);
    dr_lm_batch_free(&b);
    dr_lm_batch_free(&c);
    dr_lm_feed_free(&f);
    dr_lm_feed_free(&g);
    dr_lm_data_free(&d);
}

/* ---- checkpoints ------------------------------------------------------------------------ */

static const dr_lm_training some_training = {
    .context = 64, .batch_tokens = 128, .steps = 10, .seconds = 0.1, .rate = 1.0 / 3, .seed = 11,
    .data_digest = 0xfedcba9876543210u, .held_out_most = 99, .step = 4, .elapsed = 1e-3,
    .cursor = {1, 2, 3}};

static void test_checkpoint(void **state)
{
    (void)state;
    tiny t;
    dr_lm_training training = some_training;
    dr_lm_checkpoint c;
    tiny_create(&t, "cpu", 1, false);
    const int64_t n = t.model.size;
    rng r = {6};
    float *m = calloc((size_t)n, sizeof *m), *v = calloc((size_t)n, sizeof *v);
    float *m2 = calloc((size_t)n, sizeof *m2), *weights = malloc((size_t)n * sizeof *weights);
    assert_true(m != NULL && v != NULL && m2 != NULL && weights != NULL);
    for (int32_t i = 0; i < t.model.n_params; i++)
        fill(&r, m + t.model.params[i].at, t.model.params[i].count, 1);
    memcpy(weights, t.model.weights, (size_t)n * sizeof *weights);
    LM_MUST(dr_lm_checkpoint_save(folder, &t.model, m, v, &training, true));
    memset(t.model.weights, 0, (size_t)n * sizeof *weights);
    training.step = 5;
    LM_MUST(dr_lm_checkpoint_save(folder, &t.model, m, v, &training, true));
    LM_MUST(dr_lm_checkpoint_open(below(DR_LM_PREVIOUS), &c)); /* the first of the two */
    assert_memory_equal(&c.training, &some_training, sizeof some_training);
    assert_memory_equal(&c.config, &t.model.config, sizeof c.config);
    LM_MUST(dr_lm_checkpoint_read(&c, &t.model, m2, v));
    assert_memory_equal(t.model.weights, weights, (size_t)n * sizeof *weights);
    assert_memory_equal(m2, m, (size_t)n * sizeof *m);
    dr_lm_checkpoint_close(&c);

    /* Any byte changed, any byte missing: refused, and the other file is as good as ever. */
    size_t bytes;
    FILE *f = fopen(below(DR_LM_CURRENT), "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    bytes = (size_t)ftell(f);
    rewind(f);
    unsigned char *content = malloc(bytes);
    assert_non_null(content);
    assert_int_equal(fread(content, 1, bytes, f), bytes);
    fclose(f);
    for (size_t at = 0; at < bytes; at += at < 3000 ? 61 : 4999) {
        content[at] ^= 1;
        put_file(below(DR_LM_CURRENT), content, bytes);
        if (dr_lm_checkpoint_open(below(DR_LM_CURRENT), &c) == DR_OK)
            fail_msg("byte %zu of %zu is wrong and nobody says so", at, bytes);
        assert_non_null(strstr(dr_lm_error(), DR_LM_CURRENT));
        content[at] ^= 1;
        put_file(below(DR_LM_CURRENT), content, at);
        assert_int_equal(dr_lm_checkpoint_open(below(DR_LM_CURRENT), &c), DR_ERR_FORMAT);
    }
    LM_MUST(dr_lm_checkpoint_open(below(DR_LM_PREVIOUS), &c));
    dr_lm_checkpoint_close(&c);
    assert_int_equal(dr_lm_checkpoint_open(below("absent"), &c), DR_ERR_IO);
    const dr_weights_entry e = {"x", dr_tensor_make(m, DR_F32, 1, 1, 0, 0, 0)};
    MUST(dr_weights_write(below("foreign"), &e, 1, NULL, 0));
    assert_int_equal(dr_lm_checkpoint_open(below("foreign"), &c), DR_ERR_FORMAT);
    assert_non_null(strstr(dr_lm_error(), "not a checkpoint"));
    free(content);
    free(m);
    free(m2);
    free(v);
    free(weights);
    tiny_free(&t);
}

/* ---- the commands ----------------------------------------------------------------------- */

#define PROGRAM DR_TEST_BINARY_DIR "/deltarule"
#define TINY "--layers", "2", "--hidden", "32", "--heads", "2", "--head-dim", "16", "--context", \
    "64", "--batch-tokens", "256", "--lr", "1e-2", "--arch", "gdn,kda", "--json"

static void need_program(void)
{
    if (access(PROGRAM, X_OK) != 0)
        skip();
}

static pid_t start(const char *const *args)
{
    const char *argv[64] = {"deltarule"};
    int n = 1;
    while (args[n - 1] != NULL && n < 63) {
        argv[n] = args[n - 1];
        n++;
    }
    unlink(below("out")); /* of the run before */
    pid_t child = fork();
    if (child != 0)
        return child;
    int out = open(below("out"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    int err = open(below("err"), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(out, 1);
    dup2(err, 2);
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv(PROGRAM, (char *const *)argv);
    _exit(127);
}

static int finish(pid_t child)
{
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

#define RUN(...) finish(start((const char *const[]){__VA_ARGS__, NULL}))

/* A stream of the command as text; the caller frees it. */
static char *text_of(const char *name)
{
    FILE *f = fopen(below(name), "rb");
    char *text = calloc(1, 1 << 20);
    assert_true(f != NULL && text != NULL);
    size_t n = fread(text, 1, (1 << 20) - 1, f);
    text[n] = '\0';
    fclose(f);
    return text;
}

static void expect_exit(int got, int want)
{
    if (got == want)
        return;
    char *err = text_of("err");
    fail_msg("exit status %d instead of %d: %s", got, want, err);
}

static void expect_said(const char *sentence)
{
    char *err = text_of("err");
    if (strstr(err, sentence) == NULL)
        fail_msg("expected \"%s\", got \"%s\"", sentence, err);
    free(err);
}

/* The losses of the steps in the JSON lines of "out", behind those that are there. */
typedef struct curve {
    double loss[512];
    int64_t steps;
} curve;

static void read_curve(curve *c)
{
    char *out = text_of("out");
    for (char *line = strtok(out, "\n"); line != NULL; line = strtok(NULL, "\n")) {
        const char *step = strstr(line, "\"step\":"), *loss = strstr(line, "\"loss\":");
        if (step == NULL || loss == NULL)
            continue;
        c->loss[c->steps++] = atof(loss + 7);
        assert_int_equal(atoll(step + 7), c->steps);
        assert_true(c->steps < (int64_t)DR_COUNT(c->loss));
    }
    free(out);
}

/* All tensors of two checkpoints, moments included. */
static void expect_same_tensors(const char *a, const char *b)
{
    dr_weights *x, *y;
    MUST(dr_weights_open(a, &x));
    MUST(dr_weights_open(b, &y));
    assert_int_equal(dr_weights_count(x), dr_weights_count(y));
    for (int64_t i = 0; i < dr_weights_count(x); i++) {
        dr_tensor t, u;
        MUST(dr_weights_find(x, dr_weights_name(x, i), &t));
        MUST(dr_weights_find(y, dr_weights_name(x, i), &u));
        if (memcmp(t.data, u.data, (size_t)view_count(&t) * sizeof(float)) != 0)
            fail_msg("%s differs", dr_weights_name(x, i));
    }
    dr_weights_close(x);
    dr_weights_close(y);
}

static void pause_ms(long ms)
{
    const struct timespec span = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&span, NULL);
}

/* Until the child has printed that many lines. */
static void wait_for_lines(pid_t child, int lines)
{
    for (int tries = 0; tries < 12000; tries++, pause_ms(10)) {
        int seen = 0;
        if (access(below("out"), R_OK) != 0)
            continue;
        char *out = text_of("out");
        for (char *c = out; *c != '\0'; c++)
            seen += *c == '\n';
        free(out);
        if (seen >= lines)
            return;
    }
    kill(child, SIGKILL);
    fail_msg("%d lines did not come", lines);
}

static void test_learns(void **state)
{
    (void)state;
    curve one = {0}, two = {0};
    need_program();
    put_text(30);
    expect_exit(RUN("train", "--data", below("text"), TINY, "--steps", "30", "--threads", "1",
                         "--out", below("a")), 0);
    read_curve(&one);
    assert_int_equal(one.steps, 30);
    if (!(fabs(one.loss[0] - log(256)) < 0.05 && one.loss[29] < one.loss[0] - 2))
        fail_msg("the loss went from %g to %g", one.loss[0], one.loss[29]);
    char *out = text_of("out");
    assert_non_null(strstr(out, "\"held_out_bytes\""));
    assert_non_null(strstr(out, "\"gzip\""));
    free(out);
    expect_exit(RUN("train", "--data", below("text"), TINY, "--steps", "30", "--threads", "2",
                         "--out", below("b")), 0);
    read_curve(&two);
    assert_memory_equal(&one, &two, sizeof one);
    expect_same_tensors(below("a/model.safetensors"), below("b/model.safetensors"));
}

/* Many ranks learn what one learns, by any protocol, and leave checkpoints that any number goes on from. The
 * rate is a tenth of the other tests': AdamW makes more of a rounding at every step, the more the higher it is. */
static void test_ranks(void **state)
{
    static const struct {
        const char *ranks, *cp;
    } ways[] = {{"1", "p2p"}, {"2", "p2p"}, {"3", "doubling"}, {"4", "grouped:2"}, {"5", "allgather"}};
    (void)state;
    curve one = {0};
    need_program();
    put_text(30);
    expect_exit(RUN("train", "--data", below("text"), TINY, "--context", "200", "--lr", "1e-3", "--steps", "50", "--threads",
                         "1"), 0);
    read_curve(&one);
    assert_int_equal(one.steps, 50);
    for (size_t w = 0; w < DR_COUNT(ways); w++) {
        curve many = {0};
        expect_exit(RUN("train", "--data", below("text"), TINY, "--context", "200", "--lr", "1e-3", "--steps", "50",
                             "--threads", "1", "--ranks",
                             ways[w].ranks, "--cp", ways[w].cp, "--out", below("a")), 0);
        read_curve(&many);
        assert_int_equal(many.steps, 50);
        for (int i = 0; i < 50; i++)
            if (!(fabs(many.loss[i] - one.loss[i]) <= 1e-5 * one.loss[i]))
                fail_msg("%s ranks, %s, step %d: the loss is %.9g, of one rank %.9g", ways[w].ranks,
                         ways[w].cp, i + 1, many.loss[i], one.loss[i]);
    }
    expect_exit(RUN("train", "--data", below("text"), "--json", "--resume", "--out", below("a"), "--steps",
                         "52", "--ranks", "2"), 0);
    expect_exit(RUN("train", "--data", below("text"), "--json", "--resume", "--out", below("a"), "--steps",
                         "54"), 0);
    expect_exit(RUN("train", "--data", below("text"), TINY, "--steps", "1", "--ranks", "2", "--cp", "swift"), 2);
    expect_said("protocol: must be one of");
    expect_exit(RUN("train", "--data", below("text"), TINY, "--steps", "1", "--cp", "p2p"), 2);
    expect_said("--cp: needs --ranks");
}

/* Interrupted twice at some step, gone on: as if nothing had happened. */
static void test_resumes(void **state)
{
    (void)state;
    static curve whole, parts;
    whole = parts = (curve){0};
    need_program();
    put_text(30);
    const char *const first[] = {"train", "--data", below("text"), TINY, "--steps", "150",
                                 "--save", "0.05", "--out", below("a"), NULL};
    const char *const again[] = {"train", "--data", below("text"), "--json", "--resume", "--save",
                                 "0.05", "--threads", "1", "--out", below("a"), NULL};
    for (int part = 0; part < 3; part++) {
        pid_t child = start(part == 0 ? first : again);
        if (part < 2)
            wait_for_lines(child, 20);
        if (part < 2)
            kill(child, part == 0 ? SIGINT : SIGTERM);
        expect_exit(finish(child), 0);
        if (part < 2)
            expect_said("interrupted after step");
        read_curve(&parts);
    }
    assert_int_equal(parts.steps, 150);
    expect_exit(RUN("train", "--data", below("text"), TINY, "--steps", "150", "--out",
                         below("b")), 0);
    read_curve(&whole);
    assert_memory_equal(&whole, &parts, sizeof whole);
    expect_same_tensors(below("a/model.safetensors"), below("b/model.safetensors"));
}

static void test_second_signal(void **state)
{
    (void)state;
    need_program();
    put_text(30);
    pid_t child = start((const char *const[]){"train", "--data", below("text"), TINY, "--batch-tokens",
                                              "16384", "--steps", "200", "--out", below("a"), NULL});
    wait_for_lines(child, 1);
    kill(child, SIGINT);
    pause_ms(20);
    kill(child, SIGINT);
    expect_exit(finish(child), -SIGINT);
}

static void test_damaged_checkpoint(void **state)
{
    (void)state;
    need_program();
    put_text(30);
    const char *text = below("text"), *a = below("a");
    expect_exit(RUN("train", "--data", text, TINY, "--steps", "6", "--save", "0.001", "--out", a),
                     0);
    assert_int_equal(truncate(below("a/model.safetensors"), 100000), 0);
    expect_exit(RUN("train", "--data", text, "--out", a, "--resume"), 2);
    expect_said("--resume=previous goes on from its step");
    expect_exit(RUN("generate", "--model", a), 2);
    expect_said("model.safetensors: tensor");
    expect_exit(RUN("train", "--data", text, "--out", a, "--resume=previous", "--json"), 0);
    expect_exit(RUN("train", "--data", text, "--out", a, "--resume=previous", "--json"), 0);
    expect_exit(RUN("generate", "--model", a, "--tokens", "5"), 0);

    expect_exit(RUN("train", "--data", text, "--out", a, "--resume", "--hidden", "64"), 2);
    expect_said("--hidden: the checkpoint was made with 32, got 64");
    expect_exit(RUN("train", "--data", text, "--out", a, "--resume", "--arch", "kda"), 2);
    expect_said("--arch: the checkpoint was made with other layers");
    put_file(below("text/a0.txt"), "other", 5);
    expect_exit(RUN("train", "--data", text, "--out", a, "--resume"), 2);
    expect_said("does not hold the files that the checkpoint was made with");
    expect_exit(RUN("train", "--data", text, "--out", below("none"), "--resume"), 2);
    expect_said("cannot be opened");
}

static void test_generate(void **state)
{
    (void)state;
    need_program();
    put_text(30);
    const char *a = below("a");
    expect_exit(RUN("train", "--data", below("text"), TINY, "--steps", "20", "--out", a), 0);
    expect_exit(RUN("generate", "--model", a, "--prompt", "delta ", "--tokens", "40"), 0);
    char *one = text_of("out");
    assert_int_equal(strlen(one), 6 + 40 + 1);
    assert_memory_equal(one, "delta ", 6);
    expect_exit(RUN("generate", "--model", below("a/model.safetensors"), "--prompt", "delta ",
                         "--tokens", "40", "--threads", "1"), 0);
    char *two = text_of("out");
    assert_string_equal(one, two);
    free(two);
    expect_exit(RUN("generate", "--model", a, "--prompt", "delta ", "--tokens", "40", "--seed",
                         "2", "--temperature", "2", "--top-p", "1"), 0);
    two = text_of("out");
    assert_string_not_equal(one, two);
    free(one);
    free(two);
    expect_exit(RUN("generate", "--model", a, "--tokens", "3", "--temperature", "0"), 0);
}

static void test_wrong_usage(void **state)
{
    (void)state;
    need_program();
    assert_int_equal(mkdir(below("nothing"), 0700), 0);
    put_text(3);
    const char *text = below("text"), *nothing = below("nothing");
    const struct {
        const char *args[8], *sentence;
    } cases[] = {
        {{"train"}, "--data: must be given"},
        {{"train", "--data", nothing}, "no readable text"},
        {{"train", "--data", text, "--layers", "0"}, "--layers: must be a whole number from 1"},
        {{"train", "--data", text, "--layers", "2x"}, "--layers: must be a whole number"},
        {{"train", "--data", text, "--lr", "fast"}, "--lr: must be a number"},
        {{"train", "--data", text, "--seconds", "nan"}, "--seconds: must be a number"},
        {{"train", "--data", text, "--arch", "mamba"}, "arch: must be gdn, kda"},
        {{"train", "--data", text, "--arch", "gdn,kda", "--layers", "1"}, "longer than the 1 layers"},
        {{"train", "--data", text, "--head-dim", "300"}, "--head-dim"},
        {{"train", "--data", text, "--resume"}, "--resume: needs --out"},
        {{"train", "--data", text, "--resume=next"}, "--resume: must be current or previous"},
        {{"train", "--data", text, "--out", "/proc/none"}, "--out: /proc/none: cannot be made"},
        {{"train", "--data", text, "more"}, "\"more\" is not an option"},
        {{"train", "--data", text, "--optimizer", "sgd"}, "--optimizer"},
        {{"generate"}, "--model: must be given"},
        {{"generate", "--model", nothing}, "cannot be opened"},
        {{"generate", "--model", nothing, "--top-p", "0"}, "--top-p: must be a number"},
        {{"generate", "--model", nothing, "--tokens", "-1"}, "--tokens: must be a whole number"},
        {{"generate", "--model", nothing, "text"}, "\"text\" is not an option"},
    };
    for (size_t i = 0; i < DR_COUNT(cases); i++) {
        expect_exit(finish(start(cases[i].args)), 2);
        expect_said(cases[i].sentence);
    }
}

int main(void)
{
#define TEST(fn) cmocka_unit_test_setup_teardown(fn, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_op_gradients),
        cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_adamw),
        cmocka_unit_test(test_model_gradients),
        cmocka_unit_test(test_decoding),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_arch),
        TEST(test_data),
        TEST(test_feed),
        TEST(test_checkpoint),
        TEST(test_learns),
        TEST(test_ranks),
        TEST(test_resumes),
        TEST(test_second_signal),
        TEST(test_damaged_checkpoint),
        TEST(test_generate),
        TEST(test_wrong_usage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
