/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_chunk.h - a chunk as the CPU backend holds it: sizes, the arrays of a key head and of
 * a value head, how they are loaded from the caller's tensors, and what the forward leaves
 * for the adjoint. Layouts by name: NOTE [Layouts] in kern.h.
 *
 * Letters: T C K V H HV as everywhere; G value heads of a key head; c tokens of a chunk;
 * NR columns of a panel; K4, ldk as in kern.h.
 *
 * NOTE [Gates as sums]: decays between two tokens are exp of the sum of the ln decays between
 * them, and sums restart (at every pair for GDN, at every 16 rows for KDA). Differences of
 * long sums are never taken: in fp32 they cost accuracy in proportion to the decay.
 */
#ifndef DR_CPU_CHUNK_H
#define DR_CPU_CHUNK_H

#include "cpu/cpu.h"

#define DR_CPU_BLOCK 16     /* rows of a block of tokens */
#define DR_CPU_MAX_CHUNK 64 /* largest C */

/* Sizes that follow from a plan and a kernel table; int64_t where they enter offsets. */
typedef struct dr_cpu_dims {
    const dr_kern *kern;
    int32_t H, HV, G, K, V;
    int64_t C, K4, ldk, NR;
    int64_t panels;  /* of a state: ceil(V / NR) */
    int64_t state;   /* floats of a state: panels * K4 * NR */
    int64_t values;  /* floats of a chunk's values: panels * C * NR */
    bool kda;
} dr_cpu_dims;
dr_cpu_dims dr_cpu_dims_of(const dr_kern *kern, const dr_plan *plan);

/* The tokens of one chunk. */
typedef struct dr_cpu_span {
    int64_t index;     /* of the chunk, in [0, NT) */
    int64_t batch, t0; /* row of the tensors and first token */
    int32_t c, rows;   /* tokens; rounded up to 4 */
} dr_cpu_span;
dr_cpu_span dr_cpu_chunk_span(const dr_plan *plan, const dr_piece *piece, int64_t j);

/* What to load; the rest of the arrays keeps what it holds. */
enum dr_cpu_parts {
    DR_CPU_Q = 1,     /* the query side: q, qk, P, qbar */
    DR_CPU_PAIRS = 2, /* kk, qk, L, P and what only they need */
    DR_CPU_GRADS = 4  /* what only the adjoint needs: E, d_g, d_a, d_b */
};

/* One key head of a chunk. */
typedef struct dr_cpu_keys {
    float *k, *q;           /* rows: k; scale * q; both normalised where the problem says so */
    float *k_rstd, *q_rstd; /* [C] of the normalisation, 1 without it; the unscaled normalised
                               query is q / scale */
    float *kt;              /* tokens: k. GDN */
    float *kk, *qk;         /* square: k_i . k_j, scale q_i . k_j. GDN */
} dr_cpu_keys;

/* One value head of a chunk. For GDN some arrays do not exist (NULL), for KDA others. */
typedef struct dr_cpu_head {
    dr_kern_chunk at; /* for the stages; rows set by the load */
    float *L, *P;     /* square: L_ij = b_i k_i E_ij k_j (i > j),
                         P_ij = scale q_i E_ij k_j (i >= j) */
    float *g;         /* ln decay, finite: GDN [C], KDA rows; 0 in padding rows */
    float *b;         /* [C] beta; 0 in padding rows */
    float *dec;       /* [ldk] exp(G_c) of every channel */
    /* GDN */
    float *gam, *lam; /* [C] exp(G_i), exp(G_c - G_i) */
    float *E;         /* square exp(G_i - G_j), 0 above the diagonal. GRADS */
    /* KDA */
    float *kbar, *qbar, *khat; /* rows: k exp(G_i), scale q exp(G_i), k exp(G_c - G_i) */
    float *kk, *qk;   /* square: k_i E_ij k_j, scale q_i E_ij k_j (i >= j) */
    /* What the gate and beta were made of, per element of g and b. GRADS */
    float *d_g;       /* dg/dx: x the factor or raw input that g came from; 1 for LOG and NONE */
    float *d_a;       /* dg/da_log; 0 where there is none */
    float *d_b;       /* [C] dbeta/dx: 1 for VALUE */
    float *bias, *tmp; /* scratch of the load */
} dr_cpu_head;

/* Carve the arrays; staggered, so that rows of different arrays do not share L1 sets. */
void dr_cpu_keys_carve(dr_arena *a, const dr_cpu_dims *d, dr_cpu_keys *out);
void dr_cpu_head_carve(dr_arena *a, const dr_cpu_dims *d, bool grads, dr_cpu_head *out);
float *dr_cpu_take(dr_arena *a, int64_t n, int64_t m); /* n * m floats, staggered */

/* Load a key head (0 <= h < H), and a value head (0 <= j < HV) whose keys are loaded, with the
 * problem's options applied. Padding is zero. head->at points to keys afterwards (GDN). */
void dr_cpu_load_keys(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s, int32_t h,
                      unsigned parts, dr_cpu_keys *keys);
void dr_cpu_load_head(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s, int32_t j,
                      unsigned parts, const dr_cpu_keys *keys, dr_cpu_head *head);

/* Tensors [B,T,heads,n] of any dtype and strides, tokens of a span, elements [n0, n1) of a head.
 * Values come and go as panels [..][C][NR] of which only those of [n0, n1) are touched
 * (n0 a multiple of NR); rows as [C][ld]. Loading fills padding with zeros: rows up to
 * a multiple of 16, columns up to pad (a multiple of 16; panels: whole panels). */
void dr_cpu_load_rows(const dr_cpu_dims *d, const dr_tensor *t, const dr_cpu_span *s, int32_t head,
                      int32_t n, float scale, float *dst, int64_t ld);
void dr_cpu_load_values(const dr_cpu_dims *d, const dr_tensor *t, const dr_cpu_span *s,
                        int32_t head, int32_t n0, int32_t n1, float *dst);
void dr_cpu_store_rows(const dr_cpu_dims *d, const float *src, int64_t ld, const dr_cpu_span *s,
                       int32_t head, int32_t n, const dr_tensor *t);
void dr_cpu_store_values(const dr_cpu_dims *d, const float *src, const dr_cpu_span *s,
                         int32_t head, int32_t n0, int32_t n1, const dr_tensor *t);

/* States [.., HV, K, V] of any dtype and strides to and from panels, value columns [n0, n1).
 * An absent tensor or slot -1 loads as zero and stores nothing. */
void dr_cpu_load_state(const dr_cpu_dims *d, const dr_tensor *t, int64_t slot, int32_t head,
                       int32_t n0, int32_t n1, float *S);
void dr_cpu_store_state(const dr_cpu_dims *d, const float *S, int64_t slot, int32_t head,
                        int32_t n0, int32_t n1, const dr_tensor *t);
/* One state or map, fp32 [n,K] contiguous as passes exchange them, seen as [1,1,K,n]: slot 0,
 * head 0 of the two functions above. data may be NULL. */
dr_tensor dr_cpu_turned(const float *data, int64_t K, int64_t n);

/* What the forward leaves for the adjoint; every pointer NULL when saved is not wanted. */
typedef struct dr_cpu_saved {
    float *entry;  /* [N][HV][state] entering each piece. Always */
    float *reads;  /* [NT][HV][values] gam K S, what the state predicts. FACTORS, STATES */
    float *states; /* [NT][HV][state] entering each chunk. STATES */
} dr_cpu_saved;
void dr_cpu_saved_carve(dr_pass *p, const dr_cpu_dims *d, dr_cpu_saved *out);

/* How a pass is cut into tasks: (piece, run of heads, run of columns). A unit is one value
 * head; units are counted key head by key head, so that a run shares its keys. */
typedef struct dr_cpu_cut {
    int32_t key0;            /* first key head of the window */
    int32_t units;           /* value heads of the window */
    int32_t run;             /* units of a task */
    int32_t runs;            /* tasks along the heads */
    int32_t cols;            /* columns of a task, a multiple of 32 */
    int32_t col_runs;        /* tasks along the columns */
    int64_t tasks;
} dr_cpu_cut;
/* whole: runs never cut the group of a key head. most: largest run. */
dr_cpu_cut dr_cpu_cut_of(const dr_pass *p, const dr_cpu_dims *d, int32_t most, bool whole);

#endif
