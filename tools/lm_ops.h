/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lm_ops.h - the operations of a language model that the library does not have: embedding,
 * RMSNorm, SwiGLU, cross-entropy, AdamW. Matrices are f32, row-major, one row per token.
 *
 * NOTE [Same bits]: tokens are cut into DR_LM_BLOCKS ranges by a rule that sees their number
 * alone; ranges run on any thread, and sums over tokens are formed per range and added up in
 * order. So results do not depend on the number of threads.
 *
 * Letters: T tokens, D width of the model, F width inside the SwiGLU, S symbols.
 */
#ifndef DR_LM_OPS_H
#define DR_LM_OPS_H

#include <stdint.h>

enum { DR_LM_BLOCKS = 64 };

/* x[t] = table[symbols[t]] */
void dr_lm_embed(int threads, int64_t T, int64_t D, const int32_t *symbols, const float *table,
                 float *x);
/* dtable[s] = sum of dx[t] over the tokens with symbol s. order: [T + S + 1], scratch. */
void dr_lm_embed_backward(int threads, int64_t T, int64_t D, int64_t S, const int32_t *symbols,
                          const float *dx, float *dtable, int64_t *order);

/* y = sum * rstd * w with rstd = rsqrt(mean sum^2 + eps), rstd [T]; sum = x + add, or x itself
 * where add is NULL (sum is not touched then). */
void dr_lm_norm(int threads, int64_t T, int64_t D, float eps, const float *x, const float *add,
                const float *w, float *sum, float *rstd, float *y);
/* x: the sum. dx += the gradient through the norm; dw = the weight's. partial:
 * [DR_LM_BLOCKS * D], scratch. */
void dr_lm_norm_backward(int threads, int64_t T, int64_t D, const float *x, const float *w,
                         const float *rstd, const float *dy, float *dx, float *dw, float *partial);

/* u [T,2F] = gate | up; h [T,F] = silu(gate) * up. */
void dr_lm_swiglu(int threads, int64_t T, int64_t F, const float *u, float *h);
/* du may be u. */
void dr_lm_swiglu_backward(int threads, int64_t T, int64_t F, const float *u, const float *dh,
                           float *du);

/* The sum of -log softmax(logits[t])[target[t]] over T tokens in nats, divided by the tokens of the
 * whole batch, of which they may be a share. The logits are used up; where
 * gradient is nonzero they become the gradient of that. rows: [T], scratch. */
double dr_lm_cross_entropy(int threads, int64_t T, int64_t whole, int64_t S, float *logits, const int32_t *target,
                           int gradient, double *rows);

/* Sum of squares of n numbers. */
double dr_lm_square_sum(int threads, int64_t n, const float *x);

/* One step of AdamW with decoupled decay on n parameters; step counts from 1. */
typedef struct dr_lm_adamw {
    double rate, beta1, beta2, eps, decay;
    double gradient_scale; /* of g, for clipping */
    int64_t step;
} dr_lm_adamw;
void dr_lm_adamw_step(int threads, int64_t n, const dr_lm_adamw *how, const float *g, float *w,
                      float *m, float *v);

#endif
