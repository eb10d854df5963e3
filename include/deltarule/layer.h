/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer.h - whole token-mixing layers: the Gated DeltaNet block as Qwen3-Next
 * and Qwen3.5 have it, and the Kimi Delta Attention block, forward, backward
 * and decoding. A layer is projections, one causal convolution with SiLU, the
 * delta rule with q/k l2norm, a gated RMSNorm and an output projection.
 *
 * A layer owns no parameters: it lists what it needs (name, shape, how to
 * initialise), and the caller passes one tensor for each, in that order. All
 * tensors of a layer are f32, contiguous. Document boundaries are given once,
 * to dr_layer_plan_create, and reach every stage.
 */
#ifndef DELTARULE_LAYER_H
#define DELTARULE_LAYER_H

#include "deltarule.h"
#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dr_layer_kind { DR_LAYER_GDN = 1, DR_LAYER_KDA = 2 } dr_layer_kind;

typedef struct dr_layer_config {
    uint32_t size;
    dr_layer_kind kind;   /* required */
    int32_t hidden;       /* width of x and y */
    int32_t heads;        /* H */
    int32_t value_heads;  /* HV; 0: H */
    int32_t key_dim;      /* K */
    int32_t value_dim;    /* V; 0: K */
    int32_t conv_width;   /* W >= 1; 0: 4 */
    int32_t conv_bias;    /* nonzero: the convolution has a bias */
    dr_gate gate;         /* GDN: 0 or SOFTPLUS. KDA: SOFTPLUS or LOWER_BOUND, required */
    double lower_bound;   /* < 0, for DR_GATE_LOWER_BOUND */
    double beta_scale;    /* 1 or 2; 0: 1 */
    int32_t gate_rank;    /* KDA: inner width of the f and g projection pairs
                             (f_a, f_b, g_a, g_b); 0: one full-rank matrix each */
    double norm_eps;      /* of the gated RMSNorm; 0: 1e-6 (GDN), 1e-5 (KDA) */
    dr_keep keep;         /* what the delta rule keeps for the adjoint */
} dr_layer_config;
#define DR_LAYER_CONFIG_INIT                                                \
    {(uint32_t)sizeof(dr_layer_config), (dr_layer_kind)0, 0, 0, 0, 0, 0, 0, 0, (dr_gate)0, 0.0, \
     0.0, 0, 0.0, DR_KEEP_FACTORS}

typedef struct dr_layer dr_layer;
DR_API dr_status dr_layer_create(const dr_context *ctx, const dr_layer_config *config,
                                 dr_layer **out);
DR_API void dr_layer_destroy(dr_layer *layer); /* NULL is fine */

/* How a parameter is drawn at the start of training. */
typedef enum dr_init {
    DR_INIT_LINEAR = 1,  /* uniform in +-1/sqrt(fan in) */
    DR_INIT_ONES = 2,
    DR_INIT_ZEROS = 3,
    DR_INIT_A_LOG = 4    /* log of uniform (0.01, 16) */
} dr_init;

/* Names follow the published checkpoints ("in_proj_qkv.weight", "A_log", ...). */
typedef struct dr_param_info {
    const char *name; /* owned by the layer */
    int32_t rank;
    int64_t shape[DR_MAX_RANK];
    dr_init init;
} dr_param_info;
DR_API int32_t dr_layer_param_count(const dr_layer *layer);
DR_API dr_status dr_layer_param(const dr_layer *layer, int32_t index, dr_param_info *info);
DR_API int32_t dr_layer_conv_channels(const dr_layer *layer); /* D = 2*H*K + HV*V */

/* A layer on one arrangement of tokens. */
typedef struct dr_layer_layout {
    uint32_t size;
    int64_t batch, tokens;    /* B, T */
    const int64_t *offsets;   /* packed, as dr_problem.offsets; B = 1 */
    int64_t sequences;
    /* [B,T], contiguous: 0 marks a padding token. Each run of real tokens is a
     * sequence of its own, exactly as if the padding were not there; y, dx and
     * all gradients of padding are zero. Not together with offsets, nor with
     * states. NULL: no padding. */
    const uint8_t *mask;
} dr_layer_layout;
#define DR_LAYER_LAYOUT_INIT {(uint32_t)sizeof(dr_layer_layout), 1, 0, NULL, 0, NULL}

typedef struct dr_layer_plan dr_layer_plan;
DR_API dr_status dr_layer_plan_create(const dr_layer *layer, const dr_layer_layout *layout,
                                      dr_layer_plan **out);
/* The same on this rank's share of one stream (comm.h, cp.h): layout describes the whole stream, batch 1
 * without a mask. x, y and their gradients are this rank's span [1,T_local,hidden]; conv and recurrent
 * states are per piece, in span order: of those going in the pieces that start a sequence are read, of
 * those coming out the pieces that end one are final, and in the adjoint the other way round. The
 * gradients of parameters are this rank's part: their sum over the ranks (dr_comm_sum) is the gradient.
 * Creation, dr_layer_forward and dr_layer_backward are collective; not for dr_layer_step. comm must
 * outlive the plan, and can no longer be used after a failure of a call. */
struct dr_comm;
struct dr_partition;
DR_API dr_status dr_layer_cp_plan_create(const dr_layer *layer, struct dr_comm *comm,
                                         const dr_layer_layout *layout,
                                         const struct dr_partition *partition,
                                         const char *protocol, dr_layer_plan **out);
DR_API void dr_layer_plan_destroy(dr_layer_plan *plan);
/* Bytes of dr_buffers: saved (forward -> backward) and scratch (the largest call). */
DR_API dr_status dr_layer_plan_sizes(const dr_layer_plan *plan, size_t *saved, size_t *scratch);
DR_API dr_status dr_layer_buffers_create(const dr_layer_plan *plan, dr_buffers *out);

typedef struct dr_layer_io {
    uint32_t size;
    const dr_tensor *params;  /* dr_layer_param_count tensors, f32, contiguous */
    dr_tensor x, y;           /* [B,T,hidden] */
    /* Carried states, each optional: convolution [N,D,W-1] over channels q|k|v,
     * recurrent [N,HV,K,V]. Same memory for _in and _out updates in place. */
    dr_tensor conv_in, conv_out, state_in, state_out;
    const int32_t *state_index; /* pool slots, as dr_io; forward and step only */
    /* backward */
    dr_tensor dy, dx;
    const dr_tensor *grads;   /* as params; data NULL: not wanted */
    int32_t accumulate;       /* nonzero: add to grads, else overwrite */
    dr_tensor d_conv_in, d_conv_out, d_state_in, d_state_out;
} dr_layer_io;
#define DR_LAYER_IO_INIT                                                    \
    {(uint32_t)sizeof(dr_layer_io), NULL, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, \
     DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, NULL, DR_TENSOR_NONE, DR_TENSOR_NONE, \
     NULL, 0, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE}

/* Forward; `saved` of buffers may be NULL when no backward follows. */
DR_API dr_status dr_layer_forward(const dr_layer_plan *plan, const dr_layer_io *io,
                                  const dr_buffers *buffers);
/* Needs the saved of dr_layer_forward with the same x, params and states. */
DR_API dr_status dr_layer_backward(const dr_layer_plan *plan, const dr_layer_io *io,
                                   const dr_buffers *buffers);
/* Decoding: the few new tokens of each sequence, by the recurrent step. All four
 * state tensors are required. */
DR_API dr_status dr_layer_step(const dr_layer_plan *plan, const dr_layer_io *io,
                               const dr_buffers *buffers);

#ifdef __cplusplus
}
#endif
#endif
