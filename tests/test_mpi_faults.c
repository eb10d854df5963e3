/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_mpi_faults.c - what the other ranks see when one disagrees, fails in the middle, sends
 * something else, comes too late or refuses: an error on every rank, in time, and an MPI that still
 * works. With the argument "killed" one process kills itself, and the launcher must end the job.
 */
#include "test_mpi.h"

#include <signal.h>

static const char *const protocols[] = {"p2p", "allgather", "grouped:2", "doubling"};

enum { LARGE = 8 << 20, CANARY_BYTES = 1000 };

static const int64_t offsets[] = {0, 60};

static spec spec_make(void)
{
    spec s = {.p = problem_make(DR_KDA, 60, 2, 2, 8, 8), .seed = 3, .absent = BIT(chunk_states)};
    s.p.offsets = offsets;
    s.p.sequences = 1;
    return s;
}

static dr_partition cut(dr_fragment *fragments, const dr_comm *comm)
{
    dr_partition p = DR_PARTITION_INIT;
    p.ranks = comm->size;
    p.count = comm->size;
    p.fragments = fragments;
    MUST(dr_partition_contiguous(60, comm->size, fragments));
    return p;
}

static dr_status swap(dr_comm *comm, void *out, void *in, int32_t peer, size_t sent, size_t got)
{
    dr_batch *batch;
    dr_transfer t[2] = {{peer, 0, in, got}, {peer, 1, out, sent}};
    dr_status status = dr_comm_post(comm, t, 2, &batch);
    return status == DR_OK ? dr_comm_wait(batch) : status;
}

/* This rank is told, sooner or later: an exchange of all ranks cannot succeed any more. */
static void expect_broken(dr_comm *comm, dr_status status, double since, double limit,
                          const char *sentence)
{
    char all[8];
    for (int i = 0; i < 2 && status == DR_OK; i++)
        status = dr_comm_allgather(comm, "x", all, 1);
    assert_int_equal(status, DR_ERR_COMM);
    assert_int_equal(comm->health, DR_ERR_COMM);
    if (strstr(dr_last_error(), sentence) == NULL)
        fail_msg("rank %d: expected \"%s\" in \"%s\"", comm->rank, sentence, dr_last_error());
    if (MPI_Wtime() - since > limit)
        fail_msg("rank %d: was told after %g s", comm->rank, MPI_Wtime() - since);
    dr_batch *batch;
    REFUSED(dr_comm_post(comm, NULL, 0, &batch), DR_ERR_COMM, "can no longer be used");
}

/* Closing after a failure meets within its two seconds, and the world still works. */
static void close_broken(dr_comm *comm)
{
    double since = MPI_Wtime();
    dr_comm_close(comm);
    assert_true(MPI_Wtime() - since < 4);
    MPI_Barrier(MPI_COMM_WORLD);
}

static void test_disagreement(void **state)
{
    (void)state;
    static const char *const names[] = {"problem", "partition", "protocol", "gate: must be one of"};
    dr_comm *comm = mpi_open(MPI_COMM_WORLD, 60);
    for (size_t what = 0; what < DR_COUNT(names); what++) {
        spec sp = spec_make();
        trial x = trial_make(&sp);
        dr_fragment fragments[8];
        dr_partition p = cut(fragments, comm);
        bool odd = comm->rank == 1;
        if (odd && what == 0)
            x.s.p.scale = 2;
        if (odd && what == 1)
            fragments[0].end = fragments[1].begin = 5;
        if (odd && what == 3)
            x.s.p.gate = (dr_gate)0;
        span s;
        REFUSED(span_plan(&s, comm, &x, "ref", &p, odd && what == 2 ? "doubling" : "p2p"),
                DR_ERR_ARG, names[what]);
        assert_int_equal(comm->health, DR_OK);
        span_free(&s);
        trial_free(&x);
    }
    dr_comm_close(comm);
}

/* A rank whose pass fails: everybody hears of it long before the time limit. */
static void test_failing_rank(void **state)
{
    (void)state;
    for (size_t i = 0; i < DR_COUNT(protocols); i++)
        for (int failing = 0; failing < world_size; failing++)
            for (int backward = 0; backward < 2; backward++) {
                dr_comm *comm = mpi_open(MPI_COMM_WORLD, 60);
                spec sp = spec_make();
                trial x = trial_make(&sp);
                dr_fragment fragments[8];
                dr_partition p = cut(fragments, comm);
                span s;
                MUST(span_plan(&s, comm, &x, "cpu", &p, protocols[i]));
                span_fill(&s, comm, &x, &p);
                MPI_Barrier(MPI_COMM_WORLD); /* everybody has a plan */
                double since = MPI_Wtime();
                bool fails = comm->rank == failing;
                char sentence[40] = "exhausted";
                if (fails && !backward)
                    dr_comm_abort(comm, "exhausted");
                dr_status status = dr_cp_forward(s.plan, &s.io, &s.b);
                if (fails && backward)
                    dr_comm_abort(comm, "exhausted");
                if (status == DR_OK)
                    status = dr_cp_backward(s.plan, &s.io, &s.b);
                expect_broken(comm, status, since, 20, fails ? "" : sentence);
                span_free(&s);
                trial_free(&x);
                close_broken(comm);
            }
}

/* Rank 1 gives up while large messages are on their way to it and others wait for it: they return,
 * their memory is their own again, and nothing writes to it later. */
static void test_memory_comes_back(void **state)
{
    (void)state;
    dr_comm *comm = mpi_open(MPI_COMM_WORLD, 60);
    double since = MPI_Wtime();
    if (comm->rank == 1) {
        usleep(200000);
        dr_comm_abort(comm, "disk full");
        char canary[CANARY_BYTES] = {0};
        dr_transfer t = {0, 1, canary, sizeof canary};
        dr_batch *batch;
        REFUSED(comm->ops->post(comm, &t, 1, &batch), DR_ERR_COMM, "disk full");
        close_broken(comm);
        return;
    }
    fence out = fence_make(LARGE, 64, 1), in = fence_make(LARGE, 64, 2);
    assert_int_equal(swap(comm, out.data, in.data, 1, LARGE, LARGE), DR_ERR_COMM);
    fence_free(&out); /* whoever reads it now is killed */
    expect_broken(comm, DR_ERR_COMM, since, 10, "");
    memset(in.data, 3, LARGE);
    close_broken(comm);
    for (size_t i = 0; i < LARGE; i++)
        if (in.data[i] != 3)
            fail_msg("byte %zu of a failed receive was written after its wait", i);
    fence_free(&in);
}

/* Unequal sizes, from one byte to a whole piece; the third rank waits for something else. */
static void test_sizes_differ(void **state)
{
    (void)state;
    static const size_t piece = 1 << 26;
    const size_t sizes[][2] = {{100, 104},         {104, 100},         {1, LARGE},
                               {LARGE, LARGE - 1}, {piece + 1, piece}, {piece, piece + 1}};
    char *out = calloc(1, piece + 1), *in = calloc(1, piece + 1);
    for (size_t i = 0; i < DR_COUNT(sizes); i++) {
        dr_comm *comm = mpi_open(MPI_COMM_WORLD, 60);
        double since = MPI_Wtime();
        dr_status status = DR_OK;
        if (comm->rank < 2)
            status = swap(comm, out, in, 1 - comm->rank, sizes[i][comm->rank], sizes[i][0]);
        expect_broken(comm, status, since, 20, "disagree on the size of a transfer");
        close_broken(comm);
    }
    free(out);
    free(in);
}

/* The last rank comes two seconds late where one is the limit. */
static void test_late_rank(void **state)
{
    (void)state;
    dr_comm *comm = mpi_open(MPI_COMM_WORLD, 1);
    char *out = calloc(1, LARGE), *in = calloc(1, LARGE);
    int32_t last = comm->size - 1;
    double since = MPI_Wtime();
    dr_status status = DR_OK;
    if (comm->rank == last) {
        usleep(2500000);
        status = swap(comm, out, in, 0, LARGE, LARGE);
    } else {
        status = swap(comm, out, in, last, LARGE, LARGE);
        assert_true(MPI_Wtime() - since > 0.9);
    }
    expect_broken(comm, status, since, 4, "waited longer than 1 s for rank 2");
    free(out);
    free(in);
    MPI_Barrier(MPI_COMM_WORLD); /* closing has a limit of its own */
    close_broken(comm);
}

static void test_failing_split(void **state)
{
    (void)state;
    dr_comm *comm = mpi_open(MPI_COMM_WORLD, 60), *part = comm;
    double since = MPI_Wtime();
    if (comm->rank == 1)
        dr_comm_abort(comm, "changed its mind");
    dr_status status = dr_comm_split(comm, 0, 0, &part);
    assert_null(part);
    expect_broken(comm, status, since, 10, comm->rank == 1 ? "" : "rank 1: changed its mind");
    close_broken(comm);
}

static void test_refusals(void **state)
{
    (void)state;
    dr_comm *comm;
    REFUSED(dr_comm_mpi_create(MPI_COMM_NULL, &comm), DR_ERR_ARG, "must not be MPI_COMM_NULL");
    if (world_rank == 1)
        REFUSED(dr_comm_mpi_create(MPI_COMM_WORLD, NULL), DR_ERR_ARG, "out: must not be NULL");
    else
        REFUSED(dr_comm_mpi_create(MPI_COMM_WORLD, &comm), DR_ERR_ARG, "another rank refused");
    MPI_Comm half, between;
    MPI_Comm_split(MPI_COMM_WORLD, world_rank > 0, 0, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, world_rank > 0 ? 0 : 1, 1, &between);
    REFUSED(dr_comm_mpi_create(between, &comm), DR_ERR_ARG, "got an intercommunicator");
    MPI_Comm_free(&between);
    MPI_Comm_free(&half);
}

/* Rank 1 dies while the others wait for it. */
static int killed(void)
{
    dr_comm *comm;
    char byte = 0;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &(int){0});
    if (dr_comm_mpi_create(MPI_COMM_WORLD, &comm) != DR_OK)
        return 0;
    dr_comm_set_timeout(comm, 60);
    if (comm->rank == 1)
        raise(SIGKILL);
    swap(comm, &byte, &byte, 1, 1, 1);
    return 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_disagreement),      cmocka_unit_test(test_failing_rank),
        cmocka_unit_test(test_memory_comes_back), cmocka_unit_test(test_sizes_differ),
        cmocka_unit_test(test_late_rank),         cmocka_unit_test(test_failing_split),
        cmocka_unit_test(test_refusals),
    };
    if (argc > 1 && strcmp(argv[1], "killed") == 0)
        return killed();
    return mpi_main(argc, argv, "mpi_faults", tests, DR_COUNT(tests));
}
