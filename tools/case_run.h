/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case_run.h - a run from inside: shared by case_run.c, which lays out, fills and reads
 * tensors, and the files that tell what an operation reads and writes (case_delta.c,
 * case_rows.c, case_layer.c, case_cp.c).
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

typedef struct dr_case_world dr_case_world; /* the ranks of a CP run; case_cp.c */

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
    dr_case_world *world;
};

/* One row per operation: open declares the tensors (run->status tells), call runs one trip. */
typedef struct dr_case_row {
    const char *name;
    int trips;
    dr_status (*open)(dr_case_run *run);
    dr_status (*call)(dr_case_run *run, dr_direction dir);
} dr_case_row;
extern const dr_case_row dr_case_delta, dr_case_step, dr_case_stages, dr_case_cp;
extern const dr_case_row dr_case_conv, dr_case_conv_step, dr_case_gate, dr_case_beta,
    dr_case_l2norm, dr_case_norm, dr_case_matmul;
extern const dr_case_row dr_case_layer, dr_case_layer_step;

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
#define E1(a) ((dr_case_extents){1, {a, 0, 0, 0}})
#define E2(a, b) ((dr_case_extents){2, {a, b, 0, 0}})
#define E3(a, b, c) ((dr_case_extents){3, {a, b, c, 0}})
#define E4(a, b, c, d) ((dr_case_extents){4, {a, b, c, d}})

/* Gives *view memory, poisoned, or filled if it is an input. A failure stays in run->status,
 * and later declarations do nothing. */
void dr_case_declare(dr_case_run *run, dr_tensor *view, const char *name, int role, dr_dtype dtype,
                     dr_case_extents shape, dr_case_values values, double span);
/* Short forms: an input, an output, an adjoint's output (unless only those that are always
 * wanted are, and this is not one), a tensor that is f32 and compact whatever the case. */
void dr_case_input(dr_case_run *run, dr_tensor *view, const char *name, dr_dtype dtype,
                   dr_case_extents e, dr_case_values values, double span);
void dr_case_output(dr_case_run *run, dr_tensor *view, const char *name, dr_dtype dtype,
                    dr_case_extents e);
void dr_case_gradient(dr_case_run *run, dr_tensor *view, const char *name, dr_dtype dtype,
                      dr_case_extents e, bool always);
void dr_case_fixed(dr_case_run *run, dr_tensor *view, const char *name, int role,
                   dr_case_extents e);
/* An output in the memory of an input. */
void dr_case_alias(dr_case_run *run, dr_tensor *view, const char *name, const char *input);
void dr_case_fail(dr_case_run *run, dr_status status); /* the first failure stays */

int64_t dr_case_sequences(const dr_case *c);
/* Slots of the states: of a pool if the case has one (*index then says which sequence has
 * which: the last first, the second none), else one per sequence. */
int64_t dr_case_pool(dr_case_run *run, const int32_t **index);
void dr_case_poison(const dr_buffers *b); /* whoever reads what nobody wrote gets NaN */
dr_buffers dr_case_buffers(const dr_case_run *run, dr_buffers b); /* without `saved` where nothing is kept */

/* The problem of a case, and its tensors in run->io. */
dr_problem dr_case_problem(const dr_case *c);
void dr_case_declare_io(dr_case_run *run);

/* Strides of a layout for a view that has its type and shape, and poisoned memory for it: the
 * caller's to free, *bytes long. NULL: no memory. */
char *dr_case_place(dr_tensor *view, dr_case_layout layout, size_t *bytes);
/* The i-th element in row-major order. */
double dr_case_element(const dr_tensor *view, int64_t i);
void dr_case_set_element(const dr_tensor *view, int64_t i, double x);

void dr_case_world_close(dr_case_world *world);             /* NULL is fine */
size_t dr_case_world_workspace(const dr_case_world *world); /* of the rank that needs most */
void dr_case_forget(void);                                  /* the sentence of an earlier CP run */

#endif
