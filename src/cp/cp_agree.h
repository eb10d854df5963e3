/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_agree.h - how the ranks of a group find out, before any tensor travels, that all of them
 * succeeded so far and mean the same; and how a rank ends an exchange, whatever became of it.
 *
 * NOTE [Agree, then talk]: whoever creates something collective fills an agreement with what it has
 * found wrong by itself and with digests of what must be equal everywhere, and then calls
 * dr_cp_agree. Afterwards every rank goes on, or every rank has an error that says why. A failure inside
 * a later call aborts the communicator instead, so that no peer waits for a message that will never
 * come.
 */
#ifndef DR_CP_AGREE_H
#define DR_CP_AGREE_H

#include "base/base.h"

#include <deltarule/comm.h>
#include <deltarule/cp.h>

enum { DR_AGREED = 4 }; /* digests of an agreement */

/* Zeroed, but for what a rank has to say; it travels as it is. */
typedef struct dr_agreement {
    int64_t status;             /* a dr_status */
    uint64_t digest[DR_AGREED]; /* dr_cp_digest of each thing that must be the same */
    char sentence[216];         /* what status means; empty when it is DR_OK */
} dr_agreement;

/* Starts at DR_DIGEST, goes on from an earlier value. */
#define DR_DIGEST 0xcbf29ce484222325u
uint64_t dr_cp_digest(uint64_t h, const void *data, size_t bytes);
uint64_t dr_cp_digest_offsets(const int64_t *offsets, int64_t sequences); /* offsets may be NULL */
uint64_t dr_cp_digest_partition(const dr_partition *partition);

/* Takes over a status and its sentence (dr_last_error). */
void dr_agreement_set(dr_agreement *mine, dr_status status);

/* Collective. what[i] names digest i, NULL where it is not used. DR_OK: no rank had anything to
 * say and all digests are equal; otherwise the same kind of failure on all ranks. */
dr_status dr_cp_agree(dr_comm *comm, const dr_agreement *mine, const char *const what[DR_AGREED]);

/* Ends an exchange that has come to status: waits for the n batches that are not NULL. The first
 * failure aborts the communicator, so that no peer waits in vain, and is what is returned and said. */
dr_status dr_cp_settle(dr_comm *comm, dr_status status, dr_batch *const *batches, int64_t n);

#endif
