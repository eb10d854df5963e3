/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_halo.c - a convolution whose stream is cut over ranks equals the convolution of the stream:
 * outputs, final states and every gradient, over random worlds, partitions and layouts, many of whose
 * fragments are shorter than the halo. The history itself is compared bit for bit with the stream, and
 * what travels (recorder) with a count made token by token.
 */
#include <stdint.h>

static uint64_t seed = 20251; /* ranks.h draws from it */
#include "ranks.h"

#include <deltarule/cp.h>
#include <deltarule/ops.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = 5, MAX_W = 5, MAX_HALO = 12, MAX_T = 64, MAX_N = 12, MAX_RANKS = 5, MAX_F = 24,
       MAX_P = MAX_N + MAX_F };

typedef struct stream {
    float x[MAX_T * D], w[D * MAX_W], bias[D], h0[MAX_P * D * MAX_HALO];
    float dy[MAX_T * D], dht[MAX_P * D * MAX_HALO];
    float y[MAX_T * D], ht[MAX_P * D * MAX_HALO];
    float dx[MAX_T * D], dh0[MAX_P * D * MAX_HALO], dw[D * MAX_W], dbias[D];
} stream;

typedef struct job {
    int32_t W, dilation;
    int64_t T, N, halo, offsets[MAX_N + 1];
    int32_t ranks;
    int64_t count;
    dr_fragment fragments[MAX_F];
    bool states; /* initial states and their gradients are there */
} job;

typedef struct rank_work {
    const job *j;
    const stream *in;
    stream *out; /* gathered; disjoint parts by rank */
    float dw[D * MAX_W], dbias[D];
    dr_comm *comm;
    dr_status status;
    char error[200];
    dr_cp_info info;
} rank_work;

static dr_conv_args conv_of(stream *s, const job *j, int64_t T, const int64_t *offsets, int64_t N)
{
    dr_conv_args a = DR_CONV_ARGS_INIT;
    a.activation = DR_ACT_SILU;
    a.dilation = j->dilation;
    a.offsets = offsets;
    a.sequences = N;
    a.x = dr_tensor_make(s->x, DR_F32, 3, 1, T, D, 0);
    a.weight = dr_tensor_make(s->w, DR_F32, 2, D, j->W, 0, 0);
    a.bias = dr_tensor_make(s->bias, DR_F32, 1, D, 0, 0, 0);
    a.y = dr_tensor_make(s->y, DR_F32, 3, 1, T, D, 0);
    a.dy = dr_tensor_make(s->dy, DR_F32, 3, 1, T, D, 0);
    a.dx = dr_tensor_make(s->dx, DR_F32, 3, 1, T, D, 0);
    a.dweight = dr_tensor_make(s->dw, DR_F32, 2, D, j->W, 0, 0);
    a.dbias = dr_tensor_make(s->dbias, DR_F32, 1, D, 0, 0, 0);
    return a;
}

static dr_tensor state_of(float *data, const job *j, int64_t N)
{
    return dr_tensor_make(data, DR_F32, 3, N, D, j->halo, 0);
}

#define TRY(call) do { if ((status = (call)) != DR_OK) goto end; } while (0)

static dr_status one_rank(const job *j, stream *s)
{
    dr_context *ctx = NULL;
    dr_status status;
    TRY(dr_context_create("ref", NULL, &ctx));
    dr_conv_args a = conv_of(s, j, j->T, j->offsets, j->N);
    if (j->states) {
        a.initial_state = state_of(s->h0, j, j->N);
        a.d_initial_state = state_of(s->dh0, j, j->N);
    }
    a.final_state = state_of(s->ht, j, j->N);
    a.d_final_state = state_of(s->dht, j, j->N);
    TRY(dr_conv(ctx, &a));
    TRY(dr_conv_backward(ctx, &a));
end:
    dr_context_destroy(ctx);
    return status;
}

/* The element that stands `back` tokens before token t of sequence q: of the stream, or of its state. */
static float looked_up(const job *j, const stream *s, int64_t q, int64_t t, int64_t d)
{
    if (t >= j->offsets[q])
        return s->x[t * D + d];
    return j->states ? s->h0[(q * D + d) * j->halo + j->halo - (j->offsets[q] - t)] : 0;
}

static dr_status compute(rank_work *w)
{
    const job *j = w->j;
    dr_context *ctx = NULL;
    dr_halo *halo = NULL;
    dr_cp_plan *plan = NULL; /* for the pieces */
    stream *s = calloc(1, sizeof *s);
    float *history = calloc(2 * MAX_P * D * MAX_HALO, sizeof *history), *d_history = history + MAX_P * D * MAX_HALO;
    int64_t offsets[MAX_P + 1], first[MAX_P]; /* of a piece, in the stream */
    dr_cp_piece pieces[MAX_P];
    void *scratch = NULL;
    dr_status status;
    dr_partition partition = DR_PARTITION_INIT;
    partition.ranks = j->ranks;
    partition.count = j->count;
    partition.fragments = j->fragments;
    dr_halo_config config = DR_HALO_CONFIG_INIT;
    config.tokens = j->T;
    config.offsets = j->offsets;
    config.sequences = j->N;
    config.partition = &partition;
    config.channels = D;
    config.width = j->halo;
    dr_problem problem = DR_PROBLEM_INIT;
    problem.variant = DR_GDN;
    problem.tokens = j->T;
    problem.heads = problem.key_dim = problem.value_dim = 1;
    problem.gate = DR_GATE_LOG;
    problem.beta = DR_BETA_VALUE;
    problem.offsets = j->offsets;
    problem.sequences = j->N;
    TRY(dr_context_create("ref", NULL, &ctx));
    TRY(dr_cp_plan_create(ctx, w->comm, &problem, &partition, "p2p", &plan));
    TRY(dr_halo_create(ctx, w->comm, &config, &halo));
    dr_comm_record_clear(w->comm);
    w->info = (dr_cp_info)DR_CP_INFO_INIT;
    TRY(dr_halo_describe(halo, &w->info));
    const int64_t N = w->info.pieces, T = w->info.tokens;
    int64_t at = 0, n = 0;
    for (int64_t i = 0; i < N; i++)
        TRY(dr_cp_plan_piece(plan, i, &pieces[i]));
    for (int64_t i = 0; i < j->count; i++) {
        const dr_fragment *f = &j->fragments[i];
        if (f->rank != w->comm->rank)
            continue;
        const size_t bytes = (size_t)(f->end - f->begin) * D * sizeof(float);
        memcpy(s->x + at * D, w->in->x + f->begin * D, bytes);
        memcpy(s->dy + at * D, w->in->dy + f->begin * D, bytes);
        at += f->end - f->begin;
        for (; n < N && f->begin < f->end && pieces[n].end <= at; n++)
            first[n] = f->begin + pieces[n].begin - (at - (f->end - f->begin));
    }
    const size_t state = (size_t)(D * j->halo) * sizeof(float);
    for (int64_t i = 0; i < N; i++) {
        offsets[i] = pieces[i].begin;
        offsets[i + 1] = pieces[i].end;
        if (pieces[i].starts)
            first[i] = j->offsets[pieces[i].sequence];
        memset(s->h0 + i * D * j->halo, 0xff, state); /* what must not be read is NaN */
        if (pieces[i].starts)
            memcpy(s->h0 + i * D * j->halo, w->in->h0 + pieces[i].sequence * D * j->halo, state);
        if (pieces[i].ends) /* the convolution reads all, so the others are zero */
            memcpy(s->dht + i * D * j->halo, w->in->dht + pieces[i].sequence * D * j->halo, state);
    }
    memcpy(s->w, w->in->w, sizeof s->w);
    memcpy(s->bias, w->in->bias, sizeof s->bias);
    dr_buffers b = DR_BUFFERS_INIT;
    scratch = aligned_alloc(64, (w->info.scratch_bytes + 64) / 64 * 64);
    b.scratch = scratch;
    b.scratch_bytes = w->info.scratch_bytes;
    const dr_tensor none = DR_TENSOR_NONE, h0 = j->states ? state_of(s->h0, j, N) : none;
    const dr_tensor dh0 = j->states ? state_of(s->dh0, j, N) : none;
    const dr_tensor ht = state_of(history, j, N), dht = state_of(d_history, j, N);
    dr_conv_args a = conv_of(s, j, T, offsets, N);
    a.initial_state = ht;
    a.final_state = state_of(s->ht, j, N);
    a.d_final_state = state_of(s->dht, j, N);
    a.d_initial_state = dht;
    TRY(dr_halo_forward(halo, &a.x, &h0, &ht, &b));
    for (int64_t i = 0; i < N; i++) /* bit for bit what stands there in the stream */
        for (int64_t d = 0; T > 0 && d < D; d++)
            for (int64_t c = 0; c < j->halo; c++) {
                float want = looked_up(j, w->in, pieces[i].sequence, first[i] - j->halo + c, d);
                if (memcmp(&want, &history[(i * D + d) * j->halo + c], sizeof want) != 0) {
                    snprintf(w->error, sizeof w->error, "history of piece %d, channel %d, column %d", (int)i,
                             (int)d, (int)c);
                    status = DR_ERR_FORMAT;
                    goto end;
                }
            }
    TRY(dr_conv(ctx, &a));
    TRY(dr_conv_backward(ctx, &a));
    TRY(dr_halo_backward(halo, &dht, &a.dx, &dh0, &b));
    for (int64_t i = 0, from = 0; i < j->count; i++) {
        const dr_fragment *f = &j->fragments[i];
        if (f->rank != w->comm->rank)
            continue;
        const size_t bytes = (size_t)(f->end - f->begin) * D * sizeof(float);
        memcpy(w->out->y + f->begin * D, s->y + from * D, bytes);
        memcpy(w->out->dx + f->begin * D, s->dx + from * D, bytes);
        from += f->end - f->begin;
    }
    for (int64_t i = 0; i < N; i++) {
        const int64_t q = pieces[i].sequence * D * j->halo;
        if (pieces[i].ends)
            memcpy(w->out->ht + q, s->ht + i * D * j->halo, state);
        if (pieces[i].starts)
            memcpy(w->out->dh0 + q, s->dh0 + i * D * j->halo, state);
        for (int64_t c = 0; !pieces[i].starts && c < D * j->halo; c++)
            if (s->dh0[i * D * j->halo + c] != 0)
                status = DR_ERR_FORMAT;
    }
    memcpy(w->dw, s->dw, sizeof w->dw);
    memcpy(w->dbias, s->dbias, sizeof w->dbias);
end:
    if (w->error[0] == 0)
        snprintf(w->error, sizeof w->error, "%s", dr_last_error());
    if (status != DR_OK)
        dr_comm_abort(w->comm, w->error);
    dr_halo_destroy(halo);
    dr_cp_plan_destroy(plan);
    dr_context_destroy(ctx);
    free(scratch);
    free(history);
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
static dr_comm *comms[MAX_RANKS];

static void many_ranks(const job *j, const stream *in, stream *out)
{
    dr_comm *raw[MAX_RANKS];
    assert_int_equal(dr_comm_threads_create(j->ranks, raw), DR_OK);
    memset(out->dw, 0, sizeof out->dw);
    memset(out->dbias, 0, sizeof out->dbias);
    for (int r = 0; r < j->ranks; r++) {
        assert_int_equal(dr_comm_record_create(raw[r], &comms[r]), DR_OK);
        works[r] = (rank_work){.j = j, .in = in, .out = out, .comm = comms[r]};
    }
    run_ranks(j->ranks, rank_main, works, sizeof *works);
    for (int r = 0; r < j->ranks; r++) {
        if (works[r].status != DR_OK)
            fail_msg("rank %d: %s", r, works[r].error);
        for (int i = 0; i < D * j->W; i++)
            out->dw[i] += works[r].dw[i];
        for (int i = 0; i < D; i++)
            out->dbias[i] += works[r].dbias[i];
    }
}

static void close_comms(const job *j)
{
    for (int r = 0; r < j->ranks; r++)
        dr_comm_close(comms[r]);
}

static job random_job(void)
{
    job j = {.W = 1 + (int32_t)below(MAX_W), .dilation = 1 + (int32_t)below(3), .states = below(2) == 0,
             .ranks = 1 + (int32_t)below(MAX_RANKS)};
    j.halo = (j.W - 1) * j.dilation;
    j.T = 1 + below(MAX_T);
    j.N = 1 + below(MAX_N);
    j.offsets[j.N] = j.T;
    for (int64_t n = 1; n < j.N; n++) /* sorted by insertion; empty sequences occur */
        for (int64_t at = below(j.T + 1), i = n;; i--)
            if (i == 1 || j.offsets[i - 1] <= at) {
                j.offsets[i] = at;
                break;
            } else {
                j.offsets[i] = j.offsets[i - 1];
            }
    const int64_t kind = below(3);
    dr_fragment *f = j.fragments;
    if (kind == 0) {
        j.count = j.ranks;
        assert_int_equal(dr_partition_contiguous(j.T, j.ranks, f), DR_OK);
    } else if (kind == 1) {
        j.count = 2 * j.ranks;
        assert_int_equal(dr_partition_zigzag(j.T, j.ranks, f), DR_OK);
    } else { /* uneven, often tiny or empty, on any rank, in any order */
        for (int64_t at = 0; at < j.T; j.count++) {
            int64_t end = at + below(2) * below(4) + (below(4) == 0 ? below(j.T) : 0);
            end = end > j.T || j.count == MAX_F - 1 ? j.T : end;
            f[j.count] = (dr_fragment){at, end, (int32_t)below(j.ranks)};
            at = end;
        }
        for (int64_t i = j.count - 1; i > 0; i--) {
            const int64_t k = below(i + 1);
            const dr_fragment swap = f[i];
            f[i] = f[k];
            f[k] = swap;
        }
    }
    return j;
}

static void fill(stream *s)
{
    float *all = (float *)s;
    for (size_t i = 0; i < sizeof *s / sizeof *all; i++)
        all[i] = (float)(2 * uniform() - 1);
}

static void near(const char *name, const float *a, const float *b, int64_t n)
{
    double num = 0, den = 1e-30;
    for (int64_t i = 0; i < n; i++) {
        num += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        den += (double)b[i] * b[i];
    }
    if (!(sqrt(num / den) <= 1e-6) && !(num <= 1e-24))
        fail_msg("%s: off by %g", name, sqrt(num / den));
}

static int32_t owner(const job *j, int64_t t)
{
    int64_t i = 0;
    while (t < j->fragments[i].begin || t >= j->fragments[i].end)
        i++;
    return j->fragments[i].rank;
}

/* Columns that must travel from rank to rank, token by token: every fragment whose first token is not the
 * first of its sequence needs the halo before it. */
static void expected_columns(const job *j, int64_t columns[MAX_RANKS][MAX_RANKS])
{
    memset(columns, 0, MAX_RANKS * sizeof columns[0]);
    for (int64_t i = 0; i < j->count; i++) {
        const dr_fragment *f = &j->fragments[i];
        int64_t q = 0;
        while (q < j->N && !(j->offsets[q] <= f->begin && f->begin < j->offsets[q + 1]))
            q++;
        if (f->begin == f->end || j->offsets[q] == f->begin)
            continue;
        for (int64_t t = f->begin - j->halo; t < f->begin; t++) {
            const int32_t from = owner(j, t < j->offsets[q] ? j->offsets[q] : t);
            if (from != f->rank)
                columns[from][f->rank]++;
        }
    }
}

static void check_traffic(const job *j)
{
    int64_t columns[MAX_RANKS][MAX_RANKS];
    expected_columns(j, columns);
    for (int r = 0; r < j->ranks; r++) {
        int64_t sent[2][MAX_RANKS] = {{0}}, sends[2] = {0}, bytes[2] = {0};
        int64_t messages = dr_comm_record_count(comms[r]), seen = 0;
        for (int p = 0; p < j->ranks; p++) {
            sends[0] += columns[r][p] > 0;
            sends[1] += columns[p][r] > 0;
            bytes[0] += columns[r][p] * D * 4;
            bytes[1] += columns[p][r] * D * 4;
        }
        for (int64_t i = 0; i < messages; i++) {
            dr_comm_event e;
            assert_int_equal(dr_comm_record_event(comms[r], i, &e), DR_OK);
            assert_true(e.waited >= 0);
            const int back = i >= sends[0] + sends[1]; /* the forward's sends and receives come first */
            if (!e.is_send)
                continue;
            seen++;
            assert_int_equal(sent[back][e.peer]++, 0); /* one message per pair */
            assert_int_equal(e.bytes, (size_t)(back ? columns[e.peer][r] : columns[r][e.peer]) * D * 4);
        }
        assert_int_equal(seen, sends[0] + sends[1]);
        assert_int_equal(messages, 2 * seen);
        for (int dir = 0; dir < 2; dir++) {
            assert_int_equal(works[r].info.sends[dir], sends[dir]);
            assert_int_equal(works[r].info.send_bytes[dir], bytes[dir]);
        }
    }
}

static void equals_one_rank(void **unused)
{
    (void)unused;
    static stream whole, many, again;
    int64_t far = 0; /* jobs where a rank hears from two or more */
    for (int i = 0; i < 200; i++) {
        const job j = random_job();
        fill(&whole);
        many = again = whole;
        many_ranks(&j, &whole, &many);
        check_traffic(&j);
        for (int r = 0; r < j.ranks; r++)
            far += works[r].info.sends[1] > 1;
        close_comms(&j);
        many_ranks(&j, &whole, &again);
        close_comms(&j);
        assert_memory_equal(&many, &again, sizeof many);
        if (one_rank(&j, &whole) != DR_OK)
            fail_msg("%s", dr_last_error());
        near("y", many.y, whole.y, j.T * D);
        near("final_state", many.ht, whole.ht, j.N * D * j.halo);
        near("dx", many.dx, whole.dx, j.T * D);
        near("dweight", many.dw, whole.dw, D * j.W);
        near("dbias", many.dbias, whole.dbias, D);
        if (j.states)
            near("d_initial_state", many.dh0, whole.dh0, j.N * D * j.halo);
    }
    assert_true(far > 25);
}

static void documents_keep_apart(void **unused)
{
    (void)unused;
    static stream whole, many;
    job j = {.W = 4, .dilation = 1, .halo = 3, .T = 32, .N = 4, .offsets = {0, 8, 16, 24, 32}, .ranks = 4,
             .count = 4};
    assert_int_equal(dr_partition_contiguous(j.T, j.ranks, j.fragments), DR_OK);
    fill(&whole);
    many_ranks(&j, &whole, &many);
    for (int r = 0; r < j.ranks; r++)
        assert_int_equal(dr_comm_record_count(comms[r]), 0);
    close_comms(&j);
}

/* ---- wrong calls ------------------------------------------------------------------------- */

static void refusals(void **unused)
{
    (void)unused;
    dr_context *ctx;
    dr_comm *comm;
    dr_halo *halo;
    const dr_fragment one = {0, 8, 0};
    dr_partition partition = DR_PARTITION_INIT;
    partition.ranks = 1;
    partition.count = 1;
    partition.fragments = &one;
    assert_int_equal(dr_context_create("ref", NULL, &ctx), DR_OK);
    assert_int_equal(dr_comm_self_create(&comm), DR_OK);
    const dr_halo_config good = {sizeof good, 8, NULL, 0, &partition, 2, 3};
    dr_halo_config bad[5] = {good, good, good, good, good};
    const char *const says[5] = {"config.size", "channels, width", "channels, width", "tokens", "partition"};
    bad[0].size = 1;
    bad[1].channels = 0;
    bad[2].width = -1;
    bad[3].tokens = -1;
    bad[4].partition = NULL;
    for (int i = 0; i < 5; i++) {
        assert_int_not_equal(dr_halo_create(ctx, comm, &bad[i], &halo), DR_OK);
        assert_null(halo);
        assert_non_null(strstr(dr_last_error(), says[i]));
    }
    assert_int_equal(dr_halo_create(ctx, comm, NULL, &halo), DR_ERR_ARG);
    assert_int_equal(dr_halo_create(ctx, comm, &good, &halo), DR_OK);
    float x[16] = {0}, h[6];
    _Alignas(64) char scratch[1024]; /* red zones under a sanitizer included */
    dr_buffers b = DR_BUFFERS_INIT;
    assert_int_equal(dr_halo_backward(NULL, NULL, NULL, NULL, &b), DR_ERR_ARG);
    b.scratch = scratch;
    b.scratch_bytes = sizeof scratch;
    const dr_tensor tx = dr_tensor_make(x, DR_F32, 3, 1, 8, 2, 0), none = DR_TENSOR_NONE;
    const dr_tensor narrow = dr_tensor_make(h, DR_F32, 3, 1, 2, 2, 0);
    if (dr_halo_forward(halo, &tx, &none, &narrow, &b) != DR_ERR_SHAPE)
        fail_msg("%s", dr_last_error());
    assert_non_null(strstr(dr_last_error(), "history"));
    const dr_tensor th = dr_tensor_make(h, DR_F32, 3, 1, 2, 3, 0); /* and after a failure: */
    assert_int_equal(dr_halo_forward(halo, &tx, &none, &th, &b), DR_ERR_COMM);
    dr_halo_destroy(halo);
    dr_comm_close(comm);
    dr_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_one_rank),
        cmocka_unit_test(documents_keep_apart),
        cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
