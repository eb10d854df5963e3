/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cases.h - one table of small problems for every backend, and the means to run one: the
 * command `deltarule check` walks the table, `verify` runs cases made from files, `bench`
 * times larger ones, and tests may walk it too. Needs the public headers and libc only.
 *
 * A case says everything about a call except values and backend. A run is a case on one
 * context: its tensors, laid out as the case wants them, in memory poisoned with NaN.
 * Values come from a source; a tensor's values are first rounded to its element type.
 * A wide run keeps the rounded values in f64 (backend "ref" only), so that its outputs are
 * what an exact backend would compute from the very same inputs.
 *
 *     dr_case_run *run;
 *     dr_case_open(c, ctx, false, dr_case_seeded, &seed, &run);
 *     dr_case_call(run, DR_FORWARD);
 *     dr_case_call(run, DR_ADJOINT);          when dr_case_trips(c) is 2
 *     for i below dr_case_tensors(run): dr_case_tensor_at, dr_case_read
 *     dr_case_close(run);
 */
#ifndef DR_TOOL_CASES_H
#define DR_TOOL_CASES_H

#include <deltarule/cp.h>
#include <deltarule/layer.h>
#include <deltarule/ops.h>

#include <stdbool.h>

typedef enum dr_case_op {
    DR_CASE_DELTA = 1, /* dr_forward, dr_backward */
    DR_CASE_STEP,      /* dr_step */
    DR_CASE_STAGES,    /* the stages of both directions; maps, applied and composed */
    DR_CASE_CP,        /* as DELTA, over ranks */
    DR_CASE_CONV,      /* dr_conv, dr_conv_backward */
    DR_CASE_CONV_STEP,
    DR_CASE_GATE,
    DR_CASE_BETA,
    DR_CASE_L2NORM,
    DR_CASE_NORM,
    DR_CASE_MATMUL, /* [T,K] x [K,V] */
    DR_CASE_LAYER,  /* dr_layer_forward, dr_layer_backward */
    DR_CASE_LAYER_STEP,
    DR_CASE_OPS_ /* one past the last */
} dr_case_op;

typedef enum dr_case_layout {
    DR_CASE_COMPACT = 0,
    DR_CASE_PADDED, /* slices of wider rows: every axis but the last has a gap */
    DR_CASE_FREE    /* first axis fastest, gaps everywhere, axis 1 backwards */
} dr_case_layout;

enum dr_case_flag {
    DR_CASE_NO_STATE = 1u << 0,      /* no initial and no final state, nor their gradients */
    DR_CASE_FRESH = 1u << 1,         /* DELTA: from zero; only the final state is wanted */
    DR_CASE_IN_PLACE = 1u << 2,      /* the final state in the initial one's memory; forward only */
    DR_CASE_POOL = 1u << 3,          /* state_index over a larger pool, in place; forward only */
    DR_CASE_ENTRY = 1u << 4,         /* STAGES: entry and exit through the call, not through io */
    DR_CASE_FEW = 1u << 5,           /* only some of the gradients are wanted */
    DR_CASE_NO_BIAS = 1u << 6,       /* no dt_bias, bias */
    DR_CASE_NO_A_LOG = 1u << 7,      /* lower-bounded gate without a_log */
    DR_CASE_ALTERNATE = 1u << 8,     /* g is 0 and -decay in turn */
    DR_CASE_STATE_PLUS = 1u << 9,    /* CONV: states of halo + 1 columns */
    DR_CASE_NO_SAVED = 1u << 10,     /* nothing kept for an adjoint; forward only */
    DR_CASE_MASK = 1u << 11,         /* LAYER: padding tokens */
    DR_CASE_TRANSPOSED = 1u << 12,   /* MATMUL: both operands transposed */
    DR_CASE_CHUNK_STATES = 1u << 13, /* DELTA: the states entering the chunks too */
    DR_CASE_FULL = 1u << 14,         /* not part of a quick run */
    DR_CASE_APART = 1u << 15         /* CP: outputs stay with the ranks and are never read */
};

/* CP: who owns which tokens of the stream. */
typedef enum dr_case_cut {
    DR_CASE_CONTIGUOUS = 0, /* equal shares in order */
    DR_CASE_UNEVEN,         /* unequal shares in order, every fourth rank without tokens */
    DR_CASE_ZIGZAG,         /* two shares each, one from either end */
    DR_CASE_CUTS,           /* rank r owns the tokens from cuts[r] to cuts[r + 1] of each row */
    DR_CASE_CUT_COUNT_
} dr_case_cut;

/* Zero means the default of the struct that the field goes into. */
typedef struct dr_case {
    const char *name;
    dr_case_op op;
    uint32_t flags;
    dr_variant variant;     /* delta rule, gate (width of g), layer (kind) */
    int64_t B, T;           /* B 0: 1 */
    int32_t H, HV, K, V;    /* CONV: HV channels. rows of L2NORM: K, of NORM: V. HV 0: H */
    const int64_t *offsets; /* packed: N documents */
    int64_t N;
    dr_gate gate;
    double lower_bound;
    dr_beta beta;
    double beta_scale, scale, eps; /* eps of l2norm, norm, layer */
    int32_t l2norm;
    dr_head_map head_map;
    int32_t state_v_first;
    int32_t chunk;
    dr_keep keep;
    dr_dtype dtype;       /* of activations and weights; 0: f32 */
    dr_dtype gate_dtype;  /* of g, beta, a_log, dt_bias; 0: f32 */
    dr_dtype state_dtype; /* 0: f32 */
    dr_case_layout layout;
    double decay;              /* mean of -g, or its alternate value */
    int32_t width, dilation;   /* CONV, LAYER */
    dr_activation activation;  /* CONV, NORM */
    int32_t hidden, gate_rank; /* LAYER */
    const char *cp;            /* CP: the protocol */
    int32_t ranks;
    dr_case_cut cut;
    const int64_t *cuts; /* of DR_CASE_CUTS: ranks + 1 tokens */
} dr_case;

/* What seeded values look like. */
typedef enum dr_case_values {
    DR_VALUES_EVEN = 0,  /* uniform in +-span */
    DR_VALUES_ROWS,      /* the same; the first row of the last axis is zero */
    DR_VALUES_DECAY,     /* -span times an exponential variable */
    DR_VALUES_ALTERNATE, /* 0 and -span in turn */
    DR_VALUES_FACTOR,    /* exp of a decay; 0 and 1 now and then */
    DR_VALUES_BETA,      /* uniform in [0, span], the ends included now and then */
    DR_VALUES_POSITIVE   /* uniform in [span/2, 3 span/2] */
} dr_case_values;

#define DR_CASE_NAME 48
typedef struct dr_case_tensor {
    char name[DR_CASE_NAME];
    bool output;
    bool adjoint; /* an output of the adjoint trip */
    dr_dtype dtype;
    int32_t rank;
    int64_t shape[DR_MAX_RANK];
    int64_t count;
    dr_case_values values;
    double span;
} dr_case_tensor;

/* Writes values [first, first + count) of an input, in row-major order, to out. */
typedef void dr_case_source(void *user, const dr_case_tensor *t, int64_t first, int64_t count,
                            double *out);
/* The source for user = uint64_t *seed: any element from its index, without order. */
void dr_case_seeded(void *user, const dr_case_tensor *t, int64_t first, int64_t count, double *out);

/* The table; NULL past the last case. */
const dr_case *dr_case_at(int index);
const char *dr_case_op_name(dr_case_op op);
int dr_case_trips(const dr_case *c); /* 1: forward only, 2: forward and adjoint */

typedef struct dr_case_run dr_case_run;
/* Errors are the library's, with its sentence in dr_case_why; ERR_MEMORY may come without one. */
dr_status dr_case_open(const dr_case *c, const dr_context *ctx, bool wide, dr_case_source *source,
                       void *user, dr_case_run **out);
dr_status dr_case_call(dr_case_run *run, dr_direction dir);
void dr_case_close(dr_case_run *run); /* NULL is fine */
/* The sentence of the calling thread's last failure; of a CP run, that of the rank that failed. */
const char *dr_case_why(void);
/* CP: how long the slowest rank took for the last call, without spreading and gathering. */
double dr_case_seconds(const dr_case_run *run);
/* CP: messages and bytes that all ranks send in a call, as their plans say. */
void dr_case_traffic(const dr_case_run *run, dr_direction dir, int64_t *sends, int64_t *bytes);

int dr_case_tensors(const dr_case_run *run);
const dr_case_tensor *dr_case_tensor_at(const dr_case_run *run, int index);
int dr_case_find(const dr_case_run *run, const char *name); /* -1 if absent */
void dr_case_read(const dr_case_run *run, int index, double *out);
/* Remembers all that calls must leave alone: inputs, and the gaps beside outputs. */
void dr_case_watch(dr_case_run *run);
/* The name of a tensor whose part of that has changed since; NULL if none. */
const char *dr_case_damage(const dr_case_run *run);
int32_t dr_case_chunk(const dr_case_run *run); /* C in use; 0 where there is none */
size_t dr_case_workspace(const dr_case_run *run, dr_direction dir); /* bytes */

/* How far got is from want, and how far it may be: the budget of the arithmetic plus the
 * rounding of the element type in which got was stored, that is its unit roundoff u, and for
 * numbers too small for it the size of its smallest normal one:
 *     ||got - want|| <= (arithmetic + u) ||want|| + sqrt(count) * smallest + doubt
 * doubt is what want itself may be off by, an L2 norm; 0 if it is as good as exact. In f32 and f64,
 * the types of the arithmetic itself, u is part of the budget. */
#define DR_CASE_FP32 1e-5
#define DR_CASE_FP64 1e-11
typedef struct dr_case_error {
    double relative; /* ||got - want|| / ||want||; infinite or NaN if got is not finite */
    double largest;  /* of |got - want| */
    double limit;    /* of relative */
    bool ok;
} dr_case_error;
dr_case_error dr_case_compare(const double *got, const double *want, int64_t count, dr_dtype stored,
                              double arithmetic, double doubt);

#endif
