/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mpi.h - a communicator whose ranks are those of an MPI_Comm. In a library of its own,
 * libdeltarule_mpi, so that the core needs no MPI; the only header that includes <mpi.h>.
 */
#ifndef DELTARULE_MPI_H
#define DELTARULE_MPI_H

#include "comm.h"

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A communicator over the ranks of comm, with their numbers in comm. Any intracommunicator will
 * do: the world, or a part of it in any order. Messages travel on duplicates of comm and never meet
 * those of the caller.
 *
 * Collective over comm, and so are dr_comm_split and dr_comm_close; close before MPI_Finalize.
 *
 * Threads   MPI must be initialised with MPI_THREAD_FUNNELED or more (MPI_Init asks for less; use
 *           MPI_Init_thread). FUNNELED: all calls from the main thread. Two communicators at the
 * same time on two threads: MPI_THREAD_MULTIPLE. Memory    A batch holds a copy of what it sends: a
 * failed wait then leaves MPI nothing of the caller's to read. Transfers may have any size.
 * Failures  A rank that gives up tells all others, which find the notice in post, test and wait.
 *           A process that dies is the launcher's business: mpirun ends the job, and no later than
 *           its time limit a wait for it returns DR_ERR_COMM. After a failure close stays up to two
 *           seconds to let the others take what was sent to them.
 *           MPICH raises failures of messages on MPI_COMM_WORLD: with its default handler there,
 *           MPI_ERRORS_ARE_FATAL, a receive that is too small ends the job instead.
 * Errors    ERR_ARG (no MPI, too few threads, null or inter-communicator), ERR_MEMORY on any rank,
 *           ERR_COMM (MPI's own failures, with MPI's text). */
DR_API dr_status dr_comm_mpi_create(MPI_Comm comm, dr_comm **out);

#ifdef __cplusplus
}
#endif
#endif
