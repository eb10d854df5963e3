/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern_body.h - the forward's kernels, each once, over the vector vocabulary (its words:
 * kern_c.c). Contracts: kern.h. Included by every kern_<isa>.c before the adjoint's and the row
 * operations' bodies, which may use the functions and tiles that stand first here.
 *
 * A register tile is mr rows by nv vectors, both known at compile time once inlined; mr is
 * V_MR (V_MRB where the tile is a block of tokens wide) or 4: row counts are multiples of 4, and
 * both divide 16. The left operand of a product is broadcast element by element straight from
 * where it lies, the right one is a panel in L1.
 */
#ifndef V_MRB
#define V_MRB V_MR
#endif
#define V_LOOP _Pragma("GCC unroll 16")

enum {
    NV = NR / V_LANES, /* vectors of a row of a panel */
    NB = 16 / V_LANES  /* vectors of a row of a block of tokens */
};

/* ---- functions -------------------------------------------------------------------- */

/* Within 1.5 ulp; 0 below the normal range, +Inf above, NaN for NaN. */
V_CALL v_f v_exp(v_f x)
{
    v_f n = v_round(v_mul(x, v_set(1.44269504f)));
    v_f r = v_fnma(n, v_set(0.693359375f), x);
    r = v_fnma(n, v_set(-2.12194440e-4f), r);
    v_f z = v_mul(r, r);
    v_f high = v_fma(v_set(1.3814599e-3f), z, v_fma(v_set(8.3687170e-3f), r, v_set(4.1668390e-2f)));
    v_f p = v_fma(high, z, v_fma(v_set(1.6666521e-1f), r, v_set(0.49999994f)));
    p = v_add(v_fma(p, z, r), v_set(1.0f));
    p = v_scale2(p, n);
    p = v_where_less(x, v_set(-87.33654f), v_zero(), p);
    return v_where_less(v_set(88.722839f), x, v_set(__builtin_inff()), p);
}

/* log(1 + f) / f up to the factor f, for s = f / (2 + f) and z = s^2: 2 atanh(s) / s. */
V_CALL v_f v_atanh_tail(v_f z)
{
    v_f p = v_fma(v_set(2.0f / 15), z, v_set(2.0f / 13));
    p = v_fma(p, z, v_set(2.0f / 11));
    p = v_fma(p, z, v_set(2.0f / 9));
    p = v_fma(p, z, v_set(2.0f / 7));
    p = v_fma(p, z, v_set(2.0f / 5));
    p = v_fma(p, z, v_set(2.0f / 3));
    return v_fma(p, z, v_set(2.0f));
}

/* log(1 + x) for x in [0, 1], small relative error also for tiny x. */
V_CALL v_f v_log1p(v_f x)
{
    v_f s = v_div(x, v_add(v_set(2.0f), x));
    return v_mul(s, v_atanh_tail(v_mul(s, s)));
}

/* log x for normal x > 0. */
V_CALL v_f v_log(v_f x)
{
    v_f n;
    v_f f = v_sub(v_split2(x, &n), v_set(1.0f));
    v_f s = v_div(f, v_add(v_set(2.0f), f));
    v_f y = v_mul(s, v_atanh_tail(v_mul(s, s)));
    return v_fma(n, v_set(0.693359375f), v_fma(n, v_set(-2.12194440e-4f), y));
}

/* sigmoid(x), and 1 - sigmoid(x) without cancellation. */
V_CALL v_f v_sigmoid(v_f x, v_f *rest)
{
    v_f e = v_exp(v_neg(v_abs(x)));
    v_f large = v_div(v_set(1.0f), v_add(v_set(1.0f), e));
    v_f small = v_mul(e, large);
    *rest = v_where_less(x, v_zero(), large, small);
    return v_where_less(x, v_zero(), small, large);
}

V_CALL v_f v_softplus(v_f x)
{
    return v_add(v_max(v_zero(), x), v_log1p(v_exp(v_neg(v_abs(x)))));
}

/* ---- tiles ------------------------------------------------------------------------ */

V_CALL void tile_zero(const int mr, const int nv, v_f acc[][NV])
{
    V_LOOP for (int m = 0; m < mr; m++)
        V_LOOP for (int j = 0; j < nv; j++)
            acc[m][j] = v_zero();
}

V_CALL void tile_load(const int mr, const int nv, v_f acc[][NV], const float *p, int64_t ld)
{
    V_LOOP for (int m = 0; m < mr; m++)
        V_LOOP for (int j = 0; j < nv; j++)
            acc[m][j] = v_load(p + m * ld + j * V_LANES);
}

V_CALL void tile_store(const int mr, const int nv, v_f acc[][NV], float *p, int64_t ld)
{
    V_LOOP for (int m = 0; m < mr; m++)
        V_LOOP for (int j = 0; j < nv; j++)
            v_store(p + m * ld + j * V_LANES, acc[m][j]);
}

/* acc[m] += sum over i < k of a[m * lm + i * lk] * b[i * ldb ..] */
V_CALL void tile_mul(const int mr, const int nv, v_f acc[][NV], const float *a, int64_t lm,
                     int64_t lk, const float *b, int64_t ldb, int k)
{
    _Pragma("GCC unroll 4") for (int i = 0; i < k; i++) {
        v_f y[NV];
        V_LOOP for (int j = 0; j < nv; j++)
            y[j] = v_load(b + j * V_LANES);
        V_LOOP for (int m = 0; m < mr; m++) {
            v_f x = v_set(a[m * lm]);
            V_LOOP for (int j = 0; j < nv; j++)
                acc[m][j] = v_fma(x, y[j], acc[m][j]);
        }
        a += lk;
        b += ldb;
    }
}

/* Row m times s[m]. */
V_CALL void tile_scale(const int mr, const int nv, v_f acc[][NV], const float *s)
{
    V_LOOP for (int m = 0; m < mr; m++) {
        v_f x = v_set(s[m]);
        V_LOOP for (int j = 0; j < nv; j++)
            acc[m][j] = v_mul(x, acc[m][j]);
    }
}

/* Fetches the next few lines of each stream. */
V_CALL void ahead_some(dr_kern_ahead *a)
{
    for (int i = 0; i < a->n; i++) {
        dr_kern_stream *s = &a->s[i];
        for (int n = 0; n < s->step && s->rows > 0; n++) {
            v_prefetch2(s->at + (int64_t)64 * s->line);
            if (++s->line == s->lines) {
                s->line = 0;
                s->rows--;
                s->at += s->stride;
            }
        }
    }
}

/* ---- conversions ------------------------------------------------------------------ */

V_CALL v_f get_f32(const void *p, int64_t i) { return v_loadu((const float *)p + i); }
V_CALL v_f get_bf16(const void *p, int64_t i) { return v_load_bf16((const uint16_t *)p + i); }
V_CALL v_f get_f16(const void *p, int64_t i) { return v_load_f16((const uint16_t *)p + i); }
V_CALL void put_f32(void *p, int64_t i, v_f x) { v_storeu((float *)p + i, x); }
V_CALL void put_bf16(void *p, int64_t i, v_f x) { v_store_bf16((uint16_t *)p + i, x); }
V_CALL void put_f16(void *p, int64_t i, v_f x) { v_store_f16((uint16_t *)p + i, x); }

/* Elements [i, i + n), n < V_LANES, by way of a full vector. */
V_CALL v_f get_part(v_f (*get)(const void *, int64_t), size_t item, const void *p, int64_t i, int n)
{
    float whole[V_LANES] = {0};
    __builtin_memcpy(whole, (const char *)p + (size_t)i * item, (size_t)n * item);
    return get(whole, 0);
}
V_CALL void put_part(void (*put)(void *, int64_t, v_f), size_t item, void *p, int64_t i, int n,
                     v_f x)
{
    float whole[V_LANES];
    put(whole, 0, x);
    __builtin_memcpy((char *)p + (size_t)i * item, whole, (size_t)n * item);
}

V_CALL void load_any(v_f (*get)(const void *, int64_t), size_t item, int rows, int n, int pad,
                     const void *src, int64_t stride, float scale, float *dst, int64_t ldd,
                     int64_t pd)
{
    const v_f s = v_set(scale);
    for (int i = 0; i < rows; i++) {
        const char *from = (const char *)src + i * stride * (int64_t)item;
        float *to = dst + i * ldd;
        int p = 0;
        for (; p + NR <= n; p += NR, to += pd)
            V_LOOP for (int j = 0; j < NR; j += V_LANES)
                v_store(to + j, v_mul(s, get(from, p + j)));
        for (; p < pad; p += NR, to += pd)
            for (int j = 0; j < NR && p + j < pad; j += V_LANES) {
                int left = n - p - j;
                v_f x = left >= V_LANES ? get(from, p + j)
                        : left > 0      ? get_part(get, item, from, p + j, left)
                                        : v_zero();
                v_store(to + j, v_mul(s, x));
            }
    }
}

V_CALL void store_any(void (*put)(void *, int64_t, v_f), size_t item, int rows, int n,
                      const float *src, int64_t lds, int64_t ps, void *dst, int64_t stride)
{
    for (int i = 0; i < rows; i++) {
        char *to = (char *)dst + i * stride * (int64_t)item;
        const float *from = src + i * lds;
        int p = 0;
        for (; p + NR <= n; p += NR, from += ps)
            V_LOOP for (int j = 0; j < NR; j += V_LANES)
                put(to, p + j, v_load(from + j));
        for (; p < n; p += NR, from += ps)
            for (int j = 0; j < NR && p + j < n; j += V_LANES) {
                if (n - p - j >= V_LANES)
                    put(to, p + j, v_load(from + j));
                else
                    put_part(put, item, to, p + j, n - p - j, v_load(from + j));
            }
    }
}

static void k_load_f32(int rows, int n, int pad, const void *src, int64_t stride, float scale,
                       float *dst, int64_t ldd, int64_t pd)
{
    load_any(get_f32, 4, rows, n, pad, src, stride, scale, dst, ldd, pd);
}

static void k_load_bf16(int rows, int n, int pad, const void *src, int64_t stride, float scale,
                        float *dst, int64_t ldd, int64_t pd)
{
    load_any(get_bf16, 2, rows, n, pad, src, stride, scale, dst, ldd, pd);
}

static void k_load_f16(int rows, int n, int pad, const void *src, int64_t stride, float scale,
                       float *dst, int64_t ldd, int64_t pd)
{
    load_any(get_f16, 2, rows, n, pad, src, stride, scale, dst, ldd, pd);
}

static void k_store_f32(int rows, int n, const float *src, int64_t lds, int64_t ps, void *dst,
                        int64_t stride)
{
    store_any(put_f32, 4, rows, n, src, lds, ps, dst, stride);
}

static void k_store_bf16(int rows, int n, const float *src, int64_t lds, int64_t ps, void *dst,
                         int64_t stride)
{
    store_any(put_bf16, 2, rows, n, src, lds, ps, dst, stride);
}

static void k_store_f16(int rows, int n, const float *src, int64_t lds, int64_t ps, void *dst,
                        int64_t stride)
{
    store_any(put_f16, 2, rows, n, src, lds, ps, dst, stride);
}

/* ---- rows ------------------------------------------------------------------------- */

static void k_transpose(int m, int n, const float *src, int64_t lds, float *dst, int64_t ldd)
{
    int i = 0;
    for (; i + V_LANES <= m; i += V_LANES) {
        int j = 0;
        for (; j + V_LANES <= n; j += V_LANES) {
            v_f r[V_LANES];
            V_LOOP for (int x = 0; x < V_LANES; x++)
                r[x] = v_loadu(src + (i + x) * lds + j);
            v_transpose(r);
            V_LOOP for (int x = 0; x < V_LANES; x++)
                v_storeu(dst + (j + x) * ldd + i, r[x]);
        }
        for (; j < n; j++)
            for (int x = 0; x < V_LANES; x++)
                dst[j * ldd + i + x] = src[(i + x) * lds + j];
    }
    for (; i < m; i++)
        for (int j = 0; j < n; j++)
            dst[j * ldd + i] = src[i * lds + j];
}

static void k_l2rows(int rows, int ldk, float eps, float scale, float *x, float *rstd)
{
    for (int i = 0; i < rows; i++) {
        float *row = x + (int64_t)i * ldk;
        v_f s[NB];
        V_LOOP for (int j = 0; j < NB; j++)
            s[j] = v_zero();
        for (int d = 0; d < ldk; d += 16)
            V_LOOP for (int j = 0; j < NB; j++) {
                v_f y = v_load(row + d + j * V_LANES);
                s[j] = v_fma(y, y, s[j]);
            }
        V_LOOP for (int j = 1; j < NB; j++)
            s[0] = v_add(s[0], s[j]);
        const float r = 1.0f / __builtin_sqrtf(v_sum(s[0]) + eps);
        const v_f by = v_set(r), then = v_set(scale);
        rstd[i] = r;
        for (int d = 0; d < ldk; d += V_LANES)
            v_store(row + d, v_mul(then, v_mul(by, v_load(row + d))));
    }
}

/* ---- general product -------------------------------------------------------------- */

/* mr rows, nv vectors of which the last has `last` lanes (V_LANES: whole). */
V_CALL void gemm_tile(const int mr, const int nv, const bool whole, int last, int k,
                      const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
                      int64_t ldc, bool add)
{
    v_f acc[V_MR][NV];
    V_LOOP for (int m = 0; m < mr; m++)
        V_LOOP for (int j = 0; j < nv; j++) {
            const float *p = c + m * ldc + j * V_LANES;
            acc[m][j] = !add                      ? v_zero()
                        : whole || j + 1 < nv ? v_loadu(p)
                                                  : v_load_part(p, last);
        }
    for (int i = 0; i < k; i++) {
        v_f y[NV];
        V_LOOP for (int j = 0; j < nv; j++)
            y[j] = whole || j + 1 < nv ? v_loadu(b + j * V_LANES)
                                       : v_load_part(b + j * V_LANES, last);
        V_LOOP for (int m = 0; m < mr; m++) {
            v_f x = v_set(a[m * lda + i]);
            V_LOOP for (int j = 0; j < nv; j++)
                acc[m][j] = v_fma(x, y[j], acc[m][j]);
        }
        b += ldb;
    }
    V_LOOP for (int m = 0; m < mr; m++)
        V_LOOP for (int j = 0; j < nv; j++) {
            float *p = c + m * ldc + j * V_LANES;
            if (whole || j + 1 < nv)
                v_storeu(p, acc[m][j]);
            else
                v_store_part(p, last, acc[m][j]);
        }
}

static void k_gemm(int m, int n, int k, const float *a, int64_t lda, const float *b, int64_t ldb,
                   float *c, int64_t ldc, bool add)
{
    int j = 0;
    for (; j + NR <= n; j += NR) {
        int i = 0;
        for (; i + 4 <= m; i += 4)
            gemm_tile(4, NV, true, 0, k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, add);
        for (; i < m; i++)
            gemm_tile(1, NV, true, 0, k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc, add);
    }
    for (; j < n; j += V_LANES) {
        int last = n - j < V_LANES ? n - j : V_LANES, i = 0;
        for (; i + 4 <= m; i += 4)
            gemm_tile(4, 1, false, last, k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc,
                      add);
        for (; i < m; i++)
            gemm_tile(1, 1, false, last, k, a + i * lda, lda, b + j, ldb, c + i * ldc + j, ldc,
                      add);
    }
}

/* ---- pointwise -------------------------------------------------------------------- */

/* For i over whole vectors and the rest: n lanes at i, `left` of them present. */
#define V_OVER(i, left, n) \
    for (int i = 0, left = (n); i < (n); i += V_LANES, left = (n) - i)
V_CALL v_f v_get(const float *p, int left)
{
    return left >= V_LANES ? v_loadu(p) : v_load_part(p, left);
}
V_CALL void v_put(float *p, int left, v_f x)
{
    if (left >= V_LANES)
        v_storeu(p, x);
    else
        v_store_part(p, left, x);
}

static void k_vexp(int n, const float *x, float *y)
{
    V_OVER(i, left, n)
        v_put(y + i, left, v_exp(v_get(x + i, left)));
}

static void k_sigmoid(int n, float scale, const float *x, float *y, float *dy)
{
    V_OVER(i, left, n) {
        v_f rest, s = v_sigmoid(v_get(x + i, left), &rest);
        s = v_mul(v_set(scale), s);
        v_put(y + i, left, s);
        if (dy != NULL)
            v_put(dy + i, left, v_mul(s, rest));
    }
}

#define DECAY_FLOOR -1e30f

static void k_gate_log(int n, const float *x, float *g)
{
    V_OVER(i, left, n)
        v_put(g + i, left, v_max(v_set(DECAY_FLOOR), v_get(x + i, left)));
}

static void k_gate_factor(int n, const float *x, float *g, float *d)
{
    V_OVER(i, left, n) {
        v_f f = v_get(x + i, left);
        v_f y = v_where_less(f, v_set(1.17549435e-38f), v_set(DECAY_FLOOR), v_log(f));
        y = v_where_less(f, v_zero(), v_set(__builtin_nanf("")), y);
        y = v_fma(v_zero(), f, y); /* NaN and Inf stay visible */
        v_put(g + i, left, y);
        if (d != NULL)
            v_put(d + i, left, v_div(v_set(1.0f), f));
    }
}

static void k_gate_softplus(int n, const float *x, const float *bias, float ea, float *g, float *d)
{
    const v_f minus = v_set(-ea);
    V_OVER(i, left, n) {
        v_f rest, z = v_add(v_get(x + i, left), v_get(bias + i, left));
        v_put(g + i, left, v_max(v_set(DECAY_FLOOR), v_mul(minus, v_softplus(z))));
        if (d != NULL)
            v_put(d + i, left, v_mul(minus, v_sigmoid(z, &rest)));
    }
}

static void k_gate_lower(int n, const float *x, const float *bias, float ea, float bound, float *g,
                         float *d, float *da)
{
    const v_f a = v_set(ea), low = v_set(bound);
    V_OVER(i, left, n) {
        v_f rest, z = v_mul(a, v_add(v_get(x + i, left), v_get(bias + i, left)));
        v_f y = v_mul(low, v_sigmoid(z, &rest));
        v_f slope = v_mul(y, rest);
        v_put(g + i, left, v_max(v_set(DECAY_FLOOR), y));
        if (d != NULL)
            v_put(d + i, left, v_mul(slope, a));
        if (da != NULL)
            v_put(da + i, left, v_mul(slope, z));
    }
}

/* ---- factors of a chunk ----------------------------------------------------------- */

static void k_pair(int rows, int k, const float *a, int lda, const float *b, float *c, int ldc)
{
    v_f acc[V_MRB][NV];
    int r = 0;
    for (; r + V_MRB <= rows; r += V_MRB) {
        tile_zero(V_MRB, NB, acc);
        tile_mul(V_MRB, NB, acc, a + (int64_t)r * lda, lda, 1, b, 16, k);
        tile_store(V_MRB, NB, acc, c + (int64_t)r * ldc, ldc);
    }
    for (; r < rows; r += 4) {
        tile_zero(4, NB, acc);
        tile_mul(4, NB, acc, a + (int64_t)r * lda, lda, 1, b, 16, k);
        tile_store(4, NB, acc, c + (int64_t)r * ldc, ldc);
    }
}

/* The ln decay of a pair is the sum of the gates between: row i of the table is row i - 1 plus
 * g_i, and a new column starts at 0. */
static float k_gdn_pairs(int rows, int ldc, const float *g, const float *b, const float *kk,
                         const float *qk, float *gam, float *lam, float *L, float *P, float *e)
{
    _Alignas(64) float run[64] = {0};
    float sum = 0;
    for (int i = 0; i < rows; i++)
        gam[i] = sum += g[i];
    const float all = sum;
    sum = 0;
    for (int i = rows; i-- > 0; sum += g[i])
        lam[i] = sum;
    k_vexp(rows, gam, gam);
    k_vexp(rows, lam, lam);
    for (int i = 0; kk != NULL && i < rows; i++) {
        const v_f gi = v_set(g[i]), bi = v_set(b[i]);
        const int64_t row = (int64_t)i * ldc;
        for (int j = 0; j < i / 16 * 16 + 16; j += V_LANES) {
            v_f r = v_keep(v_add(v_load(run + j), gi), i - j);
            v_store(run + j, r);
            r = v_exp(r);
            v_store(L + row + j, v_keep(v_mul(bi, v_mul(r, v_load(kk + row + j))), i - j));
            if (P != NULL)
                v_store(P + row + j, v_keep(v_mul(r, v_load(qk + row + j)), i - j + 1));
            if (e != NULL)
                v_store(e + row + j, v_keep(r, i - j + 1));
        }
    }
    float last;
    k_vexp(1, &all, &last);
    return last;
}

static bool k_kda_sums(int n, int ldk, const float *g, float *G, float *sum)
{
    v_f span = v_zero();
    for (int d = 0; d < n; d += V_LANES) {
        v_f s = v_zero();
        for (int64_t i = 0; i < 16; i++) {
            s = v_add(s, v_load(g + i * ldk + d));
            span = v_max(v_abs(s), span);
            v_store(G + i * ldk + d, s);
        }
        v_store(sum + d, s);
    }
    float spans[V_LANES];
    v_storeu(spans, span);
    bool fast = true;
    for (int i = 0; i < V_LANES; i++)
        fast = fast && spans[i] <= DR_KERN_SPAN;
    return fast;
}

/* Row i, channels [d, d + V_LANES): what both forms share. f = exp(G_i). */
V_CALL void block_forward(const dr_kern_block *b, int64_t at, int64_t d, v_f x, v_f f)
{
    const v_f a = v_load(b->a + d), left = v_mul(x, f);
    v_store(b->kbar + at, v_mul(left, a));
    if (b->kp != NULL)
        v_store(b->kp + at, left);
    if (b->q != NULL) {
        v_f y = v_mul(v_load(b->q + at), f);
        v_store(b->qbar + at, v_mul(y, a));
        if (b->qp != NULL)
            v_store(b->qp + at, y);
    }
}

static void k_kda_rows(const dr_kern_block *b)
{
    if (b->fast) {
        _Alignas(64) float last[256]; /* exp(G_15) z */
        const float *end = b->kbar + 15 * (int64_t)b->ldk;
        for (int64_t d = 0; d < b->n; d += V_LANES)
            v_store(last + d, v_mul(v_exp(v_load(end + d)), v_load(b->z + d)));
        for (int64_t i = 0; i < 16; i++)
            for (int64_t d = 0; d < b->n; d += V_LANES) {
                const int64_t at = i * b->ldk + d;
                v_f x = v_load(b->k + at), f = v_exp(v_load(b->kbar + at));
                v_f back = v_div(x, f);
                block_forward(b, at, d, x, f);
                v_store(b->kd + at, back);
                v_store(b->khat + at, v_mul(back, v_load(last + d)));
            }
        return;
    }
    for (int64_t d = 0; d < b->n; d += V_LANES) {
        const v_f z = v_load(b->z + d);
        v_f s = v_zero();
        for (int64_t i = 15; i >= 0; i--) {
            const int64_t at = i * b->ldk + d;
            v_f x = v_load(b->k + at), g = v_load(b->g + at);
            v_f ahead = v_mul(x, v_exp(s));
            block_forward(b, at, d, x, v_exp(v_load(b->kbar + at)));
            v_store(b->kd + at, ahead);
            v_store(b->khat + at, v_mul(ahead, z));
            v_store(b->eg + at, v_exp(g));
            s = v_add(s, g);
        }
    }
}

static void k_kda_reach(int k, const float *s, const float *in, float *out)
{
    for (int d = 0; d < k; d++) {
        const v_f x = v_set(s[d]);
        V_LOOP for (int j = 0; j < NB; j++)
            v_store(out + d * 16 + j * V_LANES, v_mul(x, v_load(in + d * 16 + j * V_LANES)));
    }
}

/* Columns [j, j + count) of row i: decay the running keys by eg_i, then the two dot products. */
V_CALL void diagonal_tile(const int count, const bool with_q, int n, int ldk, const float *k,
                          const float *q, const float *eg, float *work, float *kk, float *qk)
{
    v_f s[4], t[4];
    V_LOOP for (int j = 0; j < count; j++)
        s[j] = t[j] = v_zero();
    for (int d = 0; d < n; d += V_LANES) {
        v_f e = v_load(eg + d), x = v_load(k + d), y = with_q ? v_load(q + d) : x;
        V_LOOP for (int j = 0; j < count; j++) {
            v_f w = v_mul(e, v_load(work + (int64_t)j * ldk + d));
            v_store(work + (int64_t)j * ldk + d, w);
            s[j] = v_fma(x, w, s[j]);
            if (with_q)
                t[j] = v_fma(y, w, t[j]);
        }
    }
    V_LOOP for (int j = 0; j < count; j++) {
        kk[j] = v_sum(s[j]);
        if (with_q)
            qk[j] = v_sum(t[j]);
    }
}

V_CALL void diagonal_rows(const bool with_q, int n, int ldk, const float *k, const float *q,
                          const float *eg, float *kk, float *qk, int ldc, float *work)
{
    for (int i = 0; i < 16; i++) {
        const float *ki = k + (int64_t)i * ldk, *qi = with_q ? q + (int64_t)i * ldk : ki;
        const float *ei = eg + (int64_t)i * ldk;
        float *kr = kk + (int64_t)i * ldc, *qr = with_q ? qk + (int64_t)i * ldc : kr;
        int j = 0;
        for (; j + 4 <= i; j += 4)
            diagonal_tile(4, with_q, n, ldk, ki, qi, ei, work + (int64_t)j * ldk, kr + j, qr + j);
        for (; j < i; j++)
            diagonal_tile(1, with_q, n, ldk, ki, qi, ei, work + (int64_t)j * ldk, kr + j, qr + j);
        v_f s = v_zero(), t = v_zero();
        for (int d = 0; d < n; d += V_LANES) {
            v_f x = v_load(ki + d);
            v_store(work + (int64_t)i * ldk + d, x);
            s = v_fma(x, x, s);
            t = v_fma(x, v_load(qi + d), t);
        }
        kr[i] = v_sum(s);
        qr[i] = v_sum(t);
        for (j = i + 1; j < 16; j++)
            kr[j] = qr[j] = 0;
    }
}

static void k_kda_diagonal(int n, int ldk, const float *k, const float *q, const float *eg,
                           float *kk, float *qk, int ldc, float *work)
{
    if (q != NULL)
        diagonal_rows(true, n, ldk, k, q, eg, kk, qk, ldc, work);
    else
        diagonal_rows(false, n, ldk, k, k, eg, kk, kk, ldc, work);
}

static void k_kda_pairs(int rows, int ldc, const float *b, const float *kk, const float *qk,
                        float *L, float *P)
{
    for (int i = 0; i < rows; i++) {
        const v_f bi = v_set(b[i]);
        const int64_t row = (int64_t)i * ldc;
        for (int j = 0; j < i / 16 * 16 + 16; j += V_LANES) {
            v_store(L + row + j, v_keep(v_mul(bi, v_load(kk + row + j)), i - j));
            if (P != NULL)
                v_store(P + row + j, v_keep(v_load(qk + row + j), i - j + 1));
        }
    }
}

/* ---- stages ----------------------------------------------------------------------- */

/* Rows r .. r + mr. The tile that has just formed K S is turned into the right-hand side, loses
 * what the earlier rows contribute, and is solved in place: acc holds -X until the end. */
V_CALL void tile_k(const int mr, const dr_kern_chunk *c, const float *S, const float *v, float *X,
                   float *Xd, float *N, int r)
{
    v_f acc[V_MR][NV];
    const float *L = c->L + (int64_t)r * c->ldc;
    tile_zero(mr, NV, acc);
    tile_mul(mr, NV, acc, c->kl + (int64_t)r * c->ldk, c->ldk, 1, S, NR, c->k);
    if (c->gam != NULL)
        tile_scale(mr, NV, acc, c->gam + r);
    if (N != NULL)
        tile_store(mr, NV, acc, N + r * NR, NR);
    if (v != NULL)
        V_LOOP for (int m = 0; m < mr; m++)
            V_LOOP for (int j = 0; j < NV; j++)
                acc[m][j] = v_sub(acc[m][j], v_load(v + (r + m) * NR + j * V_LANES));
    tile_scale(mr, NV, acc, c->b + r);
    tile_mul(mr, NV, acc, L, c->ldc, 1, X, NR, r);
    V_LOOP for (int m = 0; m < mr; m++) {
        V_LOOP for (int j = 0; j < NV; j++)
            acc[m][j] = v_neg(acc[m][j]);
        V_LOOP for (int n = m + 1; n < mr; n++) {
            v_f l = v_set(L[(int64_t)n * c->ldc + r + m]);
            V_LOOP for (int j = 0; j < NV; j++)
                acc[n][j] = v_fma(l, acc[m][j], acc[n][j]);
        }
    }
    tile_store(mr, NV, acc, X + r * NR, NR);
    if (c->lam != NULL) {
        tile_scale(mr, NV, acc, c->lam + r);
        tile_store(mr, NV, acc, Xd + r * NR, NR);
    }
}

static void k_stage_k(const dr_kern_chunk *c, const float *S, const float *v, float *X, float *Xd,
                      float *N)
{
    int r = 0;
    for (; r + V_MR <= c->rows; r += V_MR)
        tile_k(V_MR, c, S, v, X, Xd, N, r);
    for (; r < c->rows; r += 4)
        tile_k(4, c, S, v, X, Xd, N, r);
}

/* The triangle of P within the tile is spelled out: a later token never enters a sum. */
V_CALL void tile_q(const int mr, const dr_kern_chunk *c, const float *S, const float *X, float *o,
                   int r)
{
    v_f acc[V_MR][NV];
    const float *P = c->P + (int64_t)r * c->ldc;
    tile_zero(mr, NV, acc);
    tile_mul(mr, NV, acc, c->ql + (int64_t)r * c->ldk, c->ldk, 1, S, NR, c->k);
    if (c->gam != NULL)
        tile_scale(mr, NV, acc, c->gam + r);
    tile_mul(mr, NV, acc, P, c->ldc, 1, X, NR, r);
    V_LOOP for (int n = 0; n < mr; n++) {
        v_f y[NV];
        V_LOOP for (int j = 0; j < NV; j++)
            y[j] = v_load(X + (r + n) * NR + j * V_LANES);
        V_LOOP for (int m = n; m < mr; m++) {
            v_f x = v_set(P[(int64_t)m * c->ldc + r + n]);
            V_LOOP for (int j = 0; j < NV; j++)
                acc[m][j] = v_fma(x, y[j], acc[m][j]);
        }
    }
    tile_store(mr, NV, acc, o + r * NR, NR);
}

static void k_stage_q(const dr_kern_chunk *c, const float *S, const float *X, float *o)
{
    int r = 0;
    for (; r + V_MR <= c->rows; r += V_MR)
        tile_q(V_MR, c, S, X, o, r);
    for (; r < c->rows; r += 4)
        tile_q(4, c, S, X, o, r);
}

V_CALL void tile_u(const int mr, const dr_kern_chunk *c, const float *S, const float *Xd,
                   float *out, int d)
{
    v_f acc[V_MR][NV];
    tile_load(mr, NV, acc, S + d * NR, NR);
    tile_scale(mr, NV, acc, c->dec + d);
    tile_mul(mr, NV, acc, c->ku + d, 1, c->ldk, Xd, NR, c->rows);
    tile_store(mr, NV, acc, out + d * NR, NR);
}

static void k_stage_u(const dr_kern_chunk *c, const float *S, const float *Xd, float *out,
                      dr_kern_ahead *ahead)
{
    int d = 0;
    for (; d + V_MR <= c->k; d += V_MR) {
        tile_u(V_MR, c, S, Xd, out, d);
        if (ahead != NULL)
            ahead_some(ahead);
    }
    for (; d < c->k; d += 4) {
        tile_u(4, c, S, Xd, out, d);
        if (ahead != NULL)
            ahead_some(ahead);
    }
}
