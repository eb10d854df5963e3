/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_mpi.h - what the groups under mpirun share: every rank runs the same cmocka tests in the
 * same order, and a rank whose test fails aborts, whereupon the launcher ends the job. Also one
 * rank's part of a trial: its rows of every tensor, run over a communicator.
 */
#ifndef DR_TEST_MPI_H
#define DR_TEST_MPI_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "trial.h"

#include <deltarule/mpi.h>

static int world_rank, world_size;

static inline int mpi_main(int argc, char **argv, const char *name, const struct CMUnitTest *tests,
                           size_t n)
{
    int level, failed;
    setenv("CMOCKA_TEST_ABORT", "1", 1);
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN); /* mpi.h says why */
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    failed = _cmocka_run_group_tests(name, tests, n, NULL, NULL);
    MPI_Finalize();
    return failed;
}

static inline dr_comm *mpi_open(MPI_Comm from, double timeout)
{
    dr_comm *comm;
    MUST(dr_comm_mpi_create(from, &comm));
    MUST(dr_comm_set_timeout(comm, timeout));
    return comm;
}

/* What one rank owns of a trial: which rows of the stream, which sequence each piece belongs to. */
typedef struct span {
    dr_cp_plan *plan;
    dr_context *ctx;
    dr_buffers b;
    int64_t tokens, pieces;
    int64_t *row;       /* [tokens] */
    dr_cp_piece *piece; /* [pieces] */
    float *t[SLOTS];
    dr_io io;
} span;

/* Elements of one token or one state of the slot; 0: the slot has no such rows. */
static inline int64_t slot_row(const trial *x, int i, bool *of_state)
{
    int64_t shape[DR_MAX_RANK], width = 1;
    int32_t rank = slot_shape(&x->p, x->N, 0, i, shape);
    *of_state = slots[i].letters[0] == 'N';
    if (!slot_used(x, i) || (!*of_state && slots[i].letters[0] != 'B'))
        return 0;
    for (int32_t a = *of_state ? 1 : 2; a < rank; a++)
        width *= shape[a];
    return width;
}

/* Whether the piece takes part in a state tensor: inputs and gradients live at the ends of
 * sequences. */
static inline bool piece_counts(int i, const dr_cp_piece *p)
{
    return i == S_initial_state || i == S_d_initial_state ? p->starts : p->ends;
}

static inline dr_status span_plan(span *s, dr_comm *comm, const trial *x, const char *backend,
                                  const dr_partition *partition, const char *protocol)
{
    dr_context_options one = DR_CONTEXT_OPTIONS_INIT;
    one.threads = 1;
    *s = (span){.b = DR_BUFFERS_INIT, .io = DR_IO_INIT};
    MUST(dr_context_create(backend, &one, &s->ctx));
    return dr_cp_plan_create(s->ctx, comm, &x->s.p, partition, protocol, &s->plan);
}

/* Gathers this rank's rows; pieces inside a sequence get NaN, since nobody may read them. */
static inline void span_fill(span *s, dr_comm *comm, const trial *x, const dr_partition *partition)
{
    dr_cp_info info = DR_CP_INFO_INIT;
    MUST(dr_cp_plan_describe(s->plan, &info));
    MUST(dr_cp_buffers_create(s->plan, &s->b));
    s->tokens = info.tokens;
    s->pieces = info.pieces;
    s->row = calloc((size_t)s->tokens + 1, sizeof *s->row);
    s->piece = calloc((size_t)s->pieces + 1, sizeof *s->piece);
    for (int64_t f = 0, at = 0; f < partition->count; f++)
        for (int64_t t = partition->fragments[f].begin;
             partition->fragments[f].rank == comm->rank && t < partition->fragments[f].end; t++)
            s->row[at++] = t;
    for (int64_t n = 0; n < s->pieces; n++)
        MUST(dr_cp_plan_piece(s->plan, n, &s->piece[n]));
    dr_problem mine = x->p;
    mine.tokens = s->tokens;
    for (int i = 0; i < SLOTS; i++) {
        bool of_state;
        int64_t width = slot_row(x, i, &of_state), n = of_state ? s->pieces : s->tokens;
        int64_t shape[DR_MAX_RANK] = {0};
        if (width == 0)
            continue;
        int32_t rank = slot_shape(&mine, s->pieces, 0, i, shape);
        s->t[i] = malloc((size_t)(n * width + 1) * sizeof(float));
        memset(s->t[i], UNWRITTEN, (size_t)(n * width + 1) * sizeof(float));
        *io_slot(&s->io, i) =
            dr_tensor_make(s->t[i], DR_F32, rank, shape[0], shape[1], shape[2], shape[3]);
        if (slots[i].role == ROLE_OUTPUT || slots[i].role == ROLE_GRADIENT)
            continue;
        double *all = view_read(&x->t[i].view);
        for (int64_t r = 0; r < n; r++)
            for (int64_t c = 0; c < width && (!of_state || piece_counts(i, &s->piece[r])); c++)
                s->t[i][r * width + c] =
                    (float)all[(of_state ? s->piece[r].sequence : s->row[r]) * width + c];
        free(all);
    }
}

static inline void span_free(span *s)
{
    for (int i = 0; i < SLOTS; i++)
        free(s->t[i]);
    free(s->row);
    free(s->piece);
    dr_buffers_destroy(&s->b);
    dr_cp_plan_destroy(s->plan);
    dr_context_destroy(s->ctx);
}

#endif
