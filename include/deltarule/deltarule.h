/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deltarule.h - the delta-rule family of linear attention: gated delta rule
 * (GDN) and Kimi Delta Attention (KDA), forward, adjoint and decoding.
 *
 * Per sequence and value head, S is the K x V state, D_t = exp(g_t) the decay:
 *
 *     R_t = D_t S_{t-1}                      decay first
 *     r_t = v_t - R_t^T k_t                  what the state does not yet know
 *     S_t = R_t + k_t (beta_t r_t)^T         write
 *     o_t = scale * S_t^T q_t                read after the write
 *
 * GDN has one g per token and value head, KDA one per key channel too. Formulas
 * of the whole family and of the adjoint: DESIGN.md, "Mathematics".
 *
 * Letters: B batch rows, T tokens, H query/key heads, HV value heads, K and V
 * key and value head widths, N sequences, C chunk length, NT chunks in all.
 *
 * Every function returns dr_status; on failure dr_last_error() of the same
 * thread holds one sentence naming the argument, the rule and the value, and
 * nothing has been written. Every plain struct starts with its own size: set
 * it with the ..._INIT macro. Zero in any other field means "default" or
 * "absent" unless its comment says otherwise.
 */
#ifndef DELTARULE_H
#define DELTARULE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DR_VERSION_MAJOR 0
#define DR_VERSION_MINOR 1
#define DR_VERSION_PATCH 0
#define DR_VERSION (DR_VERSION_MAJOR * 10000 + DR_VERSION_MINOR * 100 + DR_VERSION_PATCH)

#if defined(__GNUC__)
#define DR_API __attribute__((visibility("default")))
#else
#define DR_API
#endif

/* ------------------------------------------------------------------------ */
/* Status                                                                   */
/* ------------------------------------------------------------------------ */

/* name, value (frozen), text */
#define DR_STATUS_LIST(X)                                                   \
    X(OK, 0, "ok")                                                          \
    X(ERR_ARG, -1, "invalid argument")                                      \
    X(ERR_SHAPE, -2, "wrong shape, stride or element type")                 \
    X(ERR_SUPPORT, -3, "not supported by this backend")                     \
    X(ERR_MEMORY, -4, "out of memory")                                      \
    X(ERR_BUFFER, -5, "buffer missing, too small or misaligned")            \
    X(ERR_DEVICE, -6, "device failure")                                     \
    X(ERR_COMM, -7, "communication failure")                                \
    X(ERR_IO, -8, "input or output failure")                                \
    X(ERR_FORMAT, -9, "malformed file")

typedef enum dr_status {
#define DR_STATUS_ENUM(name, value, text) DR_##name = value,
    DR_STATUS_LIST(DR_STATUS_ENUM)
#undef DR_STATUS_ENUM
    DR_STATUS_MIN_ = -9
} dr_status;

/* Text of a status; never NULL. */
DR_API const char *dr_status_text(dr_status status);

/* The sentence of this thread's last failure; "" before the first. Valid until
 * the thread's next failure. */
DR_API const char *dr_last_error(void);

/* DR_VERSION of the library that is linked. */
DR_API int dr_version(void);

/* Receives every failure sentence once, where it arises. NULL turns it off
 * (the default). The callback may be called from any thread. */
typedef void dr_log_fn(void *user, dr_status status, const char *sentence);
DR_API void dr_set_log(dr_log_fn *fn, void *user);

/* ------------------------------------------------------------------------ */
/* Tensors                                                                  */
/* ------------------------------------------------------------------------ */

typedef enum dr_dtype {
    DR_F32 = 1,
    DR_BF16 = 2,
    DR_F16 = 3,
    DR_F64 = 4 /* backend "ref" only */
} dr_dtype;

DR_API const char *dr_dtype_name(dr_dtype dtype); /* "f32"; "?" if unknown */
DR_API size_t dr_dtype_size(dr_dtype dtype);      /* bytes; 0 if unknown */

#define DR_MAX_RANK 4

/* A view of the caller's memory. Strides count elements, may have any value
 * (0 repeats, negative runs backwards) on inputs; distinct elements of an
 * output must have distinct addresses. A stride of an extent of 1 is ignored.
 * data == NULL means absent. Inputs are never written. */
typedef struct dr_tensor {
    void *data;
    dr_dtype dtype;
    int32_t rank;
    int64_t shape[DR_MAX_RANK];
    int64_t stride[DR_MAX_RANK];
} dr_tensor;

/* A row-major (last index fastest) view; rank 1 to 4. Unused trailing shape
 * arguments are ignored. */
DR_API dr_tensor dr_tensor_make(void *data, dr_dtype dtype, int32_t rank, int64_t n0, int64_t n1,
                                int64_t n2, int64_t n3);

/* ------------------------------------------------------------------------ */
/* Context                                                                  */
/* ------------------------------------------------------------------------ */

/* A backend opened on a device, with its threads. Immutable once created: any
 * number of threads may use one context at the same time. */
typedef struct dr_context dr_context;

/* Runs body(arg, i) for i in [0, n) in any order, on any threads, and returns
 * when all are done. Results never depend on who runs what. */
typedef void dr_task_fn(void *arg, int64_t i);
typedef void dr_parallel_fn(void *user, int64_t n, dr_task_fn *body, void *arg);

typedef struct dr_context_options {
    uint32_t size;
    int32_t threads;          /* 0: OMP_NUM_THREADS, else the cores this process may use */
    dr_parallel_fn *parallel; /* the host program's own pool; NULL: OpenMP */
    void *parallel_user;
} dr_context_options;
#define DR_CONTEXT_OPTIONS_INIT {(uint32_t)sizeof(dr_context_options), 0, NULL, NULL}

/* Opens a backend by name: "cpu" or "ref". Nothing is ever replaced by another
 * backend. options may be NULL. Errors: ERR_ARG (unknown name, threads < 0),
 * ERR_MEMORY, ERR_SUPPORT (DR_CPU names an ISA that this machine lacks). */
DR_API dr_status dr_context_create(const char *backend, const dr_context_options *options,
                                   dr_context **out);
DR_API void dr_context_destroy(dr_context *ctx); /* NULL is fine */

DR_API const char *dr_context_backend(const dr_context *ctx);
DR_API int32_t dr_context_threads(const dr_context *ctx);
/* The instruction set in use ("avx2", "c", ...), and why it was chosen. */
DR_API const char *dr_context_isa(const dr_context *ctx);
DR_API const char *dr_context_isa_reason(const dr_context *ctx);
/* Names of the backends that this build holds; NULL past the last. */
DR_API const char *dr_backend_name(int index);

/* ------------------------------------------------------------------------ */
/* The problem                                                              */
/* ------------------------------------------------------------------------ */

typedef enum dr_variant { DR_GDN = 1, DR_KDA = 2 } dr_variant;

/* What io.g holds. There is no default: models that look alike differ here. */
typedef enum dr_gate {
    DR_GATE_NONE = 1,       /* io.g absent; no decay */
    DR_GATE_LOG = 2,        /* natural-log decay per token, g <= 0 */
    DR_GATE_FACTOR = 3,     /* the decay factor exp(g) itself, in [0, 1] */
    DR_GATE_SOFTPLUS = 4,   /* raw x: g = -exp(a_log) * softplus(x + dt_bias) */
    DR_GATE_LOWER_BOUND = 5 /* raw x: g = lower_bound * sigmoid(exp(a_log) * (x + dt_bias)) */
} dr_gate;

typedef enum dr_beta {
    DR_BETA_VALUE = 1, /* beta, in [0, 2] */
    DR_BETA_LOGIT = 2  /* beta = beta_scale * sigmoid(logit) */
} dr_beta;

typedef enum dr_head_map {
    DR_HEADS_INTERLEAVED = 0, /* value head j reads key head j / (HV/H) */
    DR_HEADS_TILED = 1        /* value head j reads key head j % H (ggml files) */
} dr_head_map;

/* What a forward pass leaves in `saved` for the adjoint. Never changes a
 * result by more than rounding; dr_plan_sizes tells the bytes. */
typedef enum dr_keep {
    DR_KEEP_FACTORS = 0, /* per-token chunk factors; states are recomputed */
    DR_KEEP_INPUTS = 1,  /* nothing beyond the entry states */
    DR_KEEP_STATES = 2   /* factors and the state at every chunk boundary */
} dr_keep;

typedef struct dr_problem {
    uint32_t size;
    dr_variant variant;   /* required */
    int64_t batch;        /* B >= 1; must be 1 when offsets are given */
    int64_t tokens;       /* T >= 0 per batch row */
    int32_t heads;        /* H >= 1 */
    int32_t value_heads;  /* HV, a multiple of H; 0: H */
    int32_t key_dim;      /* K in [1, 256] */
    int32_t value_dim;    /* V in [1, 256] */

    /* Packed documents: sequences + 1 offsets into the T tokens, starting at
     * 0, non-decreasing (equal neighbours are an empty document), the last at
     * most T. Tokens past the last offset belong to nobody: their outputs and
     * gradients are zero. Host memory, copied by dr_plan_create. NULL: each
     * batch row is one sequence of T tokens. */
    const int64_t *offsets;
    int64_t sequences;    /* N of a packed problem; 0 without offsets */

    dr_gate gate;         /* required, no default */
    double lower_bound;   /* DR_GATE_LOWER_BOUND: < 0, required */
    dr_beta beta;         /* required, no default */
    double beta_scale;    /* DR_BETA_LOGIT: 1 or 2 (negative eigenvalues); 0: 1 */
    int32_t l2norm;       /* nonzero: q and k rows become x * rsqrt(sum x^2 + eps) */
    double l2norm_eps;    /* 0: 1e-6; a normal fp32 number; only with l2norm */
    double scale;         /* of the output; 0: K^(-1/2) */
    dr_head_map head_map;
    int32_t state_v_first; /* nonzero: every state is [.., V, K] instead of [.., K, V] */
    int32_t chunk;        /* C; 0: the backend's choice. Refused where not offered */
    dr_keep keep;
} dr_problem;
#define DR_PROBLEM_INIT                                                     \
    {(uint32_t)sizeof(dr_problem), (dr_variant)0, 1, 0, 1, 0, 0, 0, NULL, 0, (dr_gate)0, 0.0, \
     (dr_beta)0, 0.0, 0, 0.0, 0.0, DR_HEADS_INTERLEAVED, 0, 0, DR_KEEP_FACTORS}

/* DR_OK if ctx can run the problem, else DR_ERR_SUPPORT (or ERR_ARG, ERR_SHAPE)
 * with the whole reason in dr_last_error(). */
DR_API dr_status dr_supports(const dr_context *ctx, const dr_problem *problem);

/* ------------------------------------------------------------------------ */
/* Plan and buffers                                                         */
/* ------------------------------------------------------------------------ */

/* Chunk table, sizes and choices for one problem on one context. Immutable;
 * any number of threads may share one. The context must outlive it. */
typedef struct dr_plan dr_plan;

DR_API dr_status dr_plan_create(const dr_context *ctx, const dr_problem *problem, dr_plan **out);
DR_API void dr_plan_destroy(dr_plan *plan); /* NULL is fine */

typedef struct dr_plan_info {
    uint32_t size;
    int32_t chunk;           /* C in use */
    int64_t sequences;       /* N: states in initial_state, final_state */
    int64_t chunks;          /* NT: chunks of all sequences, in order */
    size_t saved_bytes;      /* forward -> adjoint, under problem.keep */
    size_t forward_scratch;  /* one dr_forward or dr_step */
    size_t backward_scratch; /* one dr_backward */
    size_t staged_scratch;   /* one staged trip of either direction (cp.h) */
} dr_plan_info;
#define DR_PLAN_INFO_INIT {(uint32_t)sizeof(dr_plan_info), 0, 0, 0, 0, 0, 0, 0}

DR_API dr_status dr_plan_describe(const dr_plan *plan, dr_plan_info *info);

/* Working memory of one call at a time, 64-byte aligned; the caller's, or from
 * dr_buffers_create. `saved` may be NULL when no adjoint will follow. Contents
 * of fresh memory do not matter. */
typedef struct dr_buffers {
    uint32_t size;
    void *saved;
    size_t saved_bytes;
    void *scratch;
    size_t scratch_bytes;
} dr_buffers;
#define DR_BUFFERS_INIT {(uint32_t)sizeof(dr_buffers), NULL, 0, NULL, 0}

/* Allocates what every call of this plan needs (the largest scratch). */
DR_API dr_status dr_buffers_create(const dr_plan *plan, dr_buffers *out);
DR_API void dr_buffers_destroy(dr_buffers *buffers); /* frees and clears; NULL is fine */

/* ------------------------------------------------------------------------ */
/* Forward, backward, step                                                  */
/* ------------------------------------------------------------------------ */

/* Tensors of a call. dtypes: q, k, v, o, d_o, dq, dk, dv, beta, g and the
 * parameters may each be f32, bf16 or f16 (and f64 on "ref"); states, chunk
 * states and their gradients may be too, f32 being the norm. All arithmetic is
 * fp32 inside (fp64 in "ref"); the only roundings to a narrower type are the
 * final stores. With batch == 1 the leading B may be left out ([T,H,K]).
 *
 * What a call writes shares no memory with anything else that it reads or writes, except where a
 * comment says so (states in place); this is not checked, and holds for every call of the library. */
typedef struct dr_io {
    uint32_t size;
    /* inputs of both directions */
    dr_tensor q, k;        /* [B,T,H,K] */
    dr_tensor v;           /* [B,T,HV,V] */
    dr_tensor g;           /* GDN [B,T,HV], KDA [B,T,HV,K]; absent with DR_GATE_NONE */
    dr_tensor beta;        /* [B,T,HV] */
    dr_tensor a_log;       /* [HV]; raw gates. Absent: exp(a_log) = 1, lower bound only */
    dr_tensor dt_bias;     /* GDN [HV], KDA [HV,K] or [HV*K]; raw gates; absent: 0 */
    dr_tensor initial_state; /* [N,HV,K,V], natural layout; absent: zero */
    /* State pools: with state_index (N entries, host memory), initial_state and
     * final_state are [slots,HV,K,V] and sequence n uses slot state_index[n].
     * -1: a padding sequence, starts from zero and stores no state. Slots of
     * one call must differ. Not for dr_backward. */
    const int32_t *state_index;
    /* outputs of forward */
    dr_tensor o;           /* [B,T,HV,V] */
    dr_tensor final_state; /* [N,HV,K,V]; absent: not wanted. May be the very
                              memory of initial_state: updated in place */
    dr_tensor chunk_states; /* [NT,HV,K,V], state entering each chunk; absent: not wanted */
    /* inputs of backward */
    dr_tensor d_o;         /* [B,T,HV,V]; absent: zero */
    dr_tensor d_final_state; /* [N,HV,K,V]; absent: zero */
    /* outputs of backward; each may be absent. Of the forms that were passed:
     * dg is the gradient of the factor or raw gate if that is what g held */
    dr_tensor dq, dk;      /* [B,T,H,K], summed over the value heads of a group */
    dr_tensor dv;          /* [B,T,HV,V] */
    dr_tensor dg;          /* as g */
    dr_tensor dbeta;       /* [B,T,HV] */
    dr_tensor da_log;      /* [HV] */
    dr_tensor ddt_bias;    /* as dt_bias */
    dr_tensor d_initial_state; /* [N,HV,K,V] */
} dr_io;
/* Set size after zeroing: dr_io io = DR_IO_INIT; */
#define DR_TENSOR_NONE {NULL, (dr_dtype)0, 0, {0, 0, 0, 0}, {0, 0, 0, 0}}
#define DR_IO_INIT                                                          \
    {(uint32_t)sizeof(dr_io), DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, \
     DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, NULL, DR_TENSOR_NONE,    \
     DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE,          \
     DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE,          \
     DR_TENSOR_NONE, DR_TENSOR_NONE}

/* dr_forward - outputs and final states of all sequences, chunkwise.
 *
 * Needs     q, k, v, beta, o (unless only final_state is wanted); g as the gate says.
 * Owns      nothing.
 * Threads   one call at a time per dr_buffers; plan and context may be shared.
 * Order     finished on return.
 * Errors    ERR_ARG, ERR_SHAPE, ERR_BUFFER, ERR_SUPPORT. Nothing is written then.
 */
DR_API dr_status dr_forward(const dr_plan *plan, const dr_io *io, const dr_buffers *buffers);

/* dr_backward - gradients, given the same inputs and the `saved` that the
 * matching dr_forward wrote. Of the forward's outputs none is read.
 *
 * Needs     dr_forward on the same plan, inputs and saved.
 * Owns, Threads, Order, Errors: as dr_forward.
 */
DR_API dr_status dr_backward(const dr_plan *plan, const dr_io *io, const dr_buffers *buffers);

/* dr_step - decoding: every sequence's tokens (one or many), token by token,
 * from initial_state into final_state, both required; give the same tensor for
 * both to update in place. Equal to dr_forward up to rounding, and the faster
 * of the two for a few tokens. Saves nothing for an adjoint.
 */
DR_API dr_status dr_step(const dr_plan *plan, const dr_io *io, const dr_buffers *buffers);

#ifdef __cplusplus
}
#endif
#endif
