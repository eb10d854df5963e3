/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_properties.c - what must hold whatever the numbers are, on every backend: linearity,
 * cutting a sequence anywhere, packing, order, affine maps, staged against one call, and the
 * same bits at any thread count, batch, layout of boundaries and state of the workspace.
 *
 * Where states are handed on, "cpu" gets f32 and "ref" f64: each its own inner precision, so
 * that handing on rounds nothing and results may be asked to agree bit for bit.
 */
#include "trial.h"

#include <pthread.h>

#define BUDGET 1e-5

typedef struct subject {
    const char *name;
    dr_dtype inner; /* element type of its states inside */
    dr_context *ctx;
} subject;

static subject subjects[] = {{"cpu", DR_F32, NULL}, {"ref", DR_F64, NULL}};

static const dr_variant variants[] = {DR_GDN, DR_KDA};

/* A mid-sized problem with most options on. */
static spec plain(const subject *u, dr_variant variant, int64_t T)
{
    spec s = {.p = problem_make(variant, T, 2, 4, 40, 24), .state_dtype = u->inner};
    s.p.gate = DR_GATE_SOFTPLUS;
    s.p.beta = DR_BETA_LOGIT;
    s.p.beta_scale = 2;
    s.p.l2norm = 1;
    s.seed = (uint64_t)T;
    return s;
}

static how exact(const subject *u) { return (how){.out = u->inner}; }

#define FOR_EACH_SUBJECT(u, variant)                                                     \
    for (const subject *u = subjects; u < subjects + DR_COUNT(subjects); u++)            \
        for (const dr_variant *variant = variants; variant < variants + DR_COUNT(variants); variant++)

/* ---- parts of a whole -------------------------------------------------------------------- */

static const uint32_t everything = (1u << SLOTS) - 1;
static const uint32_t sums = BIT(da_log) | BIT(ddt_bias);

typedef struct part {
    int64_t b, from, to, n; /* batch row, tokens of it, sequence */
    int64_t chunk0;         /* index of its first chunk */
} part;

/* The piece of a whole result that a part's result must equal: bitwise, or within budget. */
static void expect_part(const char *what, const result *got, const trial *whole, const result *want,
                        part at, uint32_t which, double budget)
{
    for (int i = 0; i < SLOTS; i++) {
        char first = slots[i].letters[0];
        if (!(which & ~sums & 1u << i) || got->value[i] == NULL || want->value[i] == NULL)
            continue;
        int64_t axis = first == 'B' ? whole->p.batch * whole->p.tokens : whole->N;
        int64_t skip = first == 'B' ? at.b * whole->p.tokens + at.from : at.n;
        int64_t inner = axis > 0 ? want->count[i] / axis : 0;
        if (first == 'C') {
            inner = (int64_t)whole->p.value_heads * whole->p.key_dim * whole->p.value_dim;
            skip = at.chunk0;
        }
        const double *ours = want->value[i] + skip * inner;
        if (budget > 0) {
            difference d = compare(got->value[i], ours, got->count[i], got->dtype[i], budget, 0);
            if (!d.allowed)
                fail_msg("%s: %s: relative L2 error %.3g", what, slots[i].name, d.l2);
            continue;
        }
        for (int64_t m = 0; m < got->count[i]; m++)
            if (memcmp(&got->value[i][m], &ours[m], sizeof *ours) != 0)
                fail_msg("%s: %s[%lld]: %.17g is not %.17g", what, slots[i].name, (long long)m,
                         got->value[i][m], ours[m]);
    }
}

/* Gradients of parameters sum over parts. */
static void add_sums(result *total, const result *x)
{
    for (int i = 0; i < SLOTS; i++) {
        if (!(sums & 1u << i) || x->value[i] == NULL)
            continue;
        if (total->value[i] == NULL) {
            total->value[i] = calloc((size_t)x->count[i] + 1, sizeof(double));
            total->count[i] = x->count[i];
            total->dtype[i] = DR_F32;
        }
        for (int64_t m = 0; m < x->count[i]; m++)
            total->value[i][m] += x->value[i][m];
    }
}

static void expect_sums(const char *what, const result *total, const result *want)
{
    result only = *total;
    for (int i = 0; i < SLOTS; i++)
        if (!(sums & 1u << i))
            only.value[i] = NULL;
    expect_close(what, &only, want, BUDGET, NULL);
}

static void test_packed_equals_separate(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 1, 1, 65, 66, 130, 210, 210, 247};
    enum { N = 8 };
    FOR_EACH_SUBJECT(u, variant)
    for (int keep = DR_KEEP_FACTORS; keep <= DR_KEEP_STATES; keep++) {
        spec s = plain(u, *variant, 250);
        s.p.offsets = offsets;
        s.p.sequences = N;
        s.p.keep = (dr_keep)keep;
        trial x = trial_make(&s);
        result want = trial_run(u->ctx, &x, exact(u)), total = {0};
        int64_t chunk0 = 0;
        for (int64_t n = 0; n < N; n++) {
            part at = {0, offsets[n], offsets[n + 1], n, chunk0};
            trial y = trial_cut(&x, 0, at.from, at.to, n);
            result got = trial_run(u->ctx, &y, exact(u));
            expect_part("packed against separate", &got, &x, &want, at, everything, 0);
            add_sums(&total, &got);
            chunk0 += dr_ceil_div(at.to - at.from, want.chunk);
            result_free(&got);
        }
        expect_sums("packed against separate", &total, &want);
        for (int64_t m = 247 * 4 * 24; m < want.count[S_o]; m++) /* tokens of nobody */
            assert_true(want.value[S_o][m] == 0 && want.value[S_dv][m] == 0);
        result_free(&total);
        result_free(&want);
        trial_free(&x);
    }
}

static void test_batch_equals_rows(void **state)
{
    (void)state;
    FOR_EACH_SUBJECT(u, variant)
    {
        spec s = plain(u, *variant, 97);
        s.p.batch = 4;
        trial x = trial_make(&s);
        result want = trial_run(u->ctx, &x, exact(u)), total = {0};
        for (int64_t b = 0; b < 4; b++) {
            trial y = trial_cut(&x, b, 0, 97, b);
            result got = trial_run(u->ctx, &y, exact(u));
            part at = {b, 0, 97, b, b * dr_ceil_div(97, want.chunk)};
            expect_part("row alone", &got, &x, &want, at, everything, 0);
            add_sums(&total, &got);
            result_free(&got);
        }
        expect_sums("row alone", &total, &want);
        result_free(&total);
        result_free(&want);
        trial_free(&x);
    }
}

static void test_sequence_order(void **state)
{
    (void)state;
    static const int64_t forth[] = {0, 70, 71, 71, 100}, back[] = {0, 29, 29, 30, 100};
    enum { N = 4, T = 100 };
    FOR_EACH_SUBJECT(u, variant)
    {
        spec s = plain(u, *variant, T), r = s;
        s.p.offsets = forth;
        r.p.offsets = back;
        s.p.sequences = r.p.sequences = N;
        trial x = trial_make(&s), y = trial_make(&r);
        result a = trial_run(u->ctx, &x, exact(u));
        for (int i = 0; i < SLOTS; i++) { /* y: the documents of x in the opposite order */
            dr_tensor *from = io_slot(&x.io, i), *to = io_slot(&y.io, i);
            if (from->data == NULL)
                continue;
            double *values = view_read(from);
            if (strchr("BN", slots[i].letters[0]) == NULL)
                view_write(to, values);
            int64_t inner = view_count(from) / (slots[i].letters[0] == 'B' ? T : N);
            for (int n = 0; n < N && slots[i].letters[0] == 'B'; n++) {
                dr_tensor part_of = view_cut(*to, 1, back[N - 1 - n], back[N - n]);
                view_write(&part_of, values + forth[n] * inner);
            }
            for (int n = 0; n < N && slots[i].letters[0] == 'N'; n++) {
                dr_tensor part_of = view_cut(*to, 0, N - 1 - n, N - n);
                view_write(&part_of, values + n * inner);
            }
            free(values);
            tensor_remember(&y.t[i]);
        }
        result b = trial_run(u->ctx, &y, exact(u));
        for (int n = 0; n < N; n++) {
            trial z = trial_cut(&y, 0, back[N - 1 - n], back[N - n], N - 1 - n);
            result c = trial_run(u->ctx, &z, exact(u));
            part at = {0, forth[n], forth[n + 1], n, 0};
            expect_part("order of sequences", &c, &x, &a, at, everything & ~BIT(chunk_states), 0);
            at = (part){0, back[N - 1 - n], back[N - n], N - 1 - n, 0};
            expect_part("order of sequences", &c, &y, &b, at, everything & ~BIT(chunk_states), 0);
            result_free(&c);
        }
        expect_sums("order of sequences", &b, &a);
        result_free(&a);
        result_free(&b);
        trial_free(&x);
        trial_free(&y);
    }
}

/* ---- cuts -------------------------------------------------------------------------------- */

/* A dense state tensor of x with these values. */
static tensor carried(const trial *x, dr_dtype dtype, const double *values)
{
    rng r = {3};
    int64_t shape[DR_MAX_RANK];
    int32_t rank = slot_shape(&x->p, 1, 0, S_initial_state, shape);
    tensor t = tensor_make(&r, LAYOUT_DENSE, dtype, rank, shape);
    view_write(&t.view, values);
    return t;
}

static void check_cut(const subject *u, const spec *s, int64_t at)
{
    trial x = trial_make(s), a = trial_cut(&x, 0, 0, at, 0),
          b = trial_cut(&x, 0, at, s->p.tokens, 0);
    how h = exact(u), forward = h;
    forward.forward_only = true;
    result whole = trial_run(u->ctx, &x, h), total = {0};
    result before = trial_run(u->ctx, &a, forward);
    tensor middle = carried(&a, u->inner, before.value[S_final_state]);
    b.io.initial_state = middle.view;
    result second = trial_run(u->ctx, &b, h);
    tensor d_middle = carried(&a, u->inner, second.value[S_d_initial_state]);
    a.io.d_final_state = d_middle.view;
    result first = trial_run(u->ctx, &a, h);
    bool aligned = at % whole.chunk == 0;
    double budget = aligned ? 0 : BUDGET;
    uint32_t which = everything & ~(aligned ? 0 : BIT(chunk_states));
    expect_part("before the cut", &first, &x, &whole, (part){0, 0, at, 0, 0},
                which & ~BIT(final_state), budget);
    expect_part("after the cut", &second, &x, &whole,
                (part){0, at, s->p.tokens, 0, at / whole.chunk}, which & ~BIT(d_initial_state), budget);
    add_sums(&total, &first);
    add_sums(&total, &second);
    expect_sums("cut", &total, &whole);
    result *all[] = {&whole, &total, &before, &second, &first};
    for (size_t i = 0; i < DR_COUNT(all); i++)
        result_free(all[i]);
    tensor_free(&middle);
    tensor_free(&d_middle);
    trial_free(&x);
}

static void test_cut_anywhere(void **state)
{
    (void)state;
    static const int64_t cuts[] = {0, 1, 16, 31, 32, 33, 64, 65, 100, 128, 149, 150};
    FOR_EACH_SUBJECT(u, variant)
    for (size_t i = 0; i < DR_COUNT(cuts); i++) {
        spec s = plain(u, *variant, 150);
        s.p.keep = (dr_keep)(i % 3);
        check_cut(u, &s, cuts[i]);
    }
}

/* ---- linearity, chunks, forms ------------------------------------------------------------- */

/* Runs x with some of its inputs replaced by a combination of two sets of values. */
static result mix(const subject *u, trial *x, const int *which, int n, double *const *one,
                  double *const *two, double a, double b)
{
    for (int i = 0; i < n; i++) {
        int64_t count = view_count(&x->t[which[i]].view);
        double *values = malloc(sizeof *values * (size_t)(count + 1));
        assert_non_null(values);
        for (int64_t m = 0; m < count; m++)
            values[m] = a * one[i][m] + b * two[i][m];
        view_write(&x->t[which[i]].view, values);
        tensor_remember(&x->t[which[i]]);
        free(values);
    }
    return trial_run(u->ctx, x, exact(u));
}

static void check_linear(const subject *u, dr_variant variant, const int *which, int n, uint32_t outputs)
{
    spec s = plain(u, variant, 90);
    s.dtype = u->inner; /* the combination must not be rounded */
    trial x = trial_make(&s), y;
    s.seed++;
    y = trial_make(&s);
    double *one[2], *two[2];
    for (int i = 0; i < n; i++) {
        one[i] = view_read(&x.t[which[i]].view);
        two[i] = view_read(&y.t[which[i]].view);
    }
    result p = mix(u, &x, which, n, one, two, 1, 0), q = mix(u, &x, which, n, one, two, 0, 1);
    result both = mix(u, &x, which, n, one, two, 2, -3);
    for (int i = 0; i < SLOTS; i++) {
        if (!(outputs & 1u << i))
            continue;
        for (int64_t m = 0; m < p.count[i]; m++)
            p.value[i][m] = 2 * p.value[i][m] - 3 * q.value[i][m];
        expect_near(slots[i].name, both.value[i], p.value[i], p.count[i], BUDGET);
    }
    for (int i = 0; i < n; i++) {
        free(one[i]);
        free(two[i]);
    }
    result_free(&p);
    result_free(&q);
    result_free(&both);
    trial_free(&x);
    trial_free(&y);
}

static void test_linear(void **state)
{
    (void)state;
    static const int values[] = {S_v, S_initial_state}, cotangents[] = {S_d_o, S_d_final_state};
    FOR_EACH_SUBJECT(u, variant)
    {
        check_linear(u, *variant, values, 2, BIT(o) | BIT(final_state) | BIT(chunk_states));
        check_linear(u, *variant, cotangents, 2,
                     BIT(dq) | BIT(dk) | BIT(dv) | BIT(dg) | BIT(dbeta) | BIT(d_initial_state));
    }
}

/* Chunkwise, token by token, and in chunks of any other length. */
static void test_chunks_change_nothing(void **state)
{
    (void)state;
    static const int32_t lengths[] = {1, 3, 8, 16, 32, 64, 128};
    FOR_EACH_SUBJECT(u, variant)
    for (int64_t T = 1; T < 200; T += 43) {
        spec s = plain(u, *variant, T);
        s.absent = BIT(chunk_states);
        trial x = trial_make(&s);
        result want = trial_run(u->ctx, &x, exact(u));
        how step = {.form = FORM_STEP, .out = u->inner};
        result got = trial_run(u->ctx, &x, step);
        expect_close("token by token", &got, &want, BUDGET, NULL);
        result_free(&got);
        for (size_t c = 0; c < DR_COUNT(lengths); c++) {
            x.p.chunk = lengths[c];
            if (dr_supports(u->ctx, &x.p) != DR_OK)
                continue;
            got = trial_run(u->ctx, &x, exact(u));
            assert_int_equal(got.chunk, lengths[c]);
            expect_close("other chunks", &got, &want, BUDGET, NULL);
            result_free(&got);
        }
        result_free(&want);
        trial_free(&x);
    }
}

static void test_keep_agrees(void **state)
{
    (void)state;
    FOR_EACH_SUBJECT(u, variant)
    {
        spec s = plain(u, *variant, 201);
        trial x = trial_make(&s);
        result want = trial_run(u->ctx, &x, exact(u));
        for (int keep = DR_KEEP_INPUTS; keep <= DR_KEEP_STATES; keep++) {
            x.p.keep = (dr_keep)keep;
            result got = trial_run(u->ctx, &x, exact(u));
            expect_close("keep", &got, &want, BUDGET, NULL);
            result_free(&got);
        }
        result_free(&want);
        trial_free(&x);
    }
}

static void test_staged_equals_one_call(void **state)
{
    (void)state;
    FOR_EACH_SUBJECT(u, variant)
    for (int keep = DR_KEEP_FACTORS; keep <= DR_KEEP_STATES; keep++) {
        spec s = plain(u, *variant, 140);
        s.p.keep = (dr_keep)keep;
        s.p.batch = 2;
        trial x = trial_make(&s);
        how staged = exact(u);
        staged.form = FORM_STAGED;
        result want = trial_run(u->ctx, &x, exact(u)), got = trial_run(u->ctx, &x, staged);
        expect_close("staged", &got, &want, BUDGET, NULL);
        result_free(&got);
        result_free(&want);
        trial_free(&x);
    }
}

/* ---- the same bits ------------------------------------------------------------------------ */

typedef struct job {
    pthread_t thread;
    dr_task_fn *body;
    void *arg;
    int64_t i;
} job;

static void *do_job(void *arg)
{
    job *j = arg;
    j->body(j->arg, j->i);
    return NULL;
}

/* A host program's pool: a thread for each of the last tasks, the others here, backwards. */
static void host_parallel(void *user, int64_t n, dr_task_fn *body, void *arg)
{
    job jobs[3];
    int64_t extra = n < 3 ? n : 3;
    ++*(int *)user;
    for (int64_t i = 0; i < extra; i++) {
        jobs[i] = (job){.body = body, .arg = arg, .i = n - 1 - i};
        if (pthread_create(&jobs[i].thread, NULL, do_job, &jobs[i]) != 0)
            abort();
    }
    for (int64_t i = n - 1 - extra; i >= 0; i--)
        body(arg, i);
    for (int64_t i = 0; i < extra; i++)
        pthread_join(jobs[i].thread, NULL);
}

static void test_threads_change_no_bit(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 130, 131, 131, 190, 300};
    static const int32_t threads[] = {1, 2, 3, 5, 4 /* of the host's own pool */};
    FOR_EACH_SUBJECT(u, variant)
    for (int form_of = FORM_CALL; form_of <= FORM_STEP; form_of++) {
        spec s = plain(u, *variant, 300);
        s.p.offsets = offsets;
        s.p.sequences = 5;
        trial x = trial_make(&s);
        how h = {.form = (form)form_of};
        result want = trial_run(u->ctx, &x, h);
        for (size_t i = 0; i < DR_COUNT(threads); i++) {
            int calls = 0;
            bool own = i + 1 == DR_COUNT(threads);
            dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
            options.threads = threads[i];
            options.parallel = own ? host_parallel : NULL;
            options.parallel_user = &calls;
            dr_context *ctx;
            MUST(dr_context_create(u->name, &options, &ctx));
            assert_int_equal(dr_context_threads(ctx), threads[i]);
            result got = trial_run(ctx, &x, h);
            expect_same("threads", &got, &want, 0);
            assert_true(!own || calls > 0);
            result_free(&got);
            dr_context_destroy(ctx);
        }
        result_free(&want);
        trial_free(&x);
    }
}

static void test_poisoned_workspace_changes_no_bit(void **state)
{
    (void)state;
    FOR_EACH_SUBJECT(u, variant)
    for (int form_of = FORM_CALL; form_of <= FORM_STEP; form_of++) {
        spec s = plain(u, *variant, 65);
        trial x = trial_make(&s);
        result want = trial_run(u->ctx, &x, (how){.form = (form)form_of, .clean = true});
        result got = trial_run(u->ctx, &x, (how){.form = (form)form_of});
        expect_same("poisoned workspace", &got, &want, 0);
        result_free(&got);
        result_free(&want);
        trial_free(&x);
    }
}

/* No initial state against zeros; dense against one packed document; B left out. */
static void test_spellings_change_no_bit(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 129};
    FOR_EACH_SUBJECT(u, variant)
    {
        spec s = plain(u, *variant, 129);
        trial x = trial_make(&s);
        double *zero = calloc((size_t)view_count(&x.io.initial_state), sizeof *zero);
        view_write(&x.t[S_initial_state].view, zero);
        view_write(&x.t[S_d_final_state].view, zero);
        free(zero);
        tensor_remember(&x.t[S_initial_state]);
        tensor_remember(&x.t[S_d_final_state]);
        result want = trial_run(u->ctx, &x, (how){0});
        trial y = x;
        y.io.initial_state.data = y.io.d_final_state.data = NULL;
        result none = trial_run(u->ctx, &y, (how){0});
        expect_same("no state against zeros", &none, &want, 0);
        trial z = x;
        z.p.offsets = offsets;
        z.p.sequences = 1;
        result packed = trial_run(u->ctx, &z, (how){0});
        expect_same("packed against dense", &packed, &want, 0);
        trial w = x;
        for (int i = 0; i < SLOTS; i++) {
            dr_tensor *t = io_slot(&w.io, i);
            if (t->data == NULL || slots[i].letters[0] != 'B')
                continue;
            t->rank--;
            memmove(t->shape, t->shape + 1, sizeof t->shape - sizeof *t->shape);
            memmove(t->stride, t->stride + 1, sizeof t->stride - sizeof *t->stride);
        }
        result flat = trial_run(u->ctx, &w, (how){0});
        expect_same("without the batch axis", &flat, &want, 0);
        result *all[] = {&want, &none, &packed, &flat};
        for (size_t i = 0; i < DR_COUNT(all); i++)
            result_free(all[i]);
        trial_free(&x);
    }
}

/* Leaving an output out, or updating the state in place, changes no other output. */
static void test_wanted_outputs_change_no_bit(void **state)
{
    (void)state;
    FOR_EACH_SUBJECT(u, variant)
    {
        spec s = plain(u, *variant, 100);
        trial x = trial_make(&s);
        result want = trial_run(u->ctx, &x, exact(u));
        for (int i = 0; i < SLOTS; i++) {
            if (slots[i].role != ROLE_OUTPUT && slots[i].role != ROLE_GRADIENT)
                continue;
            how h = exact(u), alone = h;
            h.unwanted = 1u << i;
            result got = trial_run(u->ctx, &x, h);
            expect_same("one output less", &got, &want, 0);
            result_free(&got);
            alone.unwanted = ~(1u << i);
            if (slots[i].role == ROLE_GRADIENT)
                alone.unwanted &= ~BIT(final_state); /* forward must have something to do */
            got = trial_run(u->ctx, &x, alone);
            expect_same("one output alone", &got, &want, 0);
            result_free(&got);
        }
        trial y = x;
        tensor place = carried(&x, u->inner, want.value[S_final_state]);
        double *start = view_read(&x.io.initial_state);
        for (int form_of = FORM_CALL; form_of <= FORM_STEP; form_of++) {
            how h = {.form = (form)form_of, .out = u->inner, .forward_only = true};
            result plainly = trial_run(u->ctx, &x, h);
            view_write(&place.view, start);
            y.io.initial_state = y.io.final_state = place.view;
            h.unwanted = BIT(final_state);
            result got = trial_run(u->ctx, &y, h);
            got.value[S_final_state] = view_read(&place.view);
            got.count[S_final_state] = view_count(&place.view);
            expect_same("in place", &got, &plainly, 0);
            result_free(&got);
            result_free(&plainly);
        }
        free(start);
        tensor_free(&place);
        result_free(&want);
        trial_free(&x);
    }
}

/* ---- maps -------------------------------------------------------------------------------- */

/* A staged trip opened on x, up to its maps. */
typedef struct trip {
    dr_plan *plan;
    fenced_buffers b;
    dr_io io;
    tensor o;
} trip;

static trip trip_open(const subject *u, trial *x, dr_direction dir, float *maps)
{
    trip t = {.io = x->io};
    MUST(dr_plan_create(u->ctx, &x->p, &t.plan));
    dr_plan_info info = DR_PLAN_INFO_INIT;
    MUST(dr_plan_describe(t.plan, &info));
    t.b = buffers_make(info.saved_bytes, info.staged_scratch, UNWRITTEN);
    rng r = {9};
    int64_t shape[DR_MAX_RANK];
    int32_t rank = slot_shape(&x->p, x->N, 0, S_o, shape);
    t.o = tensor_make(&r, LAYOUT_DENSE, DR_F32, rank, shape);
    t.io.o = t.o.view;
    MUST(dr_prepare(t.plan, DR_FORWARD, &t.io, &t.b.b));
    if (dir == DR_ADJOINT) {
        MUST(dr_recur(t.plan, DR_FORWARD, &t.io, &t.b.b, NULL, NULL));
        MUST(dr_output(t.plan, DR_FORWARD, &t.io, &t.b.b));
        MUST(dr_prepare(t.plan, DR_ADJOINT, &t.io, &t.b.b));
    }
    MUST(dr_summarize(t.plan, dir, &t.io, &t.b.b, maps));
    return t;
}

static void trip_close(trip *t)
{
    dr_plan_destroy(t->plan);
    buffers_free(&t->b);
    tensor_free(&t->o);
}

static float *floats(int64_t n)
{
    float *x = malloc(sizeof *x * (size_t)(n + 1));
    assert_non_null(x);
    return x;
}

static void expect_near_f(const char *what, const float *got, const float *want, int64_t n, double budget)
{
    double *g = malloc(sizeof *g * (size_t)(2 * n + 1));
    assert_non_null(g);
    for (int64_t i = 0; i < n; i++) {
        g[i] = got[i];
        g[n + i] = want[i];
    }
    expect_near(what, g, g + n, n, budget);
    free(g);
}

/* The exit of a run from any entry is the map applied to it. */
static void test_exit_is_the_map_applied(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 64, 65, 65, 130};
    FOR_EACH_SUBJECT(u, variant)
    for (int dir = 1; dir >= -1; dir -= 2) {
        spec s = plain(u, *variant, 130);
        s.p.offsets = offsets;
        s.p.sequences = 4;
        trial x = trial_make(&s);
        int32_t K = x.p.key_dim, V = x.p.value_dim;
        int64_t n = x.N * x.p.value_heads, map = (int64_t)(V + K) * K, size = (int64_t)V * K;
        float *maps = floats(n * map), *entry = floats(n * size), *out = floats(n * size),
              *applied = floats(n * size);
        rng r = {11};
        for (int zero = 0; zero < 2; zero++) {
            for (int64_t i = 0; i < n * size; i++)
                entry[i] = zero ? 0 : (float)rng_normal(&r);
            trip t = trip_open(u, &x, (dr_direction)dir, maps);
            MUST(dr_recur(t.plan, (dr_direction)dir, &t.io, &t.b.b, entry, out));
            MUST(dr_map_apply(u->ctx, n, K, V, zero ? NULL : entry, maps, applied));
            for (int64_t i = 0; i < n; i++)
                expect_near_f("exit", out + i * size, applied + i * size, size, BUDGET);
            if (zero) /* B itself */
                for (int64_t i = 0; i < n; i++)
                    assert_memory_equal(applied + i * size, maps + i * map, sizeof(float) * (size_t)size);
            else /* the empty document hands its entry on */
                assert_memory_equal(out + 2 * 4 * size, entry + 2 * 4 * size,
                                    sizeof(float) * (size_t)(4 * size));
            trip_close(&t);
        }
        for (int64_t i = 2 * 4; i < 3 * 4; i++) /* and its map is [0; I] */
            for (int64_t m = 0; m < map; m++)
                assert_true(maps[i * map + m] == (m >= size && (m - size) % (K + 1) == 0 ? 1 : 0));
        free(maps);
        free(entry);
        free(out);
        free(applied);
        trial_free(&x);
    }
}

/* Maps of the parts, composed, against the map of the whole; R against A transposed. */
static void test_maps_compose(void **state)
{
    (void)state;
    static const int64_t cuts[] = {0, 40, 64, 129, 150};
    FOR_EACH_SUBJECT(u, variant)
    {
        spec s = plain(u, *variant, 150);
        trial x = trial_make(&s);
        int32_t K = x.p.key_dim, V = x.p.value_dim, n = x.p.value_heads;
        int64_t map = (int64_t)(V + K) * K, all = n * map;
        float *whole[2] = {floats(all), floats(all)}, *piece[4], *left = floats(all), *right = floats(all),
              *pair = floats(all);
        for (int back = 0; back < 2; back++) {
            trip t = trip_open(u, &x, back ? DR_ADJOINT : DR_FORWARD, whole[back]);
            trip_close(&t);
            for (int i = 0; i < 4; i++) { /* in the order of travel */
                int at = back ? 3 - i : i;
                trial y = trial_cut(&x, 0, cuts[at], cuts[at + 1], 0);
                piece[i] = floats(all);
                trip p = trip_open(u, &y, back ? DR_ADJOINT : DR_FORWARD, piece[i]);
                trip_close(&p);
            }
            memcpy(left, piece[0], sizeof *left * (size_t)all);
            for (int i = 1; i < 4; i++) { /* ((1 2) 3) 4 */
                MUST(dr_map_compose(u->ctx, n, K, V, left, piece[i], right));
                memcpy(left, right, sizeof *left * (size_t)all);
            }
            MUST(dr_map_compose(u->ctx, n, K, V, piece[2], piece[3], pair)); /* (1 2) (3 4) */
            MUST(dr_map_compose(u->ctx, n, K, V, piece[0], piece[1], right));
            float *other = floats(all);
            MUST(dr_map_compose(u->ctx, n, K, V, right, pair, other));
            for (int j = 0; j < n; j++) {
                int64_t at = j * map, B = (int64_t)V * K;
                expect_near_f("B composed", left + at, whole[back] + at, B, BUDGET);
                expect_near_f("A composed", left + at + B, whole[back] + at + B, map - B, BUDGET);
                expect_near_f("B associated", other + at, left + at, B, BUDGET);
                expect_near_f("A associated", other + at + B, left + at + B, map - B, BUDGET);
            }
            free(other);
            for (int i = 0; i < 4; i++)
                free(piece[i]);
        }
        for (int j = 0; j < n; j++) {
            const float *A = whole[0] + j * map + V * K, *R = whole[1] + j * map + V * K;
            for (int a = 0; a < K; a++)
                for (int b = 0; b < K; b++)
                    pair[a * K + b] = A[b * K + a];
            expect_near_f("R against A transposed", R, pair, (int64_t)K * K, BUDGET);
        }
        free(whole[0]);
        free(whole[1]);
        free(left);
        free(right);
        free(pair);
        trial_free(&x);
    }
}

/* Absent states skip the product: a NaN in A does not spread. */
static void test_reset_skips_the_product(void **state)
{
    (void)state;
    enum { K = 5, V = 3 };
    float map[(V + K) * K], out[V * K];
    for (int i = 0; i < (V + K) * K; i++)
        map[i] = i < V * K ? (float)i : NAN;
    for (const subject *u = subjects; u < subjects + DR_COUNT(subjects); u++) {
        MUST(dr_map_apply(u->ctx, 1, K, V, NULL, map, out));
        assert_memory_equal(out, map, sizeof out);
    }
}

static int open_subjects(void **state)
{
    (void)state;
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    for (size_t i = 0; i < DR_COUNT(subjects); i++)
        if (dr_context_create(subjects[i].name, &options, &subjects[i].ctx) != DR_OK)
            return 1;
    return 0;
}

static int close_subjects(void **state)
{
    (void)state;
    for (size_t i = 0; i < DR_COUNT(subjects); i++)
        dr_context_destroy(subjects[i].ctx);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_packed_equals_separate),
        cmocka_unit_test(test_batch_equals_rows),
        cmocka_unit_test(test_sequence_order),
        cmocka_unit_test(test_cut_anywhere),
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_chunks_change_nothing),
        cmocka_unit_test(test_keep_agrees),
        cmocka_unit_test(test_staged_equals_one_call),
        cmocka_unit_test(test_threads_change_no_bit),
        cmocka_unit_test(test_poisoned_workspace_changes_no_bit),
        cmocka_unit_test(test_spellings_change_no_bit),
        cmocka_unit_test(test_wanted_outputs_change_no_bit),
        cmocka_unit_test(test_exit_is_the_map_applied),
        cmocka_unit_test(test_maps_compose),
        cmocka_unit_test(test_reset_skips_the_product),
    };
    return cmocka_run_group_tests(tests, open_subjects, close_subjects);
}
