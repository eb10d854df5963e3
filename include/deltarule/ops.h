/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops.h - the pointwise and row operations around the delta rule: causal
 * depthwise convolution, gate activations, beta, l2norm, gated RMSNorm.
 *
 * One argument struct serves both directions: the plain call reads the inputs
 * and writes the output, the ..._backward call also reads the output's gradient
 * and writes those gradients that are present. All tensors may be f32, bf16 or
 * f16 (f64 on "ref"), with any strides; arithmetic is fp32 (fp64 on "ref").
 * Every call finishes before it returns, is safe from many threads at once,
 * allocates nothing, and gives the same bits at any thread count.
 * Errors: ERR_ARG, ERR_SHAPE, ERR_SUPPORT; nothing is written then.
 */
#ifndef DELTARULE_OPS_H
#define DELTARULE_OPS_H

#include "deltarule.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dr_activation { DR_ACT_NONE = 0, DR_ACT_SILU = 1, DR_ACT_SIGMOID = 2 } dr_activation;

/* Causal depthwise convolution with taps j = 0..W-1, tap W-1 on the current token:
 *   p[t,d] = bias[d] + sum_j weight[d,j] * x[t - (W-1-j)*dilation, d],  y = act(p)
 * Sources before a sequence's first token come from its initial_state, or are 0.
 * halo = (W-1)*dilation. */
typedef struct dr_conv_args {
    uint32_t size;
    dr_activation activation; /* NONE or SILU */
    int32_t dilation;         /* >= 1; 0: 1 */
    const int64_t *offsets;   /* as dr_problem.offsets; then B = 1 */
    int64_t sequences;
    dr_tensor x;              /* [B,T,D]; channel-major through strides */
    dr_tensor weight;         /* [D,W], W >= 1 */
    dr_tensor bias;           /* [D] or absent */
    /* [N,D,halo], or [N,D,halo+1] as transformers keeps it: the last columns are
     * the newest tokens; the oldest of halo+1 is carried but never read. Absent: zero. */
    dr_tensor initial_state;
    const int32_t *state_index; /* pool slots as in dr_io; forward and step only */
    dr_tensor y;              /* [B,T,D] */
    dr_tensor final_state;    /* as initial_state (its own width); may be its memory */
    dr_tensor dy;             /* [B,T,D]; absent: zero */
    dr_tensor d_final_state;  /* absent: zero */
    dr_tensor dx, dweight, dbias, d_initial_state;
} dr_conv_args;
#define DR_CONV_ARGS_INIT                                                   \
    {(uint32_t)sizeof(dr_conv_args), DR_ACT_NONE, 1, NULL, 0, DR_TENSOR_NONE, DR_TENSOR_NONE, \
     DR_TENSOR_NONE, DR_TENSOR_NONE, NULL, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE,    \
     DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE}

DR_API dr_status dr_conv(const dr_context *ctx, const dr_conv_args *args);
DR_API dr_status dr_conv_backward(const dr_context *ctx, const dr_conv_args *args);
/* Decoding: initial_state and final_state are required (the same tensor updates
 * in place); x is [N,T,D] with the few new tokens of each sequence, or packed. */
DR_API dr_status dr_conv_step(const dr_context *ctx, const dr_conv_args *args);

/* Gate activation, DR_GATE_SOFTPLUS or DR_GATE_LOWER_BOUND (formulas: dr_gate). */
typedef struct dr_gate_args {
    uint32_t size;
    dr_gate gate;
    double lower_bound; /* < 0, for DR_GATE_LOWER_BOUND */
    dr_tensor x;        /* [B,T,HV] or [B,T,HV,K] */
    dr_tensor a_log;    /* [HV]; absent only for the lower bound: exp(a_log) = 1 */
    dr_tensor dt_bias;  /* [HV], or [HV,K] or [HV*K]; absent: 0 */
    dr_tensor g;        /* as x; natural-log decay */
    dr_tensor dg, dx, da_log, ddt_bias;
} dr_gate_args;
#define DR_GATE_ARGS_INIT                                                   \
    {(uint32_t)sizeof(dr_gate_args), (dr_gate)0, 0.0, DR_TENSOR_NONE, DR_TENSOR_NONE, \
     DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE,  \
     DR_TENSOR_NONE}

DR_API dr_status dr_gate_activate(const dr_context *ctx, const dr_gate_args *args);
DR_API dr_status dr_gate_backward(const dr_context *ctx, const dr_gate_args *args);

/* beta = scale * sigmoid(x) */
typedef struct dr_beta_args {
    uint32_t size;
    double scale;    /* 1 or 2; 0: 1 */
    dr_tensor x;     /* any rank 1 to 4 */
    dr_tensor beta;  /* as x */
    dr_tensor dbeta, dx;
} dr_beta_args;
#define DR_BETA_ARGS_INIT                                                   \
    {(uint32_t)sizeof(dr_beta_args), 0.0, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, \
     DR_TENSOR_NONE}

DR_API dr_status dr_beta_sigmoid(const dr_context *ctx, const dr_beta_args *args);
DR_API dr_status dr_beta_backward(const dr_context *ctx, const dr_beta_args *args);

/* y = x * rsqrt(sum over the last axis of x^2 + eps); a zero row gives zero. */
typedef struct dr_l2norm_args {
    uint32_t size;
    double eps;   /* 0: 1e-6; a normal fp32 number */
    dr_tensor x;  /* [.., D], rank 1 to 4 */
    dr_tensor y;  /* as x */
    dr_tensor dy, dx;
} dr_l2norm_args;
#define DR_L2NORM_ARGS_INIT                                                 \
    {(uint32_t)sizeof(dr_l2norm_args), 0.0, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, \
     DR_TENSOR_NONE}

DR_API dr_status dr_l2norm(const dr_context *ctx, const dr_l2norm_args *args);
DR_API dr_status dr_l2norm_backward(const dr_context *ctx, const dr_l2norm_args *args);

/* y = x * rsqrt(mean over the last axis of x^2 + eps) * weight * act(gate) */
typedef struct dr_norm_args {
    uint32_t size;
    dr_activation activation; /* SILU (Qwen, GDN) or SIGMOID (Kimi, KDA); no default */
    double eps;               /* 0: 1e-6; a normal fp32 number */
    dr_tensor x, gate;        /* [.., V], rank 1 to 4 */
    dr_tensor weight;         /* [V] */
    dr_tensor y;              /* as x */
    dr_tensor dy, dx, dgate, dweight;
} dr_norm_args;
#define DR_NORM_ARGS_INIT                                                   \
    {(uint32_t)sizeof(dr_norm_args), DR_ACT_NONE, 0.0, DR_TENSOR_NONE, DR_TENSOR_NONE, \
     DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE,   \
     DR_TENSOR_NONE}

DR_API dr_status dr_gated_norm(const dr_context *ctx, const dr_norm_args *args);
DR_API dr_status dr_gated_norm_backward(const dr_context *ctx, const dr_norm_args *args);

/* out = alpha * op(a) op(b) + beta_out * out, row-major: op(a) is [m,k], op(b)
 * [k,n], out [m,n]. The projections of layers; CBLAS on "cpu", which takes f32
 * with a contiguous last axis (or first, for a transposed operand). */
typedef struct dr_matmul_args {
    uint32_t size;
    dr_tensor a, b, out; /* rank 2; a transposed operand is a view with swapped strides */
    double alpha;        /* 0: 1 */
    int32_t accumulate;  /* nonzero: add to out */
} dr_matmul_args;
#define DR_MATMUL_ARGS_INIT                                                 \
    {(uint32_t)sizeof(dr_matmul_args), DR_TENSOR_NONE, DR_TENSOR_NONE, DR_TENSOR_NONE, 0.0, 0}

DR_API dr_status dr_matmul(const dr_context *ctx, const dr_matmul_args *args);

#ifdef __cplusplus
}
#endif
#endif
