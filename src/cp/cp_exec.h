/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_exec.h - runs a rank's program of a protocol around the stages of a pass.
 */
#ifndef DR_CP_EXEC_H
#define DR_CP_EXEC_H

#include "base/arena.h"
#include "cp/schedule.h"
#include "plan/route.h"

#include <deltarule/comm.h>

/* Everything one trip of a program needs; all memory is the call's. */
typedef struct dr_exec {
    const dr_context *ctx;
    dr_comm *comm;
    const dr_program *program;
    const dr_route *route;
    int32_t HV, K, V;
    int dir;
    const dr_tensor *boundary; /* [N,HV,K,V]: initial_state, or d_final_state; data NULL: zero */
    /* carved by dr_exec_carve */
    float **values;            /* registers */
    float *kept;               /* in saved: maps [0; A^T] */
    float *turn;               /* one state, turned V-major */
    dr_batch **batches;        /* by register: of the receive that fills it, else NULL; then the sends */
    int32_t *map_of;           /* per piece: its place in maps, or -1 */
    int32_t *entry_of;         /* per piece: its place in entries, or -1 */
    float *maps, *entries;
    int32_t n_maps, n_entries, n_sends;
} dr_exec;

/* Lays out the memory of a trip (NOTE [Measure or carve] in backend.h). */
void dr_exec_carve(dr_exec *x, dr_arena *saved, dr_arena *scratch);

/* Posts every receive of the program. Call before the local work. */
dr_status dr_exec_post(dr_exec *x);
/* After summarize has filled maps: runs the program; entries are filled. */
dr_status dr_exec_run(dr_exec *x);
/* Waits for the sends. Must be called after dr_exec_post whatever failed in between: `status` is what
 * has happened so far; a failure aborts the communicator so that no peer waits in vain. */
dr_status dr_exec_finish(dr_exec *x, dr_status status);

size_t dr_exec_bytes(const dr_exec *x, dr_value_kind kind);

#endif
