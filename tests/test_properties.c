/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_properties.c - what must hold whatever the numbers are, on every backend: packing,
 * batching and order, cutting a sequence anywhere, linearity, chunk lengths, what is kept, and
 * stages against one call. Affine maps are in test_maps.c, equal bits in test_bits.c.
 */
#include "subjects.h"

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
                (part){0, at, s->p.tokens, 0, at / whole.chunk}, which & ~BIT(d_initial_state),
                budget);
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

static void check_linear(const subject *u, dr_variant variant, const int *which, int n,
                         uint32_t outputs)
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
    };
    return cmocka_run_group_tests(tests, open_subjects, close_subjects);
}
