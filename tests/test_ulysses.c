/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ulysses.c - tokens exchanged for heads equals one rank: outputs, states, every gradient
 * and the gradients of the parameters, for gates, head maps, element types, strides, partitions
 * and second protocols; alone on all ranks to the bit. What travels, held against the recorder; what is
 * refused, on all ranks; and peers that fail.
 */
#include <stdint.h>

static uint64_t seed = 4711; /* ranks.h draws from it */
#include "ranks.h"

#include <deltarule/cp.h>

#include "base/half.h"

#include <stdio.h>
#include <stdlib.h>

enum { K = 6, V = 5, MAX_HV = 16, MAX_T = 90, MAX_N = 12, MAX_RANKS = 8, MAX_F = 2 * MAX_RANKS,
       MAX_P = MAX_N + MAX_F };

typedef struct job {
    dr_variant variant;
    dr_gate gate;
    dr_dtype dtype;          /* of the ranks' inputs; one rank has f32 */
    const char *backend, *protocol;
    int32_t H, HV, tiled, v_first, strided, ranks;
    int64_t T, N, offsets[MAX_N + 1], count;
    dr_fragment fragments[MAX_F];
} job;

/* The tensors of a call, in the order of both tables below. */
enum { Q, KEY, VAL, G, BETA, D_O, O, DQ, DK, DV, DG, DBETA, TOKEN_FIELDS };
enum { H0, DHT, HT, DH0, STATES };
enum { A_LOG, BIAS, DA, DBIAS, PARAMS };
#define INPUT_FIELD(i) ((i) <= D_O)

typedef struct memory {
    float token[TOKEN_FIELDS][MAX_T * MAX_HV * 2 * K], state[STATES][MAX_P * MAX_HV * K * V];
    float param[PARAMS][MAX_HV * K];
} memory;

static int32_t gate_width(const job *j) { return j->variant == DR_KDA ? K : 1; }
static int32_t heads_of(const job *j, int i)
{
    return i == Q || i == KEY || i == DQ || i == DK ? j->H : j->HV;
}
static int32_t width_of(const job *j, int i)
{
    const int32_t widths[] = {K, K, V, gate_width(j), 1, V, V, K, K, V, gate_width(j), 1};
    return widths[i];
}

/* Values that bf16 holds exactly. */
static void fill(memory *m, const job *j)
{
    memset(m, 0xff, sizeof *m);
    for (int i = 0; i <= D_O; i++)
        for (int64_t x = 0; x < j->T * heads_of(j, i) * width_of(j, i); x++) {
            float r = (float)(below(129) - 64) / 128;
            if (i == BETA || i == G)
                r = fabsf(r) * 2 * (i == G && j->gate == DR_GATE_LOG ? -1.0f : 1.0f);
            m->token[i][x] = r;
        }
    for (int i = 0; i <= DHT; i++)
        for (int64_t x = 0; x < MAX_N * MAX_HV * K * V; x++)
            m->state[i][x] = (float)(below(129) - 64) / 128;
    for (int i = 0; i <= BIAS; i++)
        for (int x = 0; x < MAX_HV * K; x++)
            m->param[i][x] = (float)(below(129) - 64) / 128;
}

static dr_problem problem_of(const job *j)
{
    dr_problem p = DR_PROBLEM_INIT;
    p.variant = j->variant;
    p.tokens = j->T;
    p.heads = j->H;
    p.value_heads = j->HV;
    p.key_dim = K;
    p.value_dim = V;
    p.offsets = j->offsets;
    p.sequences = j->N;
    p.gate = j->gate;
    p.lower_bound = j->gate == DR_GATE_LOWER_BOUND ? -2 : 0;
    p.beta = DR_BETA_VALUE;
    p.l2norm = 1;
    p.head_map = j->tiled ? DR_HEADS_TILED : DR_HEADS_INTERLEAVED;
    p.state_v_first = j->v_first;
    return p;
}

static dr_io io_of(memory *m, const job *j, int64_t T, int64_t N, dr_dtype dtype, bool strided)
{
    dr_io io = DR_IO_INIT;
    dr_tensor *const token[] = {&io.q, &io.k, &io.v, &io.g, &io.beta, &io.d_o,
                                &io.o, &io.dq, &io.dk, &io.dv, &io.dg, &io.dbeta};
    dr_tensor *const state[] = {&io.initial_state, &io.d_final_state, &io.final_state, &io.d_initial_state};
    dr_tensor *const param[] = {&io.a_log, &io.dt_bias, &io.da_log, &io.ddt_bias};
    for (int i = 0; i < TOKEN_FIELDS; i++) {
        const bool scalar = i == BETA || i == DBETA || ((i == G || i == DG) && j->variant == DR_GDN);
        if ((i == G || i == DG) && j->gate == DR_GATE_NONE)
            continue;
        dr_tensor *t = token[i];
        *t = dr_tensor_make(m->token[i], INPUT_FIELD(i) ? dtype : DR_F32, scalar ? 3 : 4, 1, T, heads_of(j, i),
                            width_of(j, i));
        if (strided) { /* every other element, heads outermost */
            t->stride[3] = 2;
            t->stride[1] = 2 * width_of(j, i);
            t->stride[2] = T * t->stride[1];
        }
    }
    for (int i = 0; i < STATES; i++)
        *state[i] = dr_tensor_make(m->state[i], DR_F32, 4, N, j->HV, j->v_first ? V : K, j->v_first ? K : V);
    for (int i = 0; i < PARAMS; i++)
        if (j->gate == DR_GATE_SOFTPLUS || j->gate == DR_GATE_LOWER_BOUND)
            *param[i] = dr_tensor_make(m->param[i], DR_F32, i % 2 == 1 && j->variant == DR_KDA ? 2 : 1, j->HV, K,
                                       0, 0);
    return io;
}

static void one_rank(memory *m, const job *j)
{
    dr_context *ctx;
    dr_plan *plan;
    dr_buffers b;
    dr_problem p = problem_of(j);
    must(dr_context_create(j->backend, NULL, &ctx));
    must(dr_plan_create(ctx, &p, &plan));
    must(dr_buffers_create(plan, &b));
    dr_io io = io_of(m, j, j->T, j->N, DR_F32, false);
    must(dr_forward(plan, &io, &b));
    must(dr_backward(plan, &io, &b));
    dr_buffers_destroy(&b);
    dr_plan_destroy(plan);
    dr_context_destroy(ctx);
}

/* ---- many ranks ------------------------------------------------------------------------ */

typedef struct rank_work {
    const job *job;
    const memory *whole;
    memory *out, *mine;
    dr_comm *comm;
    int fail_at; /* 1: gives up instead of calling forward; 2: instead of backward; 3: chunk_states */
    dr_status status;
    char error[256];
    dr_cp_info info;
    dr_cp_piece piece[MAX_P];
} rank_work;

static rank_work works[MAX_RANKS];

/* Between the stream and this rank's span; in: from the stream. */
static void cut(rank_work *w, dr_io *io, bool in)
{
    const job *j = w->job;
    dr_tensor *const token[] = {&io->q, &io->k, &io->v, &io->g, &io->beta, &io->d_o,
                                &io->o, &io->dq, &io->dk, &io->dv, &io->dg, &io->dbeta};
    int64_t at = 0;
    for (int64_t f = 0; f < j->count; f++)
        for (int64_t t = j->fragments[f].begin; t < j->fragments[f].end && j->fragments[f].rank == w->comm->rank;
             t++, at++)
            for (int i = 0; i < TOKEN_FIELDS; i++)
                for (int32_t h = 0; token[i]->data != NULL && INPUT_FIELD(i) == in && h < heads_of(j, i); h++)
                    for (int32_t x = 0; x < width_of(j, i); x++) {
                        const dr_tensor *s = token[i];
                        void *here = dr_at(s, 0, at, h, s->rank == 4 ? x : 0);
                        const int64_t there = (t * heads_of(j, i) + h) * width_of(j, i) + x;
                        if (in)
                            dr_put(here, s->dtype, 0, w->whole->token[i][there]);
                        else
                            w->out->token[i][there] = (float)dr_get(here, s->dtype, 0);
                    }
    const size_t size = (size_t)j->HV * K * V;
    for (size_t n = 0; n < (size_t)w->info.pieces; n++)
        for (int i = 0; i < STATES; i++) {
            const size_t s = (size_t)w->piece[n].sequence * size;
            const bool counts = i == H0 || i == DH0 ? w->piece[n].starts : w->piece[n].ends;
            if (in && i <= DHT && counts) /* the others are NaN: they must not be read */
                memcpy(w->mine->state[i] + n * size, w->whole->state[i] + s, size * sizeof(float));
            if (!in && i > DHT && counts)
                memcpy(w->out->state[i] + s, w->mine->state[i] + n * size, size * sizeof(float));
            for (size_t x = 0; !in && i > DHT && !counts && x < size; x++)
                if (w->mine->state[i][n * size + x] != 0)
                    w->status = DR_ERR_FORMAT; /* promised to be zero */
        }
}

static dr_status compute(rank_work *w, const dr_cp_plan *plan, dr_buffers *b)
{
    w->info = (dr_cp_info)DR_CP_INFO_INIT;
    dr_cp_plan_describe(plan, &w->info);
    for (int64_t n = 0; n < w->info.pieces; n++)
        dr_cp_plan_piece(plan, n, &w->piece[n]);
    memset(w->mine, 0xff, sizeof *w->mine);
    memcpy(w->mine->param, w->whole->param, sizeof w->mine->param);
    dr_io io = io_of(w->mine, w->job, w->info.tokens, w->info.pieces, w->job->dtype, w->job->strided);
    cut(w, &io, true);
    if (w->fail_at == 1)
        return DR_ERR_IO;
    if (w->fail_at == 3)
        io.chunk_states = dr_tensor_make(w->mine->state[HT], DR_F32, 4, w->info.pieces, w->job->HV, K, V);
    dr_status status = dr_cp_forward(plan, &io, b);
    if (status == DR_OK)
        status = w->fail_at == 2 ? DR_ERR_IO : dr_cp_backward(plan, &io, b);
    if (status == DR_OK)
        cut(w, &io, false);
    return status;
}

static void *rank_main(void *arg)
{
    rank_work *w = arg;
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
    dr_status status = dr_context_create(j->backend, &one, &ctx);
    if (status == DR_OK)
        status = dr_cp_plan_create(ctx, w->comm, &p, &partition, j->protocol, &plan);
    if (status == DR_OK)
        status = dr_cp_buffers_create(plan, &b);
    if (status == DR_OK)
        status = compute(w, plan, &b);
    if (w->status == DR_OK)
        w->status = status;
    snprintf(w->error, sizeof w->error, "%s", dr_last_error());
    dr_buffers_destroy(&b);
    dr_cp_plan_destroy(plan);
    dr_context_destroy(ctx);
    return NULL;
}

static memory whole, gathered, spans[MAX_RANKS];

static void many_ranks(const job *j, dr_comm **comms, int failing, int fail_at)
{
    memset(&gathered, 0xff, sizeof gathered);
    for (int r = 0; r < j->ranks; r++) {
        works[r] = (rank_work){.job = j, .whole = &whole, .out = &gathered, .mine = &spans[r],
                               .comm = comms[r], .fail_at = r == failing ? fail_at : 0};
    }
    run_ranks(j->ranks, rank_main, works, sizeof *works);
    for (int i = DA; i <= DBIAS; i++) /* partial on every rank */
        for (int x = 0; x < MAX_HV * K; x++) {
            gathered.param[i][x] = 0;
            for (int r = 0; r < j->ranks; r++)
                gathered.param[i][x] += spans[r].param[i][x];
        }
}

/* limit 0: to the bit. */
static void near(const job *j, const char *what, int i, const float *a, const float *b, int64_t n, double limit)
{
    const bool same = limit == 0 ? memcmp(a, b, (size_t)n * sizeof *a) == 0 : distance(a, b, (size_t)n) < limit;
    if (!same)
        fail_msg("%s %s %s, %d ranks, T %d, N %d, gate %d: %s %d is off by %g", j->backend,
                 j->variant == DR_KDA ? "kda" : "gdn", j->protocol, j->ranks, (int)j->T, (int)j->N, (int)j->gate,
                 what, i, distance(a, b, (size_t)n));
}

static void compare(const job *j, double limit)
{
    for (int i = O; i < TOKEN_FIELDS; i++)
        if (i != DG || j->gate != DR_GATE_NONE)
            near(j, "token tensor", i, gathered.token[i], whole.token[i],
                 j->T * heads_of(j, i) * width_of(j, i), limit);
    for (int i = HT; i < STATES; i++)
        near(j, "state", i, gathered.state[i], whole.state[i], j->N * j->HV * K * V, limit);
    for (int i = DA; i < PARAMS && (j->gate == DR_GATE_SOFTPLUS || j->gate == DR_GATE_LOWER_BOUND); i++)
        near(j, "parameter", i, gathered.param[i], whole.param[i],
             i == DA ? j->HV : (int64_t)j->HV * gate_width(j), limit);
}

/* Sorted cuts, some equal. */
static void cuts_random(int64_t *cuts, int64_t n, int64_t T)
{
    cuts[0] = 0;
    for (int64_t i = 1; i < n; i++) {
        int64_t at = i, x = below(3) == 0 ? cuts[i - 1] : below(T + 1);
        for (; at > 0 && cuts[at - 1] > x; at--)
            cuts[at] = cuts[at - 1];
        cuts[at] = x;
    }
    cuts[n] = T;
}

static void partition(job *j, int kind)
{
    int64_t cuts[MAX_F + 1];
    j->count = kind == 0 ? j->ranks : 2 * j->ranks;
    if (kind == 0)
        must(dr_partition_contiguous(j->T, j->ranks, j->fragments));
    else if (kind == 1)
        must(dr_partition_zigzag(j->T, j->ranks, j->fragments));
    else { /* anybody's, some ranks without any */
        cuts_random(cuts, j->count, j->T);
        for (int64_t i = 0; i < j->count; i++)
            j->fragments[j->count - 1 - i] = (dr_fragment){cuts[i], cuts[i + 1], (int32_t)below(j->ranks)};
    }
}

static void run_all(const job *j, double limit)
{
    dr_comm *comms[MAX_RANKS];
    open_ranks(comms, j->ranks, 60);
    many_ranks(j, comms, -1, 0);
    for (int r = 0; r < j->ranks; r++)
        if (works[r].status != DR_OK)
            fail_msg("%s on rank %d of %d: %s", j->protocol, r, j->ranks, works[r].error);
    compare(j, limit);
    close_ranks(comms, j->ranks);
}

static void test_equals_one_rank(void **state)
{
    (void)state;
    static const struct {
        int32_t ranks, H, HV;
        const char *protocol;
    } worlds[] = {
        {1, 3, 3, "ulysses"}, {2, 2, 4, "ulysses"}, {4, 4, 8, "ulysses:4"}, {8, 8, 16, "ulysses"},
        {2, 2, 2, "ulysses:2+p2p"}, {3, 1, 2, "ulysses:1+doubling"}, {4, 2, 4, "ulysses:2+p2p"},
        {6, 2, 6, "ulysses:2+allgather"}, {6, 3, 6, "ulysses:3+grouped:2"}, {8, 2, 4, "ulysses:2+grouped:2"},
        {8, 4, 4, "ulysses:4+doubling"}, {8, 4, 8, "ulysses:2+ulysses:2+p2p"},
    };
    static const dr_gate gates[] = {DR_GATE_LOG, DR_GATE_SOFTPLUS, DR_GATE_NONE, DR_GATE_LOWER_BOUND,
                                    DR_GATE_FACTOR};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        for (int round = 0; round < 15; round++) {
            job j = {.variant = round % 2 ? DR_KDA : DR_GDN, .gate = gates[round % 5],
                     .dtype = below(2) ? DR_BF16 : DR_F32, .backend = below(2) ? "cpu" : "ref",
                     .protocol = worlds[i].protocol, .H = worlds[i].H, .HV = worlds[i].HV,
                     .tiled = (int32_t)below(2), .v_first = (int32_t)below(2), .strided = (int32_t)below(2),
                     .ranks = worlds[i].ranks, .T = 1 + below(MAX_T), .N = 1 + below(MAX_N)};
            cuts_random(j.offsets, j.N, j.T);
            partition(&j, round % 3);
            fill(&whole, &j);
            one_rank(&whole, &j);
            run_all(&j, 1e-5);
        }
}

/* Every head is computed by one rank on the whole stream, as on one rank. */
static void test_bits(void **state)
{
    (void)state;
    for (int round = 0; round < 8; round++) {
        job j = {.variant = round % 2 ? DR_KDA : DR_GDN, .gate = round % 4 < 2 ? DR_GATE_LOG : DR_GATE_SOFTPLUS,
                 .dtype = DR_F32, .backend = round < 4 ? "cpu" : "ref", .protocol = "ulysses", .H = 4, .HV = 8,
                 .ranks = 4, .T = MAX_T, .N = 3, .offsets = {0, 40, 40, MAX_T}};
        partition(&j, round % 3);
        fill(&whole, &j);
        one_rank(&whole, &j);
        run_all(&j, 0);
    }
}

/* One message to every other member each way, the receives before anything else; along the column
 * what the second protocol says. */
static void test_messages(void **state)
{
    (void)state;
    enum { P = 4, H = 2, HV = 4, TOKENS = 10, WS = HV / 2 * K * V * 4 };
    /* ranks 0 and 1 are row 0, which holds the start of the one sequence on rank 0 */
    const int64_t inputs = TOKENS * (2 * H / 2 * K + HV / 2 * (V + 1 + 1)) * 4, output = TOKENS * HV / 2 * V * 4;
    job j = {.variant = DR_GDN, .gate = DR_GATE_LOG, .dtype = DR_F32, .backend = "ref",
             .protocol = "ulysses:2+p2p", .H = H, .HV = HV, .ranks = P, .T = 40, .N = 1, .offsets = {0, 40}};
    dr_comm *inner[P], *comms[P];
    partition(&j, 0);
    fill(&whole, &j);
    open_ranks(inner, P, 60);
    for (int r = 0; r < P; r++)
        must(dr_comm_record_create(inner[r], &comms[r]));
    many_ranks(&j, comms, -1, 0);
    for (int r = 0; r < P; r++) {
        assert_int_equal(works[r].status, DR_OK);
        const dr_cp_info *info = &works[r].info;
        const int64_t onward[2] = {r < 2, r >= 2}; /* the state from row to row, and its gradient back */
        /* the start is rank 0's, the end rank 3's; the parcel for a member carries that member's states */
        const int64_t states[2] = {(r == 0) + (r == 2), (r == 3) + (r == 1)};
        for (int d = 0; d < 2; d++) {
            assert_int_equal(info->sends[d], 2 + onward[d]);
            assert_int_equal(info->send_bytes[d], inputs + output + (states[d] + onward[d]) * WS);
        }
        int64_t sends = 0, bytes = 0, first_send = INT64_MAX, receives = 0;
        for (int64_t e = 0; e < dr_comm_record_count(comms[r]); e++) {
            dr_comm_event event;
            must(dr_comm_record_event(comms[r], e, &event));
            if (event.bytes == 256) /* an agreement */
                continue;
            if (event.is_send) {
                sends++;
                bytes += (int64_t)event.bytes;
                first_send = event.posted < first_send ? event.posted : first_send;
            } else if (event.posted < first_send)
                receives++;
        }
        assert_int_equal(sends, info->sends[0] + info->sends[1]);
        assert_int_equal(bytes, info->send_bytes[0] + info->send_bytes[1]);
        assert_int_equal(receives, 2); /* of the forward, both ways */
    }
    close_ranks(comms, P);
}

/* Refused on all ranks for the same reason, and the communicator stays usable. */
static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        int32_t ranks, H, HV;
        const char *protocol, *sentence;
        dr_status status;
    } rows[] = {
        {4, 2, 4, "ulysses", " heads: must be a multiple of the 4 ranks", DR_ERR_SUPPORT},
        {4, 4, 8, "ulysses:2", "needs a second protocol", DR_ERR_ARG},
        {4, 4, 8, "ulysses:3+p2p", "must divide the number of ranks (4), got 3", DR_ERR_ARG},
        {4, 4, 8, "ulysses:2+ring", "got \"ring\"", DR_ERR_ARG},
        {4, 4, 8, "ulysses:2+ulysses:3+p2p", "must divide the number of ranks (2), got 3", DR_ERR_ARG},
        {4, 4, 8, "ulysses:0", "needs a width", DR_ERR_ARG},
        {4, 4, 8, "p2p+ulysses", "takes no second protocol", DR_ERR_ARG},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        job j = {.variant = DR_GDN, .gate = DR_GATE_LOG, .dtype = DR_F32, .backend = "ref",
                 .protocol = rows[i].protocol, .H = rows[i].H, .HV = rows[i].HV, .ranks = rows[i].ranks, .T = 40,
                 .N = 1, .offsets = {0, 40}};
        dr_comm *comms[MAX_RANKS];
        partition(&j, 0);
        fill(&whole, &j);
        open_ranks(comms, j.ranks, 10);
        many_ranks(&j, comms, -1, 0);
        for (int r = 0; r < j.ranks; r++) {
            char sentence[300];
            snprintf(sentence, sizeof sentence, " %s", works[r].error);
            if (works[r].status != rows[i].status || strstr(sentence, rows[i].sentence) == NULL)
                fail_msg("%s, rank %d: %s", j.protocol, r, works[r].error);
            assert_int_equal(comms[r]->health, DR_OK);
        }
        close_ranks(comms, j.ranks);
    }
}

/* A rank that gives up, or asks for what cannot be had: every other rank returns ERR_COMM. */
static void test_peers_that_fail(void **state)
{
    (void)state;
    static const char *const protocols[] = {"ulysses", "ulysses:2+p2p", "ulysses:2+doubling"};
    for (int i = 0; i < 3; i++)
        for (int failing = 0; failing < 4; failing++)
            for (int fail_at = 1; fail_at <= 3; fail_at++) {
                job j = {.variant = DR_KDA, .gate = DR_GATE_LOG, .dtype = DR_F32, .backend = "ref",
                         .protocol = protocols[i], .H = 4, .HV = 4, .ranks = 4, .T = 40, .N = 1,
                         .offsets = {0, 40}};
                dr_comm *comms[4];
                partition(&j, 0);
                fill(&whole, &j);
                open_ranks(comms, 4, 0.3);
                many_ranks(&j, comms, failing, fail_at);
                for (int r = 0; r < 4; r++) {
                    if (r == failing && fail_at == 3)
                        assert_non_null(strstr(works[r].error, "chunk_states: must be absent under ulysses"));
                    if (r == failing || works[r].status == DR_ERR_COMM)
                        continue;
                    /* done with its part before the other failed: only without anything left to wait for */
                    assert_int_equal(works[r].status, DR_OK);
                    assert_string_not_equal(j.protocol, "ulysses");
                    assert_int_equal(fail_at, 2);
                }
                close_ranks(comms, 4);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equals_one_rank), cmocka_unit_test(test_bits),
        cmocka_unit_test(test_messages),        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_peers_that_fail),
    };
    return cmocka_run_group_tests_name("ulysses", tests, NULL, NULL);
}
