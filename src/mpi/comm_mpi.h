/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm_mpi.h - what the two files of the MPI communicator share: comm_mpi.c moves transfers,
 * comm_mpi_open.c opens, splits and closes. Only they look in here; both see nothing of the core
 * but public headers.
 */
#ifndef DR_COMM_MPI_H
#define DR_COMM_MPI_H

#include <deltarule/mpi.h>

#include <stdbool.h>

enum {
    PIECE = 1 << 26, /* bytes of a message; far below the int that MPI counts with */
    TAG_LAST = 0,    /* NOTE [Order and sizes] */
    TAG_MORE = 1,
    WHY = 256, /* bytes of a reason */
};

/* One MPI message. */
typedef struct leg {
    int32_t peer;
    bool is_send;
    int bytes, tag;
} leg;

typedef struct mpi_batch {
    dr_batch base;
    struct mpi_batch *next; /* in kept */
    int n, left, receives;  /* messages; of them unfinished; of these receives */
    bool spoilt;            /* at least one did not bring what it should */
    leg *legs;
    MPI_Request requests[];
} mpi_batch;

/* What went from one rank to another, or came. */
typedef struct tally {
    uint32_t messages, notices;
} tally;

typedef struct mpi_comm {
    dr_comm base;
    MPI_Comm data, control;
    mpi_batch *kept; /* NOTE [What MPI keeps] */
    bool told;       /* notices are on their way */
    char why[WHY], notice[WHY];
    tally *sent, *received, *expected; /* [size] each; expected: NOTE [Leaving] */
    MPI_Request notices[];
} mpi_comm;

extern const dr_comm_ops dr_mpi_ops;

__attribute__((format(printf, 2, 3))) dr_status dr_mpi_refuse(dr_status status, const char *format,
                                                              ...);

/* The first reason stands. Tells everybody else; never blocks. */
__attribute__((format(printf, 2, 3))) void dr_mpi_give_up(mpi_comm *c, const char *format, ...);
void dr_mpi_failed(mpi_comm *c, const char *call, int code); /* the same, with MPI's text */
dr_status dr_mpi_broken(const mpi_comm *c);                  /* the status of every later call */
void dr_mpi_hear(mpi_comm *c);                               /* reads notices */
void dr_mpi_rest(unsigned looks);                            /* between two looks at MPI */

/* n messages and a place of `copies` bytes behind legs[n]; NULL: no memory. */
mpi_batch *dr_mpi_batch_create(mpi_comm *c, size_t n, size_t copies);
bool dr_mpi_start(mpi_comm *c, mpi_batch *b, leg l, void *data); /* data: the batch's own if sent */
void dr_mpi_collect(mpi_batch *b);                               /* notes what has ended */
void dr_mpi_release(mpi_batch *b);                               /* frees or keeps */

dr_status dr_mpi_split(dr_comm *comm, int32_t color, int32_t key, dr_comm **out);
void dr_mpi_close(dr_comm *comm);

#endif
