/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_faults.c - what happens when things go wrong around a call: buffers are a byte short,
 * absent or shifted, an adjoint comes without its forward, stages come out of order. Each must
 * give its status and sentence and leave every output untouched. And while things go right,
 * nothing is allocated. Allocations that fail are in test_alloc.c, wrong tensors in
 * test_arguments.c.
 */
#include "alloc_watch.h"
#include "rig.h"

#include <deltarule/ops.h>

static const char *const backends[] = {"cpu", "ref"};
static const int64_t offsets[] = {0, 3, 3, 40}, other_offsets[] = {0, 3, 4, 40};

static spec plain(void)
{
    spec s = {.p = problem_make(DR_KDA, 40, 2, 4, 24, 16)};
    s.p.gate = DR_GATE_SOFTPLUS;
    s.p.beta = DR_BETA_LOGIT;
    s.p.l2norm = 1;
    s.p.offsets = offsets;
    s.p.sequences = 3;
    return s;
}

/* ---- running allocates nothing ------------------------------------------------------------- */

static dr_status staged(const rig *r, dr_direction dir, float *maps)
{
    DR_TRY(dr_prepare(r->plan, dir, &r->io, &r->b.b));
    DR_TRY(dr_summarize(r->plan, dir, &r->io, &r->b.b, maps));
    DR_TRY(dr_recur(r->plan, dir, &r->io, &r->b.b, NULL, NULL));
    return dr_output(r->plan, dir, &r->io, &r->b.b);
}

static void test_running_allocates_nothing(void **state)
{
    (void)state;
    static float maps[3 * 4 * 40 * 24], states[3 * 4 * 16 * 24];
    for (size_t b = 0; b < DR_COUNT(backends); b++) {
        spec s = plain();
        rig r = rig_make(backends[b], &s);
        long before = allocs.calls;
        MUST(dr_forward(r.plan, &r.io, &r.b.b));
        MUST(dr_backward(r.plan, &r.io, &r.b.b));
        MUST(rig_step(&r, &r.io, &r.b.b));
        MUST(staged(&r, DR_FORWARD, maps));
        MUST(staged(&r, DR_ADJOINT, maps));
        MUST(dr_map_apply(r.ctx, 12, 24, 16, NULL, maps, states));
        dr_plan_info info = DR_PLAN_INFO_INIT;
        MUST(dr_plan_describe(r.plan, &info));
        assert_int_equal(dr_supports(r.ctx, &s.p), DR_OK);
        assert_int_equal(dr_forward(r.plan, NULL, &r.b.b), DR_ERR_ARG); /* nor does failing */
        assert_int_equal(allocs.calls, before);
        rig_free(&r);
    }
}

/* ---- buffers -------------------------------------------------------------------------------- */

static void expect_refused(rig *r, const struct rig_entry *e, const dr_io *io, const dr_buffers *b,
                           dr_status status, const char *text)
{
    dr_status got = e->call(r, io, b);
    if (got != status || strstr(dr_last_error(), text) == NULL)
        fail_msg("%s: expected %s, \"%s\"; got %s, \"%s\"", e->name, dr_status_text(status), text,
                 dr_status_text(got), dr_last_error());
    rig_untouched(r);
}

static size_t scratch_of(const rig *r, const struct rig_entry *e)
{
    return e->staged    ? r->info.staged_scratch
           : e->dir > 0 ? r->info.forward_scratch
                        : r->info.backward_scratch;
}

static void test_spoilt_buffers(void **state)
{
    (void)state;
    for (size_t b = 0; b < DR_COUNT(backends); b++) {
        spec s = plain();
        rig r = rig_make(backends[b], &s);
        for (size_t i = 0; i < DR_COUNT(rig_entries); i++) {
            const struct rig_entry *e = &rig_entries[i];
            char text[100];
            dr_buffers x = r.b.b;
            x.scratch_bytes = scratch_of(&r, e) - 1;
            snprintf(text, sizeof text, "buffers.scratch: needs %zu bytes, got %zu",
                     scratch_of(&r, e), x.scratch_bytes);
            expect_refused(&r, e, &r.io, &x, DR_ERR_BUFFER, text);
            x = r.b.b;
            x.scratch = NULL;
            expect_refused(&r, e, &r.io, &x, DR_ERR_BUFFER, "buffers.scratch: needs ");
            x = r.b.b;
            x.scratch = (char *)x.scratch + 4;
            expect_refused(&r, e, &r.io, &x, DR_ERR_BUFFER, "buffers: must be aligned to 64 bytes");
            x = r.b.b;
            x.saved = (char *)x.scratch + 64; /* the end of one is the start of the other */
            x.saved_bytes = SIZE_MAX;
            if (scratch_of(&r, e) > 64)
                expect_refused(&r, e, &r.io, &x, DR_ERR_BUFFER, "must not overlap");
            x = r.b.b;
            x.size--;
            expect_refused(&r, e, &r.io, &x, DR_ERR_ARG, "buffers.size: must be ");
            expect_refused(&r, e, &r.io, NULL, DR_ERR_ARG, "buffers: must not be NULL");
            if (e->call == rig_step) /* saves nothing */
                continue;
            x = r.b.b;
            x.saved_bytes = r.info.saved_bytes - 1;
            snprintf(text, sizeof text, "buffers.saved: needs %zu bytes, got %zu",
                     r.info.saved_bytes, x.saved_bytes);
            expect_refused(&r, e, &r.io, &x, DR_ERR_BUFFER, text);
            x = r.b.b;
            x.saved = (char *)x.saved + 32;
            expect_refused(&r, e, &r.io, &x, DR_ERR_BUFFER, "buffers: must be aligned");
            x = r.b.b;
            x.saved = NULL;
            x.saved_bytes = 0;
            if (e->saved)
                expect_refused(&r, e, &r.io, &x, DR_ERR_BUFFER, "buffers.saved: needs ");
            else
                MUST(e->call(&r, &r.io, &x));
            rig_forget_outputs(&r);
        }
        rig_free(&r);
    }
}

/* Without `saved` the outputs are the same. */
static void test_forward_without_saved(void **state)
{
    (void)state;
    for (size_t b = 0; b < DR_COUNT(backends); b++)
        for (int keep = DR_KEEP_FACTORS; keep <= DR_KEEP_STATES; keep++) {
            spec s = plain();
            s.p.keep = (dr_keep)keep;
            rig r = rig_make(backends[b], &s);
            MUST(dr_forward(r.plan, &r.io, &r.b.b));
            double *with = view_read(&r.io.o);
            rig_forget_outputs(&r);
            dr_buffers x = r.b.b;
            x.saved = NULL;
            MUST(dr_forward(r.plan, &r.io, &x));
            double *without = view_read(&r.io.o);
            assert_memory_equal(with, without, sizeof *with * (size_t)view_count(&r.io.o));
            free(with);
            free(without);
            rig_free(&r);
        }
}

/* Sizes suffice exactly: the calls above and everywhere ran in fenced buffers; those of
 * dr_buffers_create are such buffers, cleared by destroy. */
static void test_buffers_create(void **state)
{
    (void)state;
    spec s = plain();
    rig r = rig_make("cpu", &s);
    dr_buffers x;
    MUST(dr_buffers_create(r.plan, &x));
    assert_int_equal(x.size, sizeof x);
    assert_int_equal(x.saved_bytes, r.info.saved_bytes);
    assert_true(x.scratch_bytes >= r.info.staged_scratch &&
                x.scratch_bytes >= r.info.backward_scratch);
    MUST(dr_forward(r.plan, &r.io, &x));
    MUST(dr_backward(r.plan, &r.io, &x));
    dr_buffers_destroy(&x);
    assert_true(x.saved == NULL && x.scratch == NULL && x.saved_bytes == 0 && x.scratch_bytes == 0);
    dr_buffers_destroy(&x);
    dr_buffers_destroy(NULL);
    REFUSED(dr_buffers_create(NULL, &x), DR_ERR_ARG, "plan: must not be NULL");
    REFUSED(dr_buffers_create(r.plan, NULL), DR_ERR_ARG, "out: must not be NULL");
    rig_free(&r);
}

/* ---- the order of calls ---------------------------------------------------------------------- */

static void test_adjoint_without_its_forward(void **state)
{
    (void)state;
    for (size_t b = 0; b < DR_COUNT(backends); b++) {
        spec s = plain();
        rig r = rig_make(backends[b], &s);
        const char *text = "buffers.saved: must hold what a forward of this problem left";
        for (size_t i = 0; i < DR_COUNT(rig_entries); i++) {
            const struct rig_entry *e = &rig_entries[i];
            if (e->dir > 0)
                continue;
            MUST(e->call(&r, &r.io, &r.b.b)); /* as things are it may run */
            rig_forget_outputs(&r);
            memset(r.b.saved.data, 0, 64);
            expect_refused(&r, e, &r.io, &r.b.b, DR_ERR_BUFFER, text);
            memset(r.b.saved.data, UNWRITTEN, r.b.saved.bytes);
            expect_refused(&r, e, &r.io, &r.b.b, DR_ERR_BUFFER, text);
            MUST(dr_forward(r.plan, &r.io, &r.b.b));
            rig_forget_outputs(&r);
            for (int field = 0; field < 6; field++) { /* the forward of another problem */
                spec other = plain();
                other.p.scale = field == 0 ? 0.5 : 0;
                other.p.offsets = field == 1 ? other_offsets : offsets;
                other.p.keep = field == 2 ? DR_KEEP_INPUTS : DR_KEEP_FACTORS;
                other.p.l2norm = field != 3;
                other.p.beta_scale = field == 4 ? 2 : 1;
                other.p.head_map = field == 5 ? DR_HEADS_TILED : DR_HEADS_INTERLEAVED;
                dr_plan *kept = r.plan;
                MUST(dr_plan_create(r.ctx, &other.p, &r.plan));
                dr_plan_info info = DR_PLAN_INFO_INIT;
                MUST(dr_plan_describe(r.plan, &info));
                if (info.saved_bytes <= r.b.b.saved_bytes &&
                    info.staged_scratch <= r.b.b.scratch_bytes &&
                    info.backward_scratch <= r.b.b.scratch_bytes)
                    expect_refused(&r, e, &r.io, &r.b.b, DR_ERR_BUFFER, text);
                dr_plan_destroy(r.plan);
                r.plan = kept;
            }
        }
        rig_free(&r);
    }
}

/* A new trip makes what an older forward saved unusable until its states are there. */
static void test_prepare_takes_saved_back(void **state)
{
    (void)state;
    spec s = plain();
    rig r = rig_make("cpu", &s);
    MUST(dr_prepare(r.plan, DR_FORWARD, &r.io, &r.b.b));
    REFUSED(dr_backward(r.plan, &r.io, &r.b.b), DR_ERR_BUFFER, "buffers.saved: must hold");
    MUST(dr_recur(r.plan, DR_FORWARD, &r.io, &r.b.b, NULL, NULL));
    MUST(dr_backward(r.plan, &r.io, &r.b.b));
    rig_free(&r);
}

static void test_stages_out_of_order(void **state)
{
    (void)state;
    static float maps[3 * 4 * 40 * 24];
    for (size_t b = 0; b < DR_COUNT(backends); b++)
        for (int dir = 1; dir >= -1; dir -= 2) {
            spec s = plain();
            rig r = rig_make(backends[b], &s);
            dr_direction d = (dr_direction)dir;
            REFUSED(dr_summarize(r.plan, d, &r.io, &r.b.b, maps), DR_ERR_ARG,
                    "dr_summarize: needs dr_prepare on the same buffers and direction first");
            REFUSED(dr_recur(r.plan, d, &r.io, &r.b.b, NULL, NULL), DR_ERR_ARG,
                    "dr_recur: needs dr_prepare");
            REFUSED(dr_output(r.plan, d, &r.io, &r.b.b), DR_ERR_ARG, "dr_output: needs dr_recur");
            rig_untouched(&r);
            MUST(dr_prepare(r.plan, d, &r.io, &r.b.b));
            REFUSED(dr_output(r.plan, d, &r.io, &r.b.b), DR_ERR_ARG, "dr_output: needs dr_recur");
            if (dir < 0) /* the other direction of the same buffers */
                REFUSED(dr_recur(r.plan, DR_FORWARD, &r.io, &r.b.b, NULL, NULL), DR_ERR_ARG,
                        "dr_recur: needs dr_prepare");
            rig_untouched(&r);
            MUST(dr_recur(r.plan, d, &r.io, &r.b.b, NULL, NULL));
            MUST(dr_output(r.plan, d, &r.io, &r.b.b));
            rig_forget_outputs(&r);
            REFUSED(dr_output(r.plan, d, &r.io, &r.b.b), DR_ERR_ARG, "dr_output: needs dr_recur");
            REFUSED(dr_recur(r.plan, d, &r.io, &r.b.b, NULL, NULL), DR_ERR_ARG,
                    "dr_recur: needs dr_prepare");
            REFUSED(dr_summarize(r.plan, d, &r.io, &r.b.b, NULL), DR_ERR_ARG,
                    "maps: must not be NULL");
            REFUSED(dr_prepare(r.plan, (dr_direction)2, &r.io, &r.b.b), DR_ERR_ARG,
                    "dir: must be DR_FORWARD (1) or DR_ADJOINT (-1), got 2");
            REFUSED(dr_prepare(NULL, d, &r.io, &r.b.b), DR_ERR_ARG, "plan: must not be NULL");
            rig_untouched(&r);
            rig_free(&r);
        }
}

/* A refused forward leaves an earlier saved usable. */
static void test_refused_forward_keeps_saved(void **state)
{
    (void)state;
    spec s = plain();
    rig r = rig_make("cpu", &s);
    MUST(dr_backward(r.plan, &r.io, &r.b.b));
    double *want = view_read(&r.io.dq);
    dr_io bad = r.io;
    bad.v.shape[1]--;
    REFUSED(dr_forward(r.plan, &bad, &r.b.b), DR_ERR_SHAPE, "v: expected");
    MUST(dr_backward(r.plan, &r.io, &r.b.b));
    double *got = view_read(&r.io.dq);
    assert_memory_equal(got, want, sizeof *want * (size_t)view_count(&r.io.dq));
    free(want);
    free(got);
    rig_free(&r);
}

/* ---- maps, log ----------------------------------------------------------------------------- */

static void test_spoilt_maps(void **state)
{
    (void)state;
    enum { K = 4, V = 3, MAP = (V + K) * K, STATE = V * K };
    float x[4 * MAP], out[2 * MAP];
    memset(x, 0, sizeof x);
    memset(out, UNWRITTEN, sizeof out);
    for (size_t b = 0; b < DR_COUNT(backends); b++) {
        dr_context *ctx;
        MUST(dr_context_create(backends[b], NULL, &ctx));
        REFUSED(dr_map_apply(NULL, 1, K, V, x, x, out), DR_ERR_ARG, "ctx: must not be NULL");
        REFUSED(dr_map_apply(ctx, -1, K, V, x, x, out), DR_ERR_ARG, "n: must be 0 or more");
        REFUSED(dr_map_apply(ctx, INT64_MAX, K, V, x, x, out), DR_ERR_ARG, "n: must be 0 or more");
        REFUSED(dr_map_apply(ctx, 1, 0, V, x, x, out), DR_ERR_SHAPE,
                "K, V: must be 1 to 256, got 0, 3");
        REFUSED(dr_map_apply(ctx, 1, K, 257, x, x, out), DR_ERR_SHAPE, "got 4, 257");
        REFUSED(dr_map_apply(ctx, 1, K, V, x, NULL, out), DR_ERR_ARG, "maps: must not be NULL");
        REFUSED(dr_map_apply(ctx, 1, K, V, x, x, NULL), DR_ERR_ARG, "out: must not be NULL");
        REFUSED(dr_map_apply(ctx, 2, K, V, x, x + 2 * STATE, x + STATE), DR_ERR_ARG,
                "out: must not overlap");
        REFUSED(dr_map_apply(ctx, 1, K, V, NULL, x, x + MAP - 1), DR_ERR_ARG,
                "out: must not overlap");
        REFUSED(dr_map_compose(ctx, 1, K, V, NULL, x, out), DR_ERR_ARG,
                "first, second, out: must not be");
        REFUSED(dr_map_compose(ctx, 1, K, V, x, NULL, out), DR_ERR_ARG,
                "first, second, out: must not be");
        REFUSED(dr_map_compose(ctx, 1, K, V, x, x + MAP, x), DR_ERR_ARG,
                "out: must not overlap first");
        REFUSED(dr_map_compose(ctx, 1, K, 0, x, x, out), DR_ERR_SHAPE, "got 4, 0");
        MUST(dr_map_apply(ctx, 0, K, V, NULL, NULL, NULL));
        MUST(dr_map_compose(ctx, 0, K, V, NULL, NULL, NULL));
        dr_context_destroy(ctx);
    }
    for (size_t i = 0; i < sizeof out; i++)
        assert_int_equal(((unsigned char *)out)[i], UNWRITTEN);
}

typedef struct heard {
    int times;
    dr_status status;
    char sentence[512];
} heard;

static void hear(void *user, dr_status status, const char *sentence)
{
    heard *h = user;
    h->times++;
    h->status = status;
    snprintf(h->sentence, sizeof h->sentence, "%s", sentence);
}

static void test_log_hears_each_failure_once(void **state)
{
    (void)state;
    heard h = {0};
    spec s = plain();
    rig r = rig_make("cpu", &s);
    dr_set_log(hear, &h);
    dr_io bad = r.io;
    bad.q.rank = 0;
    assert_int_equal(dr_forward(r.plan, &bad, &r.b.b), DR_ERR_SHAPE);
    assert_int_equal(h.times, 1);
    assert_int_equal(h.status, DR_ERR_SHAPE);
    assert_string_equal(h.sentence, dr_last_error());
    assert_string_equal(h.sentence, "q: rank must be 1 to 4, got 0");
    MUST(dr_forward(r.plan, &r.io, &r.b.b));
    assert_int_equal(h.times, 1);
    assert_string_equal(h.sentence, dr_last_error()); /* success does not clear it */
    dr_set_log(NULL, NULL);
    assert_int_equal(dr_forward(r.plan, &bad, &r.b.b), DR_ERR_SHAPE);
    assert_int_equal(h.times, 1);
    rig_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_running_allocates_nothing),
        cmocka_unit_test(test_spoilt_buffers),
        cmocka_unit_test(test_forward_without_saved),
        cmocka_unit_test(test_buffers_create),
        cmocka_unit_test(test_adjoint_without_its_forward),
        cmocka_unit_test(test_prepare_takes_saved_back),
        cmocka_unit_test(test_stages_out_of_order),
        cmocka_unit_test(test_refused_forward_keeps_saved),
        cmocka_unit_test(test_spoilt_maps),
        cmocka_unit_test(test_log_hears_each_failure_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
