/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern.h - the table of CPU kernels. Every kernel is written once, in kern_body.h,
 * kern_grad_body.h or kern_rows_body.h, over the vector vocabulary of an instruction set;
 * kern_<isa>.c is that vocabulary plus the bodies, and exports one record. kern.c picks one.
 * Everything in src/cpu above the table is plain C and reaches vectors through it.
 *
 * Letters: C chunk length, K V key and value widths, NR columns of a state panel (dr_kern.nr).
 *
 * NOTE [Layouts]: fp32, 64-byte aligned, zero in every padding place, so that kernels have no
 * tails.
 *   rows     [C][ldk]                  tokens by channels, ldk = K rounded up to 16
 *   square   [C][ldc]                  tokens by tokens, ldc = C; only the 16 x 16 blocks on and
 *                                      below the diagonal are written or read
 *   panels   [V/NR][C][NR]             tokens by value columns, rounded up
 *   state    [V/NR][K4][NR]            K4 = K rounded up to 4
 *   tokens   [C/16][K4][16]            transposed rows, 16 tokens wide
 * A chunk of c tokens has c rounded up to 4 rows; rows from c up to c rounded up to 16 are
 * zero, as are their beta and ln decay: a zero row is the neutral token.
 *
 * Kernels return void or a number and cannot fail. Pointers are 64-byte aligned unless the
 * contract says "any"; counts may be 0. NaN and Inf spread as IEEE has it: selection is by
 * index, never by multiplying with 0.
 */
#ifndef DR_KERN_H
#define DR_KERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One value head of one chunk, as its stages read it. GDN: kl = ku = k, ql = q (times scale),
 * gam_i = exp(G_i), lam_i = exp(G_c - G_i). KDA: kl = kbar, ql = qbar, ku = khat, and gam
 * and lam are NULL, which stands for 1. */
typedef struct dr_kern_chunk {
    int32_t rows;              /* a multiple of 4 */
    int32_t k;                 /* K4, rows of the state */
    int32_t ldk, ldc;
    const float *kl, *ql, *ku; /* rows */
    const float *L, *P;        /* square: strictly lower, lower */
    const float *b, *gam, *lam; /* [C] */
    const float *dec;          /* [K4] exp(G_c) of each row of the state */
} dr_kern_chunk;

/* A block of 16 rows with gates per channel: rows [16][ldk], vectors [n], n a multiple of 16. G is
 * summed from the entry of the block; all = exp(G_15). q NULL: no qbar and no qp. */
typedef struct dr_kern_block {
    int32_t n, ldk;
    bool fast;                 /* what kda_sums has said */
    const float *k, *q, *g;
    const float *a, *z;        /* [n] decay before and after the block */
    float *kbar, *qbar, *khat; /* k exp(G_i) a, where G_i is on entry; q exp(G_i) a; and
                                  k exp(G_15 - G_i) z */
    float *kp, *qp;            /* k exp(G_i), q exp(G_i); may be NULL */
    float *kd;                 /* fast: k exp(-G_i); else k exp(G_15 - G_i) */
    float *eg;                 /* unless fast: exp(g_i) */
} dr_kern_block;

/* Memory to be touched soon, fetched a few lines at a time between register tiles. */
typedef struct dr_kern_stream {
    const char *at;      /* the row to go on with */
    int64_t stride;      /* bytes between rows */
    int32_t rows;        /* left, the one in hand included */
    int32_t lines, line; /* cache lines of a row, and the next of them */
    int32_t step;        /* lines per tile */
} dr_kern_stream;

typedef struct dr_kern_ahead {
    int32_t n;
    dr_kern_stream s[4];
} dr_kern_ahead;

/* Up to this many nats a decay may be a product of exp(G_i) and exp(-G_j): the rounding of such a
 * G, which a weak gate after a strong one suffers, is below 5e-7. */
#define DR_KERN_SPAN 16.0f

/* X(return type, name, arguments) */
#define DR_KERN_LIST(X)                                                                            \
    /* dst = scale * src, `rows` rows of n elements, src any, `stride` elements between rows.      \
     * Element (i, j) goes to dst[i * ldd + j / nr * pd + j % nr]: pd = nr for rows, the size of a \
     * panel for panels. Columns n to pad (multiple of 16) become zero. */                         \
    X(void, load_f32, (int rows, int n, int pad, const void *src, int64_t stride, float scale,     \
                       float *dst, int64_t ldd, int64_t pd))                                       \
    X(void, load_bf16, (int rows, int n, int pad, const void *src, int64_t stride, float scale,    \
                        float *dst, int64_t ldd, int64_t pd))                                      \
    X(void, load_f16, (int rows, int n, int pad, const void *src, int64_t stride, float scale,     \
                       float *dst, int64_t ldd, int64_t pd))                                       \
    /* The way back: src as dst above, dst any; exactly n elements a row are written. */           \
    X(void, store_f32, (int rows, int n, const float *src, int64_t lds, int64_t ps, void *dst,     \
                        int64_t stride))                                                           \
    X(void, store_bf16, (int rows, int n, const float *src, int64_t lds, int64_t ps, void *dst,    \
                         int64_t stride))                                                          \
    X(void, store_f16, (int rows, int n, const float *src, int64_t lds, int64_t ps, void *dst,     \
                        int64_t stride))                                                           \
    /* dst[j * ldd + i] = src[i * lds + j] for i < m, j < n; both any. */                          \
    X(void, transpose, (int m, int n, const float *src, int64_t lds, float *dst, int64_t ldd))     \
    /* Rows x [rows][ldk] become x * r * scale, r = rsqrt(sum x^2 + eps) to rstd. */               \
    X(void, l2rows, (int rows, int ldk, float eps, float scale, float *x, float *rstd))            \
    /* c[m][n] = a[m][k] b[k][n] (+ c if add), row-major, any sizes, any pointers. */              \
    X(void, gemm, (int m, int n, int k, const float *a, int64_t lda, const float *b, int64_t ldb,  \
                   float *c, int64_t ldc, bool add))                                               \
    /* y = scale * sigmoid(x); dy = its derivative, or NULL. Any pointers. */                      \
    X(void, sigmoid, (int n, float scale, const float *x, float *y, float *dy))                    \
    /* Natural-log decays from what g holds, any pointers. Never below -1e30, so that sums stay    \
     * finite: -inf and the factor 0 become that. d = dg/dx, da = dg/da_log, or NULL.              \
     * softplus: -ea * log(1 + exp(x + bias)). lower: bound * sigmoid(ea * (x + bias)). */         \
    X(void, gate_log, (int n, const float *x, float *g))                                           \
    X(void, gate_factor, (int n, const float *x, float *g, float *d))                              \
    X(void, gate_softplus, (int n, const float *x, const float *bias, float ea, float *g,          \
                            float *d))                                                             \
    X(void, gate_lower, (int n, const float *x, const float *bias, float ea, float bound,          \
                         float *g, float *d, float *da))                                           \
    /* c[i][0..16) = a[i] . b for rows of a [rows][lda] and b = one block of tokens [k][16]. */    \
    X(void, pair, (int rows, int k, const float *a, int lda, const float *b, float *c, int ldc))   \
    /* Scalar gates. From ln decays g [C]: gam, lam, and with E_ij = exp(g_j+1 + .. + g_i):        \
     * L_ij = b_i kk_ij E_ij (i > j), P_ij = qk_ij E_ij (i >= j), 0 above within the diagonal      \
     * blocks. qk and P may be NULL together; e (square, E itself, 0 above) may be NULL.           \
     * kk NULL: only gam and lam. Returns exp(G_c). */                                             \
    X(float, gdn_pairs, (int rows, int ldc, const float *g, const float *b, const float *kk,       \
                         const float *qk, float *gam, float *lam, float *L, float *P, float *e))   \
    /* Gates per channel, one block of 16 rows, n channels (multiple of 16): rows G_i = g_0 + .. + \
     * g_i, and sum = G_15. True when no G exceeds DR_KERN_SPAN nats in size. */                   \
    X(bool, kda_sums, (int n, int ldk, const float *g, float *G, float *sum))                      \
    /* The rows of such a block, see dr_kern_block. */                                             \
    X(void, kda_rows, (const dr_kern_block *b))                                                    \
    /* Tokens of one block [k][16]: out_d = s_d in_d; out may be in. */                            \
    X(void, kda_reach, (int k, const float *s, const float *in, float *out))                       \
    /* The diagonal block of 16 rows: kk_ij = sum_d k_id k_jd E_ijd, qk the same with q (or both   \
     * NULL), E_ijd = product of eg_j+1,d .. eg_i,d; for i >= j, 0 above. work: [16][ldk]. */      \
    X(void, kda_diagonal, (int n, int ldk, const float *k, const float *q, const float *eg,        \
                           float *kk, float *qk, int ldc, float *work))                            \
    /* L_ij = b_i kk_ij for i > j and P_ij = qk_ij for i >= j, 0 above within the diagonal blocks. \
     * qk, P may be NULL together. */                                                              \
    X(void, kda_pairs, (int rows, int ldc, const float *b, const float *kk, const float *qk,       \
                        float *L, float *P))                                                       \
    /* y_i = exp(x_i), any pointers. */                                                            \
    X(void, vexp, (int n, const float *x, float *y))                                               \
    /* The stages of one chunk on one panel of the state S [K4][NR]; v X Xd N o: [C][NR].          \
     * K stage: N = gam (kl S); X = (I + L)^-1 b (v - N); Xd = lam X.                              \
     * v NULL: zero. N NULL: not stored. Xd NULL exactly when lam is NULL; then X serves. */       \
    X(void, stage_k, (const dr_kern_chunk *c, const float *S, const float *v, float *X,            \
                      float *Xd, float *N))                                                        \
    /* Q stage: o = gam (ql S) + P X. */                                                           \
    X(void, stage_q, (const dr_kern_chunk *c, const float *S, const float *X, float *o))           \
    /* Update: out = dec S + ku^T Xd; out may be S. ahead may be NULL. */                          \
    X(void, stage_u, (const dr_kern_chunk *c, const float *S, const float *Xd, float *out,         \
                      dr_kern_ahead *ahead))

#include "cpu/kern_grad.h"
#include "cpu/kern_rows.h"

#define DR_KERN_ALL(X) DR_KERN_LIST(X) DR_KERN_GRAD_LIST(X) DR_KERN_ROWS_LIST(X)

typedef struct dr_kern {
    const char *isa;
    uint32_t needs; /* enum dr_cpu_feature */
    int32_t nr;     /* columns of a state panel: 16 or 32 */
    int32_t lanes;  /* floats of a vector */
#define DR_KERN_MEMBER(type, name, args) type(*name) args;
    DR_KERN_ALL(DR_KERN_MEMBER)
#undef DR_KERN_MEMBER
} dr_kern;

/* The record at the end of an ISA file: the body of row `name` is the static function k_name. */
#define DR_KERN_FIELD(type, name, args) .name = k_##name,
#define DR_KERN_RECORD(isa_name, features)                                                         \
    {.isa = (isa_name), .needs = (features), .nr = NR, .lanes = V_LANES, DR_KERN_ALL(DR_KERN_FIELD)}

extern const dr_kern dr_kern_c, dr_kern_avx2, dr_kern_avx512, dr_kern_neon; /* as built */

/* The records of this build, worst to best; NULL past the last. */
const dr_kern *dr_kern_at(int index);

#endif
