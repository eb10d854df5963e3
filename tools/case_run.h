/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case_run.h - a run from inside: shared by case_run.c, which lays out, fills and reads
 * tensors, and case_ops.c, which tells what each operation reads and writes.
 */
#ifndef DR_TOOL_CASE_RUN_H
#define DR_TOOL_CASE_RUN_H

#include "cases.h"

enum { DR_CASE_MAX_TENSORS = 80, DR_CASE_MAX_PARAMS = 24 };

typedef struct dr_case_slot {
    dr_case_tensor info;
    dr_tensor view; /* may be wider than info.dtype */
    char *memory;   /* NULL: another slot's */
    size_t bytes;
    uint64_t guarded; /* fingerprint of what calls must not write */
} dr_case_slot;

struct dr_case_run {
    dr_case c; /* defaults filled in */
    const dr_context *ctx;
    bool wide;
    dr_case_source *source;
    void *user;
    dr_status status; /* of the opener: the first failure stays */
    dr_case_slot slots[DR_CASE_MAX_TENSORS];
    int count;

    dr_plan *plan;
    dr_plan_info info;
    dr_buffers buffers;
    dr_io io;
    dr_conv_args conv;
    dr_gate_args gate;
    dr_beta_args beta;
    dr_l2norm_args l2norm;
    dr_norm_args norm;
    dr_matmul_args matmul;
    dr_layer *layer;
    dr_layer_plan *layer_plan;
    dr_layer_io layer_io;
    dr_tensor params[DR_CASE_MAX_PARAMS], grads[DR_CASE_MAX_PARAMS];
    dr_tensor states, entry, exit, d_entry, d_exit, maps, d_maps, applied, composed;
    int32_t *state_index;
    uint8_t *mask;
};

/* One row per operation: open declares the tensors (run->status tells), call runs one trip. */
typedef struct dr_case_row {
    const char *name;
    int trips;
    dr_status (*open)(dr_case_run *run);
    dr_status (*call)(dr_case_run *run, dr_direction dir);
} dr_case_row;
extern const dr_case_row dr_case_rows[DR_CASE_OPS_];

/* What a tensor is to the call; FIXED: f32 and compact whatever the case and the run. */
enum dr_case_role {
    DR_CASE_INPUT = 0,
    DR_CASE_OUTPUT = 1,
    DR_CASE_GRADIENT = 2,
    DR_CASE_FIXED = 4
};

typedef struct dr_case_extents {
    int32_t rank;
    int64_t n[DR_MAX_RANK];
} dr_case_extents;

/* Gives *view memory, poisoned, or filled if it is an input. A failure stays in run->status,
 * and later declarations do nothing. */
void dr_case_declare(dr_case_run *run, dr_tensor *view, const char *name, int role, dr_dtype dtype,
                     dr_case_extents shape, dr_case_values values, double span);
/* An output in the memory of an input. */
void dr_case_alias(dr_case_run *run, dr_tensor *view, const char *name, const char *input);

#endif
