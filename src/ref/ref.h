/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref.h - the oracle backend: fp64 inside, one token at a time, the formulas as they
 * stand in DESIGN.md. It is right by being simple; every other backend is compared with
 * it, so nothing here is fast and nothing is clever.
 *
 * Letters: K V key and value widths, n columns of a state that are at work (a window of
 * the V, and K more when a map is built), N pieces, NT chunks, HV value heads, C chunk.
 * A state S is [K,n] fp64, row-major. b t h j: batch row, token, key head, value head.
 */
#ifndef DR_REF_H
#define DR_REF_H

#include "backend.h"
#include "base/half.h"

struct dr_device {
    dr_pool pool;
};

/* One token as one value head sees it: activated, normalised, fp64. */
typedef struct dr_ref_token {
    double *q, *k;  /* [K] */
    double *decay;  /* [K] factors; GDN repeats its one */
    double *v;      /* [n] */
    double *d_o;    /* [n]; adjoint only */
    double *r;      /* [n] room for the residual, or for its gradient */
    double beta, scale;
} dr_ref_token;

/* What one lane of the pool works in. */
typedef struct dr_ref_lane {
    dr_ref_token token;
    double *S;       /* [K,V+K] */
    double *row;     /* [max(K,V)] */
    double *d_decay; /* [K]; adjoint only, as all below */
    /* G value heads share a key head, L is the most chunks of a piece, c the longest chunk */
    double *dS;      /* [G,K,V] */
    double *entries; /* [G,L,K,V]: states entering the chunks, where saved has only the first */
    double *history; /* [c+1,K,V]: states before and after each token of a chunk */
    double *dq, *dk; /* [c,K], summed over the G value heads */
} dr_ref_lane;

/* A trip's memory as carved; see NOTE [Measure or carve] in backend.h. */
typedef struct dr_ref_trip {
    /* What the adjoint starts its states from, fp64: with DR_KEEP_STATES the state entering
     * every chunk [NT,HV,K,V], otherwise the state entering every piece [N,HV,K,V]. This
     * backend has no factors to keep, so DR_KEEP_FACTORS is DR_KEEP_INPUTS here. */
    dr_tensor saved;
    dr_tensor entry;            /* staged: [N,HV,K,V] fp64, from recur to output */
    double *da_log, *ddt_bias;  /* adjoint: [N,HV], [N,HV,gate width], one piece's share */
    dr_ref_lane *lanes;
} dr_ref_trip;
dr_ref_trip dr_ref_carve(dr_pass *p);

/* Columns [c0, c0 + n) of a state [slot,j], any dtype and stride, to and from S [K,n]. */
void dr_ref_load_state(const dr_tensor *from, int64_t slot, int32_t j, int32_t K, int32_t c0,
                       int32_t n, double *S);
void dr_ref_store_state(const dr_tensor *to, int64_t slot, int32_t j, int32_t K, int32_t c0,
                        int32_t n, const double *S);

/* The same where a piece's states come from and go to: entry and exit of the pass, the
 * states of io and its pool. */
void dr_ref_load_entry(const dr_pass *p, int64_t piece, int32_t j, int32_t c0, int32_t n,
                       double *S);
void dr_ref_store_exit(const dr_pass *p, int64_t piece, int32_t j, int32_t c0, int32_t n,
                       const double *S);

void dr_ref_load_row(const dr_tensor *from, int64_t b, int64_t t, int32_t h, int32_t c0,
                     int32_t n, double *out);
void dr_ref_store_row(const dr_tensor *to, int64_t b, int64_t t, int32_t h, int32_t c0,
                      int32_t n, const double *in);

/* Reads token t of row b for value head j; n columns of v (and d_o) from c0. */
void dr_ref_load_token(const dr_pass *p, int64_t b, int64_t t, int32_t j, int32_t c0, int32_t n,
                       dr_ref_token *x);
/* The recurrence: S from before token x to after it. */
void dr_ref_advance(const dr_ref_token *x, int32_t K, int32_t n, double *S);
/* Its adjoint: dS from after token x to before it. */
void dr_ref_retreat(const dr_ref_token *x, int32_t K, int32_t n, double *dS);

dr_stage dr_ref_summarize, dr_ref_adjoint_recur, dr_ref_adjoint_output;

dr_status dr_ref_conv(dr_device *dev, int dir, const dr_conv_args *a);
dr_status dr_ref_gate(dr_device *dev, int dir, const dr_gate_args *a);
dr_status dr_ref_beta(dr_device *dev, int dir, const dr_beta_args *a);
dr_status dr_ref_l2norm(dr_device *dev, int dir, const dr_l2norm_args *a);
dr_status dr_ref_norm(dr_device *dev, int dir, const dr_norm_args *a);
dr_status dr_ref_matmul(dr_device *dev, const dr_matmul_args *a);

DR_INLINE double dr_ref_sigmoid(double x)
{
    double e = exp(-fabs(x)); /* never overflows */
    return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

DR_INLINE double dr_ref_softplus(double x) { return fmax(x, 0) + log1p(exp(-fabs(x))); }

/* a = exp(a_log) and dt_bias of a value head and channel; absent means 1 and 0. */
typedef struct dr_ref_gate_params {
    double a, dt_bias;
} dr_ref_gate_params;

DR_INLINE dr_ref_gate_params dr_ref_load_gate_params(const dr_tensor *a_log,
                                                     const dr_tensor *dt_bias, int64_t j, int64_t c)
{
    return (dr_ref_gate_params){
        a_log->data ? exp(dr_get(dr_at(a_log, j, 0, 0, 0), a_log->dtype, 0)) : 1,
        dt_bias->data ? dr_get(dr_at(dt_bias, j, c, 0, 0), dt_bias->dtype, 0) : 0,
    };
}

/* The raw gate forms at x (bias included), a = exp(a_log): g, and its slopes in x and a_log. */
typedef struct dr_ref_gate_point {
    double g, dx, da_log;
} dr_ref_gate_point;

DR_INLINE dr_ref_gate_point dr_ref_gate_at(dr_gate form, double lower_bound, double a, double x)
{
    if (form == DR_GATE_SOFTPLUS) {
        double g = -a * dr_ref_softplus(x);
        return (dr_ref_gate_point){g, -a * dr_ref_sigmoid(x), g};
    }
    double z = a * x, s = dr_ref_sigmoid(z), dz = lower_bound * s * dr_ref_sigmoid(-z);
    return (dr_ref_gate_point){lower_bound * s, dz * a, dz * z};
}

/* x in place to x * rsqrt(sum x^2 + eps); returns the factor. */
DR_INLINE double dr_ref_normalise(double *x, int32_t n, double eps)
{
    double sum = eps;
    for (int32_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    double rstd = 1 / sqrt(sum);
    for (int32_t i = 0; i < n; i++)
        x[i] *= rstd;
    return rstd;
}

#endif
