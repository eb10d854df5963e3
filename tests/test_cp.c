/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cp.c - one stream over many ranks equals one rank: outputs, final states and every gradient, for
 * worlds x partitions x packed layouts x protocols, on the threads communicator. Also what
 * travels (recorder), agreement and refusals, and peers that fail.
 */
#include <stdint.h>

static uint64_t seed = 12345; /* ranks.h draws from it */
#include "ranks.h"

#include <deltarule/cp.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 2, HV = 4, K = 6, V = 5, MAX_T = 96, MAX_N = 24, MAX_RANKS = 8, MAX_FRAGMENTS = 24,
       MAX_P = MAX_N + MAX_FRAGMENTS };

/* Everything of a stream, token-major; gradients and outputs as well. */
typedef struct stream {
    float q[MAX_T * H * K], k[MAX_T * H * K], v[MAX_T * HV * V], g[MAX_T * HV * K], beta[MAX_T * HV];
    float d_o[MAX_T * HV * V], o[MAX_T * HV * V];
    float dq[MAX_T * H * K], dk[MAX_T * H * K], dv[MAX_T * HV * V], dg[MAX_T * HV * K], dbeta[MAX_T * HV];
    float h0[MAX_P * HV * K * V], ht[MAX_P * HV * K * V], dht[MAX_P * HV * K * V], dh0[MAX_P * HV * K * V];
} stream;

typedef struct job {
    dr_variant variant;
    const char *backend, *protocol;
    int64_t T, N;
    int64_t offsets[MAX_N + 1];
    int32_t ranks;
    int64_t count;
    dr_fragment fragments[MAX_FRAGMENTS];
} job;

static int gate_width(const job *j) { return j->variant == DR_KDA ? K : 1; }

static void fill(stream *s, const job *j, double decay)
{
    float *all[] = {s->q, s->k, s->v, s->d_o, s->h0, s->dht};
    const size_t n[] = {MAX_T * H * K, MAX_T * H * K, MAX_T * HV * V, MAX_T * HV * V, MAX_N * HV * K * V,
                        MAX_N * HV * K * V};
    for (int t = 0; t < 6; t++)
        for (size_t i = 0; i < n[t]; i++)
            all[t][i] = (float)(2 * uniform() - 1) * (t < 2 ? 0.6f : 1.0f);
    for (int i = 0; i < MAX_T * HV * gate_width(j); i++)
        s->g[i] = (float)(-decay * uniform());
    for (int i = 0; i < MAX_T * HV; i++)
        s->beta[i] = (float)uniform();
}

static dr_problem problem_of(const job *j)
{
    dr_problem p = DR_PROBLEM_INIT;
    p.variant = j->variant;
    p.tokens = j->T;
    p.heads = H;
    p.value_heads = HV;
    p.key_dim = K;
    p.value_dim = V;
    p.offsets = j->offsets;
    p.sequences = j->N;
    p.gate = DR_GATE_LOG;
    p.beta = DR_BETA_VALUE;
    return p;
}

static dr_io io_of(stream *s, const job *j, int64_t T, int64_t N)
{
    dr_io io = DR_IO_INIT;
    int rank = j->variant == DR_KDA ? 4 : 3, w = gate_width(j);
    io.q = dr_tensor_make(s->q, DR_F32, 4, 1, T, H, K);
    io.k = dr_tensor_make(s->k, DR_F32, 4, 1, T, H, K);
    io.v = dr_tensor_make(s->v, DR_F32, 4, 1, T, HV, V);
    io.g = dr_tensor_make(s->g, DR_F32, rank, 1, T, HV, w);
    io.beta = dr_tensor_make(s->beta, DR_F32, 3, 1, T, HV, 0);
    io.o = dr_tensor_make(s->o, DR_F32, 4, 1, T, HV, V);
    io.d_o = dr_tensor_make(s->d_o, DR_F32, 4, 1, T, HV, V);
    io.dq = dr_tensor_make(s->dq, DR_F32, 4, 1, T, H, K);
    io.dk = dr_tensor_make(s->dk, DR_F32, 4, 1, T, H, K);
    io.dv = dr_tensor_make(s->dv, DR_F32, 4, 1, T, HV, V);
    io.dg = dr_tensor_make(s->dg, DR_F32, rank, 1, T, HV, w);
    io.dbeta = dr_tensor_make(s->dbeta, DR_F32, 3, 1, T, HV, 0);
    io.initial_state = dr_tensor_make(s->h0, DR_F32, 4, N, HV, K, V);
    io.final_state = dr_tensor_make(s->ht, DR_F32, 4, N, HV, K, V);
    io.d_final_state = dr_tensor_make(s->dht, DR_F32, 4, N, HV, K, V);
    io.d_initial_state = dr_tensor_make(s->dh0, DR_F32, 4, N, HV, K, V);
    return io;
}

static void one_rank_on(const char *backend, stream *s, const job *j)
{
    dr_context *ctx;
    dr_plan *plan;
    dr_buffers b;
    dr_problem p = problem_of(j);
    must(dr_context_create(backend, NULL, &ctx));
    must(dr_plan_create(ctx, &p, &plan));
    must(dr_buffers_create(plan, &b));
    dr_io io = io_of(s, j, j->T, j->N);
    must(dr_forward(plan, &io, &b));
    must(dr_backward(plan, &io, &b));
    dr_buffers_destroy(&b);
    dr_plan_destroy(plan);
    dr_context_destroy(ctx);
}

static void one_rank(stream *s, const job *j) { one_rank_on("ref", s, j); }

/* ---- many ranks ------------------------------------------------------------------------ */

typedef struct rank_work {
    const job *job;
    const stream *whole;
    stream *out;
    dr_comm *comm;
    int fail_at;               /* 1: gives up instead of calling forward; 2: instead of backward */
    dr_status status;
    char error[256];
    dr_cp_info info;
    int64_t pieces;
    dr_cp_piece piece[MAX_N + MAX_FRAGMENTS];
} rank_work;

/* Copies rows [from, from + n) of the stream to row `at` of the span, or back. */
static void move(float *to, const float *from, int64_t at, int64_t start, int64_t n, int64_t width)
{
    memcpy(to + at * width, from + start * width, (size_t)(n * width) * sizeof *to);
}

static dr_status compute(rank_work *w)
{
    const job *j = w->job;
    dr_context_options one = DR_CONTEXT_OPTIONS_INIT;
    one.threads = 1;
    dr_context *ctx = NULL;
    dr_cp_plan *plan = NULL;
    dr_buffers b = DR_BUFFERS_INIT;
    dr_problem p = problem_of(j);
    dr_partition partition = DR_PARTITION_INIT;
    partition.ranks = j->ranks;
    partition.count = j->count;
    partition.fragments = j->fragments;
    stream *s = calloc(1, sizeof *s);
    dr_status status = dr_context_create(j->backend, &one, &ctx);
    if (status == DR_OK)
        status = dr_cp_plan_create(ctx, w->comm, &p, &partition, j->protocol, &plan);
    if (status == DR_OK)
        status = dr_cp_buffers_create(plan, &b);
    if (status == DR_OK) {
        w->info = (dr_cp_info)DR_CP_INFO_INIT;
        dr_cp_plan_describe(plan, &w->info);
        w->pieces = w->info.pieces;
        int64_t gw = gate_width(j), at = 0;
        for (int64_t i = 0; i < j->count; i++) {
            const dr_fragment *f = &j->fragments[i];
            if (f->rank != w->comm->rank)
                continue;
            int64_t n = f->end - f->begin;
            move(s->q, w->whole->q, at, f->begin, n, H * K);
            move(s->k, w->whole->k, at, f->begin, n, H * K);
            move(s->v, w->whole->v, at, f->begin, n, HV * V);
            move(s->g, w->whole->g, at, f->begin, n, HV * gw);
            move(s->beta, w->whole->beta, at, f->begin, n, HV);
            move(s->d_o, w->whole->d_o, at, f->begin, n, HV * V);
            at += n;
        }
        for (int64_t n = 0; n < w->pieces; n++) {
            dr_cp_plan_piece(plan, n, &w->piece[n]);
            int64_t q = w->piece[n].sequence, size = HV * K * V;
            move(s->h0, w->whole->h0, n, q, 1, size);
            move(s->dht, w->whole->dht, n, q, 1, size);
            if (!w->piece[n].starts) /* must not be read */
                memset(s->h0 + n * size, 0xff, (size_t)size * sizeof(float));
            if (!w->piece[n].ends)
                memset(s->dht + n * size, 0xff, (size_t)size * sizeof(float));
        }
        dr_io io = io_of(s, j, w->info.tokens, w->pieces);
        if (w->fail_at == 1)
            status = DR_ERR_IO;
        else
            status = dr_cp_forward(plan, &io, &b);
        if (status == DR_OK)
            status = w->fail_at == 2 ? DR_ERR_IO : dr_cp_backward(plan, &io, &b);
    }
    snprintf(w->error, sizeof w->error, "%s", dr_last_error());
    for (int64_t i = 0, at = 0; status == DR_OK && i < j->count; i++) {
        const dr_fragment *f = &j->fragments[i];
        if (f->rank != w->comm->rank)
            continue;
        int64_t n = f->end - f->begin, gw = gate_width(j);
        memcpy(w->out->o + f->begin * HV * V, s->o + at * HV * V, (size_t)(n * HV * V) * 4);
        memcpy(w->out->dq + f->begin * H * K, s->dq + at * H * K, (size_t)(n * H * K) * 4);
        memcpy(w->out->dk + f->begin * H * K, s->dk + at * H * K, (size_t)(n * H * K) * 4);
        memcpy(w->out->dv + f->begin * HV * V, s->dv + at * HV * V, (size_t)(n * HV * V) * 4);
        memcpy(w->out->dg + f->begin * HV * gw, s->dg + at * HV * gw, (size_t)(n * HV * gw) * 4);
        memcpy(w->out->dbeta + f->begin * HV, s->dbeta + at * HV, (size_t)(n * HV) * 4);
        at += n;
    }
    for (int64_t n = 0; status == DR_OK && n < w->pieces; n++) {
        const size_t size = HV * K * V;
        if (w->piece[n].ends)
            memcpy(w->out->ht + (size_t)w->piece[n].sequence * size, s->ht + (size_t)n * size, size * 4);
        if (w->piece[n].starts)
            memcpy(w->out->dh0 + (size_t)w->piece[n].sequence * size, s->dh0 + (size_t)n * size, size * 4);
    }
    dr_buffers_destroy(&b);
    dr_cp_plan_destroy(plan);
    dr_context_destroy(ctx);
    free(s);
    return status;
}

static void *rank_main(void *arg)
{
    rank_work *w = arg;
    w->status = compute(w);
    return NULL;
}

static rank_work works[MAX_RANKS];

/* Runs all ranks; out holds the gathered stream. */
static void many_ranks(const job *j, const stream *whole, stream *out, dr_comm **comms, int failing,
                       int fail_at)
{
    for (int r = 0; r < j->ranks; r++) {
        works[r] = (rank_work){.job = j, .whole = whole, .out = out, .comm = comms[r],
                               .fail_at = r == failing ? fail_at : 0};
    }
    run_ranks(j->ranks, rank_main, works, sizeof *works);
}

static void compare(const stream *got, const stream *want, const job *j, const char *what)
{
    size_t T = (size_t)j->T, N = (size_t)j->N, w = (size_t)gate_width(j);
    const struct {
        const char *name;
        const float *a, *b;
        size_t n;
    } rows[] = {
        {"o", got->o, want->o, T * HV * V},     {"dq", got->dq, want->dq, T * H * K},
        {"dk", got->dk, want->dk, T * H * K},   {"dv", got->dv, want->dv, T * HV * V},
        {"dg", got->dg, want->dg, T * HV * w},  {"dbeta", got->dbeta, want->dbeta, T * HV},
        {"ht", got->ht, want->ht, N * HV * K * V}, {"dh0", got->dh0, want->dh0, N * HV * K * V},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!(distance(rows[i].a, rows[i].b, rows[i].n) < 1e-5))
            fail_msg("%s %s %s, %d ranks, T %d, N %d, %s: %s is off by %g", j->backend,
                     j->variant == DR_KDA ? "kda" : "gdn", j->protocol, j->ranks, (int)j->T, (int)j->N, what,
                     rows[i].name, distance(rows[i].a, rows[i].b, rows[i].n));
}

static void layout_random(job *j)
{
    j->T = 1 + below(MAX_T - 1);
    j->N = 1 + below(MAX_N - 1);
    for (int64_t n = 1; n < j->N; n++)
        j->offsets[n] = below(3) == 0 ? j->offsets[n - 1] : below(j->T + 1);
    j->offsets[0] = 0;
    j->offsets[j->N] = j->T;
    for (int64_t n = 1; n <= j->N; n++)
        for (int64_t m = n; m > 0 && j->offsets[m] < j->offsets[m - 1]; m--) {
            int64_t x = j->offsets[m];
            j->offsets[m] = j->offsets[m - 1];
            j->offsets[m - 1] = x;
        }
}

static void partition_random(job *j, int kind)
{
    if (kind == 0) {
        j->count = j->ranks;
        must(dr_partition_contiguous(j->T, j->ranks, j->fragments));
    } else if (kind == 1) {
        j->count = 2 * j->ranks;
        must(dr_partition_zigzag(j->T, j->ranks, j->fragments));
    } else { /* uneven cuts; contiguous with empty ranks, or anybody's; table order shuffled */
        j->count = kind == 2 ? j->ranks : 1 + below(MAX_FRAGMENTS - 1);
        int64_t cuts[MAX_FRAGMENTS + 1] = {0};
        for (int64_t i = 1; i < j->count; i++)
            cuts[i] = below(4) == 0 ? cuts[i - 1] : below(j->T + 1);
        cuts[j->count] = j->T;
        for (int64_t i = 1; i < j->count; i++)
            for (int64_t m = i; m > 1 && cuts[m] < cuts[m - 1]; m--) {
                int64_t x = cuts[m];
                cuts[m] = cuts[m - 1];
                cuts[m - 1] = x;
            }
        for (int64_t i = 0; i < j->count; i++)
            j->fragments[i] = (dr_fragment){cuts[i], cuts[i + 1],
                                            kind == 2 ? (int32_t)i : (int32_t)below(j->ranks)};
        for (int64_t i = j->count - 1; kind == 3 && i > 0; i--) {
            int64_t m = below(i + 1);
            dr_fragment x = j->fragments[i];
            j->fragments[i] = j->fragments[m];
            j->fragments[m] = x;
        }
    }
}

static const char *const protocols[] = {"p2p",       "allgather", "grouped:1", "grouped:2",
                                        "grouped:3", "doubling",  "relay",     "relay:2"};
enum { PROTOCOLS = sizeof protocols / sizeof *protocols };

static stream whole, gathered, first;

static bool is_relay(const job *j) { return strncmp(j->protocol, "relay", 5) == 0; }

/* It serves one stretch per rank; what it does not serve it refuses everywhere, with the reason. */
static bool refused_by_relay(const job *j)
{
    if (!is_relay(j) || works[0].status == DR_OK)
        return false;
    for (int r = 0; r < j->ranks; r++) {
        assert_int_equal(works[r].status, DR_ERR_SUPPORT);
        if (strstr(works[r].error, "relay needs one stretch") == NULL)
            fail_msg("rank %d says: %s", r, works[r].error);
    }
    return true;
}

static void sweep(const char *backend, int rounds)
{
    for (int round = 0; round < rounds; round++)
        for (int kind = 0; kind < 4; kind++) {
            job j = {.variant = round % 2 ? DR_KDA : DR_GDN, .backend = backend};
            j.ranks = 1 + (int32_t)below(MAX_RANKS);
            layout_random(&j);
            partition_random(&j, kind);
            fill(&whole, &j, round % 3 == 0 ? 1e-3 : 1.0);
            one_rank(&whole, &j);
            for (int i = 0; i < PROTOCOLS; i++) {
                j.protocol = protocols[i];
                dr_comm *comms[MAX_RANKS];
                open_ranks(comms, j.ranks, 60);
                memset(&gathered, 0xff, sizeof gathered);
                many_ranks(&j, &whole, &gathered, comms, -1, 0);
                if (kind % 2 == 1 && refused_by_relay(&j)) {
                    close_ranks(comms, j.ranks);
                    continue;
                }
                for (int r = 0; r < j.ranks; r++)
                    if (works[r].status != DR_OK)
                        fail_msg("%s on rank %d: %s", j.protocol, r, works[r].error);
                close_ranks(comms, j.ranks);
                compare(&gathered, &whole, &j, kind == 0 ? "contiguous" : kind == 1 ? "zig-zag" : "random");
                if (i == 0)
                    first = gathered;
                else if (strcmp(j.protocol, "doubling") != 0 && !is_relay(&j)) { /* p2p, allgather, grouped: same bits */
                    assert_memory_equal(first.o, gathered.o, sizeof(float) * (size_t)j.T * HV * V);
                    assert_memory_equal(first.dg, gathered.dg,
                                        sizeof(float) * (size_t)j.T * HV * (size_t)gate_width(&j));
                    assert_memory_equal(first.dk, gathered.dk, sizeof(float) * (size_t)j.T * H * K);
                }
            }
        }
}

static void test_many_ranks_ref(void **state) { (void)state; sweep("ref", 12); }
static void test_many_ranks_cpu(void **state) { (void)state; sweep("cpu", 24); }

/* Cuts on edges of chunks: relay computes every chunk from the state that one rank would have. */
static void test_relay_bits(void **state)
{
    (void)state;
    const char *const backends[] = {"ref", "cpu"};
    for (int i = 0; i < 8; i++) {
        job j = {.variant = i % 2 ? DR_KDA : DR_GDN, .backend = backends[i / 2 % 2], .protocol = "relay",
                 .T = 96, .N = i < 4 ? 1 : 3, .offsets = {0, i < 4 ? 96 : 64, 64, 96}, .ranks = 3};
        partition_random(&j, 0);
        for (int r = 0; r < 3; r++)
            assert_int_equal(j.fragments[r].begin % 32, 0);
        fill(&whole, &j, 0.1);
        one_rank_on(j.backend, &whole, &j);
        dr_comm *comms[3];
        open_ranks(comms, 3, 60);
        many_ranks(&j, &whole, &gathered, comms, -1, 0);
        close_ranks(comms, 3);
        for (int r = 0; r < 3; r++)
            assert_int_equal(works[r].status, DR_OK);
        compare(&gathered, &whole, &j, "cut on chunks");
        if (strcmp(j.backend, "cpu") != 0)
            continue; /* ref computes in fp64 and hands on fp32: equal to rounding */
        const size_t T = (size_t)j.T * sizeof(float), w = (size_t)gate_width(&j);
        assert_memory_equal(gathered.o, whole.o, T * HV * V);
        assert_memory_equal(gathered.dq, whole.dq, T * H * K);
        assert_memory_equal(gathered.dk, whole.dk, T * H * K);
        assert_memory_equal(gathered.dv, whole.dv, T * HV * V);
        assert_memory_equal(gathered.dg, whole.dg, T * HV * w);
        assert_memory_equal(gathered.dbeta, whole.dbeta, T * HV);
        assert_memory_equal(gathered.ht, whole.ht, (size_t)j.N * HV * K * V * sizeof(float));
        assert_memory_equal(gathered.dh0, whole.dh0, (size_t)j.N * HV * K * V * sizeof(float));
    }
}

/* One long document over P ranks: messages and bytes of each protocol. */
static void test_messages(void **state)
{
    (void)state;
    enum { P = 5, WS = 4 * HV * K * V, WM = 4 * HV * K * K };
    const struct {
        const char *protocol;
        int64_t sends[2], bytes[2];
    } want[] = {
        {"p2p", {P - 1, P - 1}, {(P - 1) * WS, (P - 1) * WS}},
        /* source to everybody behind, and each inner map to everybody behind it */
        {"allgather", {4 + 3 + 2 + 1, 4 + 3 + 2 + 1},
         {4 * WS + 6 * (WS + WM), 4 * WS + 6 * (WS + WM)}},
        /* the last rank takes no part in the rounds: distances 1 and 2 of 4 ranks, then the shift */
        {"relay", {H * (P - 1), H * (P - 1)}, {(P - 1) * WS, (P - 1) * WS}},
        {"relay:2", {P - 1, P - 1}, {(P - 1) * WS, (P - 1) * WS}},
        {"doubling", {3 + 2 + 4, 3 + 2 + 4},
         {1 * WS + 2 * (WS + WM) + 2 * WS + 4 * WS, 9 * WS}},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        job j = {.variant = DR_GDN, .backend = "ref", .protocol = want[i].protocol, .T = 40, .N = 1,
                 .offsets = {0, 40}, .ranks = P};
        partition_random(&j, 0);
        fill(&whole, &j, 0.1);
        dr_comm *inner[P], *comms[P];
        open_ranks(inner, P, 60);
        for (int r = 0; r < P; r++)
            must(dr_comm_record_create(inner[r], &comms[r]));
        many_ranks(&j, &whole, &gathered, comms, -1, 0);
        int64_t sends = 0, bytes = 0, planned[2] = {0, 0}, planned_bytes[2] = {0, 0};
        for (int r = 0; r < P; r++) {
            assert_int_equal(works[r].status, DR_OK);
            for (int64_t e = 0; e < dr_comm_record_count(comms[r]); e++) {
                dr_comm_event event;
                must(dr_comm_record_event(comms[r], e, &event));
                if (!event.is_send || event.bytes == 256 + 0 * (size_t)e) /* the agreement */
                    continue;
                sends++;
                bytes += (int64_t)event.bytes;
            }
            for (int d = 0; d < 2; d++) {
                planned[d] += works[r].info.sends[d];
                planned_bytes[d] += works[r].info.send_bytes[d];
            }
        }
        for (int d = 0; d < 2; d++) {
            assert_int_equal(planned[d], want[i].sends[d]);
            assert_int_equal(planned_bytes[d], want[i].bytes[d]);
        }
        assert_int_equal(sends, planned[0] + planned[1]);
        assert_int_equal(bytes, planned_bytes[0] + planned_bytes[1]);
        close_ranks(comms, P);
    }
}

/* Cuts on document boundaries: nothing travels at all. */
static void test_nothing_crosses_boundaries(void **state)
{
    (void)state;
    for (int i = 0; i < PROTOCOLS; i++) {
        job j = {.variant = DR_KDA, .backend = "ref", .protocol = protocols[i], .T = 40, .N = 4,
                 .offsets = {0, 10, 20, 30, 40}, .ranks = 4};
        partition_random(&j, 0);
        fill(&whole, &j, 0.1);
        dr_comm *comms[4];
        open_ranks(comms, 4, 60);
        many_ranks(&j, &whole, &gathered, comms, -1, 0);
        for (int r = 0; r < 4; r++) {
            assert_int_equal(works[r].status, DR_OK);
            assert_int_equal(works[r].info.sends[0] + works[r].info.sends[1], 0);
        }
        close_ranks(comms, 4);
    }
}

/* A rank that gives up at a pass: the others return an error within the time limit. */
static void test_peers_that_fail(void **state)
{
    (void)state;
    for (int i = 0; i < PROTOCOLS; i++)
        for (int failing = 0; failing < 4; failing++)
            for (int fail_at = 1; fail_at <= 2; fail_at++) {
                job j = {.variant = DR_GDN, .backend = "ref", .protocol = protocols[i], .T = 40, .N = 1,
                         .offsets = {0, 40}, .ranks = 4};
                partition_random(&j, 0);
                fill(&whole, &j, 0.1);
                dr_comm *comms[4];
                open_ranks(comms, 4, 0.2);
                many_ranks(&j, &whole, &gathered, comms, failing, fail_at);
                int broken = 0;
                for (int r = 0; r < 4; r++) {
                    if (works[r].status == DR_ERR_COMM) {
                        broken++;
                        assert_int_equal(comms[r]->health, DR_ERR_COMM);
                        assert_non_null(strstr(works[r].error, "comm"));
                    }
                }
                assert_true(broken >= 1);
                close_ranks(comms, 4);
            }
}

typedef struct disagreeing {
    dr_comm *comm;
    int what;
    dr_status status;
    char error[256];
} disagreeing;

static void *disagree(void *arg)
{
    disagreeing *d = arg;
    job j = {.variant = DR_GDN, .T = 40, .N = 2, .offsets = {0, 10, 40}, .ranks = 3};
    bool odd = d->comm->rank == 1;
    partition_random(&j, 0);
    if (odd && d->what == 1)
        j.offsets[1] = 11;
    if (odd && d->what == 2)
        j.fragments[0].end = j.fragments[1].begin = 5;
    dr_problem p = problem_of(&j);
    if (odd && d->what == 0)
        p.scale = 2;
    if (odd && d->what == 4)
        p.gate = (dr_gate)0;
    dr_partition partition = DR_PARTITION_INIT;
    partition.ranks = 3;
    partition.count = 3;
    partition.fragments = j.fragments;
    dr_context *ctx;
    dr_cp_plan *plan = NULL;
    if (dr_context_create("ref", NULL, &ctx) != DR_OK)
        return NULL;
    d->status = dr_cp_plan_create(ctx, d->comm, &p, &partition, odd && d->what == 3 ? "doubling" : "p2p", &plan);
    snprintf(d->error, sizeof d->error, "%s", dr_last_error());
    dr_cp_plan_destroy(plan);
    dr_context_destroy(ctx);
    return NULL;
}

/* Whatever one rank means differently, every rank is told, and the communicator stays usable. */
static void test_agreement(void **state)
{
    (void)state;
    const char *const names[] = {"problem", "offsets", "partition", "protocol", "gate: must be one of"};
    for (int what = 0; what < 5; what++) {
        dr_comm *comms[3];
        disagreeing d[3];
        open_ranks(comms, 3, 10);
        for (int r = 0; r < 3; r++)
            d[r] = (disagreeing){.comm = comms[r], .what = what};
        run_ranks(3, disagree, d, sizeof *d);
        for (int r = 0; r < 3; r++) {
            assert_int_equal(d[r].status, DR_ERR_ARG);
            if (strstr(d[r].error, names[what]) == NULL)
                fail_msg("expected \"%s\" in \"%s\"", names[what], d[r].error);
            assert_int_equal(comms[r]->health, DR_OK);
        }
        close_ranks(comms, 3);
    }
}

static dr_status fail_silently(dr_comm *comm, const dr_transfer *transfers, int32_t n, dr_batch **out)
{
    (void)comm;
    (void)transfers;
    (void)n;
    (void)out;
    return DR_ERR_COMM;
}

/* A host's own communicator that fails on one rank and says nothing: that rank gets a sentence, and
 * the others do not wait for the time limit. */
static void test_silent_failure(void **state)
{
    (void)state;
    dr_comm *comms[3];
    disagreeing d[3];
    open_ranks(comms, 3, 600);
    dr_comm_ops broken = *comms[1]->ops;
    broken.post = fail_silently;
    comms[1]->ops = &broken;
    for (int r = 0; r < 3; r++)
        d[r] = (disagreeing){.comm = comms[r], .what = -1};
    run_ranks(3, disagree, d, sizeof *d);
    for (int r = 0; r < 3; r++)
        assert_int_equal(d[r].status, DR_ERR_COMM);
    assert_non_null(strstr(d[1].error, "post of threads on rank 1 returned"));
    close_ranks(comms, 3);
}

static void refused(dr_status status, const char *sentence)
{
    assert_true(status != DR_OK);
    if (strstr(dr_last_error(), sentence) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", sentence, dr_last_error());
}

static void test_refusals(void **state)
{
    (void)state;
    job j = {.variant = DR_GDN, .T = 40, .N = 2, .offsets = {0, 10, 40}, .ranks = 1};
    partition_random(&j, 0);
    dr_problem p = problem_of(&j);
    dr_partition partition = DR_PARTITION_INIT;
    partition.ranks = 1;
    partition.count = 1;
    partition.fragments = j.fragments;
    dr_context *ctx;
    dr_comm *comm;
    dr_cp_plan *plan;
    must(dr_context_create("ref", NULL, &ctx));
    must(dr_comm_self_create(&comm));
    refused(dr_cp_plan_create(ctx, comm, &p, &partition, "ring", &plan), "got \"ring\"");
    refused(dr_cp_plan_create(ctx, comm, &p, &partition, "grouped", &plan), "grouped needs a width");
    refused(dr_cp_plan_create(ctx, comm, &p, &partition, "grouped:x", &plan), "got \"grouped:x\"");
    refused(dr_cp_plan_create(ctx, comm, &p, &partition, "p2p:2", &plan), "p2p takes no width");
    refused(dr_cp_plan_create(ctx, comm, &p, NULL, "p2p", &plan), "partition: must be given");
    j.fragments[0].begin = 1;
    refused(dr_cp_plan_create(ctx, comm, &p, &partition, "p2p", &plan), "token 0 is owned by nobody");
    j.fragments[0] = (dr_fragment){0, 30, 0};
    refused(dr_cp_plan_create(ctx, comm, &p, &partition, "p2p", &plan), "token 30 is owned by nobody");
    j.fragments[1] = (dr_fragment){20, 40, 0};
    partition.count = 2;
    refused(dr_cp_plan_create(ctx, comm, &p, &partition, "p2p", &plan), "token 20 is owned twice");
    j.fragments[1] = (dr_fragment){30, 41, 0};
    refused(dr_cp_plan_create(ctx, comm, &p, &partition, "p2p", &plan), "must lie in [0, 40)");
    j.fragments[1] = (dr_fragment){30, 40, 1};
    refused(dr_cp_plan_create(ctx, comm, &p, &partition, "p2p", &plan), "rank: must be 0 to 0, got 1");
    partition.ranks = 2;
    refused(dr_cp_plan_create(ctx, comm, &p, &partition, "p2p", &plan), "size of the communicator (1), got 2");
    dr_comm_close(comm);
    dr_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_many_ranks_ref),
        cmocka_unit_test(test_many_ranks_cpu),
        cmocka_unit_test(test_relay_bits),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_nothing_crosses_boundaries),
        cmocka_unit_test(test_peers_that_fail),
        cmocka_unit_test(test_agreement),
        cmocka_unit_test(test_silent_failure),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests_name("cp", tests, NULL, NULL);
}
