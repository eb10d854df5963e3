/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern_rows.h - rows of the kernel table for row operations and decoding; bodies in
 * kern_rows_body.h. A row is n floats; pointers may have any alignment, nothing outside the n
 * floats is touched, and an output may be an input of the same row unless said otherwise.
 */
#ifndef DR_KERN_ROWS_H
#define DR_KERN_ROWS_H

#define DR_KERN_ROWS_LIST(X)                                                                       \
    /* out_t,i = act(init_t,i + sum over j < taps of w[j * ldw + i] row[t + j][i]) for t < tokens, \
     * at out[t * ldo + i] and init[t * ldi + i]; act = SiLU or none; init NULL: 0. ldw may be     \
     * negative. out may be init, not a row. ahead, if not NULL, has `tokens` rows, `hop` bytes    \
     * apart, of n elements of `size` bytes, that will be read soon. */                            \
    X(void, conv_rows, (int n, int tokens, int taps, const float *const *row, const float *w,      \
                        int64_t ldw, const float *init, int64_t ldi, bool silu, float *out,        \
                        int64_t ldo, const char *ahead, int64_t hop, int size))                    \
    /* out[i] = act(bias + sum over j < taps of w[j] x[i - (taps - 1 - j) step]); out not in x. */ \
    X(void, conv_line, (int n, int taps, int64_t step, const float *x, const float *w, float bias, \
                        bool silu, float *out))                                                    \
    /* d_i = dy_i silu'(p_i) */                                                                    \
    X(void, silu_grad, (int n, const float *p, const float *dy, float *d))                         \
    /* sums[j * lds + i] += sum over t < tokens of d[t * ldd + i] row[t + j][i] for j < taps, and  \
     * sums[taps * lds + i] += sum of d[t * ldd + i]. */                                           \
    X(void, conv_sums, (int n, int tokens, int taps, const float *d, int64_t ldd,                  \
                        const float *const *row, float *sums, int64_t lds))                        \
    /* A narrow matrix turned: dst[j * ldd + i] = src[i * lds + j] for i < m, j < n, n <= 8. */    \
    X(void, narrow_in, (int m, int n, const float *src, int64_t lds, float *dst, int64_t ldd))     \
    /* The way back into rows without gaps: dst[i * n + j] = src[j * lds + i], n <= 8. */          \
    X(void, narrow_out, (int m, int n, const float *src, int64_t lds, float *dst))                 \
    /* a . b */                                                                                    \
    X(float, dot, (int n, const float *a, const float *b))                                         \
    /* y = s x */                                                                                  \
    X(void, scale_row, (int n, float s, const float *x, float *y))                                 \
    /* dx = r (dy - c r x): the adjoint of y = r x with r a norm of x and c = r x . dy (or the     \
     * mean of that). */                                                                           \
    X(void, norm_grad, (int n, float r, float c, const float *x, const float *dy, float *dx))      \
    /* y = r x w act(gate), act = SiLU or sigmoid */                                               \
    X(void, gated_row, (int n, bool silu, float r, const float *x, const float *w,                 \
                        const float *gate, float *y))                                              \
    /* With z = r x: dz = dy w act(gate), dgate = dy z w act'(gate), dw += dy z act(gate); returns \
     * dz . z. */                                                                                  \
    X(float, gated_grad, (int n, bool silu, float r, const float *x, const float *w,               \
                          const float *gate, const float *dy, float *dz, float *dgate, float *dw)) \
    /* Raw gates: with z = x + bias, g = -ea softplus(z), or bound sigmoid(ea z) where lower. Of   \
     * the sum z both rounded part and rest are used: exp(z) keeps its digits at z = -80. */       \
    X(void, raw_gate, (int n, bool lower, float bound, const float *ea, const float *bias,         \
                       const float *x, float *g))                                                  \
    /* Its adjoint: dx, da += dg dg/da_log, db += dx. */                                           \
    X(void, raw_gate_grad, (int n, bool lower, float bound, const float *ea, const float *bias,    \
                            const float *x, const float *dg, float *dx, float *da, float *db))     \
    /* dx = scale dy sigmoid'(x) */                                                                \
    X(void, sigmoid_grad, (int n, float scale, const float *x, const float *dy, float *dx))        \
    /* One token on n columns of a state with contiguous columns, K rows ldi (ldo) apart:          \
     * u = b (v - sum_i dk_i in_i), out_i = d_i in_i + k_i u, o = sum_i q_i out_i; dk = d k.       \
     * out may be in. ahead, if not NULL, are n K floats that will be wanted next. */              \
    X(void, step_columns, (int K, int n, const float *d, const float *dk, const float *k,          \
                           const float *q, float b, const float *v, const float *in, int64_t ldi,  \
                           float *out, int64_t ldo, float *o, const float *ahead))                 \
    /* The same on a transposed state: n rows of K contiguous elements. */                         \
    X(void, step_rows, (int K, int n, const float *d, const float *dk, const float *k,             \
                        const float *q, float b, const float *v, const float *in, int64_t ldi,     \
                        float *out, int64_t ldo, float *o, const float *ahead))

#endif
