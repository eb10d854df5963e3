/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_alloc.c - every allocation of the library fails in its turn, in everything that makes
 * an object: the call says so with a sentence, hands out nothing and gives back what it had
 * taken. Over several ranks one of them runs out of memory, and nobody waits for ever.
 */
#include "alloc_watch.h"
#include "trial.h"

#include <deltarule/comm.h>
#include <deltarule/layer.h>
#include <deltarule/weights.h>

#include <pthread.h>

static const char *const backends[] = {"cpu", "ref"};
static const int64_t offsets[] = {0, 3, 3, 40};

static dr_problem packed_problem(void)
{
    dr_problem p = problem_make(DR_KDA, 40, 2, 4, 24, 16);
    p.offsets = offsets;
    p.sequences = 3;
    return p;
}

/* ---- makers: what they need stands ready here ------------------------------------------------ */

static dr_context *context;
static dr_plan *plan;
static dr_layer *layer;
static dr_layer_plan *layer_plan;
static dr_comm *self;
static char path[] = "/tmp/dr_alloc_XXXXXX";

static dr_status make_cpu(void **out) { return dr_context_create("cpu", NULL, (dr_context **)out); }
static dr_status make_ref(void **out) { return dr_context_create("ref", NULL, (dr_context **)out); }
static void drop_context(void *x) { dr_context_destroy(x); }

static dr_status make_dense(void **out)
{
    dr_problem p = packed_problem();
    p.offsets = NULL;
    p.sequences = 0;
    p.batch = 3;
    return dr_plan_create(context, &p, (dr_plan **)out);
}

static dr_status make_packed(void **out)
{
    dr_problem p = packed_problem();
    return dr_plan_create(context, &p, (dr_plan **)out);
}

static void drop_plan(void *x) { dr_plan_destroy(x); }

static dr_buffers made_buffers;

static dr_status buffers_or_nothing(dr_status status, void **out)
{
    if (status != DR_OK)
        assert_true(made_buffers.saved == NULL && made_buffers.scratch == NULL);
    *out = status == DR_OK ? &made_buffers : NULL;
    return status;
}

static dr_status make_buffers(void **out)
{
    return buffers_or_nothing(dr_buffers_create(plan, &made_buffers), out);
}

static void drop_buffers(void *x) { dr_buffers_destroy(x); }

static dr_status make_layer(void **out)
{
    dr_layer_config c = DR_LAYER_CONFIG_INIT;
    c.kind = DR_LAYER_KDA;
    c.hidden = 8;
    c.heads = 2;
    c.key_dim = 4;
    c.gate = DR_GATE_SOFTPLUS;
    return dr_layer_create(context, &c, (dr_layer **)out);
}

static void drop_layer(void *x) { dr_layer_destroy(x); }

static dr_layer_layout layout_of(int64_t batch, int64_t tokens)
{
    dr_layer_layout l = DR_LAYER_LAYOUT_INIT;
    l.batch = batch;
    l.tokens = tokens;
    return l;
}

static dr_status make_layer_plan(void **out)
{
    dr_layer_layout l = layout_of(2, 20);
    return dr_layer_plan_create(layer, &l, (dr_layer_plan **)out);
}

static dr_status make_layer_packed(void **out)
{
    dr_layer_layout l = layout_of(1, 40);
    l.offsets = offsets;
    l.sequences = 3;
    return dr_layer_plan_create(layer, &l, (dr_layer_plan **)out);
}

static dr_status make_layer_masked(void **out)
{
    static const uint8_t mask[] = {0, 1, 1, 0, 1, 1, 1, 0};
    dr_layer_layout l = layout_of(2, 4);
    l.mask = mask;
    return dr_layer_plan_create(layer, &l, (dr_layer_plan **)out);
}

static void drop_layer_plan(void *x) { dr_layer_plan_destroy(x); }

static dr_status make_layer_buffers(void **out)
{
    return buffers_or_nothing(dr_layer_buffers_create(layer_plan, &made_buffers), out);
}

static dr_status write_weights(void **out)
{
    static float data[6] = {1, 2, 3, 4, 5, 6};
    const dr_weights_entry entries[] = {{"first", dr_tensor_make(data, DR_F32, 2, 2, 3, 0, 0)},
                                        {"second", dr_tensor_make(data, DR_F32, 1, 5, 0, 0, 0)}};
    const dr_weights_note notes[] = {{"key", "value"}};
    dr_status status = dr_weights_write(path, entries, 2, notes, 1);
    *out = status == DR_OK ? path : NULL;
    return status;
}

static void drop_nothing(void *x) { (void)x; }

static dr_status open_weights(void **out) { return dr_weights_open(path, (dr_weights **)out); }
static void drop_weights(void *x) { dr_weights_close(x); }

static dr_status make_self(void **out) { return dr_comm_self_create((dr_comm **)out); }
static void drop_comm(void *x) { dr_comm_close(x); }

enum { RANKS = 3 };

static dr_comm *ranks[RANKS];

static dr_status make_threads(void **out)
{
    dr_comm *made[RANKS] = {NULL};
    dr_status status = dr_comm_threads_create(RANKS, made);
    memcpy(ranks, made, sizeof ranks);
    *out = status == DR_OK ? made[0] : NULL;
    return status;
}

static void drop_threads(void *x)
{
    (void)x;
    for (int r = 0; r < RANKS; r++)
        dr_comm_close(ranks[r]);
}

static dr_status make_cp_plan(void **out)
{
    dr_problem p = packed_problem();
    const dr_fragment all = {0, 40, 0};
    dr_partition partition = DR_PARTITION_INIT;
    partition.ranks = 1;
    partition.count = 1;
    partition.fragments = &all;
    long fail_at = allocs.fail_at;
    allocs.fail_at = 0;
    MUST(dr_comm_self_create(&self)); /* a new one each time: a failure ends it */
    allocs.fail_at = fail_at;
    dr_status status = dr_cp_plan_create(context, self, &p, &partition, "p2p", (dr_cp_plan **)out);
    if (status != DR_OK)
        dr_comm_close(self);
    return status;
}

static void drop_cp_plan(void *x)
{
    dr_cp_plan_destroy(x);
    dr_comm_close(self);
}

static const struct maker {
    const char *name;
    dr_status (*make)(void **out);
    void (*drop)(void *x);
    int least; /* allocations it cannot do without */
} makers[] = {
    {"context cpu", make_cpu, drop_context, 1},
    {"context ref", make_ref, drop_context, 1},
    {"plan, dense", make_dense, drop_plan, 2},
    {"plan, packed", make_packed, drop_plan, 3},
    {"buffers", make_buffers, drop_buffers, 2},
    {"layer", make_layer, drop_layer, 1},
    {"layer plan", make_layer_plan, drop_layer_plan, 1},
    {"layer plan, packed", make_layer_packed, drop_layer_plan, 2},
    {"layer plan, masked", make_layer_masked, drop_layer_plan, 2},
    {"layer buffers", make_layer_buffers, drop_buffers, 2},
    {"weights, written", write_weights, drop_nothing, 1},
    {"weights, opened", open_weights, drop_weights, 1},
    {"communicator of one", make_self, drop_comm, 0},
    {"communicators", make_threads, drop_threads, 2},
    {"plan over ranks", make_cp_plan, drop_cp_plan, 2},
};

static void fail_each(const struct maker *m)
{
    for (long n = 1;; n++) {
        void *out = &out;
        long before = allocs.live;
        allocs.fail_at = n;
        dr_status status = m->make(&out);
        allocs.fail_at = 0;
        if (status == DR_OK) {
            assert_non_null(out);
            m->drop(out);
            assert_int_equal(allocs.live, before);
            if (n <= m->least)
                fail_msg("%s: succeeds without its allocation %ld", m->name, n);
            return;
        }
        if (status != DR_ERR_MEMORY || strstr(dr_last_error(), "no memory") == NULL)
            fail_msg("%s, allocation %ld: %s: %s", m->name, n, dr_status_text(status),
                     dr_last_error());
        if (out != NULL && out != (void *)&out)
            fail_msg("%s, allocation %ld: something was handed out", m->name, n);
        if (allocs.live != before)
            fail_msg("%s, allocation %ld: %ld blocks leaked", m->name, n, allocs.live - before);
        assert_true(n < 200);
    }
}

static void test_every_allocation_fails(void **state)
{
    (void)state;
    int fd = mkstemp(path);
    void *out;
    assert_true(fd >= 0);
    close(fd);
    MUST(write_weights(&out));
    for (size_t b = 0; b < DR_COUNT(backends); b++) {
        dr_problem p = packed_problem();
        MUST(dr_context_create(backends[b], NULL, &context));
        MUST(dr_plan_create(context, &p, &plan));
        MUST(make_layer((void **)&layer));
        MUST(make_layer_packed((void **)&layer_plan));
        for (size_t i = 0; i < DR_COUNT(makers); i++)
            fail_each(&makers[i]);
        dr_layer_plan_destroy(layer_plan);
        dr_layer_destroy(layer);
        dr_plan_destroy(plan);
        dr_context_destroy(context);
    }
    unlink(path);
    assert_int_equal(allocs.live, 0);
}

/* ---- running a layer ----------------------------------------------------------------------------
 */

enum { HIDDEN = 8, ROWS = 40, N = 3, HEADS = 2, DIM = 4, CHANNELS = 3 * HEADS * DIM, MOST = 1024 };

/* Forward, backward and step of a layer allocate nothing. */
static void test_running_layers_allocates_nothing(void **state)
{
    (void)state;
    static float x[ROWS * HIDDEN], y[ROWS * HIDDEN], dx[ROWS * HIDDEN], weights[MOST],
        grads[24][MOST];
    static float states[N * HEADS * DIM * DIM], windows[N * CHANNELS * 3];
    for (int i = 0; i < MOST; i++)
        weights[i] = x[i % (ROWS * HIDDEN)] = 0.1f;
    for (size_t b = 0; b < DR_COUNT(backends); b++) {
        dr_tensor params[24], d_params[24];
        MUST(dr_context_create(backends[b], NULL, &context));
        MUST(make_layer((void **)&layer));
        MUST(make_layer_packed((void **)&layer_plan));
        int32_t n = dr_layer_param_count(layer);
        assert_in_range(n, 1, 24);
        assert_int_equal(dr_layer_conv_channels(layer), CHANNELS);
        for (int32_t i = 0; i < n; i++) {
            dr_param_info info;
            MUST(dr_layer_param(layer, i, &info));
            params[i] = d_params[i] = dr_tensor_make(weights, DR_F32, info.rank, info.shape[0],
                                                     info.shape[1], info.shape[2], info.shape[3]);
            d_params[i].data = grads[i];
            assert_true(view_count(&params[i]) <= MOST);
        }
        dr_layer_io io = DR_LAYER_IO_INIT;
        io.params = params;
        io.grads = d_params;
        io.x = io.dy = dr_tensor_make(x, DR_F32, 3, 1, ROWS, HIDDEN, 0);
        io.y = dr_tensor_make(y, DR_F32, 3, 1, ROWS, HIDDEN, 0);
        io.dx = dr_tensor_make(dx, DR_F32, 3, 1, ROWS, HIDDEN, 0);
        dr_buffers buffers;
        MUST(dr_layer_buffers_create(layer_plan, &buffers));
        long before = allocs.calls;
        MUST(dr_layer_forward(layer_plan, &io, &buffers));
        MUST(dr_layer_backward(layer_plan, &io, &buffers));
        io.state_in = io.state_out = dr_tensor_make(states, DR_F32, 4, N, HEADS, DIM, DIM);
        io.conv_in = io.conv_out = dr_tensor_make(windows, DR_F32, 3, N, CHANNELS, 3, 0);
        MUST(dr_layer_step(layer_plan, &io, &buffers));
        assert_int_equal(allocs.calls, before);
        dr_buffers_destroy(&buffers);
        dr_layer_plan_destroy(layer_plan);
        dr_layer_destroy(layer);
        dr_context_destroy(context);
    }
}

/* ---- one rank of several -----------------------------------------------------------------------
 */

enum { H = 2, K = 4, V = 3, TOKENS = 30, LOCAL = TOKENS / RANKS };

typedef struct rank_work {
    pthread_t thread;
    dr_comm *comm;
    const char *protocol;
    bool plan_only;
    float q[LOCAL * H * K], k[LOCAL * H * K], v[LOCAL * H * V], g[LOCAL * H], beta[LOCAL * H];
    float o[LOCAL * H * V];
    dr_status status;
    char error[256];
} rank_work;

static dr_status run_rank(rank_work *w, const dr_context *ctx)
{
    dr_problem p = problem_make(DR_GDN, TOKENS, H, H, K, V);
    dr_fragment fragments[RANKS];
    dr_partition partition = DR_PARTITION_INIT;
    partition.ranks = partition.count = RANKS;
    partition.fragments = fragments;
    DR_TRY(dr_partition_contiguous(TOKENS, RANKS, fragments));
    dr_cp_plan *cp;
    dr_status status = dr_cp_plan_create(ctx, w->comm, &p, &partition, w->protocol, &cp);
    if (status != DR_OK || w->plan_only) {
        dr_cp_plan_destroy(cp);
        return status;
    }
    dr_io io = DR_IO_INIT;
    io.q = dr_tensor_make(w->q, DR_F32, 4, 1, LOCAL, H, K);
    io.k = dr_tensor_make(w->k, DR_F32, 4, 1, LOCAL, H, K);
    io.v = dr_tensor_make(w->v, DR_F32, 4, 1, LOCAL, H, V);
    io.g = dr_tensor_make(w->g, DR_F32, 3, 1, LOCAL, H, 0);
    io.beta = dr_tensor_make(w->beta, DR_F32, 3, 1, LOCAL, H, 0);
    io.o = dr_tensor_make(w->o, DR_F32, 4, 1, LOCAL, H, V);
    dr_buffers b = DR_BUFFERS_INIT;
    status = dr_cp_buffers_create(cp, &b);
    if (status == DR_OK)
        status = dr_cp_forward(cp, &io, &b);
    if (status == DR_OK)
        status = dr_cp_backward(cp, &io, &b);
    dr_buffers_destroy(&b);
    dr_cp_plan_destroy(cp);
    return status;
}

static void *rank_main(void *arg)
{
    rank_work *w = arg;
    w->status = run_rank(w, context);
    snprintf(w->error, sizeof w->error, "%s", w->status == DR_OK ? "" : dr_last_error());
    if (w->status != DR_OK) /* as a host program would: nobody should wait for this rank */
        dr_comm_abort(w->comm, w->error);
    return NULL;
}

/* The n-th allocation, on whichever rank it falls: that rank says so, the others do not hang,
 * and nothing leaks. False when all went well. */
static bool starve(const char *protocol, bool plan_only, long n)
{
    static rank_work work[RANKS];
    dr_comm *comms[RANKS];
    long before = allocs.live;
    MUST(dr_comm_threads_create(RANKS, comms));
    allocs.fail_at = n;
    for (int r = 0; r < RANKS; r++) {
        memset(&work[r], 0, sizeof work[r]);
        work[r].comm = comms[r];
        work[r].protocol = protocol;
        work[r].plan_only = plan_only;
        MUST(dr_comm_set_timeout(comms[r], 20));
        assert_int_equal(pthread_create(&work[r].thread, NULL, rank_main, &work[r]), 0);
    }
    int starved = 0, well = 0;
    for (int r = 0; r < RANKS; r++)
        pthread_join(work[r].thread, NULL);
    bool fell = allocs.fail_at <= 0;
    allocs.fail_at = 0;
    for (int r = 0; r < RANKS; r++) {
        starved += work[r].status == DR_ERR_MEMORY;
        well += work[r].status == DR_OK;
        dr_comm_close(comms[r]);
    }
    if (fell && (starved < 1 || well > RANKS - 1))
        fail_msg("%s, allocation %ld: %s | %s | %s", protocol, n, work[0].error, work[1].error,
                 work[2].error);
    if (!fell)
        assert_int_equal(well, RANKS);
    if (allocs.live != before)
        fail_msg("%s, allocation %ld: %ld blocks leaked", protocol, n, allocs.live - before);
    return fell;
}

static void test_one_rank_without_memory(void **state)
{
    (void)state;
    static const char *const protocols[] = {"p2p", "allgather", "grouped:2", "doubling"};
    MUST(dr_context_create("ref", NULL, &context));
    alarm(300); /* a hang ends the process */
    for (size_t i = 0; i < DR_COUNT(protocols); i++)
        for (int plan_only = 0; plan_only < 2; plan_only++)
            for (long n = 1; starve(protocols[i], plan_only, n); n += plan_only ? 1 : 3)
                assert_true(n < 2000);
    alarm(0);
    dr_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_allocation_fails),
        cmocka_unit_test(test_running_layers_allocates_nothing),
        cmocka_unit_test(test_one_rank_without_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
