/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_mpi.c - ranks that are MPI processes compute what one rank does: outputs, states and every
 * gradient, for protocols x partitions x layouts x variants, over the world and over every other
 * rank of it in reverse. Also the transfers themselves: order, self, pieces, polling.
 */
#include "test_mpi.h"

static const char *const protocols[] = {"p2p",       "allgather", "grouped:1",
                                        "grouped:2", "grouped:3", "doubling",  "relay"};

enum { MAX_RANKS = 8, MAX_FRAGMENTS = 2 * MAX_RANKS };

static const int64_t one_document[] = {0, 67}, many_documents[] = {0, 13, 13, 14, 50, 67};

static spec spec_of(dr_variant variant, const int64_t *offsets, int64_t sequences)
{
    spec s = {.p = problem_make(variant, 67, 2, 4, 6, 5), .seed = 7, .absent = BIT(chunk_states)};
    s.p.offsets = offsets;
    s.p.sequences = sequences;
    return s;
}

/* The error of each tensor over all ranks, against the norm of the whole. */
static void expect_whole(const span *s, dr_comm *comm, const trial *x, const result *want,
                         const char *what)
{
    double error[SLOTS] = {0}, all[MAX_RANKS][SLOTS];
    assert_true(comm->size <= MAX_RANKS);
    for (int i = 0; i < SLOTS; i++) {
        bool of_state;
        int64_t width = slot_row(x, i, &of_state);
        if (want->value[i] == NULL)
            continue;
        for (int64_t r = 0; r < (of_state ? s->pieces : s->tokens); r++)
            for (int64_t c = 0; c < width && (!of_state || piece_counts(i, &s->piece[r])); c++) {
                int64_t at = (of_state ? s->piece[r].sequence : s->row[r]) * width + c;
                double e = s->t[i][r * width + c] - want->value[i][at];
                error[i] += e * e;
            }
    }
    MUST(dr_comm_allgather(comm, error, all, sizeof error));
    for (int i = 0; i < SLOTS; i++) {
        double sum = 0, norm = norm_of(want->value[i], want->count[i]);
        for (int32_t r = 0; r < comm->size; r++)
            sum += all[r][i];
        if (want->value[i] != NULL && !(sqrt(sum) <= 1e-5 * norm))
            fail_msg("%s: %s is off by %g", what, slots[i].name, sqrt(sum) / norm);
    }
}

static void expect_bits(const span *got, const span *want, const trial *x, const char *what)
{
    for (int i = 0; i < SLOTS; i++) {
        bool of_state;
        int64_t width = slot_row(x, i, &of_state), n = of_state ? got->pieces : got->tokens;
        for (int64_t r = 0; r < n && width > 0; r++)
            if ((!of_state || piece_counts(i, &got->piece[r])) &&
                memcmp(got->t[i] + r * width, want->t[i] + r * width,
                       (size_t)width * sizeof(float)) != 0)
                fail_msg("%s: row %lld of %s has other bits than with p2p", what, (long long)r,
                         slots[i].name);
    }
}

/* One trial by all protocols. */
static void run_protocols(dr_comm *comm, trial *x, const char *backend, const char *cut,
                          const dr_partition *partition, const result *want)
{
    span first = {0};
    for (size_t i = 0; i < DR_COUNT(protocols); i++) {
        const bool relay = strcmp(protocols[i], "relay") == 0;
        char what[160];
        span s;
        if (relay && partition->count > partition->ranks) /* it serves one stretch per rank */
            continue;
        snprintf(what, sizeof what, "%s %s %s %s, %lld documents, rank %d of %d", backend,
                 x->p.variant == DR_KDA ? "kda" : "gdn", protocols[i], cut, (long long)x->N,
                 comm->rank, comm->size);
        MUST(span_plan(&s, comm, x, backend, partition, protocols[i]));
        span_fill(&s, comm, x, partition);
        MUST(dr_cp_forward(s.plan, &s.io, &s.b));
        MUST(dr_cp_backward(s.plan, &s.io, &s.b));
        expect_whole(&s, comm, x, want, what);
        if (i == 0)
            first = s;
        else {
            if (!relay && strcmp(protocols[i], "doubling") != 0) /* no maps; another order of maps */
                expect_bits(&s, &first, x, what);
            span_free(&s);
        }
    }
    span_free(&first);
}

static void sweep(dr_comm *comm)
{
    static const char *const backends[] = {"ref", "cpu"};
    const dr_variant variants[] = {DR_GDN, DR_KDA};
    for (int packed = 0; packed < 2; packed++)
        for (size_t v = 0; v < DR_COUNT(variants); v++) {
            spec sp = spec_of(variants[v], packed ? many_documents : one_document, packed ? 5 : 1);
            trial x = trial_make(&sp);
            dr_context *ctx;
            MUST(dr_context_create("ref", NULL, &ctx));
            result want = trial_run(ctx, &x, (how){0});
            dr_context_destroy(ctx);
            for (size_t b = 0; b < DR_COUNT(backends); b++) {
                dr_fragment fragments[MAX_FRAGMENTS];
                dr_partition p = DR_PARTITION_INIT;
                p.ranks = comm->size;
                p.fragments = fragments;
                p.count = comm->size;
                MUST(dr_partition_contiguous(sp.p.tokens, comm->size, fragments));
                run_protocols(comm, &x, backends[b], "contiguous", &p, &want);
                p.count = 2 * comm->size;
                MUST(dr_partition_zigzag(sp.p.tokens, comm->size, fragments));
                run_protocols(comm, &x, backends[b], "zig-zag", &p, &want);
            }
            result_free(&want);
            trial_free(&x);
        }
}

static void test_world(void **state)
{
    (void)state;
    dr_comm *comm = mpi_open(MPI_COMM_WORLD, 60);
    assert_int_equal(comm->rank, world_rank);
    assert_int_equal(comm->size, world_size);
    assert_true(comm->timeout == 60);
    sweep(comm);
    dr_comm_close(comm);
}

/* Every other rank of the world, the last one first: once cut by MPI, once by dr_comm_split. */
static void test_subgroups(void **state)
{
    (void)state;
    bool in = world_rank % 2 == 0;
    int last = (world_size - 1) / 2 * 2;
    MPI_Comm group;
    MPI_Comm_split(MPI_COMM_WORLD, in ? 0 : MPI_UNDEFINED, -world_rank, &group);
    if (in) {
        dr_comm *comm = mpi_open(group, 60);
        assert_int_equal(comm->rank, (last - world_rank) / 2);
        sweep(comm);
        dr_comm_close(comm);
    }
    dr_comm *world = mpi_open(MPI_COMM_WORLD, 60), *part = world;
    MUST(dr_comm_split(world, in ? 3 : -1, -world_rank, &part));
    if (in) {
        assert_int_equal(part->rank, (last - world_rank) / 2);
        assert_int_equal(part->size, last / 2 + 1);
        assert_true(part->timeout == 60);
        int32_t all[MAX_RANKS];
        MUST(dr_comm_allgather(part, &world_rank, all, sizeof *all));
        for (int r = 0; r < part->size; r++)
            assert_int_equal(all[r], last - 2 * r);
        MPI_Comm_free(&group);
    } else {
        assert_null(part);
    }
    dr_comm_close(part);
    dr_comm_close(world);
}

/* Transfers of several batches match in the order posted, to itself as to others; what MPI sees of
 * the sender's buffer is what it held when posted. */
static void test_order(void **state)
{
    (void)state;
    enum { ROUNDS = 40 };
    dr_comm *comm = mpi_open(MPI_COMM_WORLD, 60);
    int32_t got[ROUNDS][MAX_RANKS], mine;
    dr_batch *receives[ROUNDS], *sends[ROUNDS];
    assert_true(world_size <= MAX_RANKS);
    for (int32_t r = 0; r < ROUNDS; r++) {
        dr_transfer in[MAX_RANKS], out[MAX_RANKS];
        for (int32_t p = 0; p < world_size; p++) {
            in[p] = (dr_transfer){p, 0, &got[r][p], sizeof mine};
            out[p] = (dr_transfer){p, 1, &mine, sizeof mine};
        }
        mine = 1000 * world_rank + r;
        MUST(dr_comm_post(comm, out, world_size, &sends[r]));
        MUST(dr_comm_post(comm, in, world_size, &receives[r]));
    }
    for (int32_t r = ROUNDS; r-- > 0;) { /* waited for backwards */
        int32_t done = 0;
        while (!done)
            MUST(dr_comm_test(receives[r], &done));
        MUST(dr_comm_wait(receives[r]));
        MUST(dr_comm_wait(sends[r]));
        for (int32_t p = 0; p < world_size; p++)
            assert_int_equal(got[r][p], 1000 * p + r);
    }
    dr_batch *nothing;
    MUST(dr_comm_post(comm, &(dr_transfer){0, 1, NULL, 0}, 1, &nothing));
    MUST(dr_comm_wait(nothing));
    dr_comm_close(comm);
}

/* A transfer that takes three messages; the middle of the ring is not involved. */
static void test_pieces(void **state)
{
    (void)state;
    const size_t bytes = 2 * (size_t)(1 << 26) + 5;
    dr_comm *comm = mpi_open(MPI_COMM_WORLD, 60);
    bool sends = world_rank == 0, takes = world_rank == world_size - 1;
    unsigned char *data = sends || takes ? malloc(bytes) : NULL;
    for (size_t i = 0; sends && i < bytes; i++)
        data[i] = (unsigned char)(i * 2654435761u >> 13);
    if (sends || takes) {
        dr_batch *batch;
        dr_transfer t = {takes ? 0 : world_size - 1, sends, data, bytes};
        MUST(dr_comm_post(comm, &t, 1, &batch));
        if (sends)
            memset(data, 0, bytes);
        MUST(dr_comm_wait(batch));
        for (size_t i = 0; takes && i < bytes; i++)
            if (data[i] != (unsigned char)(i * 2654435761u >> 13))
                fail_msg("byte %zu of %zu is wrong", i, bytes);
    }
    free(data);
    dr_comm_close(comm);
}

static void test_allgather(void **state)
{
    (void)state;
    dr_comm *comm = mpi_open(MPI_COMM_WORLD, 60);
    int32_t mine[3] = {world_rank, 10 * world_rank, -1}, all[MAX_RANKS][3];
    MUST(dr_comm_allgather(comm, mine, all, sizeof mine));
    for (int r = 0; r < world_size; r++)
        assert_int_equal(all[r][1], 10 * r);
    dr_comm_close(comm);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_world),     cmocka_unit_test(test_subgroups),
        cmocka_unit_test(test_order),     cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_allgather),
    };
    return mpi_main(argc, argv, "mpi", tests, DR_COUNT(tests));
}
