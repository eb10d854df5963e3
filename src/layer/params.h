/* SPDX-License-Identifier: Apache-2.0 */
/*
 * params.h - a layer as a table. The tokens of a layer pass through named parts, matrices
 * with one row per token; a parameter says from which part it leads to which. The two kinds
 * differ by their rows and a few choices (dr_layer_type), nothing else: layer.c makes objects
 * and lays out memory from the table, layer_check.c refuses wrong calls, layer_run.c runs the
 * right ones in both directions.
 *
 *   X --linear--> QKV --conv, SiLU--> (q|k|v) --delta rule--> (o) --norm--> NORMED --linear--> Y
 *     --linear--> DECAY, BETA ----------------------^          ^
 *     --linear--> GATE ---------------------------------------'
 *
 * DECAY and GATE may be reached by way of a narrow part (DECAY_IN, GATE_IN).
 * Letters as in deltarule.h and layer.h; D = 2*H*K + HV*V, W the taps of the convolution.
 */
#ifndef DR_LAYER_PARAMS_H
#define DR_LAYER_PARAMS_H

#include "core/delta.h"

#include <deltarule/cp.h>
#include <deltarule/layer.h>

typedef enum dr_layer_part {
    DR_PART_X,        /* [hidden] */
    DR_PART_QKV,      /* [D], and its three sections: */
    DR_PART_Q,        /* [H*K] */
    DR_PART_K,        /* [H*K] */
    DR_PART_V,        /* [HV*V] */
    DR_PART_DECAY_IN, /* [gate_rank] */
    DR_PART_DECAY,    /* [HV] or [HV*K], raw gates */
    DR_PART_BETA,     /* [HV], logits */
    DR_PART_GATE_IN,  /* [gate_rank] */
    DR_PART_GATE,     /* [HV*V] */
    DR_PART_NORMED,   /* [HV*V] */
    DR_PART_Y,        /* [hidden] */
    DR_PARTS
} dr_layer_part;

typedef enum dr_layer_use {
    DR_USE_LINEAR,    /* to = from weight^T */
    DR_USE_CONV,      /* taps of the channels of `to` */
    DR_USE_CONV_BIAS, /* stands right after its DR_USE_CONV */
    DR_USE_A_LOG,
    DR_USE_DT_BIAS,
    DR_USE_NORM,
    DR_USES
} dr_layer_use;

typedef enum dr_layer_when {
    DR_WHEN_ALWAYS,
    DR_WHEN_CONV_BIAS, /* config.conv_bias */
    DR_WHEN_FULL,      /* config.gate_rank == 0 */
    DR_WHEN_PAIR       /* config.gate_rank > 0 */
} dr_layer_when;

/* One parameter, in the order of dr_layer_param. A LINEAR row stands after the rows that
 * fill its `from`; the one that leads to Y is the last. */
typedef struct dr_layer_row {
    const char *name;
    dr_layer_use use;
    dr_layer_part from, to; /* from: of LINEAR only, else the same as to */
    dr_layer_when when;
} dr_layer_row;

/* What sets the kinds apart. */
typedef struct dr_layer_type {
    dr_layer_kind kind;
    dr_variant variant;
    dr_activation gate_activation; /* of the gated RMSNorm */
    double norm_eps;               /* default */
    /* Rules and defaults of the kind's own fields: gate, gate_rank. */
    dr_status (*complete)(dr_layer_config *config);
    const dr_layer_row *rows;
    int32_t n_rows;
} dr_layer_type;

extern const dr_layer_type dr_layer_gdn, dr_layer_kda;

#define DR_LAYER_MAX_PARAMS 24

/* Where a part lives: some columns of a buffer that is named by a part. */
typedef struct dr_layer_section {
    dr_layer_part buffer;
    int64_t first, width;
} dr_layer_section;

typedef struct dr_layer_param_entry {
    const dr_layer_row *row;
    dr_param_info info;
    int64_t count; /* elements */
} dr_layer_param_entry;

struct dr_layer {
    const dr_context *ctx;
    const dr_layer_type *type;
    dr_layer_config config; /* defaults filled in */
    dr_problem problem;     /* of the delta rule, without tokens */
    dr_layer_section part[DR_PARTS];
    int32_t n_params;
    dr_layer_param_entry params[DR_LAYER_MAX_PARAMS];
};

/*
 * NOTE [Rows that count]: only tokens that belong to a sequence are computed. With a mask the
 * real tokens are gathered into `rows` packed rows, one sequence per run, and the results
 * scattered back; tokens past the last offset are cut off. A padding token therefore cannot
 * enter a window, a state or a sum, and real tokens see the very call they would see without it.
 */
struct dr_layer_plan {
    const dr_layer *layer;
    int64_t batch, tokens;   /* of the rows that count; batch 1 when packed or masked */
    int64_t rows;            /* batch * tokens */
    int64_t outer_batch, outer_tokens; /* B and T of x and y */
    int64_t n_sequences;     /* N */
    int64_t *offsets;        /* NULL: dense */
    int64_t *run_start;      /* with a mask: first row of x of each sequence, else NULL */
    dr_plan *core;           /* NULL where cp is given */
    dr_plan_info core_info;
    struct dr_layer_cp *cp;  /* one stream over many ranks, see layer_cp.c; else NULL */
    size_t saved;            /* forward -> backward */
    size_t scratch[3];       /* by dr_layer_trip */
    uint64_t digest;
};

typedef enum dr_layer_trip {
    DR_TRIP_FORWARD,       /* leaves saved */
    DR_TRIP_FORWARD_ALONE, /* no backward follows; decoding too */
    DR_TRIP_BACKWARD
} dr_layer_trip;

/* In front of saved, so that a backward without its forward is refused. */
#define DR_LAYER_MAGIC 0x7265796c6c726464u
typedef struct dr_layer_stamp {
    uint64_t magic, digest;
} dr_layer_stamp;

/* The memory of one call. A buffer is named by a part; parts without memory here (X, Y
 * without a mask) are the caller's. */
typedef struct dr_layer_blocks {
    dr_layer_stamp *stamp;
    int32_t *order;                 /* [N], to check state_index */
    float *value[DR_PARTS];
    float *act;                     /* [rows,D] behind the convolution */
    float *o;                       /* [rows,HV*V] of the delta rule */
    float *grad[DR_PARTS];
    float *d_act, *d_o;
    float *history;                 /* [N,D,W-1] in front of each piece, under cp only */
    float *d_history, *d_leaving;   /* the same; gradients of history and of conv_out */
    dr_buffers halo;                /* scratch alone */
    float *d_param[DR_LAYER_MAX_PARAMS]; /* of what is not LINEAR, to be added to grads */
    dr_buffers core;
} dr_layer_blocks;

/* One call under way. */
typedef struct dr_layer_call {
    const dr_layer_plan *plan;
    const dr_layer *layer;
    const dr_layer_io *io;
    int64_t slots;          /* states per state tensor: N, or those of the pools */
    dr_arena saved, scratch;
    dr_layer_blocks blocks;
} dr_layer_call;

/* layer_check.c; the calls use blocks.order and blocks.stamp and set slots. */
dr_status dr_layer_check_params(const dr_layer *layer, const dr_tensor *params);
dr_status dr_layer_check_forward(dr_layer_call *c, bool step);
dr_status dr_layer_check_backward(dr_layer_call *c);

/* Carves everything a trip needs; with empty arenas it measures (arena.h). */
void dr_layer_layout_blocks(const dr_layer_plan *plan, dr_layer_trip trip, dr_arena *saved,
                            dr_arena *scratch, dr_layer_blocks *out);

/* layer_cp.c. All of it does nothing, or what one rank does, where plan->cp is NULL. */
void dr_layer_cp_clear(dr_layer_plan *plan);
void dr_layer_cp_layout(const dr_layer_plan *plan, dr_layer_trip trip, dr_arena *home, dr_arena *scratch,
                        dr_layer_blocks *out);
/* The states that the convolution of the rows begins with, [N,D,W-1]. */
dr_tensor dr_layer_cp_entering(const dr_layer_call *c);
dr_status dr_layer_cp_history(dr_layer_call *c);     /* before the convolution */
/* Where the gradient of those states goes, and that of what leaves comes from. */
dr_tensor dr_layer_cp_d_entering(const dr_layer_call *c);
dr_tensor dr_layer_cp_d_leaving(const dr_layer_call *c);
dr_status dr_layer_cp_d_history(dr_layer_call *c);   /* after the convolution's adjoint */
dr_status dr_layer_cp_forward(const dr_layer_call *c, const dr_io *io);
dr_status dr_layer_cp_backward(const dr_layer_call *c, const dr_io *io);
/* Passes a status on; a failure lets no peer wait. */
dr_status dr_layer_cp_close(const dr_layer_plan *plan, dr_status status);

/* layer.c, for layer_cp.c: digest and sizes, once rows, sequences and core_info stand. */
dr_status dr_layer_plan_finish(dr_layer_plan *plan);

/* Index of the first parameter with this use; every kind has one of each that is asked for. */
int32_t dr_layer_find_use(const dr_layer *layer, dr_layer_use use);

#endif
