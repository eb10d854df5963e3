/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_backend.c - the backend "cpu" against "ref" on the same rounded inputs: sampled
 * problems over all shapes and options, then each option on purpose; forward, backward,
 * step, staged trips and maps. "ref" itself stands on central differences here, and on the
 * independent vectors of test_oracle.c. Ends by printing the worst error of every tensor.
 */
#include "trial.h"

#include <deltarule/cp.h>

static dr_context *cpu, *ref;
static error_table table;

#define BUDGET 1e-5

/* One channel, or one direction for all keys, leaves 1 - beta of a state: with beta near 1 that
 * is a difference whose relative accuracy in fp32 is what 1e-7 / (1 - beta) says. With any beta,
 * equal keys make the sums behind dg cancel. */
static double budget_of(const spec *s)
{
    if (s->p.key_dim == 1 || (s->repeated_keys && s->wide_beta))
        return 20 * BUDGET;
    return s->repeated_keys ? 3 * BUDGET : BUDGET;
}

/* ---- sampled problems -------------------------------------------------------------------- */

static const int64_t lengths[] = {0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200};
static const struct {
    int32_t K, V;
} widths[] = {{1, 1},   {2, 1},    {16, 48},  {48, 16},   {24, 40},
              {64, 64}, {96, 192}, {100, 60}, {128, 128}, {256, 256}};

typedef struct documents {
    int64_t offsets[9];
} documents;

/* Up to 8 documents, some of them empty, possibly short of T. */
static void draw_documents(rng *r, int64_t T, documents *d, dr_problem *p)
{
    int64_t N = 1 + rng_below(r, 8), at = 0;
    d->offsets[0] = 0;
    for (int64_t i = 1; i <= N; i++) {
        bool empty = rng_below(r, 4) == 0;
        at = empty ? at : at + rng_below(r, T - at + 1);
        if (i == N && rng_below(r, 2))
            at = T;
        d->offsets[i] = at;
    }
    p->offsets = d->offsets;
    p->sequences = N;
    p->batch = 1;
}

static void draw_types(rng *r, spec *s)
{
    static const dr_dtype rows[][3] = {
        {DR_F32, DR_F32, DR_F32},  {DR_F32, DR_F32, DR_F32},    {DR_BF16, DR_F32, DR_F32},
        {DR_F16, DR_F32, DR_F32},  {DR_BF16, DR_BF16, DR_BF16}, {DR_F16, DR_F16, DR_F16},
        {DR_F32, DR_BF16, DR_F32}, {DR_BF16, DR_F16, DR_F32},
    };
    int64_t i = rng_below(r, (int64_t)DR_COUNT(rows));
    s->dtype = rows[i][0];
    s->gate_dtype = rows[i][1];
    s->state_dtype = rows[i][2];
}

static void draw_absent(rng *r, spec *s)
{
    static const uint32_t optional[] = {
        BIT(initial_state),
        BIT(chunk_states),
        BIT(d_o),
        BIT(d_final_state),
        BIT(dt_bias),
        BIT(dq),
        BIT(dk),
        BIT(dv),
        BIT(dg),
        BIT(d_initial_state),
        BIT(dbeta),
        BIT(da_log),
        BIT(ddt_bias),
        BIT(final_state),
    };
    for (size_t i = 0; i < DR_COUNT(optional); i++)
        if (rng_below(r, 5) == 0)
            s->absent |= optional[i];
    if (s->p.gate == DR_GATE_LOWER_BOUND && rng_below(r, 2))
        s->absent |= BIT(a_log) | BIT(da_log);
    if (s->absent & BIT(dt_bias))
        s->absent |= BIT(ddt_bias);
}

/* Where a result is the small remainder of large terms, fp32 owes it no relative accuracy:
 * 1 - y^2 of a normalised row of one channel, and what a long contraction leaves of a final
 * state's gradient that nothing adds to. */
static void avoid_remainders(spec *s)
{
    if (s->p.key_dim == 1) {
        s->p.l2norm = 0;
        s->p.l2norm_eps = 0;
        s->wide_beta = false;
    }
    if (s->p.tokens > 2 * s->p.key_dim)
        s->absent &= ~BIT(d_o);
}

/* A problem of this size with every option drawn at random. */
static spec draw_spec(rng *r, dr_variant variant, int64_t T, int32_t K, int32_t V, documents *d)
{
    static const decay decays[] = {DECAY_MILD,  DECAY_MILD,      DECAY_WEAK, DECAY_STRONG,
                                   DECAY_CRUSH, DECAY_ALTERNATE, DECAY_MIXED};
    bool heavy = T * K * V > 100 * 128 * 128;
    int32_t H = heavy ? 1 : 1 + (int32_t)rng_below(r, 2);
    int32_t group = 1 + (int32_t)rng_below(r, heavy ? 2 : 3);
    spec s = {.p = problem_make(variant, T, H, H * group, K, V), .seed = rng_bits(r) % 1000000};
    s.p.batch = heavy ? 1 : 1 + rng_below(r, 3);
    if (rng_below(r, 3) == 0)
        draw_documents(r, T, d, &s.p);
    s.p.gate = (dr_gate)(DR_GATE_NONE + rng_below(r, 5));
    if (s.p.gate == DR_GATE_LOWER_BOUND)
        s.p.lower_bound = rng_below(r, 2) ? -5 : -40;
    s.p.beta = rng_below(r, 2) ? DR_BETA_VALUE : DR_BETA_LOGIT;
    if (s.p.beta == DR_BETA_LOGIT)
        s.p.beta_scale = 1 + (double)rng_below(r, 2);
    s.p.l2norm = (int32_t)rng_below(r, 2);
    s.p.l2norm_eps = rng_below(r, 2) || !s.p.l2norm ? 0 : 1e-3;
    s.p.scale = rng_below(r, 2) ? 0 : 0.7;
    s.p.head_map = (dr_head_map)rng_below(r, 2);
    s.p.state_v_first = (int32_t)rng_below(r, 2);
    s.p.keep = (dr_keep)rng_below(r, 3);
    s.decay = RNG_PICK(r, decays);
    s.repeated_keys = rng_below(r, 4) == 0;
    s.wide_beta = rng_below(r, 4) == 0;
    s.layout = rng_below(r, 2) ? LAYOUT_DENSE : LAYOUT_ANY;
    draw_types(r, &s);
    draw_absent(r, &s);
    avoid_remainders(&s);
    return s;
}

/* Runs s on both backends and compares everything. */
static void check_spec(const spec *s, how h)
{
    char text[512];
    trial x = trial_make(s);
    result got = trial_run(cpu, &x, h);
    x.p.chunk = got.chunk; /* so that chunk states mean the same */
    how exact = h;
    exact.out = DR_F64;
    exact.form = h.form == FORM_STEP ? FORM_STEP : FORM_CALL;
    result want = trial_run(ref, &x, exact);
    expect_close(spec_text(s, text, sizeof text), &got, &want, budget_of(s),
                 budget_of(s) > BUDGET ? NULL : &table);
    result_free(&got);
    result_free(&want);
    trial_free(&x);
}

/* ref is slow by design: the widest states get the lengths around one chunk edge only. */
static bool too_slow(int64_t T, size_t w)
{
    bool some = T <= 1 || T == 17 || T == 65 || (T == 129 && widths[w].K < 256);
    return widths[w].K >= 96 && widths[w].V >= 96 && !some;
}

static void sample(dr_variant variant)
{
    rng r = {variant == DR_KDA ? 7001 : 7000};
    for (size_t w = 0; w < DR_COUNT(widths); w++)
        for (size_t t = 0; t < DR_COUNT(lengths); t++) {
            if (too_slow(lengths[t], w))
                continue;
            documents d;
            spec s = draw_spec(&r, variant, lengths[t], widths[w].K, widths[w].V, &d);
            how h = {.form = rng_below(&r, 3) ? FORM_CALL : FORM_STAGED};
            check_spec(&s, h);
        }
}

static void test_sampled_gdn(void **state)
{
    (void)state;
    sample(DR_GDN);
}

static void test_sampled_kda(void **state)
{
    (void)state;
    sample(DR_KDA);
}

/* Small shapes are cheap, so that many combinations of options fit. */
static void test_sampled_options(void **state)
{
    (void)state;
    rng r = {7002};
    for (int i = 0; i < 400; i++) {
        documents d;
        int32_t K = 1 + (int32_t)rng_below(&r, 40), V = 1 + (int32_t)rng_below(&r, 40);
        spec s = draw_spec(&r, i % 2 ? DR_KDA : DR_GDN, rng_below(&r, 140), K, V, &d);
        how h = {.form = rng_below(&r, 2) ? FORM_CALL : FORM_STAGED};
        check_spec(&s, h);
    }
}

/* ---- one option on purpose ---------------------------------------------------------------- */

static const dr_variant variants[] = {DR_GDN, DR_KDA};

static void test_every_gate_and_decay(void **state)
{
    (void)state;
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        for (int gate = DR_GATE_NONE; gate <= DR_GATE_LOWER_BOUND; gate++)
            for (int fade = DECAY_MILD; fade <= DECAY_ZERO; fade++) {
                spec s = {.p = problem_make(variants[i], 70, 2, 4, 24, 40), .decay = (decay)fade};
                s.p.gate = (dr_gate)gate;
                s.p.lower_bound = gate == DR_GATE_LOWER_BOUND ? -30 : 0;
                s.seed = (uint64_t)(gate * 10 + fade);
                check_spec(&s, (how){0});
            }
}

/* The hardest systems to solve: equal keys, beta at its end, no forgetting. */
static void test_repeated_keys_and_wide_beta(void **state)
{
    (void)state;
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        for (int fade = DECAY_MILD; fade <= DECAY_ZERO; fade++)
            for (int beta = 0; beta < 3; beta++) {
                spec s = {.p = problem_make(variants[i], 129, 1, 2, 32, 16),
                          .decay = (decay)fade,
                          .repeated_keys = true,
                          .wide_beta = true};
                s.p.beta = beta == 0 ? DR_BETA_VALUE : DR_BETA_LOGIT;
                s.p.beta_scale = beta;
                check_spec(&s, (how){0});
            }
}

static void test_every_dtype(void **state)
{
    (void)state;
    static const dr_dtype types[] = {DR_F32, DR_BF16, DR_F16};
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        for (int code = 0; code < 27; code++) {
            spec s = {.p = problem_make(variants[i], 67, 1, 2, 32, 24), .seed = (uint64_t)code};
            s.dtype = types[code % 3];
            s.gate_dtype = types[code / 3 % 3];
            s.state_dtype = types[code / 9];
            s.p.gate = code % 2 ? DR_GATE_SOFTPLUS : DR_GATE_LOG;
            check_spec(&s, (how){0});
        }
}

static void test_every_layout(void **state)
{
    (void)state;
    static const dr_dtype types[] = {DR_F32, DR_BF16, DR_F16};
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        for (int code = 0; code < 3 * LAYOUT_ANY; code++) {
            spec s = {.p = problem_make(variants[i], 37, 2, 4, 20, 36),
                      .layout = (layout)(code / 3)};
            s.p.batch = 2;
            s.dtype = s.gate_dtype = types[code % 3];
            s.p.state_v_first = code & 1;
            s.seed = (uint64_t)code;
            check_spec(&s, (how){0});
        }
}

static void test_heads(void **state)
{
    (void)state;
    static const int32_t heads[][2] = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 1}, {2, 2},
                                       {2, 3}, {3, 3}, {3, 4}, {5, 4}, {17, 1}};
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        for (size_t m = 0; m < DR_COUNT(heads); m++)
            for (int map = 0; map < 2; map++) {
                int32_t H = heads[m][0], HV = H * heads[m][1];
                spec s = {.p = problem_make(variants[i], 40, H, HV, 16, 8), .seed = m};
                s.p.head_map = (dr_head_map)map;
                s.p.l2norm = map;
                check_spec(&s, (how){0});
            }
}

static void test_keep_and_form(void **state)
{
    (void)state;
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        for (int keep = DR_KEEP_FACTORS; keep <= DR_KEEP_STATES; keep++)
            for (int f = FORM_CALL; f <= FORM_STAGED; f++)
                for (int64_t T = 1; T <= 210; T += 52) {
                    spec s = {.p = problem_make(variants[i], T, 2, 4, 48, 40), .decay = DECAY_WEAK};
                    s.p.keep = (dr_keep)keep;
                    s.seed = (uint64_t)T;
                    check_spec(&s, (how){.form = (form)f});
                }
}

/* Every chunk length is honoured or refused with a sentence; ref honours all. */
static void test_chunk_requests(void **state)
{
    (void)state;
    static const int32_t asked[] = {1, 2, 7, 8, 16, 31, 32, 33, 64, 100, 128, 256, 1000};
    int honoured = 0;
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        for (size_t c = 0; c < DR_COUNT(asked); c++) {
            spec s = {.p = problem_make(variants[i], 150, 1, 2, 32, 16), .decay = DECAY_MIXED};
            s.p.chunk = asked[c];
            MUST(dr_supports(ref, &s.p));
            if (dr_supports(cpu, &s.p) != DR_OK) {
                REFUSED(dr_supports(cpu, &s.p), DR_ERR_SUPPORT, "chunk");
                dr_plan *plan;
                REFUSED(dr_plan_create(cpu, &s.p, &plan), DR_ERR_SUPPORT, "chunk");
                continue;
            }
            honoured++;
            check_spec(&s, (how){0});
        }
    assert_true(honoured > 0);
}

static void test_packed_layouts(void **state)
{
    (void)state;
    static const struct {
        int64_t N, T, offsets[8];
    } rows[] = {
        {1, 0, {0, 0}},
        {1, 5, {0, 0}},
        {4, 66, {0, 1, 1, 65, 66}},
        {4, 194, {0, 64, 65, 130, 194}},
        {2, 65, {0, 64, 65}},
        {3, 100, {0, 0, 90, 90}},
        {2, 130, {0, 63, 129}},
        {5, 9, {0, 1, 2, 3, 3, 8}},
    };
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        for (size_t m = 0; m < DR_COUNT(rows); m++)
            for (int f = FORM_CALL; f <= FORM_STAGED; f++) {
                spec s = {.p = problem_make(variants[i], rows[m].T, 1, 2, 24, 16), .seed = m};
                s.p.offsets = rows[m].offsets;
                s.p.sequences = rows[m].N;
                s.p.keep = (dr_keep)(m % 3);
                s.p.gate = m % 2 ? DR_GATE_SOFTPLUS : DR_GATE_LOG;
                check_spec(&s, (how){.form = (form)f});
            }
}

/* ---- decoding ---------------------------------------------------------------------------- */

static void test_step(void **state)
{
    (void)state;
    static const int64_t tokens[] = {0, 1, 2, 5, 17, 70};
    rng r = {7003};
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        for (size_t t = 0; t < DR_COUNT(tokens); t++)
            for (size_t w = 0; w < DR_COUNT(widths); w++) {
                documents d;
                if (too_slow(tokens[t], w))
                    continue;
                spec s = draw_spec(&r, variants[i], tokens[t], widths[w].K, widths[w].V, &d);
                s.absent &= ~(BIT(initial_state) | BIT(final_state));
                check_spec(&s, (how){.form = FORM_STEP});
            }
}

/* Slots of a pool, updated in place: named slots change, others keep their bytes, -1 starts
 * from zero and stores nothing. */
static void check_pool(const dr_context *ctx, bool step, dr_dtype dtype, bool v_first)
{
    enum { N = 3, SLOT_COUNT = 7 };
    static const int32_t index[N] = {4, -1, 2};
    spec s = {.p = problem_make(DR_KDA, 3, 1, 2, 24, 40), .state_dtype = dtype};
    s.p.batch = N;
    s.p.state_v_first = v_first;
    trial x = trial_make(&s);
    how h = {.form = step ? FORM_STEP : FORM_CALL, .forward_only = true};
    int64_t size = x.t[S_initial_state].view.stride[0];
    dr_tensor padding = view_cut(x.t[S_initial_state].view, 0, 1, 2);
    double *zero = calloc((size_t)size, sizeof *zero);
    view_write(&padding, zero);
    free(zero);
    tensor_remember(&x.t[S_initial_state]);
    result want = trial_run(ctx, &x, h);

    rng r = {5};
    int64_t shape[] = {SLOT_COUNT, 2, v_first ? 40 : 24, v_first ? 24 : 40};
    tensor pool = tensor_make(&r, LAYOUT_DENSE, dtype, 4, shape);
    size_t bytes = (size_t)size * dr_dtype_size(dtype);
    for (int n = 0; n < N; n++)
        if (index[n] >= 0)
            memcpy(pool.memory.data + (size_t)index[n] * bytes,
                   x.t[S_initial_state].memory.data + (size_t)n * bytes, bytes);
    trial y = x;
    y.io.initial_state = y.io.final_state = pool.view;
    y.io.state_index = index;
    y.s.absent |= BIT(initial_state) | BIT(final_state) | BIT(chunk_states);
    result got = trial_run(ctx, &y, h);
    /* A decode step may take another path for a padding sequence, whose outputs nobody reads. */
    for (int64_t m = 0, row = want.count[S_o] / N; m < N; m++) {
        double *one = got.value[S_o] + m * row, *other = want.value[S_o] + m * row;
        if (index[m] >= 0 || !step)
            assert_memory_equal(one, other, sizeof *one * (size_t)row);
        else
            expect_near("o of a padding sequence", one, other, row, BUDGET);
    }
    double *after = view_read(&pool.view);
    for (int n = 0; n < N; n++)
        if (index[n] >= 0)
            assert_memory_equal(after + index[n] * size, want.value[S_final_state] + n * size,
                                sizeof *after * (size_t)size);
    for (size_t i = 0; i < pool.memory.bytes; i++)
        if (i / bytes != 4 && i / bytes != 2)
            assert_int_equal(pool.memory.data[i], UNWRITTEN);
    free(after);
    result_free(&got);
    result_free(&want);
    tensor_check(&pool, "pool", true);
    tensor_free(&pool);
    trial_free(&x);
}

static void test_state_pools(void **state)
{
    (void)state;
    dr_context *const both[] = {cpu, ref};
    static const dr_dtype types[] = {DR_F32, DR_BF16, DR_F16};
    for (int code = 0; code < 24; code++)
        check_pool(both[code % 2], code / 2 % 2, types[code / 4 % 3], code / 12);
}

/* ---- maps -------------------------------------------------------------------------------- */

static float *maps_of(const dr_context *ctx, trial *x, dr_direction dir, int32_t *chunk)
{
    dr_plan *plan;
    MUST(dr_plan_create(ctx, &x->p, &plan));
    dr_plan_info info = DR_PLAN_INFO_INIT;
    MUST(dr_plan_describe(plan, &info));
    *chunk = info.chunk;
    fenced_buffers b = buffers_make(info.saved_bytes, info.staged_scratch, UNWRITTEN);
    int64_t count = x->N * x->p.value_heads * (x->p.value_dim + x->p.key_dim) * x->p.key_dim;
    int64_t shape[] = {count};
    rng r = {1};
    tensor o =
        tensor_make(&r, LAYOUT_DENSE, DR_F64, 4,
                    (const int64_t[]){x->p.batch, x->p.tokens, x->p.value_heads, x->p.value_dim});
    o.view = dr_tensor_make(o.memory.data, DR_F32, 4, x->p.batch, x->p.tokens, x->p.value_heads,
                            x->p.value_dim);
    tensor maps = tensor_make(&r, LAYOUT_DENSE, DR_F32, 1, shape);
    dr_io io = x->io;
    io.o = o.view;
    MUST(dr_prepare(plan, DR_FORWARD, &io, &b.b));
    if (dir == DR_ADJOINT) {
        MUST(dr_recur(plan, DR_FORWARD, &io, &b.b, NULL, NULL));
        MUST(dr_output(plan, DR_FORWARD, &io, &b.b));
        MUST(dr_prepare(plan, DR_ADJOINT, &io, &b.b));
    }
    MUST(dr_summarize(plan, dir, &io, &b.b, (float *)maps.view.data));
    fence_check(&maps.memory, "maps");
    float *out = malloc(sizeof *out * (size_t)(count + 1));
    assert_non_null(out);
    memcpy(out, maps.view.data, sizeof *out * (size_t)count);
    tensor_free(&maps);
    tensor_free(&o);
    buffers_free(&b);
    dr_plan_destroy(plan);
    return out;
}

static double *widen(const float *x, int64_t n)
{
    double *out = malloc(sizeof *out * (size_t)(n + 1));
    assert_non_null(out);
    for (int64_t i = 0; i < n; i++)
        out[i] = x[i];
    return out;
}

/* [B; A] and [C; R] of every piece, the two blocks judged apart. */
static void check_maps(const spec *s)
{
    char text[600];
    trial x = trial_make(s);
    int64_t K = x.p.key_dim, V = x.p.value_dim, n = x.N * x.p.value_heads, size = (V + K) * K;
    for (int dir = 1; dir >= -1; dir -= 2) {
        int32_t chunk;
        float *a = maps_of(cpu, &x, (dr_direction)dir, &chunk);
        float *b = maps_of(ref, &x, (dr_direction)dir, &chunk);
        double *got = widen(a, n * size), *want = widen(b, n * size);
        for (int64_t m = 0; m < n; m++) {
            int at = snprintf(text, sizeof text, "map %lld, direction %d: ", (long long)m, dir);
            spec_text(s, text + at, sizeof text - (size_t)at);
            /* In a few channels A is the small remainder of a contraction: judged at its start.
             * Elsewhere what has faded below 1e-12 is judged as if it were that large. */
            expect_near(text, got + m * size, want + m * size, V * K, budget_of(s));
            expect_near_to(text, got + m * size + V * K, want + m * size + V * K, K * K,
                           budget_of(s), K < 16 ? sqrt((double)K) : 1e-12);
        }
        free(a);
        free(b);
        free(got);
        free(want);
    }
    trial_free(&x);
}

static void test_maps(void **state)
{
    (void)state;
    rng r = {7004};
    static const int64_t tokens[] = {0, 1, 16, 33, 64, 65, 150};
    for (size_t i = 0; i < DR_COUNT(variants); i++)
        for (size_t t = 0; t < DR_COUNT(tokens); t++)
            for (size_t w = 0; w < DR_COUNT(widths); w++) {
                documents d;
                if (too_slow(tokens[t], w) || (tokens[t] > 17 && widths[w].K == 256))
                    continue;
                spec s = draw_spec(&r, variants[i], tokens[t], widths[w].K, widths[w].V, &d);
                if (s.decay == DECAY_STRONG || s.decay == DECAY_CRUSH)
                    s.decay = DECAY_MIXED; /* a map of zeros says little */
                check_maps(&s);
            }
}

static void test_map_arithmetic(void **state)
{
    (void)state;
    rng r = {7005};
    for (size_t w = 0; w < DR_COUNT(widths); w++) {
        int32_t K = widths[w].K, V = widths[w].V;
        int64_t n = 3, size = (int64_t)(V + K) * K;
        float *x = malloc(sizeof *x * (size_t)(4 * n * size));
        assert_non_null(x);
        float *first = x, *second = x + n * size, *a = x + 2 * n * size, *b = x + 3 * n * size;
        for (int64_t i = 0; i < 2 * n * size; i++)
            x[i] = (float)(rng_normal(&r) / sqrt(K));
        for (int compose = 0; compose < 3; compose++) { /* apply, apply to zero, compose */
            int64_t count = n * (compose == 2 ? size : (int64_t)V * K);
            if (compose == 2) {
                MUST(dr_map_compose(cpu, n, K, V, first, second, a));
                MUST(dr_map_compose(ref, n, K, V, first, second, b));
            } else {
                const float *states = compose ? NULL : first;
                MUST(dr_map_apply(cpu, n, K, V, states, second, a));
                MUST(dr_map_apply(ref, n, K, V, states, second, b));
            }
            double *got = widen(a, count), *want = widen(b, count);
            expect_near("map arithmetic", got, want, count, BUDGET);
            free(got);
            free(want);
        }
        free(x);
    }
}

/* ---- ref against central differences ------------------------------------------------------ */

static double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static double loss(trial *x)
{
    how h = {.forward_only = true};
    result r = trial_run(ref, x, h);
    double sum = 0;
    const int pairs[][2] = {{S_o, S_d_o}, {S_final_state, S_d_final_state}};
    for (size_t i = 0; i < DR_COUNT(pairs); i++) {
        if (x->io.d_o.data == NULL && i == 0)
            continue;
        if (x->io.d_final_state.data == NULL && i == 1)
            continue;
        double *d = view_read(io_slot(&x->io, pairs[i][1]));
        sum += dot(r.value[pairs[i][0]], d, r.count[pairs[i][0]]);
        free(d);
    }
    result_free(&r);
    return sum;
}

/* The loss with one input moved by h along a direction. */
static double moved(trial *x, int i, const double *values, const double *along, int64_t n, double h)
{
    double *at = malloc(sizeof *at * (size_t)(n + 1));
    assert_non_null(at);
    for (int64_t m = 0; m < n; m++)
        at[m] = values[m] + h * along[m];
    view_write(&x->t[i].view, at);
    tensor_remember(&x->t[i]);
    free(at);
    return loss(x);
}

static void check_gradient(trial *x, const result *gradients, int input, int gradient,
                           const char *text)
{
    if (x->io.q.data == NULL || io_slot(&x->io, input)->data == NULL)
        return;
    int64_t n = view_count(io_slot(&x->io, input));
    double *values = view_read(io_slot(&x->io, input)),
           *along = malloc(sizeof *along * (size_t)(n + 1));
    assert_non_null(along);
    for (int64_t m = 0; m < n; m++)
        along[m] = rng_normal(&x->random);
    double h = 2e-7; /* small: a short row in l2norm bends on the scale of sqrt(eps) */
    double up = moved(x, input, values, along, n, h), down = moved(x, input, values, along, n, -h);
    double want = (up - down) / (2 * h), got = dot(gradients->value[gradient], along, n);
    double size =
        sqrt(dot(gradients->value[gradient], gradients->value[gradient], n) * dot(along, along, n));
    if (!(fabs(got - want) <= 1e-6 * size + 1e-7 * fabs(up) + 1e-9))
        fail_msg("%s: %s: %.12g by differences, %.12g by the adjoint", text, slots[gradient].name,
                 want, got);
    moved(x, input, values, along, n, 0);
    free(values);
    free(along);
}

static void test_reference_gradients(void **state)
{
    (void)state;
    static const int pairs[][2] = {{S_q, S_dq},
                                   {S_k, S_dk},
                                   {S_v, S_dv},
                                   {S_g, S_dg},
                                   {S_beta, S_dbeta},
                                   {S_a_log, S_da_log},
                                   {S_dt_bias, S_ddt_bias},
                                   {S_initial_state, S_d_initial_state}};
    rng r = {7006};
    for (int i = 0; i < 120; i++) {
        documents d;
        char text[512];
        int32_t K = 1 + (int32_t)rng_below(&r, 5), V = 1 + (int32_t)rng_below(&r, 5);
        spec s = draw_spec(&r, i % 2 ? DR_KDA : DR_GDN, rng_below(&r, 24), K, V, &d);
        s.dtype = s.gate_dtype = s.state_dtype = DR_F64;
        s.p.chunk = 1 + (int32_t)rng_below(&r, 9);
        s.absent &= BIT(initial_state) | BIT(d_o) | BIT(d_final_state) | BIT(a_log) | BIT(dt_bias);
        trial x = trial_make(&s);
        result gradients = trial_run(ref, &x, (how){.form = i % 3 ? FORM_CALL : FORM_STAGED});
        for (size_t m = 0; m < DR_COUNT(pairs); m++)
            check_gradient(&x, &gradients, pairs[m][0], pairs[m][1],
                           spec_text(&s, text, sizeof text));
        result_free(&gradients);
        trial_free(&x);
    }
}

static int open_backends(void **state)
{
    (void)state;
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    return dr_context_create("cpu", &options, &cpu) != DR_OK ||
           dr_context_create("ref", &options, &ref) != DR_OK;
}

static int close_backends(void **state)
{
    (void)state;
    dr_context_destroy(cpu);
    dr_context_destroy(ref);
    error_table_print(&table);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference_gradients),
        cmocka_unit_test(test_sampled_gdn),
        cmocka_unit_test(test_sampled_kda),
        cmocka_unit_test(test_sampled_options),
        cmocka_unit_test(test_every_gate_and_decay),
        cmocka_unit_test(test_repeated_keys_and_wide_beta),
        cmocka_unit_test(test_every_dtype),
        cmocka_unit_test(test_every_layout),
        cmocka_unit_test(test_heads),
        cmocka_unit_test(test_keep_and_form),
        cmocka_unit_test(test_chunk_requests),
        cmocka_unit_test(test_packed_layouts),
        cmocka_unit_test(test_step),
        cmocka_unit_test(test_state_pools),
        cmocka_unit_test(test_maps),
        cmocka_unit_test(test_map_arithmetic),
    };
    return cmocka_run_group_tests(tests, open_backends, close_backends);
}
