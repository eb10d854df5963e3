/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_memory.c - a trip of the cpu backend occupies what its plan says and nothing more: the pages
 * of its working memory are counted, and so is what the process grew by. (That nothing is written
 * beyond the planned sizes, and nothing allocated in a call, is shown where buffers end at an
 * unreadable page, and in test_alloc.c.)
 */
#include "test.h"

enum { T = 4096, H = 4, D = 128, TENSORS = 12 };

static long page_size(void) { return sysconf(_SC_PAGESIZE); }

static size_t resident_of(const void *map, size_t bytes)
{
    const size_t pages = (bytes + (size_t)page_size() - 1) / (size_t)page_size();
    unsigned char *in = malloc(pages);
    size_t count = 0;
    assert_int_equal(mincore((void *)(uintptr_t)map, bytes, in), 0);
    for (size_t i = 0; i < pages; i++)
        count += in[i] & 1;
    free(in);
    return count * (size_t)page_size();
}

static size_t resident_of_process(void)
{
    long size, resident;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%ld %ld", &size, &resident), 2);
    fclose(f);
    return (size_t)resident * (size_t)page_size();
}

static void *map_pages(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(p != MAP_FAILED);
    return p;
}

typedef struct call {
    dr_context *ctx;
    dr_plan *plan;
    dr_plan_info info;
    dr_io io;
    float *data[TENSORS];
    int n;
} call;

static dr_tensor filled(call *c, int64_t heads, int64_t width, double low, double high)
{
    rng random = {(uint64_t)c->n + 1};
    const int64_t count = T * heads * width;
    float *p = c->data[c->n++] = malloc((size_t)count * sizeof *p);
    for (int64_t i = 0; i < count; i++)
        p[i] = (float)rng_uniform(&random, low, high);
    return dr_tensor_make(p, DR_F32, width > 1 ? 4 : 3, 1, T, heads, width);
}

static call call_make(dr_variant variant, dr_keep keep, int32_t threads)
{
    call c = {.info = DR_PLAN_INFO_INIT, .io = DR_IO_INIT};
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    MUST(dr_context_create("cpu", &options, &c.ctx));
    dr_problem p = DR_PROBLEM_INIT;
    p.variant = variant;
    p.tokens = T;
    p.heads = p.value_heads = H;
    p.key_dim = p.value_dim = D;
    p.gate = DR_GATE_LOG;
    p.beta = DR_BETA_VALUE;
    p.l2norm = 1;
    p.keep = keep;
    MUST(dr_plan_create(c.ctx, &p, &c.plan));
    MUST(dr_plan_describe(c.plan, &c.info));
    const int64_t gates = variant == DR_KDA ? D : 1;
    dr_io *io = &c.io;
    io->q = filled(&c, H, D, -1, 1);
    io->k = filled(&c, H, D, -1, 1);
    io->v = filled(&c, H, D, -1, 1);
    io->g = filled(&c, H, gates, -0.1, 0);
    io->beta = filled(&c, H, 1, 0, 1);
    io->o = filled(&c, H, D, 0, 0);
    io->d_o = filled(&c, H, D, -1, 1);
    io->dq = filled(&c, H, D, 0, 0);
    io->dk = filled(&c, H, D, 0, 0);
    io->dv = filled(&c, H, D, 0, 0);
    io->dg = filled(&c, H, gates, 0, 0);
    io->dbeta = filled(&c, H, 1, 0, 0);
    return c;
}

static void call_free(call *c)
{
    while (c->n > 0)
        free(c->data[--c->n]);
    dr_plan_destroy(c->plan);
    dr_context_destroy(c->ctx);
}

/* Some pages of a lane's room for shapes other than this one stay untouched. */
static void expect_used(const char *what, size_t used, size_t planned)
{
    const size_t page = (size_t)page_size();
    if (used > planned + page || (double)used < 0.95 * (double)planned - 64 * (double)page)
        fail_msg("%s: %zu bytes planned, %zu used", what, planned, used);
}

static void test_used_is_planned(void **state)
{
    (void)state;
    static const dr_keep keeps[] = {DR_KEEP_INPUTS, DR_KEEP_FACTORS, DR_KEEP_STATES};
    for (int variant = 0; variant < 2; variant++)
        for (size_t k = 0; k < DR_COUNT(keeps); k++)
            for (int32_t threads = 1; threads <= 2; threads++) {
                call c = call_make(variant ? DR_KDA : DR_GDN, keeps[k], threads);
                const size_t scratch = (size_t)dr_max((int64_t)c.info.forward_scratch,
                                                      (int64_t)c.info.backward_scratch);
                dr_buffers b = DR_BUFFERS_INIT;
                b.saved = map_pages(b.saved_bytes = c.info.saved_bytes);
                b.scratch = map_pages(b.scratch_bytes = scratch);
                const size_t before = resident_of_process();
                MUST(dr_forward(c.plan, &c.io, &b));
                expect_used("saved", resident_of(b.saved, b.saved_bytes), b.saved_bytes);
                MUST(dr_backward(c.plan, &c.io, &b));
                expect_used("scratch", resident_of(b.scratch, scratch), scratch);
#ifndef __SANITIZE_ADDRESS__ /* whose shadow memory grows too */
                const size_t grown = resident_of_process() - before;
                if (grown > b.saved_bytes + scratch + ((size_t)2 << 20))
                    fail_msg("the process grew by %zu bytes, planned were %zu", grown,
                             b.saved_bytes + scratch);
#else
                (void)before;
#endif
                munmap(b.saved, b.saved_bytes);
                munmap(b.scratch, scratch);
                call_free(&c);
            }
}

/* Beside what a chunk of a head keeps as factors, one state of it, and what a thread works in. */
static void test_at_most_a_state_per_chunk(void **state)
{
    (void)state;
    for (int variant = 0; variant < 2; variant++)
        for (int32_t threads = 1; threads <= 2; threads++) {
            call inputs = call_make(variant ? DR_KDA : DR_GDN, DR_KEEP_INPUTS, threads);
            call factors = call_make(variant ? DR_KDA : DR_GDN, DR_KEEP_FACTORS, threads);
            const size_t chunk_heads = (size_t)(inputs.info.chunks * H);
            const size_t a_state = D * D * sizeof(float);
            const size_t kept = (size_t)inputs.info.chunk * D * sizeof(float);
            const size_t entries = H * a_state, lanes = (size_t)threads * (8 * a_state + (1 << 20));
            const size_t most = chunk_heads * (a_state + kept) + entries + lanes;
            assert_in_range(inputs.info.saved_bytes + inputs.info.backward_scratch, 1, most);
            assert_in_range(factors.info.saved_bytes + factors.info.backward_scratch, 1, most);
            assert_in_range(inputs.info.forward_scratch, 1, lanes);
            assert_in_range(inputs.info.saved_bytes, 1, entries + 4096);
            call_free(&inputs);
            call_free(&factors);
        }
}

/* What dr_buffers_create provides for the staged calls is not occupied until they come. */
static void test_unused_memory_is_not_occupied(void **state)
{
    (void)state;
    call c = call_make(DR_GDN, DR_KEEP_FACTORS, 1);
    dr_buffers b = DR_BUFFERS_INIT;
    MUST(dr_buffers_create(c.plan, &b));
    assert_true(c.info.staged_scratch > c.info.forward_scratch + ((size_t)32 << 20));
    const char *at = b.scratch;
    const size_t page = (size_t)page_size(), skip = page - (uintptr_t)at % page;
    MUST(dr_forward(c.plan, &c.io, &b));
    const size_t used = resident_of(at + skip, (b.scratch_bytes - skip) / page * page);
    if (used > c.info.forward_scratch + 16 * page)
        fail_msg("%zu bytes are occupied, forward_scratch is %zu", used, c.info.forward_scratch);
    dr_buffers_destroy(&b);
    call_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_used_is_planned),
        cmocka_unit_test(test_at_most_a_state_per_chunk),
        cmocka_unit_test(test_unused_memory_is_not_occupied),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
