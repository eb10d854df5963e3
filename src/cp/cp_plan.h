/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_plan.h - what the files of context parallelism share: the plan of a rank, the table row
 * of a protocol, and the engine that runs it. A rank computes on its span with a plain plan whose
 * sequences are the rank's pieces; what the pieces owe each other across ranks is the engine's work.
 *
 * An engine is a way of running: programs over states and maps (cp_run.c; most protocols are only
 * a generator for it), or tokens exchanged for heads (cp_ulysses.c). Recipe (c) in CONTRIBUTING.md.
 */
#ifndef DR_CP_PLAN_H
#define DR_CP_PLAN_H

#include "core/delta.h"
#include "cp/schedule.h"
#include "plan/route.h"

#include <deltarule/comm.h>

/* A protocol as named: "name", "name:width" or "name:width+rest". */
typedef struct dr_cp_spec {
    const struct dr_cp_protocol *protocol;
    int32_t width;    /* 0: not given */
    const char *rest; /* behind the plus; NULL: not given */
} dr_cp_spec;

struct dr_cp_plan {
    const dr_context *ctx;
    dr_comm *comm;
    dr_cp_spec spec;
    dr_plan *inner;        /* of the rank's span */
    dr_route route;
    size_t saved, scratch; /* of a call, set by the engine's build */
    void *own;             /* the engine's */
};

typedef struct dr_cp_engine {
    /* Everything that this rank can do and refuse by itself; inner and route stand. problem is
     * complete and that of the stream. */
    dr_status (*build)(dr_cp_plan *plan, const dr_problem *problem, const dr_partition *partition);
    /* Collective, after all ranks have agreed; optional. */
    dr_status (*join)(dr_cp_plan *plan, const dr_problem *problem, const dr_partition *partition);
    /* Also after a build that failed. */
    void (*clear)(dr_cp_plan *plan);
    /* Fills sends and send_bytes. */
    void (*describe)(const dr_cp_plan *plan, dr_cp_info *info);
    /* One trip; io is the caller's, normal the same checked and brought to one form. On failure it
     * has aborted the communicator. */
    dr_status (*run)(const dr_cp_plan *plan, int dir, const dr_io *io, const dr_io *normal,
                     const dr_buffers *buffers);
} dr_cp_engine;

typedef enum dr_cp_width { DR_CP_NO_WIDTH, DR_CP_WIDTH, DR_CP_MAY_WIDTH } dr_cp_width;

typedef struct dr_cp_protocol {
    const char *name, *about;
    dr_cp_width width;
    bool takes_rest; /* "name:width+rest" names a protocol for what remains */
    const dr_cp_engine *engine;
    /* Of programs only: see schedule.h. */
    dr_generate *generate;
    dr_generate *generate_adjoint; /* where it is not generate on the reversed chain */
} dr_cp_protocol;

extern const dr_cp_protocol dr_cp_p2p, dr_cp_relay, dr_cp_allgather, dr_cp_grouped, dr_cp_doubling;
extern const dr_cp_protocol dr_cp_ulysses;
extern const dr_cp_engine dr_cp_programs;

/* For an engine's build or join: makes room for a trip that was laid out on these empty arenas. */
dr_status dr_cp_plan_fit(dr_cp_plan *plan, const dr_arena *saved, const dr_arena *scratch);

/* DR_OK, or the whole reason in one sentence. spec may be NULL. */
dr_status dr_cp_spec_parse(const char *spec, dr_cp_spec *out);

#endif
