/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm_mpi_open.c - opening, splitting and closing the MPI communicator: everything that is
 * collective.
 *
 * NOTE [Leaving]: MPI may give the place of a freed communicator to a new one, and what was never
 * received would turn up there. After a failure, ranks that close therefore tell each other how
 * many messages they have sent, and receive and drop until they have seen as many. Whoever is
 * through, with its own sends ended, frees. Who is not in time leaves the memory that MPI may look
 * at, and the communicators, to MPI for the rest of the process.
 */
#include "mpi/comm_mpi.h"

#include <stdlib.h>
#include <string.h>

static const double grace_close = 2.0; /* seconds */

/* ---- opening ------------------------------------------------------------------------------ */

/* Takes data over. Collective; mine is what this rank already knows against it. */
static dr_status adopt(MPI_Comm data, double timeout, dr_status mine, dr_comm **out)
{
    int rank, size, worst = DR_ERR_COMM;
    MPI_Comm control = MPI_COMM_NULL;
    MPI_Comm_set_errhandler(data, MPI_ERRORS_RETURN);
    MPI_Comm_rank(data, &rank);
    MPI_Comm_size(data, &size);
    mpi_comm *c = calloc(1, sizeof *c + (size_t)size * sizeof(MPI_Request));
    tally *tallies = calloc(3 * (size_t)size, sizeof *tallies);
    if ((c == NULL || tallies == NULL) && mine == DR_OK)
        mine = dr_mpi_refuse(DR_ERR_MEMORY, "comm: no memory for %d ranks", size);
    int status = (int)mine, code = MPI_Comm_dup(data, &control);
    if (code == MPI_SUCCESS)
        code = MPI_Allreduce(&status, &worst, 1, MPI_INT, MPI_MIN, control);
    if (code == MPI_SUCCESS && worst == DR_OK) {
        c->base = (dr_comm){&dr_mpi_ops, rank, size, DR_OK, timeout};
        c->data = data;
        c->control = control;
        c->sent = tallies;
        c->received = tallies + size;
        c->expected = tallies + 2 * (size_t)size;
        for (int r = 0; r < size; r++)
            c->notices[r] = MPI_REQUEST_NULL;
        *out = &c->base;
        return DR_OK;
    }
    free(c);
    free(tallies);
    if (control != MPI_COMM_NULL)
        MPI_Comm_free(&control);
    MPI_Comm_free(&data);
    if (mine != DR_OK)
        return mine;
    if (code != MPI_SUCCESS)
        return dr_mpi_refuse(DR_ERR_COMM,
                             "comm: MPI cannot duplicate a communicator of %d ranks (error %d)",
                             size, code);
    return dr_mpi_refuse((dr_status)worst, "comm: another rank refused: %s",
                         dr_status_text((dr_status)worst));
}

dr_status dr_mpi_split(dr_comm *comm, int32_t color, int32_t key, dr_comm **out)
{
    mpi_comm *c = (mpi_comm *)comm;
    MPI_Comm part = MPI_COMM_NULL;
    /* MPI_Comm_split knows no time limit: all ranks first meet in an exchange that has one. */
    int32_t *all = malloc((size_t)comm->size * sizeof *all);
    if (all == NULL) {
        dr_mpi_give_up(c, "no memory for a split of %d ranks", comm->size);
        return dr_mpi_refuse(DR_ERR_MEMORY, "comm: no memory for a split of %d ranks", comm->size);
    }
    dr_status status = dr_comm_allgather(comm, &color, all, sizeof *all);
    free(all);
    if (status != DR_OK) {
        dr_mpi_give_up(c, "a split failed");
        return status;
    }
    int code = MPI_Comm_split(c->data, color < 0 ? MPI_UNDEFINED : color, key, &part);
    if (code != MPI_SUCCESS) {
        dr_mpi_failed(c, "MPI_Comm_split", code);
        return dr_mpi_broken(c);
    }
    return color < 0 ? DR_OK : adopt(part, comm->timeout, DR_OK, out);
}

static dr_status check_mpi(void)
{
    int yes = 0, level = MPI_THREAD_SINGLE;
    if (MPI_Initialized(&yes) != MPI_SUCCESS || !yes)
        return dr_mpi_refuse(DR_ERR_ARG,
                             "comm: MPI must be initialised first, with MPI_Init_thread");
    if (MPI_Finalized(&yes) != MPI_SUCCESS || yes)
        return dr_mpi_refuse(DR_ERR_ARG,
                             "comm: MPI must be in use, but MPI_Finalize has been called");
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_FUNNELED)
        return dr_mpi_refuse(DR_ERR_ARG,
                             "comm: MPI must be initialised with MPI_THREAD_FUNNELED or more, got "
                             "MPI_THREAD_SINGLE");
    MPI_Is_thread_main(&yes);
    if (level == MPI_THREAD_FUNNELED && !yes)
        return dr_mpi_refuse(DR_ERR_ARG,
                             "comm: outside the main thread MPI must be initialised with "
                             "MPI_THREAD_SERIALIZED or more, got MPI_THREAD_FUNNELED");
    return DR_OK;
}

dr_status dr_comm_mpi_create(MPI_Comm comm, dr_comm **out)
{
    dr_status status = check_mpi(), mine = DR_OK;
    if (status != DR_OK)
        return status;
    if (comm == MPI_COMM_NULL)
        return dr_mpi_refuse(DR_ERR_ARG, "comm: must not be MPI_COMM_NULL");
    int inter = 0;
    MPI_Comm_test_inter(comm, &inter);
    if (inter)
        return dr_mpi_refuse(DR_ERR_ARG,
                             "comm: must be an intracommunicator, got an intercommunicator");
    if (out == NULL) /* the others must hear of it */
        mine = dr_mpi_refuse(DR_ERR_ARG, "out: must not be NULL");
    else
        *out = NULL;
    MPI_Comm data = MPI_COMM_NULL;
    int code = MPI_Comm_dup(comm, &data);
    if (code != MPI_SUCCESS)
        return dr_mpi_refuse(DR_ERR_COMM, "comm: MPI cannot duplicate it (error %d)", code);
    return adopt(data, DR_COMM_TIMEOUT, mine, out);
}

/* ---- closing: NOTE [Leaving] -------------------------------------------------------------- */

/* Starts to receive one message that nobody will wait for. */
static void drop_message(mpi_comm *c)
{
    int there = 0, bytes = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, c->data, &there, &status) != MPI_SUCCESS || !there)
        return;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    mpi_batch *b = dr_mpi_batch_create(c, 1, (size_t)bytes);
    if (b == NULL)
        return;
    b->spoilt = true;
    dr_mpi_start(c, b, (leg){status.MPI_SOURCE, false, bytes, status.MPI_TAG}, b->legs + 1);
    dr_mpi_release(b);
}

/* Frees the kept batches that have ended; true if none is left and all notices are out. */
static bool settled(mpi_comm *c)
{
    for (mpi_batch **at = &c->kept; *at != NULL;) {
        mpi_batch *b = *at;
        dr_mpi_collect(b);
        if (b->left > 0) {
            at = &b->next;
            continue;
        }
        *at = b->next;
        free(b);
    }
    int out = 1;
    for (int r = 0; r < c->base.size && out; r++)
        MPI_Test(&c->notices[r], &out, MPI_STATUS_IGNORE);
    return c->kept == NULL && out;
}

static bool all_received(const mpi_comm *c)
{
    return memcmp(c->received, c->expected, (size_t)c->base.size * sizeof(tally)) == 0;
}

static bool leave(mpi_comm *c)
{
    double end = MPI_Wtime() + (c->base.timeout < grace_close ? c->base.timeout : grace_close);
    MPI_Request counts;
    int told = 0;
    if (MPI_Ialltoall(c->sent, 2, MPI_UINT32_T, c->expected, 2, MPI_UINT32_T, c->control,
                      &counts) != MPI_SUCCESS)
        return false;
    for (unsigned looks = 0; MPI_Wtime() < end; looks++) {
        drop_message(c);
        dr_mpi_hear(c);
        if (!told && MPI_Test(&counts, &told, MPI_STATUS_IGNORE) != MPI_SUCCESS)
            return false;
        if (settled(c) && told && all_received(c))
            return true;
        dr_mpi_rest(looks);
    }
    return false;
}

static void comm_free(mpi_comm *c)
{
    free(c->sent);
    free(c);
}

void dr_mpi_close(dr_comm *comm)
{
    mpi_comm *c = (mpi_comm *)comm;
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized) { /* too late for MPI, which has freed what it held */
        comm_free(c);
        return;
    }
    dr_mpi_hear(c);
    if (comm->health != DR_OK && !leave(c))
        return;
    MPI_Comm_free(&c->control);
    MPI_Comm_free(&c->data);
    comm_free(c);
}
