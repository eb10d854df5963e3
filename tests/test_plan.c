/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_plan.c - a problem checked, completed and cut: the sentence of every refusal, the
 * defaults, chunk tables by hand and against a token-by-token count, sizes at the edge of
 * 64 bits, head maps, and the arena that measures and carves.
 */
#include "test.h"

#include "base/arena.h"
#include "plan_check.h"

/* Under AddressSanitizer a request beyond reason must return NULL as it does without. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }

static const int64_t two_documents[] = {0, 5, 10};

static dr_problem good(void)
{
    dr_problem p = DR_PROBLEM_INIT;
    p.variant = DR_GDN;
    p.tokens = 10;
    p.heads = 2;
    p.value_heads = 4;
    p.key_dim = 16;
    p.value_dim = 8;
    p.gate = DR_GATE_LOG;
    p.beta = DR_BETA_VALUE;
    return p;
}

/* The problem with one change is refused, and nothing is handed out. */
#define BAD(change, status, text)                               \
    do {                                                        \
        dr_problem p = good(), out;                             \
        memset(&out, 0x5a, sizeof out);                         \
        change;                                                 \
        REFUSED(dr_problem_complete(&p, &out), status, text);   \
        for (size_t i = 0; i < sizeof out; i++)                 \
            assert_int_equal(((unsigned char *)&out)[i], 0x5a); \
    } while (0)

static void test_refused_enumerations(void **state)
{
    (void)state;
    BAD(p.size = 8, DR_ERR_ARG, "problem.size: must be ");
    BAD(p.size = 8, DR_ERR_ARG, "got 8");
    BAD(p.variant = (dr_variant)0, DR_ERR_ARG, "variant: must be DR_GDN (1) or DR_KDA (2), got 0");
    BAD(p.variant = (dr_variant)3, DR_ERR_ARG, "got 3");
    BAD(p.gate = (dr_gate)0, DR_ERR_ARG,
        "gate: must be one of DR_GATE_NONE .. DR_GATE_LOWER_BOUND (1 to 5; there is no default), "
        "got 0");
    BAD(p.gate = (dr_gate)6, DR_ERR_ARG, "got 6");
    BAD(p.beta = (dr_beta)0, DR_ERR_ARG,
        "beta: must be DR_BETA_VALUE (1) or DR_BETA_LOGIT (2; there is no default), got 0");
    BAD(p.beta = (dr_beta)3, DR_ERR_ARG, "got 3");
    BAD(p.head_map = (dr_head_map)2, DR_ERR_ARG, "head_map: must be DR_HEADS_INTERLEAVED (0)");
    BAD(p.keep = (dr_keep)3, DR_ERR_ARG, "keep: must be DR_KEEP_FACTORS (0)");
    dr_problem out;
    REFUSED(dr_problem_complete(NULL, &out), DR_ERR_ARG, "problem: must not be NULL");
}

static void test_refused_sizes(void **state)
{
    (void)state;
    BAD(p.batch = 0, DR_ERR_SHAPE, "batch: must be 1 to 2147483647, got 0");
    BAD(p.batch = -4, DR_ERR_SHAPE, "got -4");
    BAD(p.batch = 1ll << 31, DR_ERR_SHAPE, "got 2147483648");
    BAD(p.tokens = -1, DR_ERR_SHAPE, "tokens: must be 0 to 2^53, got -1");
    BAD(p.tokens = INT64_MAX, DR_ERR_SHAPE, "got 9223372036854775807");
    BAD(p.heads = 0, DR_ERR_SHAPE, "heads: must be 1 to 65536, got 0");
    BAD(p.heads = 65537, DR_ERR_SHAPE, "got 65537");
    BAD(p.value_heads = -2, DR_ERR_SHAPE, "value_heads: must be 1 to 65536, got -2");
    BAD(p.value_heads = 3, DR_ERR_SHAPE, "value_heads: must be a multiple of heads (2), got 3");
    BAD(p.value_heads = 1, DR_ERR_SHAPE, "multiple of heads (2), got 1");
    BAD(p.key_dim = 0, DR_ERR_SHAPE, "key_dim: must be 1 to 256, got 0");
    BAD(p.key_dim = 257, DR_ERR_SHAPE, "got 257");
    BAD(p.value_dim = -1, DR_ERR_SHAPE, "value_dim: must be 1 to 256, got -1");
    BAD(p.value_dim = 257, DR_ERR_SHAPE, "got 257");
    BAD((p.batch = 1 << 30, p.tokens = 1ll << 40), DR_ERR_SHAPE,
        "batch x tokens x value_heads: 1073741824 x 1099511627776 x 4 is too large");
}

static void test_refused_numbers(void **state)
{
    (void)state;
    BAD((p.gate = DR_GATE_LOWER_BOUND, p.lower_bound = 0), DR_ERR_ARG,
        "lower_bound: must be finite and below 0, got 0");
    BAD((p.gate = DR_GATE_LOWER_BOUND, p.lower_bound = 5), DR_ERR_ARG, "got 5");
    BAD((p.gate = DR_GATE_LOWER_BOUND, p.lower_bound = -INFINITY), DR_ERR_ARG, "got -inf");
    BAD((p.gate = DR_GATE_LOWER_BOUND, p.lower_bound = NAN), DR_ERR_ARG,
        "lower_bound: must be finite");
    BAD(p.lower_bound = -5, DR_ERR_ARG,
        "lower_bound: must be 0 unless gate is DR_GATE_LOWER_BOUND, got -5");
    BAD(p.beta_scale = 2, DR_ERR_ARG,
        "beta_scale: must be 0 or 1 unless beta is DR_BETA_LOGIT, got 2");
    BAD((p.beta = DR_BETA_LOGIT, p.beta_scale = 1.5), DR_ERR_ARG,
        "beta_scale: must be 1 or 2, got 1.5");
    BAD((p.beta = DR_BETA_LOGIT, p.beta_scale = NAN), DR_ERR_ARG, "beta_scale: must be 1 or 2");
    BAD(p.l2norm_eps = 1e-3, DR_ERR_ARG, "l2norm_eps: must be 0 without l2norm, got 0.001");
    BAD(p.scale = 1e300, DR_ERR_ARG, "scale: must be finite in fp32, got 1e+300");
    BAD((p.l2norm = 1, p.l2norm_eps = -1e-6), DR_ERR_ARG,
        "l2norm_eps: must be 1.17549e-38 to 3.40282e+38, got -1e-06");
    BAD((p.l2norm = 1, p.l2norm_eps = INFINITY), DR_ERR_ARG, "l2norm_eps: must be 1");
    BAD((p.l2norm = 1, p.l2norm_eps = NAN), DR_ERR_ARG, "l2norm_eps: must be 1");
    BAD((p.l2norm = 1, p.l2norm_eps = 1e-300), DR_ERR_ARG, "l2norm_eps: must be 1");
    BAD(p.scale = INFINITY, DR_ERR_ARG, "scale: must be finite in fp32, got inf");
    BAD(p.scale = NAN, DR_ERR_ARG, "scale: must be finite");
    BAD(p.chunk = -1, DR_ERR_ARG, "chunk: must be 0 (the backend's choice) or more, got -1");
}

static void test_refused_offsets(void **state)
{
    (void)state;
    static const int64_t late[] = {1, 5, 10}, falling[] = {0, 6, 5}, long_[] = {0, 5, 11},
                         negative[] = {0, -1, 5}, huge[] = {0, INT64_MAX, INT64_MIN};
    BAD(p.sequences = 2, DR_ERR_ARG, "offsets: absent although sequences is 2");
    BAD(p.offsets = two_documents, DR_ERR_ARG, "sequences: must be 1 or more with offsets, got 0");
    BAD((p.offsets = two_documents, p.sequences = -3), DR_ERR_ARG, "got -3");
    BAD((p.offsets = two_documents, p.sequences = INT64_MAX), DR_ERR_ARG, "sequences: must be");
    BAD((p.offsets = two_documents, p.sequences = 2, p.batch = 2), DR_ERR_SHAPE,
        "batch: must be 1 when offsets are given, got 2");
    BAD((p.offsets = late, p.sequences = 2), DR_ERR_ARG, "offsets[0]: must be 0, got 1");
    BAD((p.offsets = falling, p.sequences = 2), DR_ERR_ARG,
        "offsets[2]: must not be below the one before (6), got 5");
    BAD((p.offsets = negative, p.sequences = 2), DR_ERR_ARG,
        "offsets[1]: must not be below the one before (0), got -1");
    BAD((p.offsets = long_, p.sequences = 2), DR_ERR_ARG,
        "offsets[2]: must be at most the number of tokens (10), got 11");
    BAD((p.offsets = huge, p.sequences = 1), DR_ERR_ARG, "offsets[1]: must be at most");
    BAD((p.offsets = huge, p.sequences = 2), DR_ERR_ARG, "offsets[2]: must not be below");
}

static void test_defaults(void **state)
{
    (void)state;
    dr_problem p = good(), out;
    p.value_heads = 0;
    MUST(dr_problem_complete(&p, &out));
    assert_int_equal(out.value_heads, 2);
    assert_true(out.scale == 0.25 && out.l2norm_eps == 0 && out.beta_scale == 1);
    assert_int_equal(out.chunk, 0); /* the backend's to fill in */
    p.scale = -3;
    p.l2norm = 1;
    p.l2norm_eps = 0.5;
    p.beta = DR_BETA_LOGIT;
    p.beta_scale = 2;
    p.chunk = 7;
    p.offsets = two_documents;
    p.sequences = 2;
    MUST(dr_problem_complete(&p, &out));
    assert_true(out.scale == -3 && out.l2norm_eps == 0.5 && out.beta_scale == 2 && out.chunk == 7);
    assert_ptr_equal(out.offsets, two_documents);
    assert_string_equal(dr_variant_find(DR_KDA)->name, "kda");
    assert_true(dr_variant_find(DR_KDA)->gate_per_channel &&
                !dr_variant_find(DR_GDN)->gate_per_channel);
    assert_null(dr_variant_find((dr_variant)9));
}

static void check_cut(dr_problem p)
{
    dr_problem complete;
    MUST(dr_problem_complete(&p, &complete));
    dr_plan plan = {0};
    MUST(dr_plan_cut(&plan, &complete));
    const char *rule = plan_disagrees(&plan, &complete);
    if (rule != NULL)
        fail_msg("wrong: %s", rule);
    dr_plan_clear(&plan);
}

/* Chunk counts 1, 1, 2, 1 by hand. */
static void test_chunk_table_by_hand(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 64, 65, 130, 194};
    dr_problem p = good(), complete;
    p.tokens = 200;
    p.chunk = 64;
    p.offsets = offsets;
    p.sequences = 4;
    MUST(dr_problem_complete(&p, &complete));
    dr_plan plan = {0};
    MUST(dr_plan_cut(&plan, &complete));
    static const int64_t counts[] = {1, 1, 2, 1}, first[] = {0, 1, 2, 4};
    assert_int_equal(plan.n_pieces, 4);
    for (int n = 0; n < 4; n++) {
        assert_int_equal(plan.pieces[n].chunks, counts[n]);
        assert_int_equal(plan.pieces[n].chunk0, first[n]);
        assert_int_equal(plan.pieces[n].begin, offsets[n]);
        assert_int_equal(plan.pieces[n].end, offsets[n + 1]);
    }
    assert_int_equal(plan.n_chunks, 5);
    assert_int_equal(plan.longest, 2);
    assert_int_equal(plan.tail, 194);
    assert_memory_equal(plan.problem.offsets, offsets, sizeof offsets);
    dr_plan_clear(&plan);
    assert_null(plan.pieces);
    assert_null(plan.problem.offsets);
}

static void test_cuts_against_counting(void **state)
{
    (void)state;
    rng r = {42};
    for (int i = 0; i < 3000; i++) {
        int64_t offsets[20], at = 0, N = 1 + rng_below(&r, 19);
        offsets[0] = 0;
        for (int64_t n = 1; n <= N; n++)
            offsets[n] = at += rng_below(&r, 3) ? rng_below(&r, 150) : 0;
        dr_problem p = good();
        p.tokens = at + (rng_below(&r, 2) ? rng_below(&r, 70) : 0);
        p.chunk = 1 + (int32_t)rng_below(&r, 130);
        if (i % 3 != 0) {
            p.offsets = offsets;
            p.sequences = N;
        } else {
            p.batch = 1 + rng_below(&r, 4);
        }
        check_cut(p);
    }
}

/* 2^53 tokens are planned without a single overflow; nothing is walked. */
static void test_large_numbers(void **state)
{
    (void)state;
    dr_problem p = good(), complete;
    static const int64_t offsets[] = {0, 1, 1ll << 48};
    p.heads = p.value_heads = 1;
    p.tokens = 1ll << 48;
    p.chunk = 64;
    p.offsets = offsets;
    p.sequences = 2;
    MUST(dr_problem_complete(&p, &complete));
    dr_plan plan = {0};
    MUST(dr_plan_cut(&plan, &complete));
    assert_int_equal(plan.n_chunks, 1 + (1ll << 42));
    assert_int_equal(plan.pieces[1].chunks, 1ll << 42);
    dr_plan_clear(&plan);
    p.chunk = INT32_MAX;
    MUST(dr_problem_complete(&p, &complete));
    plan = (dr_plan){0};
    MUST(dr_plan_cut(&plan, &complete));
    assert_int_equal(plan.pieces[1].chunks, 131073);
    dr_plan_clear(&plan);
}

/* A problem whose workspace no machine has is an error, not a small buffer. */
static void test_workspace_beyond_addresses(void **state)
{
    (void)state;
    for (int i = 0; dr_backend_name(i) != NULL; i++) {
        dr_context *ctx;
        MUST(dr_context_create(dr_backend_name(i), NULL, &ctx));
        dr_problem p = good();
        p.heads = p.value_heads = 1;
        p.key_dim = p.value_dim = 256;
        p.tokens = 1ll << 46;
        p.keep = DR_KEEP_STATES;
        dr_plan *plan;
        dr_status status = dr_plan_create(ctx, &p, &plan);
        if (status == DR_OK) { /* then its sizes are true, and cannot be had */
            dr_plan_info info = DR_PLAN_INFO_INIT;
            MUST(dr_plan_describe(plan, &info));
            assert_true(info.saved_bytes > 1ull << 50);
            dr_buffers b = DR_BUFFERS_INIT;
            REFUSED(dr_buffers_create(plan, &b), DR_ERR_MEMORY, "buffers: no memory for ");
            assert_null(b.saved);
            assert_null(b.scratch);
            dr_plan_destroy(plan);
        } else {
            assert_int_equal(status, DR_ERR_MEMORY);
            assert_non_null(strstr(dr_last_error(), "exceeds 2^62 bytes"));
            assert_null(plan);
        }
        dr_context_destroy(ctx);
    }
}

static void test_head_maps(void **state)
{
    (void)state;
    for (int32_t H = 1; H <= 6; H++)
        for (int32_t group = 1; group <= 5; group++)
            for (int map = 0; map < 2; map++) {
                dr_problem p = good();
                p.heads = H;
                p.value_heads = H * group;
                p.head_map = (dr_head_map)map;
                int seen[30] = {0};
                for (int32_t h = 0; h < H; h++)
                    for (int32_t i = 0; i < group; i++) {
                        int32_t j = dr_value_head(&p, h, i);
                        seen[j]++;
                        assert_int_equal(dr_key_head(&p, j), h);
                        assert_int_equal(h, map == DR_HEADS_TILED ? j % H : j / group);
                    }
                for (int32_t j = 0; j < H * group; j++)
                    assert_int_equal(seen[j], 1);
            }
}

static size_t carve(dr_arena *a, char **last)
{
    DR_TAKE(a, char, 1, 1);
    DR_TAKE(a, double, 3, 7);
    *last = DR_TAKE(a, char, 5, 13);
    return a->used;
}

static void test_arena(void **state)
{
    (void)state;
    dr_arena empty = {0};
    char *last;
    size_t bytes = carve(&empty, &last);
    assert_null(last);
    assert_false(empty.overflow);
    assert_int_equal(bytes % DR_ALIGN, 0);
    fence f = fence_make(bytes, DR_ALIGN, 0);
    dr_arena real = {.base = (char *)f.data, .size = bytes};
    assert_int_equal(carve(&real, &last), bytes);
    assert_false(real.overflow);
    assert_int_equal((uintptr_t)last % DR_ALIGN, 0);
    assert_true(last + 65 <= (char *)f.data + bytes);
    last[64] = 1;
    dr_arena_done(&real);
    dr_arena tight = {.base = (char *)f.data, .size = bytes - 1};
    carve(&tight, &last);
    assert_true(tight.overflow);
    assert_null(last);
    dr_arena_done(&tight);
    fence_free(&f);
    static const int64_t large[][2] = {
        {INT64_MAX, 2}, {INT64_MAX / 2, 1}, {1ll << 40, 1ll << 40}, {-1, 1}, {1, -1}};
    for (size_t i = 0; i < DR_COUNT(large); i++) {
        dr_arena a = {0};
        assert_null(DR_TAKE(&a, double, large[i][0], large[i][1]));
        assert_true(a.overflow);
    }
    dr_arena many = {0};
    for (int i = 0; i < 5; i++)
        DR_TAKE(&many, char, INT64_MAX / 4, 1);
    assert_true(many.overflow);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused_enumerations),
        cmocka_unit_test(test_refused_sizes),
        cmocka_unit_test(test_refused_numbers),
        cmocka_unit_test(test_refused_offsets),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_chunk_table_by_hand),
        cmocka_unit_test(test_cuts_against_counting),
        cmocka_unit_test(test_large_numbers),
        cmocka_unit_test(test_workspace_beyond_addresses),
        cmocka_unit_test(test_head_maps),
        cmocka_unit_test(test_arena),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
