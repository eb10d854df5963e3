/* SPDX-License-Identifier: Apache-2.0 */
/*
 * comm_mpi.c - the table of comm.h on nonblocking MPI messages. Two private duplicates of the
 * caller's communicator: `data` carries transfers, `control` the notices of ranks that give up. A
 * transfer is one message, or several pieces when it is large. Sees only public headers.
 *
 * NOTE [Order and sizes]: MPI keeps the order of messages between two ranks on one communicator, so
 * transfers match in the order posted. Receives take any tag; the tag says whether a piece is the
 * last one, and with the byte count that finds every disagreement on a size.
 *
 * NOTE [What MPI keeps]: MPI cannot take back a send that nobody receives, nor would a wait that
 * has failed stay for it. Sends therefore go out of memory of the batch, and a batch whose sends
 * are under way outlives its wait in the list `kept`. A receive that has no message yet is
 * cancelled; one that a live sender is filling is waited for, since it ends by itself; a second
 * is the most, since a sender that has stopped may never end it.
 */
#include "mpi/comm_mpi.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const double grace_receive = 1.0; /* seconds */

dr_status dr_mpi_refuse(dr_status status, const char *format, ...)
{
    char sentence[2 * WHY];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    return dr_comm_fail(status, sentence);
}

/* ---- failing ------------------------------------------------------------------------------ */

dr_status dr_mpi_broken(const mpi_comm *c)
{
    return dr_mpi_refuse(DR_ERR_COMM, "comm: rank %d gave up: %s", c->base.rank, c->why);
}

/* The first reason stands. Tells everybody else; never blocks. */
void dr_mpi_give_up(mpi_comm *c, const char *format, ...)
{
    if (c->base.health == DR_OK) {
        va_list args;
        va_start(args, format);
        vsnprintf(c->why, sizeof c->why, format, args);
        va_end(args);
        c->base.health = DR_ERR_COMM;
    }
    if (c->told)
        return;
    c->told = true;
    memcpy(c->notice, c->why, sizeof c->notice);
    for (int r = 0; r < c->base.size; r++)
        if (r != c->base.rank &&
            MPI_Isend(c->notice, WHY, MPI_CHAR, r, 0, c->control, &c->notices[r]) == MPI_SUCCESS)
            c->sent[r].notices++;
        else
            c->notices[r] = MPI_REQUEST_NULL;
}

void dr_mpi_failed(mpi_comm *c, const char *call, int code)
{
    char text[MPI_MAX_ERROR_STRING];
    int length;
    if (MPI_Error_string(code, text, &length) != MPI_SUCCESS)
        snprintf(text, sizeof text, "error %d", code);
    dr_mpi_give_up(c, "%s: %.180s", call, text);
}

/* Reads the notices that have come. Who is told tells nobody: the sender has told all. */
void dr_mpi_hear(mpi_comm *c)
{
    for (;;) {
        int there = 0;
        MPI_Status status;
        char why[WHY];
        int code = MPI_Iprobe(MPI_ANY_SOURCE, 0, c->control, &there, &status);
        if (code == MPI_SUCCESS && !there)
            return;
        if (code == MPI_SUCCESS)
            code =
                MPI_Recv(why, WHY, MPI_CHAR, status.MPI_SOURCE, 0, c->control, MPI_STATUS_IGNORE);
        if (code != MPI_SUCCESS) {
            dr_mpi_failed(c, "MPI_Iprobe", code);
            return;
        }
        why[WHY - 1] = 0;
        c->received[status.MPI_SOURCE].notices++;
        if (c->base.health == DR_OK) {
            snprintf(c->why, sizeof c->why, "rank %d: %.220s", status.MPI_SOURCE, why);
            c->base.health = DR_ERR_COMM;
            c->told = true;
        }
    }
}

/* Between two looks at MPI: at first none, then let others run, then sleep. */
void dr_mpi_rest(unsigned looks)
{
    const struct timespec nap = {0, 50000};
    if (looks > 4000)
        nanosleep(&nap, NULL);
    else if (looks > 20)
        sched_yield();
}

/* ---- batches ------------------------------------------------------------------------------ */

mpi_batch *dr_mpi_batch_create(mpi_comm *c, size_t n, size_t copies)
{
    mpi_batch *b = NULL;
    size_t head = sizeof *b + n * (sizeof(MPI_Request) + sizeof(leg));
    if (n > INT32_MAX || copies > SIZE_MAX - head || (b = malloc(head + copies)) == NULL)
        return NULL;
    *b = (mpi_batch){.base = {&c->base}, .legs = (leg *)(void *)(b->requests + n)};
    return b;
}

static size_t pieces(size_t bytes) { return bytes / PIECE + (bytes % PIECE != 0); }

/* Starts one message; data is the batch's own if it is sent. */
bool dr_mpi_start(mpi_comm *c, mpi_batch *b, leg l, void *data)
{
    MPI_Request *request = &b->requests[b->n];
    int code = l.is_send
                   ? MPI_Isend(data, l.bytes, MPI_BYTE, l.peer, l.tag, c->data, request)
                   : MPI_Irecv(data, l.bytes, MPI_BYTE, l.peer, MPI_ANY_TAG, c->data, request);
    if (code != MPI_SUCCESS) {
        dr_mpi_failed(c, l.is_send ? "MPI_Isend" : "MPI_Irecv", code);
        return false;
    }
    b->legs[b->n++] = l;
    b->left++;
    b->receives += !l.is_send;
    c->sent[l.peer].messages += l.is_send;
    return true;
}

static void check_arrival(mpi_comm *c, mpi_batch *b, const leg *l, MPI_Status *status, int code)
{
    int count = 0, class = MPI_SUCCESS;
    if (code != MPI_SUCCESS)
        MPI_Error_class(code, &class);
    if (class == MPI_SUCCESS && !l->is_send)
        MPI_Get_count(status, MPI_BYTE, &count);
    if (class != MPI_SUCCESS && class != MPI_ERR_TRUNCATE)
        dr_mpi_failed(c, l->is_send ? "MPI_Isend" : "MPI_Irecv", code);
    else if (class == MPI_ERR_TRUNCATE ||
             (!l->is_send && (count != l->bytes || status->MPI_TAG != l->tag)))
        dr_mpi_give_up(
            c,
            "ranks %d and %d disagree on the size of a transfer (it is not the %d bytes expected)",
            c->base.rank, l->peer, l->bytes);
    else
        return;
    b->spoilt = true;
}

/* Takes note of the messages that have ended. */
void dr_mpi_collect(mpi_batch *b)
{
    mpi_comm *c = (mpi_comm *)b->base.comm;
    while (b->left > 0) {
        int i = MPI_UNDEFINED, ended = 0, cancelled = 0;
        MPI_Status status;
        int code = MPI_Testany(b->n, b->requests, &i, &ended, &status);
        if (code == MPI_SUCCESS && !ended)
            return;
        if (i < 0 || i >= b->n) { /* MPI does not say which */
            b->spoilt = true;
            dr_mpi_failed(c, "MPI_Testany", code);
            return;
        }
        b->requests[i] = MPI_REQUEST_NULL; /* after an error MPI may not do it */
        b->left--;
        if (!b->legs[i].is_send) {
            b->receives--;
            if (code == MPI_SUCCESS)
                MPI_Test_cancelled(&status, &cancelled);
            c->received[b->legs[i].peer].messages += !cancelled;
        }
        if (!b->spoilt)
            check_arrival(c, b, &b->legs[i], &status, code);
    }
}

/* The batch has failed: nothing of the caller's memory stays with MPI. */
static void take_back(mpi_batch *b)
{
    b->spoilt = true;
    for (int i = 0; i < b->n; i++)
        if (!b->legs[i].is_send && b->requests[i] != MPI_REQUEST_NULL)
            MPI_Cancel(&b->requests[i]);
    double end = MPI_Wtime() + grace_receive;
    for (unsigned looks = 0; dr_mpi_collect(b), b->receives > 0 && MPI_Wtime() < end; looks++)
        dr_mpi_rest(looks);
}

void dr_mpi_release(mpi_batch *b)
{
    mpi_comm *c = (mpi_comm *)b->base.comm;
    if (b->left == 0) {
        free(b);
        return;
    }
    b->next = c->kept;
    c->kept = b;
}

static dr_status mpi_post(dr_comm *comm, const dr_transfer *t, int32_t n, dr_batch **out)
{
    mpi_comm *c = (mpi_comm *)comm;
    dr_mpi_hear(c);
    if (comm->health != DR_OK)
        return dr_mpi_broken(c);
    size_t messages = 0, copies = 0;
    const dr_transfer *sent = NULL; /* the same bytes for many ranks are copied once */
    for (int32_t i = 0; i < n; i++) {
        messages += pieces(t[i].bytes);
        if (!t[i].is_send || t[i].bytes == 0)
            continue;
        if (sent == NULL || sent->buffer != t[i].buffer || sent->bytes != t[i].bytes)
            copies += t[i].bytes;
        sent = &t[i];
    }
    mpi_batch *b = dr_mpi_batch_create(c, messages, copies);
    if (b == NULL)
        return dr_mpi_refuse(DR_ERR_MEMORY,
                             "comm: no memory for a batch of %d transfers that sends %zu bytes", n,
                             copies);
    char *copy = NULL, *room = (char *)(b->legs + messages);
    bool started = true;
    sent = NULL;
    for (int32_t i = 0; i < n && started; i++) {
        char *data = t[i].buffer;
        if (t[i].is_send && t[i].bytes > 0) {
            if (sent == NULL || sent->buffer != t[i].buffer || sent->bytes != t[i].bytes) {
                copy = memcpy(room, t[i].buffer, t[i].bytes);
                room += t[i].bytes;
            }
            data = copy;
            sent = &t[i];
        }
        for (size_t at = 0; at < t[i].bytes && started; at += PIECE) {
            bool last = t[i].bytes - at <= PIECE;
            leg l = {t[i].peer, t[i].is_send != 0, last ? (int)(t[i].bytes - at) : PIECE,
                     last ? TAG_LAST : TAG_MORE};
            started = dr_mpi_start(c, b, l, data + at);
        }
    }
    if (!started) {
        take_back(b);
        dr_mpi_release(b);
        return dr_mpi_broken(c);
    }
    *out = &b->base;
    return DR_OK;
}

static dr_status mpi_test(dr_batch *batch, int32_t *done)
{
    mpi_batch *b = (mpi_batch *)batch;
    mpi_comm *c = (mpi_comm *)batch->comm;
    dr_mpi_collect(b);
    *done = b->left == 0 && !b->spoilt;
    if (!*done)
        dr_mpi_hear(c);
    return *done || c->base.health == DR_OK ? DR_OK : dr_mpi_broken(c);
}

static void too_late(mpi_comm *c, const mpi_batch *b)
{
    int i = 0;
    while (b->requests[i] == MPI_REQUEST_NULL)
        i++;
    dr_mpi_give_up(c, "waited longer than %g s for rank %d to %s %d bytes", c->base.timeout,
                   b->legs[i].peer, b->legs[i].is_send ? "receive" : "send", b->legs[i].bytes);
}

static dr_status mpi_wait(dr_batch *batch)
{
    mpi_batch *b = (mpi_batch *)batch;
    mpi_comm *c = (mpi_comm *)batch->comm;
    double end = MPI_Wtime() + c->base.timeout;
    for (unsigned looks = 0; dr_mpi_collect(b), b->left > 0; looks++) {
        dr_mpi_hear(c);
        if (c->base.health == DR_OK && MPI_Wtime() > end)
            too_late(c, b);
        if (c->base.health != DR_OK)
            break;
        dr_mpi_rest(looks);
    }
    bool arrived = b->left == 0 && !b->spoilt;
    if (!arrived)
        take_back(b);
    dr_mpi_release(b);
    return arrived ? DR_OK : dr_mpi_broken(c);
}

static void mpi_abort(dr_comm *comm, const char *why)
{
    dr_mpi_give_up((mpi_comm *)comm, "%s", why);
}

const dr_comm_ops dr_mpi_ops = {
    DR_COMM_ABI, "mpi", mpi_post, mpi_test, mpi_wait, dr_mpi_split, mpi_abort, dr_mpi_close,
};
