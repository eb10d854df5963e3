/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern_grad.h - rows of the kernel table for the adjoint; bodies in kern_grad_body.h, layouts
 * in kern.h.
 *
 * Letters, one chunk of one value head: H state entering it, D gradient of the state leaving
 * it, dO gradient of its outputs, N = gam (kl H), X = (I + L)^-1 b (v - N) what it writes,
 * Z = (I + L)^-T (P^T dO + lam (ku D)) the gradient of b (v - N).
 */
#ifndef DR_KERN_GRAD_H
#define DR_KERN_GRAD_H

#define DR_KERN_GRAD_LIST(X)                                                                       \
    /* One panel. R = v - N (NULL: not kept), X as above, Xd = lam X (NULL: not wanted).           \
     * v, N, R, X, Xd: [C][NR]. */                                                                 \
    X(void, grad_x, (const dr_kern_chunk *c, const float *v, const float *N, float *R, float *X,   \
                     float *Xd))                                                                   \
    /* One panel. Zn = -Z, zr_i = Z_i . R_i over the panel (NULL together with R); dO NULL: zero.  \
     * D: [K4][NR], the others [C][NR]. */                                                         \
    X(void, grad_z, (const dr_kern_chunk *c, const float *D, const float *dO, const float *R,      \
                     float *Zn, float *zr))                                                        \
    /* One panel. out = dec D + qg^T dO + kg^T Zn, the gradient of H, from rows qg_i = gam_i ql_i, \
     * kg_i = b_i gam_i kl_i (dO NULL: zero); out may be D. hd_d = H_d . D_d over the panel (NULL  \
     * together with H). ahead may be NULL. */                                                     \
    X(void, grad_d, (const dr_kern_chunk *c, const float *D, const float *H, const float *qg,      \
                     const float *dO, const float *kg, const float *Zn, float *out, float *hd,     \
                     dr_kern_ahead *ahead))                                                        \
    /* Rows dst_i = x_i y_i src_i; y NULL: 1. */                                                   \
    X(void, grad_scaled, (int rows, int ldk, const float *x, const float *y, const float *src,     \
                          float *dst))                                                             \
    /* c[i][0..16) = row i of a, times t: a in panels [..][C][NR], `ps` floats apart, t the tokens \
     * [panels * NR][16] of one block. */                                                          \
    X(void, grad_pair, (int rows, int panels, int64_t ps, const float *a, const float *t,          \
                        float *c, int ldc))                                                        \
    /* out [k][16] = S t for a state S [panels][k][NR] and t as above. ahead may be NULL. */       \
    X(void, grad_left, (int k, int panels, const float *S, const float *t, float *out,             \
                        dr_kern_ahead *ahead))                                                     \
    /* Scalar gates, squares: from ox = dO X^T, zx = Zn X^T, of which the lower triangle counts:   \
     * w_ij = ox E (i >= j), m_ij = b_i zx E, B_ij = qk ox + b_i kk zx (i > j), 0 above within the \
     * diagonal blocks and in rows up to a multiple of 16; db_i += sum_j zx kk E (i > j). */       \
    X(void, grad_gdn_pairs, (int rows, int ldc, const float *b, const float *kk, const float *qk,  \
                             const float *E, const float *ox, const float *zx, float *w, float *m, \
                             float *B, float *db))                                                 \
    /* n (multiple of 16) rows: wt = w^T, on and above the diagonal blocks; ms = m + m^T, whole. */\
    X(void, grad_gdn_mirror, (int n, int ldc, const float *w, const float *m, float *wt,           \
                              float *ms))                                                          \
    /* One block of tokens [K4][16]: from hq = H dO^T, hz = H Zn^T, dx = D X^T and the raw kt, qt: \
     * dq = gam hq + kl^T wt, dk = b gam hz + lam dx + kl^T ms + ql^T w; dq may be hq, dk hz.      \
     * b0_i = sum_d qt hq + b_i kt hz, bx_i = sum_d kt dx. */                                      \
    X(void, grad_gdn_block, (const dr_kern_chunk *c, int block, const float *kt, const float *qt,  \
                             const float *hq, const float *hz, const float *dx, const float *w,    \
                             const float *wt, const float *ms, float *dq, float *dk, float *b0,    \
                             float *bx))                                                           \
    /* See NOTE [Gradients of decays] in cpu_grad.h: da_t of every row from B, b0 (entry column),  \
     * bx (exit row) and corner. */                                                                \
    X(void, grad_gdn_decay, (int rows, int ldc, const float *gam, const float *E, const float *B,  \
                             const float *b0, const float *bx, float corner, float *da))           \
    /* Gates per channel: m_ij = b_i zx_ij (i > j), db_i += sum_j zx kk (i > j). */                \
    X(void, grad_kda_pairs, (int rows, int ldc, const float *b, const float *kk, const float *zx,  \
                             float *m, float *db))                                                 \
    /* Everything per channel, the same note: dq, dk (added to, if add) and da, rows, from k, q,   \
     * a_id = exp(g_id) (rows), hq, hz, dx (tokens, [C/16][ldk][16]), hd_d = H_d . D_d [ldk], and  \
     * the squares dp = dO X^T and m, of which the lower triangle is read.                         \
     * work: 5 x [rows up to 16][16]. */                                                           \
    X(void, grad_kda_mix, (int rows, int ldk, int ldc, const float *k, const float *q,             \
                           const float *a, const float *b, const float *hq, const float *hz,       \
                           const float *dx, const float *hd, const float *dp, const float *m,      \
                           float *dq, float *dk, float *da, bool add, float *work))                \
    /* Tokens of one block back to rows: dst[i][d] = src[d][i], added if add; n multiple of 16. */ \
    X(void, grad_rows, (int n, const float *src, float *dst, int64_t ldd, bool add))               \
    /* dv = -b Zn, panels `ps` floats apart. */                                                    \
    X(void, grad_dv, (int rows, int panels, int64_t ps, const float *b, const float *Zn,           \
                      float *dv))                                                                  \
    /* Through y = s x rstd, rstd = rsqrt(sum x^2 + eps): d, the gradient of y, becomes that of x. \
     * rstd NULL: y = s x. */                                                                      \
    X(void, grad_norm, (int rows, int ldk, float s, const float *y, const float *rstd, float *d))

#endif
