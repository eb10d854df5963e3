/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_kern_forward.h - checks of the rows of DR_KERN_LIST (cpu/kern.h); see check_kern.h.
 * Sums are judged against the sum of absolute values of what they add, decays against the
 * rounding of the gates they are made of, pointwise functions in units of the last place.
 */
#ifndef CHECK_KERN_FORWARD_H
#define CHECK_KERN_FORWARD_H

#include "check_kern.h"

static const float zero_or_nan[] = {0.0f, NAN};

/* ---- conversions --------------------------------------------------------------------- */

typedef void load_kernel(int rows, int n, int pad, const void *src, int64_t stride, float scale,
                         float *dst, int64_t ldd, int64_t pd);
typedef void store_kernel(int rows, int n, const float *src, int64_t lds, int64_t ps, void *dst,
                          int64_t stride);

/* Rows or panels, pads included, against one element at a time. */
static void check_load(check_env *e, load_kernel *load, dr_dtype type)
{
    const int nr = e->kern->nr, rows = draw_int(e, 0, 20), n = draw_int(e, 1, 150);
    const bool panels = draw(e) & 1;
    const int pad = (int)dr_round_up(n, panels ? nr : 16) + (panels ? 0 : 16 * draw_int(e, 0, 1));
    const int64_t stride = n + draw_int(e, 0, 5), ldd = panels ? nr : pad;
    const int64_t pd = panels ? rows * nr : nr;
    const size_t item = dr_dtype_size(type), span = rows ? (size_t)((rows - 1) * stride + n) : 0;
    char *src = fence_bytes(e, span * item);
    float *dst = fence(e, (int64_t)rows * pad);
    const float scale = draw(e) & 1 ? 1.0f : (float)uniform(e);
    const int kind = draw_int(e, 0, FILL_KINDS - 1);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < n; j++)
            dr_put(src, type, i * stride + j, fill_one(e, kind, i + j));
    load(rows, n, pad, src, stride, scale, dst, ldd, pd);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < pad; j++) {
            float want = j < n ? scale * (float)dr_get(src, type, i * stride + j) : 0;
            expect(e, "dst", (int64_t)i * pad + j, dst[i * ldd + j / nr * pd + j % nr], want, 0);
        }
}
static void check_load_f32(check_env *e) { check_load(e, e->kern->load_f32, DR_F32); }
static void check_load_bf16(check_env *e) { check_load(e, e->kern->load_bf16, DR_BF16); }
static void check_load_f16(check_env *e) { check_load(e, e->kern->load_f16, DR_F16); }

static void check_store(check_env *e, store_kernel *store, dr_dtype type)
{
    static const float odd[] = {INFINITY, -INFINITY, NAN, 65504.0f, 65520.0f, 1e30f, -1e-30f, -0.0f,
                                6e-8f, 3.3895314e38f};
    const int nr = e->kern->nr, rows = draw_int(e, 1, 20), n = draw_int(e, 1, 150);
    const bool panels = draw(e) & 1;
    const int pad = (int)dr_round_up(n, panels ? nr : 16);
    const int64_t stride = n + draw_int(e, 0, 5), lds = panels ? nr : pad;
    const int64_t ps = panels ? rows * nr : nr;
    const size_t item = dr_dtype_size(type);
    float *src = fence(e, (int64_t)rows * pad);
    char *dst = fence_bytes(e, (size_t)((rows - 1) * stride + n) * item), one[4];
    fill(e, draw_int(e, 0, FILL_KINDS - 1), src, (int64_t)rows * pad);
    for (int i = 0; i < 12; i++)
        src[draw_int(e, 0, rows * pad - 1)] = odd[draw_int(e, 0, (int)DR_COUNT(odd) - 1)];
    store(rows, n, src, lds, ps, dst, stride);
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < n; j++) {
            dr_put(one, type, 0, src[i * lds + j / nr * ps + j % nr]);
            expect(e, "dst", i * stride + j, dr_get(dst, type, i * stride + j),
                   dr_get(one, type, 0), 0);
        }
        if (i + 1 < rows)
            expect_untouched(e, "gap", dst + (i * stride + n) * (int64_t)item,
                             (size_t)(stride - n) * item);
    }
}
static void check_store_f32(check_env *e) { check_store(e, e->kern->store_f32, DR_F32); }
static void check_store_bf16(check_env *e) { check_store(e, e->kern->store_bf16, DR_BF16); }
static void check_store_f16(check_env *e) { check_store(e, e->kern->store_f16, DR_F16); }

/* ---- rows ----------------------------------------------------------------------------- */

static void check_transpose(check_env *e)
{
    const int m = draw_int(e, 0, 40), n = draw_int(e, 1, 40);
    const int64_t lds = n + draw_int(e, 0, 3), ldd = m + draw_int(e, 0, 3);
    float *src = fence(e, m ? (m - 1) * lds + n : 0), *dst = fence(e, m ? (n - 1) * ldd + m : 0);
    for (int i = 0; i < m; i++)
        fill(e, FILL_RANDOM, src + i * lds, n);
    e->kern->transpose(m, n, src, lds, dst, ldd);
    for (int j = 0; m > 0 && j < n; j++) {
        for (int i = 0; i < m; i++)
            expect(e, "dst", j * ldd + i, dst[j * ldd + i], src[i * lds + j], 0);
        if (j + 1 < n)
            expect_untouched(e, "gap", dst + j * ldd + m, (size_t)(ldd - m) * sizeof *dst);
    }
    expect(e, "nothing", 0, 0, 0, 0);
}

static void check_l2rows(check_env *e)
{
    const int K = draw_int(e, 1, 256), ldk = (int)dr_round_up(K, 16), rows = draw_int(e, 1, 9);
    float *x = fence(e, (int64_t)rows * ldk), *rstd = fence(e, rows);
    double *old = fence_double(e, (int64_t)rows * ldk);
    const float eps = 1e-6f, scale = (float)uniform(e);
    fill_matrix(e, draw_int(e, 0, FILL_KINDS - 1), x, rows, K, ldk, 0);
    for (int64_t i = 0; i < (int64_t)rows * ldk; i++)
        old[i] = x[i];
    e->kern->l2rows(rows, ldk, eps, scale, x, rstd);
    for (int i = 0; i < rows; i++) {
        double sum = eps;
        for (int d = 0; d < K; d++)
            sum += old[i * ldk + d] * old[i * ldk + d];
        const double r = 1 / sqrt(sum), ulps = 0.25 * (K + 2) + 3;
        expect(e, "rstd", i, rstd[i], r, ulp_bound(ulps, r));
        for (int d = 0; d < ldk; d++)
            expect(e, "x", i * ldk + d, x[i * ldk + d], old[i * ldk + d] * r * scale,
                   ulp_bound(ulps + 1, old[i * ldk + d] * r * scale));
    }
}

static void check_gemm(check_env *e)
{
    const int m = draw_int(e, 0, 10), n = draw_int(e, 1, 70), k = draw_int(e, 1, 140);
    const int64_t lda = k + draw_int(e, 0, 3), ldb = n + draw_int(e, 0, 3);
    const int64_t ldc = n + draw_int(e, 0, 3);
    const int kind = draw_int(e, 0, FILL_KINDS - 1);
    const bool add = draw(e) & 1;
    float *a = fence(e, m ? (m - 1) * lda + k : 0), *b = fence(e, (k - 1) * ldb + n);
    float *c = fence(e, m ? (m - 1) * ldc + n : 0);
    double *old = fence_double(e, (int64_t)m * n);
    for (int i = 0; i < m; i++) {
        fill(e, kind, a + i * lda, k);
        for (int j = 0; j < n; j++)
            old[i * n + j] = add ? c[i * ldc + j] = fill_one(e, kind, j) : 0;
    }
    for (int i = 0; i < k; i++)
        fill(e, kind, b + i * ldb, n);
    e->kern->gemm(m, n, k, a, lda, b, ldb, c, ldc, add);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = old[i * n + j], abs = fabs(sum);
            for (int x = 0; x < k; x++) {
                double y = (double)a[i * lda + x] * b[x * ldb + j];
                sum += y;
                abs += fabs(y);
            }
            expect(e, "c", i * ldc + j, c[i * ldc + j], sum, sum_bound(2, k, abs));
        }
        if (i + 1 < m)
            expect_untouched(e, "gap", c + i * ldc + n, (size_t)(ldc - n) * sizeof *c);
    }
    expect(e, "nothing", 0, 0, 0, 0);
}

/* ---- pointwise ------------------------------------------------------------------------ */

/* Arguments of the functions: mostly moderate, some huge, some tiny. */
static float argument(check_env *e)
{
    static const float odd[] = {0, -0.0f, 88.7f, 89, -87.3f, -87.4f, -104, 1e30f, -1e30f, INFINITY,
                                -INFINITY, NAN, 1e-20f, 20, -20, 1e-41f};
    if (uniform(e) < .2)
        return odd[draw_int(e, 0, (int)DR_COUNT(odd) - 1)];
    return (float)((2 * uniform(e) - 1) * pow(10, 4 * uniform(e) - 2));
}

static void check_vexp(check_env *e)
{
    const int n = draw_int(e, 1, 70);
    float *x = fence(e, n), *y = fence(e, n);
    for (int i = 0; i < n; i++)
        x[i] = argument(e);
    e->kern->vexp(n, x, y);
    for (int i = 0; i < n; i++) {
        double want = exp(x[i]);
        expect(e, "y", i, y[i], want > FLT_MAX ? INFINITY : want, ulp_bound(1.5, want));
    }
}

static void check_sigmoid(check_env *e)
{
    const int n = draw_int(e, 1, 70);
    const float scale = draw(e) & 1 ? 1 : 2;
    const bool with = draw(e) & 1;
    float *x = fence(e, n), *y = fence(e, n), *dy = with ? fence(e, n) : NULL;
    for (int i = 0; i < n; i++)
        x[i] = argument(e);
    e->kern->sigmoid(n, scale, x, y, dy);
    for (int i = 0; i < n; i++) {
        double t = exp(-fabs(x[i])), want = scale * (x[i] < 0 ? t : 1) / (1 + t);
        double slope = scale * t / (1 + t) / (1 + t);
        expect(e, "y", i, y[i], isnan(x[i]) ? NAN : want, 2 * ulp_bound(2, want));
        if (with)
            expect(e, "dy", i, dy[i], isnan(x[i]) ? NAN : slope, 2 * ulp_bound(3, slope));
    }
}

static void check_gate_log(check_env *e)
{
    const int n = draw_int(e, 1, 70);
    float *x = fence(e, n), *g = fence(e, n);
    for (int i = 0; i < n; i++)
        x[i] = argument(e);
    e->kern->gate_log(n, x, g);
    for (int i = 0; i < n; i++)
        expect(e, "g", i, g[i], x[i] < -1e30f ? -1e30f : x[i], 0);
}

static void check_gate_factor(check_env *e)
{
    const int n = draw_int(e, 1, 70);
    const bool with = draw(e) & 1;
    float *x = fence(e, n), *g = fence(e, n), *d = with ? fence(e, n) : NULL;
    for (int i = 0; i < n; i++) {
        double u = uniform(e);
        x[i] = u < .1 ? 0 : u < .2 ? 1 : u < .3 ? 1 - 0x1p-24f : u < .35 ? NAN : u < .4 ? -1
               : (float)pow(uniform(e), 1 + 20 * uniform(e));
    }
    e->kern->gate_factor(n, x, g, d);
    for (int i = 0; i < n; i++) {
        double want = x[i] < 0 ? NAN : x[i] < FLT_MIN ? -1e30f : log(x[i]);
        expect(e, "g", i, g[i], want, ulp_bound(3, want));
        if (with)
            expect(e, "d", i, d[i], 1 / (double)x[i], ulp_bound(1, 1 / (double)x[i]));
    }
}

static void check_gate_softplus(check_env *e)
{
    const int n = draw_int(e, 1, 70);
    const bool with = draw(e) & 1;
    const float ea = (float)exp(4 * uniform(e) - 2);
    float *x = fence(e, n), *bias = fence(e, n), *g = fence(e, n), *d = with ? fence(e, n) : NULL;
    for (int i = 0; i < n; i++) {
        x[i] = argument(e);
        bias[i] = (float)uniform(e);
    }
    e->kern->gate_softplus(n, x, bias, ea, g, d);
    for (int i = 0; i < n; i++) {
        const float z = x[i] + bias[i];
        double t = exp(-fabs(z)), soft = fmax(z, 0) + log1p(t), want = -ea * soft;
        double slope = -ea * (z < 0 ? t : 1) / (1 + t);
        if (isnan(z))
            want = slope = NAN;
        expect(e, "g", i, g[i], want < -1e30f ? -1e30f : want,
               ulp_bound(5, want) + ea * 2 * FLT_MIN);
        if (with)
            expect(e, "d", i, d[i], slope, ulp_bound(4, slope) + ea * 2 * FLT_MIN);
    }
}

static void check_gate_lower(check_env *e)
{
    const int n = draw_int(e, 1, 70);
    const bool with = draw(e) & 1;
    const float ea = (float)exp(4 * uniform(e) - 2), bound = -(float)(10 * uniform(e));
    float *x = fence(e, n), *bias = fence(e, n), *g = fence(e, n);
    float *d = with ? fence(e, n) : NULL, *da = with ? fence(e, n) : NULL;
    for (int i = 0; i < n; i++) {
        do
            x[i] = argument(e);
        while (fabsf(x[i]) > 1e20f); /* da of those would be 0 * Inf */
        bias[i] = (float)uniform(e);
    }
    e->kern->gate_lower(n, x, bias, ea, bound, g, d, da);
    for (int i = 0; i < n; i++) {
        const float z = ea * (x[i] + bias[i]);
        double t = exp(-fabs(z)), want = isnan(z) ? NAN : bound * (z < 0 ? t : 1) / (1 + t);
        double slope = isnan(z) ? NAN : bound * t / (1 + t) / (1 + t), tiny = 20 * FLT_MIN;
        expect(e, "g", i, g[i], want, ulp_bound(4, want) + tiny);
        if (!with)
            continue;
        expect(e, "d", i, d[i], slope * ea, ulp_bound(6, slope * ea) + tiny * ea);
        expect(e, "da", i, da[i], slope * z, ulp_bound(6, slope * z) + tiny * (1 + fabsf(z)));
    }
}

/* ---- factors --------------------------------------------------------------------------- */

static void check_pair(check_env *e)
{
    const int K4 = 4 * draw_int(e, 1, 64), rows = 4 * draw_int(e, 1, 8);
    const int lda = (int)dr_round_up(K4, 16), ldc = 16 * draw_int(e, 1, 4);
    const int kind = draw_int(e, 0, FILL_KINDS - 1);
    float *a = fence(e, (int64_t)rows * lda), *b = fence(e, K4 * 16);
    float *c = fence(e, (int64_t)rows * ldc);
    fill_matrix(e, kind, a, rows, K4, lda, zero_or_nan[draw_int(e, 0, 1)]);
    fill(e, kind, b, K4 * 16);
    e->kern->pair(rows, K4, a, lda, b, c, ldc);
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < 16; j++) {
            double sum = 0, abs = 0;
            for (int d = 0; d < K4; d++) {
                double y = (double)a[i * lda + d] * b[d * 16 + j];
                sum += y;
                abs += fabs(y);
            }
            expect(e, "c", i * ldc + j, c[i * ldc + j], sum, sum_bound(2, K4, abs));
        }
        expect_untouched(e, "gap", c + i * ldc + 16, (size_t)(ldc - 16) * sizeof *c);
    }
}

/* exp of a sum of n gates whose absolute values sum to abs, as computed in fp32. */
static double decay_bound(int n, double abs, double want)
{
    return want * (1.01 * n * (FLT_EPSILON / 2) * abs + 2 * FLT_EPSILON) + 1.5 * FLT_MIN;
}

static void check_gdn_pairs(check_env *e)
{
    const int C = 16 << draw_int(e, 0, 2), rows = 4 * draw_int(e, 1, C / 4);
    const int kind = draw_int(e, 0, 2);
    const bool with_q = draw(e) & 1, with_e = draw(e) & 1;
    float *g = fence(e, C), *b = fence(e, C), *kk = fence(e, C * C), *qk = fence(e, C * C);
    float *gam = fence(e, C), *lam = fence(e, C), *L = fence(e, C * C), *P = fence(e, C * C);
    float *E = fence(e, C * C);
    for (int i = 0; i < rows; i++) {
        g[i] = fill_gate(e, kind);
        b[i] = (float)(draw_int(e, 0, 3) == 0 ? draw_int(e, 0, 2) : 2 * uniform(e));
        for (int j = 0; j <= i; j++) { /* above the diagonal stays NaN: selected away */
            kk[i * C + j] = fill_one(e, FILL_RANDOM, j);
            qk[i * C + j] = fill_one(e, FILL_RANDOM, j);
        }
    }
    float all = e->kern->gdn_pairs(rows, C, g, b, kk, with_q ? qk : NULL, gam, lam, L,
                                   with_q ? P : NULL, with_e ? E : NULL);
    for (int i = 0; i < rows; i++) {
        double sum = 0, abs = 0, after = 0, after_abs = 0;
        for (int m = 0; m <= i; m++)
            sum += g[m], abs += fabs(g[m]);
        for (int m = i + 1; m < rows; m++)
            after += g[m], after_abs += fabs(g[m]);
        expect(e, "gam", i, gam[i], exp(sum), decay_bound(rows, abs, exp(sum)));
        expect(e, "lam", i, lam[i], exp(after), decay_bound(rows, after_abs, exp(after)));
        if (i + 1 == rows)
            expect(e, "all", 0, all, exp(sum), decay_bound(rows, abs, exp(sum)));
        sum = abs = 0;
        for (int j = i / 16 * 16 + 15; j >= 0; j--) {
            const int at = i * C + j;
            if (j < i)
                sum += g[j + 1], abs += fabs(g[j + 1]);
            double w = j > i ? 0 : exp(sum), bound = j > i ? 0 : decay_bound(rows, abs, w);
            double l = j < i ? (double)b[i] * kk[at] : 0, q = j <= i ? qk[at] : 0;
            const double spread = bound + w * FLT_EPSILON;
            expect(e, "L", at, L[at], l * w, fabs(l) * spread + (j < i) * FLT_MIN);
            if (with_q)
                expect(e, "P", at, P[at], q * w, fabs(q) * spread + (j <= i) * FLT_MIN);
            if (with_e)
                expect(e, "E", at, E[at], w, bound);
        }
    }
    float *only = fence(e, 2 * C);
    e->kern->gdn_pairs(rows, C, g, b, NULL, NULL, only, only + C, NULL, NULL, NULL);
    for (int i = 0; i < rows; i++) {
        expect(e, "gam alone", i, only[i], gam[i], 0);
        expect(e, "lam alone", i, only[C + i], lam[i], 0);
    }
}

static void check_kda_sums(check_env *e)
{
    const int ldk = 16 * draw_int(e, 1, 16), kind = draw_int(e, 0, 2);
    float *g = fence(e, 16 * ldk), *G = fence(e, 16 * ldk), *sum = fence(e, ldk);
    for (int i = 0; i < 16 * ldk; i++)
        g[i] = fill_gate(e, kind);
    bool fast = e->kern->kda_sums(ldk, ldk, g, G, sum);
    double most = 0;
    for (int d = 0; d < ldk; d++) {
        double s = 0, abs = 0;
        for (int i = 0; i < 16; i++) {
            s += g[i * ldk + d];
            abs += fabs(g[i * ldk + d]);
            expect(e, "G", i * ldk + d, G[i * ldk + d], s, sum_bound(1, i, abs));
            most = fmax(most, fabs(G[i * ldk + d]));
        }
        expect(e, "sum", d, sum[d], G[15 * ldk + d], 0);
    }
    expect(e, "fast", 0, fast, most <= DR_KERN_SPAN, 0);
}

static void check_kda_rows(check_env *e)
{
    const int ldk = 16 * draw_int(e, 1, 16), n = 16 * ldk, kind = draw_int(e, 0, 1);
    const bool fast = draw(e) & 1, with_q = draw(e) & 1, with_p = draw(e) & 1;
    float *k = fence(e, n), *q = fence(e, n), *g = fence(e, n), *G = fence(e, n);
    float *a = fence(e, ldk), *z = fence(e, ldk);
    float *kbar = fence(e, n), *qbar = fence(e, n), *khat = fence(e, n);
    float *kp = fence(e, n), *qp = fence(e, n), *kd = fence(e, n), *eg = fence(e, n);
    fill(e, FILL_RANDOM, k, n);
    fill(e, FILL_RANDOM, q, n);
    for (int d = 0; d < ldk; d++) {
        a[d] = (float)uniform(e);
        z[d] = (float)uniform(e);
        float s = 0;
        for (int i = 0; i < 16; i++) {
            g[i * ldk + d] = fill_gate(e, fast ? kind : 2);
            kbar[i * ldk + d] = G[i * ldk + d] = s += g[i * ldk + d];
        }
    }
    const dr_kern_block b = {.n = ldk, .ldk = ldk, .fast = fast, .k = k, .q = with_q ? q : NULL,
                             .g = g, .a = a, .z = z, .kbar = kbar, .qbar = qbar, .khat = khat,
                             .kp = with_p ? kp : NULL, .qp = with_p ? qp : NULL, .kd = kd,
                             .eg = eg};
    e->kern->kda_rows(&b);
    for (int d = 0; d < ldk; d++) {
        double after = 0, abs = 0;
        for (int i = 15; i >= 0; i--) {
            const int at = i * ldk + d;
            const double f = exp(G[at]), x = k[at], y = q[at];
            if (fast) /* from the rounded sums that the kernel was given */
                after = (double)G[15 * ldk + d] - G[at];
            const double w = exp(after);
            const double bound = fast ? 6 * FLT_EPSILON * w + FLT_MIN : decay_bound(16, abs, w);
            expect(e, "kbar", at, kbar[at], x * f * a[d], ulp_bound(4, x * f * a[d]));
            expect(e, "khat", at, khat[at], x * w * z[d], fabs(x) * 2 * bound + FLT_MIN);
            double column = fast ? x / f : x * w;
            expect(e, "kd", at, kd[at], column,
                   fast ? ulp_bound(3, column) : fabs(x) * 2 * bound + FLT_MIN);
            if (!fast)
                expect(e, "eg", at, eg[at], exp(g[at]), ulp_bound(1.5, exp(g[at])));
            if (with_p)
                expect(e, "kp", at, kp[at], x * f, ulp_bound(3, x * f));
            if (with_q)
                expect(e, "qbar", at, qbar[at], y * f * a[d], ulp_bound(4, y * f * a[d]));
            if (with_q && with_p)
                expect(e, "qp", at, qp[at], y * f, ulp_bound(3, y * f));
            after += g[at];
            abs += fabs(g[at]);
        }
    }
}

static void check_kda_reach(check_env *e)
{
    const int k = 4 * draw_int(e, 1, 64);
    float *s = fence(e, k), *in = fence(e, 16 * k), *out = draw(e) & 1 ? in : fence(e, 16 * k);
    double *old = fence_double(e, 16 * k);
    fill(e, draw_int(e, 0, FILL_KINDS - 1), s, k);
    fill(e, FILL_RANDOM, in, 16 * k);
    for (int i = 0; i < 16 * k; i++)
        old[i] = in[i];
    e->kern->kda_reach(k, s, in, out);
    for (int i = 0; i < 16 * k; i++)
        expect(e, "out", i, out[i], old[i] * s[i / 16], ulp_bound(0.5, old[i] * s[i / 16]));
}

static void check_kda_diagonal(check_env *e)
{
    const int ldk = 16 * draw_int(e, 1, 16), n = 16 * ldk, C = 16 << draw_int(e, 0, 2);
    const bool with_q = draw(e) & 1;
    float *k = fence(e, n), *q = fence(e, n), *eg = fence(e, n), *work = fence(e, n);
    float *kk = fence(e, 15 * C + 16), *qk = fence(e, 15 * C + 16);
    fill(e, FILL_RANDOM, k, n);
    fill(e, FILL_RANDOM, q, n);
    for (int i = 0; i < n; i++)
        eg[i] = expf(fill_gate(e, 2));
    e->kern->kda_diagonal(ldk, ldk, k, with_q ? q : NULL, eg, kk, with_q ? qk : NULL, C, work);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            double s = 0, s_abs = 0, t = 0, t_abs = 0;
            for (int d = 0; j <= i && d < ldk; d++) {
                double w = k[j * ldk + d];
                for (int m = j + 1; m <= i; m++)
                    w *= eg[m * ldk + d];
                s += k[i * ldk + d] * w, s_abs += fabs(k[i * ldk + d] * w);
                t += q[i * ldk + d] * w, t_abs += fabs(q[i * ldk + d] * w);
            }
            const int at = i * C + j, terms = j <= i ? ldk + 16 : -2;
            expect(e, "kk", at, kk[at], s, sum_bound(2, terms, s_abs));
            if (with_q)
                expect(e, "qk", at, qk[at], t, sum_bound(2, terms, t_abs));
        }
}

static void check_kda_pairs(check_env *e)
{
    const int C = 16 << draw_int(e, 0, 2), rows = 4 * draw_int(e, 1, C / 4);
    const bool with_q = draw(e) & 1;
    float *b = fence(e, C), *kk = fence(e, C * C), *qk = fence(e, C * C), *L = fence(e, C * C);
    float *P = fence(e, C * C);
    for (int i = 0; i < rows; i++) {
        b[i] = (float)uniform(e);
        fill(e, FILL_RANDOM, kk + i * C, i + 1);
        fill(e, FILL_RANDOM, qk + i * C, i + 1);
    }
    e->kern->kda_pairs(rows, C, b, kk, with_q ? qk : NULL, L, with_q ? P : NULL);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < i / 16 * 16 + 16; j++) {
            const int at = i * C + j;
            expect(e, "L", at, L[at], j < i ? b[i] * kk[at] : 0, 0);
            if (with_q)
                expect(e, "P", at, P[at], j <= i ? qk[at] : 0, 0);
        }
}

/* ---- stages ------------------------------------------------------------------------------ */

/* A chunk with hostile padding: NaN wherever the contract promises nothing. */
static dr_kern_chunk make_chunk(check_env *e, int kind)
{
    const int C = 16 << draw_int(e, 0, 2), K = draw_int(e, 1, 256), ldk = (int)dr_round_up(K, 16);
    dr_kern_chunk c = {.rows = 4 * draw_int(e, 1, C / 4), .k = (int)dr_round_up(K, 4), .ldk = ldk,
                       .ldc = C};
    float *left[3], *square[2], *vector[3], *dec = fence(e, dr_round_up(c.k, 16));
    for (int i = 0; i < 3; i++) {
        left[i] = fence(e, (int64_t)c.rows * ldk);
        fill_matrix(e, kind, left[i], c.rows, K, ldk, 0);
        vector[i] = fence(e, C);
        fill(e, FILL_RANDOM, vector[i], c.rows);
    }
    for (int x = 0; x < 2; x++) {
        square[x] = fence(e, (int64_t)C * C);
        for (int i = 0; i < c.rows; i++)
            for (int j = 0; j < i / 16 * 16 + 16; j++)
                square[x][i * C + j] = j < i + x ? .3f * fill_one(e, kind, i + j) : 0;
    }
    fill(e, FILL_RANDOM, dec, c.k);
    const bool gated = draw(e) & 1;
    c.kl = left[0], c.ql = left[1], c.ku = left[2], c.L = square[0], c.P = square[1];
    c.b = vector[0], c.dec = dec;
    c.gam = gated ? vector[1] : NULL, c.lam = gated ? vector[2] : NULL;
    return c;
}

/* Row i of a left operand times column j of a panel; *abs gets the sum of absolute values. */
static double row_times(const float *row, const float *panel, int k, int nr, int j, double *abs)
{
    double sum = *abs = 0;
    for (int d = 0; d < k; d++) {
        double y = (double)row[d] * panel[d * nr + j];
        sum += y;
        *abs += fabs(y);
    }
    return sum;
}

static void check_stage_k(check_env *e)
{
    const int kind = draw_int(e, 0, FILL_KINDS - 1), nr = e->kern->nr;
    const dr_kern_chunk c = make_chunk(e, kind);
    const int64_t n = (int64_t)c.rows * nr;
    const bool with_v = draw(e) & 1, with_n = draw(e) & 1;
    float *S = fence(e, (int64_t)c.k * nr), *v = fence(e, n), *X = fence(e, n), *Xd = fence(e, n);
    float *N = fence(e, n);
    double *x = fence_double(e, n), *size = fence_double(e, n);
    fill(e, kind, S, (int64_t)c.k * nr);
    fill(e, kind, v, n);
    e->kern->stage_k(&c, S, with_v ? v : NULL, X, c.lam ? Xd : NULL, with_n ? N : NULL);
    for (int j = 0; j < nr; j++)
        for (int i = 0; i < c.rows; i++) {
            const int64_t at = (int64_t)i * nr + j;
            double abs, s = row_times(c.kl + (int64_t)i * c.ldk, S, c.k, nr, j, &abs);
            const double gam = c.gam ? c.gam[i] : 1, lam = c.lam ? c.lam[i] : 1;
            if (with_n)
                expect(e, "N", at, N[at], gam * s, sum_bound(2, c.k, fabs(gam) * abs));
            x[at] = c.b[i] * ((with_v ? v[at] : 0) - gam * s);
            size[at] = fabs(c.b[i]) * ((with_v ? fabs(v[at]) : 0) + fabs(gam) * abs);
            for (int m = 0; m < i; m++) {
                x[at] -= (double)c.L[i * c.ldc + m] * x[m * nr + j];
                size[at] += fabs(c.L[i * c.ldc + m]) * size[m * nr + j];
            }
            const double bound = sum_bound(3, c.k + 2 * i, size[at]);
            expect(e, "X", at, X[at], x[at], bound);
            if (c.lam != NULL)
                expect(e, "Xd", at, Xd[at], lam * x[at], fabs(lam) * bound + FLT_MIN);
        }
    if (c.lam == NULL)
        expect_untouched(e, "Xd", Xd, (size_t)n * sizeof *Xd);
}

static void check_stage_q(check_env *e)
{
    const int kind = draw_int(e, 0, FILL_KINDS - 1), nr = e->kern->nr;
    const dr_kern_chunk c = make_chunk(e, kind);
    const int64_t n = (int64_t)c.rows * nr;
    float *S = fence(e, (int64_t)c.k * nr), *X = fence(e, n), *o = fence(e, n);
    fill(e, kind, S, (int64_t)c.k * nr);
    fill(e, kind, X, n);
    const int bad = draw_int(e, 0, c.rows); /* a NaN at one token must not reach earlier ones */
    for (int j = 0; bad < c.rows && j < nr; j++)
        X[bad * nr + j] = NAN;
    e->kern->stage_q(&c, S, X, o);
    for (int j = 0; j < nr; j++)
        for (int i = 0; i < c.rows; i++) {
            const double gam = c.gam ? c.gam[i] : 1;
            double abs, s = gam * row_times(c.ql + (int64_t)i * c.ldk, S, c.k, nr, j, &abs);
            abs *= fabs(gam);
            for (int m = 0; m <= i; m++) {
                double y = (double)c.P[i * c.ldc + m] * X[m * nr + j];
                s += y;
                abs += fabs(y);
            }
            expect(e, "o", i * nr + j, o[i * nr + j], s, sum_bound(2, c.k + i, abs));
        }
}

static void check_stage_u(check_env *e)
{
    const int kind = draw_int(e, 0, FILL_KINDS - 1), nr = e->kern->nr;
    const dr_kern_chunk c = make_chunk(e, kind);
    const int64_t n = (int64_t)c.k * nr;
    float *S = fence(e, n), *Xd = fence(e, (int64_t)c.rows * nr);
    float *out = draw(e) & 1 ? S : fence(e, n);
    double *old = fence_double(e, n);
    fill(e, kind, S, n);
    fill(e, kind, Xd, (int64_t)c.rows * nr);
    for (int64_t i = 0; i < n; i++)
        old[i] = S[i];
    dr_kern_ahead ahead = {1, {{(const char *)c.kl, c.ldk * 4, c.rows, c.ldk / 16, 0, 3}}};
    e->kern->stage_u(&c, S, Xd, out, draw(e) & 1 ? &ahead : NULL);
    for (int d = 0; d < c.k; d++)
        for (int j = 0; j < nr; j++) {
            double s = c.dec[d] * old[d * nr + j], abs = fabs(s);
            for (int i = 0; i < c.rows; i++) {
                double y = (double)c.ku[(int64_t)i * c.ldk + d] * Xd[i * nr + j];
                s += y;
                abs += fabs(y);
            }
            expect(e, "out", d * nr + j, out[d * nr + j], s, sum_bound(2, c.rows + 1, abs));
        }
}

static const check_row kernel_checks[] = {
    {"load_f32", check_load_f32},
    {"load_bf16", check_load_bf16},
    {"load_f16", check_load_f16},
    {"store_f32", check_store_f32},
    {"store_bf16", check_store_bf16},
    {"store_f16", check_store_f16},
    {"transpose", check_transpose},
    {"l2rows", check_l2rows},
    {"gemm", check_gemm},
    {"sigmoid", check_sigmoid},
    {"gate_log", check_gate_log},
    {"gate_factor", check_gate_factor},
    {"gate_softplus", check_gate_softplus},
    {"gate_lower", check_gate_lower},
    {"pair", check_pair},
    {"gdn_pairs", check_gdn_pairs},
    {"kda_sums", check_kda_sums},
    {"kda_rows", check_kda_rows},
    {"kda_reach", check_kda_reach},
    {"kda_diagonal", check_kda_diagonal},
    {"kda_pairs", check_kda_pairs},
    {"vexp", check_vexp},
    {"stage_k", check_stage_k},
    {"stage_q", check_stage_q},
    {"stage_u", check_stage_u},
    {NULL, NULL},
};

#endif
