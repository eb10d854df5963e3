/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_grad.h - the adjoint of the CPU backend, shared by its files: cpu_grad.c runs it over
 * pieces, heads and chunks, cpu_grad_chunk.c does one chunk of one value head, cpu_store.c
 * takes gradients back through the problem's options into the caller's tensors.
 *
 * Letters: kern_grad.h, cpu_chunk.h. E_ij is the decay from token j to a later token i.
 *
 * NOTE [Two halves of a chunk]: the reverse recurrence goes panel by panel over the state
 * columns: X and Z (solve), the gradient of the entry state (step), with the sums that only a
 * panel sees. What joins the columns needs H, D, X and Z of all of them: the products of pairs of
 * tokens and of tokens with D (pairs), with H, and from those every gradient (finish). A
 * staged pass runs solve and step on all chunks, keeping what they left, then pairs and finish. A
 * fused one runs solve, pairs, step and finish on each, and the gradient of H takes the place of D.
 *
 * NOTE [Gradients of decays]: the gradient of the decay factor a_t is <dR_t, S_{t-1}>: everything
 * that was written before t, and the entry state, met with everything that reads after it,
 * and the gradient of the exit state. With B_ij what reader i has of writer j without decay,
 *     da_t = sum over i >= t > j of E_it B_ij E_{t-1,j}
 * where j = "entry" and i = "exit" are one more column (b0), row (bx) and corner. No decay of
 * t itself occurs, so the sum is right at a_t = 0, and nothing in it cancels by construction, as
 * sums over rows minus sums over columns do. The gradient of ln a_t is a_t da_t.
 */
#ifndef DR_CPU_GRAD_H
#define DR_CPU_GRAD_H

#include "cpu/cpu_chunk.h"

/* One chunk of one value head: what the adjoint is given and what its first half leaves. */
typedef struct dr_grad_chunk {
    const float *H;   /* state entering */
    const float *N;   /* values: gam K H */
    const float *D;   /* gradient of the state leaving */
    float *dH;        /* gradient of H; may be D if D is not needed any more */
    float *X, *Zn;    /* values */
    float *zr;        /* [panels][C] Z_i . (v - N)_i */
    float *hd;        /* [panels][ldk] H_d . D_d */
} dr_grad_chunk;

/* What one lane of the pool works in. */
typedef struct dr_grad_lane {
    dr_cpu_keys keys;
    dr_cpu_head head;
    float *v, *dO;               /* values; v becomes dv */
    float *R, *Xd;               /* one panel */
    float *X, *Zn, *zr, *hd;     /* for chunks that keep none */
    float *qg, *kg;              /* rows, kern_grad.h; KDA: qg is qbar */
    float *qt;                   /* tokens, GDN */
    float *turned;               /* values, transposed: [C/16][panels * NR][16] */
    float *ox, *zx, *m;          /* squares, kern_grad.h */
    float *w, *wt, *ms, *B;      /* squares, GDN */
    float *hq, *hz, *dx;         /* tokens, ldk instead of K4 rows */
    float *b0, *bx;              /* [C], GDN */
    float *db, *sum_hd;          /* [C], [ldk] */
    float *a, *da;               /* decay factors and their gradients: [C], KDA: rows */
    float *dq, *dk;              /* rows, summed over the value heads of a key head */
    float *work;
} dr_grad_lane;

void dr_cpu_grad_lane_carve(dr_arena *a, const dr_cpu_dims *d, dr_grad_lane *out);

/* The halves, in two parts each: what goes before the gradient of H takes the place of D, and
 * what follows it. lane->head loaded; values lane->dO if d_o, in the first half lane->v.
 * Panels [p0, p1) in the first half. ahead may be NULL. */
void dr_cpu_grad_solve(const dr_cpu_dims *d, dr_grad_lane *lane, const dr_grad_chunk *x, bool d_o,
                       int64_t p0, int64_t p1);
void dr_cpu_grad_step(const dr_cpu_dims *d, dr_grad_lane *lane, const dr_grad_chunk *x, bool d_o,
                      int64_t p0, int64_t p1, dr_kern_ahead *ahead);
void dr_cpu_grad_pairs(const dr_cpu_dims *d, dr_grad_lane *lane, const dr_grad_chunk *x, bool d_o,
                       dr_kern_ahead *ahead);
/* lane->dq and dk (added to unless first), dv, db, da. */
void dr_cpu_grad_finish(const dr_cpu_dims *d, dr_grad_lane *lane, const dr_grad_chunk *x, bool d_o,
                        bool first, dr_kern_ahead *ahead);

/* The gradient of H alone, in place, for `panels` panels of D whose values dO (NULL: zero) lie
 * beside them. */
void dr_cpu_grad_reverse(const dr_cpu_dims *d, dr_grad_lane *lane, const float *dO, int64_t panels,
                         float *D);

/* Sums over tokens of one value head: da_log, and ddt_bias [1 or K]; NULL for gates without
 * parameters. */
typedef struct dr_grad_sums {
    double *a_log, *dt_bias;
} dr_grad_sums;

/* cpu_store.c: gradients of a chunk of value head j, then of key head h, into the pass's
 * tensors. */
void dr_cpu_grad_store_head(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s, int32_t j,
                            dr_grad_lane *lane, const dr_grad_sums *sums);
void dr_cpu_grad_store_keys(const dr_pass *p, const dr_cpu_dims *d, const dr_cpu_span *s, int32_t h,
                            dr_grad_lane *lane);

#endif
