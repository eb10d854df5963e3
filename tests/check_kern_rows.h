/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_kern_rows.h - checks of the rows of cpu/kern_rows.h; see check_kern.h.
 */
#ifndef CHECK_KERN_ROWS_H
#define CHECK_KERN_ROWS_H

#include "check_kern.h"

static const int row_lengths[] = {0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 67, 128};

#define EACH_LENGTH(n)                                                      \
    for (int at_##n = 0, n; at_##n < (int)DR_COUNT(row_lengths); at_##n++) \
        if ((n = row_lengths[at_##n]) >= 0)

#define EPS ((double)FLT_EPSILON)

static double plain_sigmoid(double x)
{
    double e = exp(-fabs(x));
    return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

/* Mostly moderate, now and then far out. */
static float draw_logit(check_env *e)
{
    double u = 2 * uniform(e) - 1;
    return (float)(draw_int(e, 0, 7) ? 6 * u : 85 * u);
}

/* A row of n floats at an odd place before an unreadable page. */
static float *draw_row(check_env *e, int kind, int n)
{
    float *p = fence(e, n);
    fill(e, kind, p, n);
    return p;
}

/* ---- convolution -------------------------------------------------------------------- */

static void check_conv_rows_at(check_env *e, int n, int tokens, int taps, int form, bool silu)
{
    const int kind = draw_int(e, 0, FILL_KINDS - 1), ld = n + 3;
    const bool backwards = draw_int(e, 0, 1), own = form == 2; /* 0: no init, 1: one, 2: each */
    const float *row[40];
    for (int r = 0; r < tokens + taps - 1; r++)
        row[r] = draw_row(e, kind, n);
    float *w = fence(e, taps * ld), *out = fence(e, tokens * ld), *bias = draw_row(e, kind, n);
    fill_matrix(e, kind, w, taps, n, ld, NAN);
    float *start = fence(e, tokens * ld); /* out as it was */
    if (own)
        fill_matrix(e, kind, out, tokens, n, ld, 0);
    for (int i = 0; i < tokens; i++)
        memcpy(start + i * ld, out + i * ld, (size_t)ld * sizeof *out);
    const float *init = form == 0 ? NULL : own ? out : bias;
    const char *ahead = draw_int(e, 0, 1) ? (const char *)w : NULL;
    e->kern->conv_rows(n, tokens, taps, row, backwards ? w + (taps - 1) * ld : w,
                       backwards ? -ld : ld, init, own ? ld : 0, silu, out, ld, ahead, 0, 2);
    for (int t = 0; t < tokens; t++) {
        for (int i = 0; i < n; i++) {
            double p = form == 0 ? 0 : own ? start[t * ld + i] : bias[i], abs = fabs(p);
            for (int j = 0; j < taps; j++) {
                double term = (double)w[(backwards ? taps - 1 - j : j) * ld + i] * row[t + j][i];
                p += term;
                abs += fabs(term);
            }
            double want = silu ? p * plain_sigmoid(p) : p;
            expect(e, "out", t * ld + i, out[t * ld + i], want,
                   1.2 * sum_bound(1, taps + 1, abs) + (silu ? ulp_bound(4, want) : 0));
        }
        if (memcmp(out + t * ld + n, start + t * ld + n, 3 * sizeof *out) != 0)
            complain(e, "gap after a row", t, 1, 0, 0);
    }
    fence_done(e);
}

static void check_conv_rows(check_env *e)
{
    static const int taps[] = {1, 2, 3, 4, 5, 6, 11}, tokens[] = {0, 1, 3, 4, 5, 8, 11};
    EACH_LENGTH(n)
    for (size_t i = 0; i < DR_COUNT(taps); i++)
        check_conv_rows_at(e, n, tokens[draw_int(e, 0, 6)], taps[i], draw_int(e, 0, 2),
                           draw_int(e, 0, 1));
}

static void check_conv_line(check_env *e)
{
    static const int taps[] = {1, 2, 4, 5, 11}, steps[] = {1, 2, 7};
    EACH_LENGTH(n)
    for (size_t x = 0; x < DR_COUNT(taps); x++) {
        const int m = taps[x], step = steps[draw_int(e, 0, 2)], halo = (m - 1) * step;
        const int kind = draw_int(e, 0, FILL_KINDS - 1);
        const bool silu = draw_int(e, 0, 1);
        float *in = draw_row(e, kind, halo + n), *w = draw_row(e, kind, m), *out = fence(e, n);
        float bias = (float)uniform(e);
        e->kern->conv_line(n, m, step, in + halo, w, bias, silu, out);
        for (int i = 0; i < n; i++) {
            double p = bias, abs = bias;
            for (int j = 0; j < m; j++) {
                double term = (double)w[j] * in[i + j * step];
                p += term;
                abs += fabs(term);
            }
            double want = silu ? p * plain_sigmoid(p) : p;
            expect(e, "out", i, out[i], want,
                   1.2 * sum_bound(1, m + 1, abs) + (silu ? ulp_bound(4, want) : 0));
        }
        fence_done(e);
    }
}

static double silu_slope_bound(double x)
{
    double s = plain_sigmoid(x), rest = plain_sigmoid(-x);
    return 8 * EPS * s * (1 + fabs(x) * rest) + FLT_MIN;
}

static void check_silu_grad(check_env *e)
{
    EACH_LENGTH(n) {
        float *p = fence(e, n), *dy = draw_row(e, FILL_RANDOM, n), *d = fence(e, n);
        for (int i = 0; i < n; i++)
            p[i] = draw_logit(e);
        e->kern->silu_grad(n, p, dy, d);
        for (int i = 0; i < n; i++) {
            double x = p[i], s = plain_sigmoid(x);
            expect(e, "d", i, d[i], dy[i] * s * (1 + x * plain_sigmoid(-x)),
                   fabs(dy[i]) * silu_slope_bound(x));
        }
        float *same = fence(e, n);
        memcpy(same, p, (size_t)n * sizeof *p);
        e->kern->silu_grad(n, same, dy, same);
        for (int i = 0; i < n; i++)
            expect(e, "d in place", i, same[i], d[i], 0);
        fence_done(e);
    }
}

static void check_conv_sums(check_env *e)
{
    static const int taps[] = {1, 2, 3, 4, 5, 9}, tokens[] = {0, 1, 2, 8, 17};
    EACH_LENGTH(n)
    for (size_t x = 0; x < DR_COUNT(taps); x++) {
        const int m = taps[x], T = tokens[draw_int(e, 0, 4)], ld = n + 1;
        const int kind = draw_int(e, 0, FILL_KINDS - 1);
        const float *row[40];
        for (int r = 0; r < T + m - 1; r++)
            row[r] = draw_row(e, kind, n);
        float *d = fence(e, T * ld), *sums = fence(e, (m + 1) * ld);
        double *before = fence_double(e, (m + 1) * ld);
        fill_matrix(e, kind, d, T, n, ld, NAN);
        fill_matrix(e, FILL_RANDOM, sums, m + 1, n, ld, 3);
        for (int i = 0; i < (m + 1) * ld; i++)
            before[i] = sums[i];
        e->kern->conv_sums(n, T, m, d, ld, row, sums, ld);
        for (int j = 0; j <= m; j++)
            for (int i = 0; i < ld; i++) {
                double want = before[j * ld + i], abs = fabs(want);
                for (int t = 0; t < T && i < n; t++) {
                    double term = j < m ? (double)d[t * ld + i] * row[t + j][i] : d[t * ld + i];
                    want += term;
                    abs += fabs(term);
                }
                expect(e, "sums", j * ld + i, sums[j * ld + i], want,
                       i < n ? sum_bound(1, T + 1, abs) : 0);
            }
        fence_done(e);
    }
}

/* ---- narrow matrices ---------------------------------------------------------------- */

static void check_narrow_in(check_env *e)
{
    EACH_LENGTH(m)
    for (int n = 0; n <= 8; n++) {
        const int lds = n + draw_int(e, 0, 2), ldd = m + 1;
        float *src = fence(e, m > 0 ? (m - 1) * lds + n : 0), *dst = fence(e, n * ldd);
        for (int i = 0; i < m; i++)
            fill(e, FILL_RANDOM, src + i * lds, n);
        e->kern->narrow_in(m, n, src, lds, dst, ldd);
        for (int j = 0; j < n; j++) {
            for (int i = 0; i < m; i++)
                expect(e, "dst", j * ldd + i, dst[j * ldd + i], src[i * lds + j], 0);
            expect_untouched(e, "gap after a row", dst + j * ldd + m, sizeof *dst);
        }
        fence_done(e);
    }
}

static void check_narrow_out(check_env *e)
{
    EACH_LENGTH(m)
    for (int n = 0; n <= 8; n++) {
        const int lds = m + 1;
        float *src = fence(e, n * lds), *dst = fence(e, m * n);
        for (int j = 0; j < n; j++)
            fill(e, FILL_RANDOM, src + j * lds, m);
        e->kern->narrow_out(m, n, src, lds, dst);
        for (int i = 0; i < m * n; i++)
            expect(e, "dst", i, dst[i], src[i % n * lds + i / n], 0);
        fence_done(e);
    }
}

/* ---- norms -------------------------------------------------------------------------- */

static void check_dot(check_env *e)
{
    EACH_LENGTH(n)
    for (int kind = 0; kind < FILL_KINDS; kind++) {
        float *a = draw_row(e, kind, n), *b = draw_row(e, kind, n);
        double want = 0, abs = 0;
        for (int i = 0; i < n; i++) {
            want += (double)a[i] * b[i];
            abs += fabs((double)a[i] * b[i]);
        }
        expect(e, "a . b", n, e->kern->dot(n, a, b), want, sum_bound(1, n, abs));
        fence_done(e);
    }
}

static void check_scale_row(check_env *e)
{
    EACH_LENGTH(n) {
        float s = (float)(2 * uniform(e)), *x = draw_row(e, FILL_RANDOM, n), *y = fence(e, n);
        e->kern->scale_row(n, s, x, y);
        for (int i = 0; i < n; i++)
            expect(e, "y", i, y[i], (double)s * x[i], ulp_bound(0.5, (double)s * x[i]));
        fence_done(e);
    }
}

static void check_norm_grad(check_env *e)
{
    EACH_LENGTH(n) {
        float r = (float)(3 * uniform(e)), c = (float)(2 * uniform(e) - 1);
        float *x = draw_row(e, FILL_RANDOM, n), *dy = draw_row(e, FILL_RANDOM, n);
        float *dx = fence(e, n);
        e->kern->norm_grad(n, r, c, x, dy, dx);
        for (int i = 0; i < n; i++) {
            double z = (double)c * r * x[i];
            expect(e, "dx", i, dx[i], r * (dy[i] - z), 2 * EPS * r * (fabs(dy[i]) + fabs(z)));
        }
        fence_done(e);
    }
}

static void check_gated_row(check_env *e)
{
    EACH_LENGTH(n)
    for (int silu = 0; silu < 2; silu++) {
        float r = (float)(3 * uniform(e)), *gate = fence(e, n), *y = fence(e, n);
        float *x = draw_row(e, FILL_RANDOM, n), *w = draw_row(e, FILL_RANDOM, n);
        for (int i = 0; i < n; i++)
            gate[i] = draw_logit(e);
        e->kern->gated_row(n, silu, r, x, w, gate, y);
        for (int i = 0; i < n; i++) {
            double a = plain_sigmoid(gate[i]) * (silu ? gate[i] : 1);
            double want = (double)r * x[i] * w[i] * a;
            expect(e, "y", i, y[i], want, ulp_bound(6, want));
        }
        fence_done(e);
    }
}

static void check_gated_grad(check_env *e)
{
    EACH_LENGTH(n)
    for (int silu = 0; silu < 2; silu++) {
        float r = (float)(3 * uniform(e)), *gate = fence(e, n), *dz = fence(e, n);
        float *x = draw_row(e, FILL_RANDOM, n), *w = draw_row(e, FILL_RANDOM, n);
        float *dy = draw_row(e, FILL_RANDOM, n), *dw = draw_row(e, FILL_RANDOM, n);
        float *dgate = fence(e, n), *before = fence(e, n);
        memcpy(before, dw, (size_t)n * sizeof *dw);
        for (int i = 0; i < n; i++)
            gate[i] = draw_logit(e);
        double got = e->kern->gated_grad(n, silu, r, x, w, gate, dy, dz, dgate, dw);
        double sum = 0, abs = 0;
        for (int i = 0; i < n; i++) {
            double u = gate[i], s = plain_sigmoid(u), rest = plain_sigmoid(-u);
            double z = (double)r * x[i];
            double a = silu ? u * s : s, slope = silu ? s * (1 + u * rest) : s * rest;
            double inner = (double)dy[i] * w[i] * a, up = (double)dy[i] * w[i] * z;
            double add = dy[i] * z * a;
            expect(e, "dz", i, dz[i], inner, ulp_bound(7, inner));
            expect(e, "dgate", i, dgate[i], up * slope,
                   silu ? fabs(up) * silu_slope_bound(u) + ulp_bound(3, up * slope)
                        : ulp_bound(8, up * slope));
            expect(e, "dw", i, dw[i], before[i] + add, ulp_bound(8, add) + EPS * fabs(before[i]));
            sum += inner * z;
            abs += fabs(inner * z);
        }
        expect(e, "dz . z", n, got, sum, sum_bound(1, n, abs) + 10 * EPS * abs);
        fence_done(e);
    }
}

/* ---- gates -------------------------------------------------------------------------- */

typedef struct gate_point {
    double g, dx, da, ulps; /* ulps: how far z alone may move them */
} gate_point;

static gate_point plain_gate(bool lower, double bound, double ea, double x)
{
    if (!lower) {
        double g = -ea * (fmax(x, 0) + log1p(exp(-fabs(x))));
        return (gate_point){g, -ea * plain_sigmoid(x), g, 8};
    }
    double z = ea * x, s = plain_sigmoid(z), rest = plain_sigmoid(-z);
    return (gate_point){bound * s, bound * s * rest * ea, bound * s * rest * z, 8 + 2 * fabs(z)};
}

static void check_raw_gates(check_env *e, bool grad)
{
    EACH_LENGTH(n)
    for (int lower = 0; lower < 2; lower++) {
        float bound = -5, *ea = fence(e, n), *bias = fence(e, n), *x = fence(e, n);
        float *out = fence(e, n);
        float *dg = draw_row(e, FILL_RANDOM, n), *da = draw_row(e, FILL_RANDOM, n);
        float *db = draw_row(e, FILL_RANDOM, n), *a0 = fence(e, n), *b0 = fence(e, n);
        for (int i = 0; i < n; i++) {
            ea[i] = (float)exp(2 * uniform(e) - 1);
            bias[i] = (float)(6 * uniform(e) - 3);
            x[i] = draw_logit(e) * 0.5f;
            a0[i] = da[i];
            b0[i] = db[i];
        }
        if (grad)
            e->kern->raw_gate_grad(n, lower, bound, ea, bias, x, dg, out, da, db);
        else
            e->kern->raw_gate(n, lower, bound, ea, bias, x, out);
        for (int i = 0; i < n; i++) {
            gate_point p = plain_gate(lower, bound, ea[i], (double)x[i] + bias[i]);
            double dx = p.dx * dg[i], a = p.da * dg[i], z = ea[i] * ((double)x[i] + bias[i]);
            /* an exponential below the smallest normal number is 0; what it is multiplied by */
            double flush = FLT_MIN * (lower ? -bound : ea[i]);
            if (!grad) {
                expect(e, "g", i, out[i], p.g, ulp_bound(p.ulps, p.g) + flush);
                continue;
            }
            flush *= fabs((double)dg[i]) * (1 + ea[i] + fabs(z));
            expect(e, "dx", i, out[i], dx, ulp_bound(p.ulps, dx) + flush);
            expect(e, "da", i, da[i], a0[i] + a, ulp_bound(p.ulps, a) + EPS * fabs(a0[i]) + flush);
            expect(e, "db", i, db[i], b0[i] + dx,
                   ulp_bound(p.ulps, dx) + EPS * fabs(b0[i]) + flush);
        }
        fence_done(e);
    }
}

static void check_raw_gate(check_env *e)
{
    check_raw_gates(e, false);
    float x[] = {INFINITY, -INFINITY, NAN, 0}, one[] = {1, 1, 1, 1}, zero[4] = {0}, g[4];
    e->kern->raw_gate(4, false, 0, one, zero, x, g);
    expect(e, "softplus gate at Inf", 0, g[0], -INFINITY, 0);
    expect(e, "softplus gate at -Inf", 1, g[1], 0, 0);
    expect(e, "softplus gate at NaN", 2, g[2], NAN, 0);
    e->kern->raw_gate(4, true, -5, one, zero, x, g);
    expect(e, "bounded gate at Inf", 0, g[0], -5, 0);
    expect(e, "bounded gate at -Inf", 1, g[1], 0, 0);
    expect(e, "bounded gate at NaN", 2, g[2], NAN, 0);
}

static void check_raw_gate_grad(check_env *e) { check_raw_gates(e, true); }

static void check_sigmoid_grad(check_env *e)
{
    EACH_LENGTH(n) {
        float scale = 2, *x = fence(e, n), *dy = draw_row(e, FILL_RANDOM, n), *dx = fence(e, n);
        for (int i = 0; i < n; i++)
            x[i] = draw_logit(e);
        e->kern->sigmoid_grad(n, scale, x, dy, dx);
        for (int i = 0; i < n; i++) {
            double want = scale * dy[i] * plain_sigmoid(x[i]) * plain_sigmoid(-x[i]);
            expect(e, "dx", i, dx[i], want, ulp_bound(7, want));
        }
        fence_done(e);
    }
}

/* ---- decoding ----------------------------------------------------------------------- */

/* A state of K channels by n columns, element (i, j) at i * si + j * sj. */
static void check_step_at(check_env *e, bool rows, int K, int n, bool in_place)
{
    const int kind = draw_int(e, 0, FILL_KINDS - 1), width = rows ? K : n, high = rows ? n : K;
    const int ldi = width + 2, ldo = in_place ? ldi : width + 5;
    float *in = fence(e, high * ldi), *out = in_place ? in : fence(e, high * ldo);
    float *d = fence(e, K), *dk = fence(e, K), *k = draw_row(e, kind, K), *q = draw_row(e, kind, K);
    float *v = draw_row(e, kind, n), *o = fence(e, n), b = (float)uniform(e);
    float *start = fence(e, high * ldi);
    fill_matrix(e, kind, in, high, width, ldi, 3);
    memcpy(start, in, (size_t)(high * ldi) * sizeof *in);
    for (int i = 0; i < K; i++) {
        d[i] = (float)uniform(e);
        dk[i] = d[i] * k[i];
    }
    (rows ? e->kern->step_rows : e->kern->step_columns)(K, n, d, dk, k, q, b, v, in, ldi, out, ldo,
                                                        o, in_place ? start : NULL);
    for (int j = 0; j < n; j++) {
        double r = v[j], abs = fabs(r), want_o = 0, abs_o = 0, slack_o = 0;
        for (int i = 0; i < K; i++) {
            double term = (double)dk[i] * start[rows ? j * ldi + i : i * ldi + j];
            r -= term;
            abs += fabs(term);
        }
        double u = b * r, slack = b * sum_bound(1, K + 1, abs) + EPS * fabs(u);
        for (int i = 0; i < K; i++) {
            double old = (double)d[i] * start[rows ? j * ldi + i : i * ldi + j], add = k[i] * u;
            double want = old + add;
            double error = fabs(k[i]) * slack + 1.5 * EPS * (fabs(old) + fabs(add));
            expect(e, "state", i * n + j, out[rows ? j * ldo + i : i * ldo + j], want,
                   error + FLT_MIN);
            want_o += q[i] * want;
            abs_o += fabs(q[i] * want);
            slack_o += fabs(q[i]) * (error + FLT_MIN);
        }
        expect(e, "o", j, o[j], want_o, sum_bound(1, K, abs_o) + slack_o);
    }
    for (int i = 0; in_place && i < high; i++)
        for (int j = width; j < ldi; j++)
            expect(e, "gap after a row", i, in[i * ldi + j], 3, 0);
    fence_done(e);
}

static void check_step(check_env *e, bool rows)
{
    static const int widths[] = {1, 2, 3, 7, 8, 9, 16, 24, 33, 64, 100, 128, 256};
    for (size_t K = 0; K < DR_COUNT(widths); K++)
        EACH_LENGTH(n) {
            check_step_at(e, rows, widths[K], n, true);
            check_step_at(e, rows, widths[K], n, false);
        }
}

static void check_step_columns(check_env *e) { check_step(e, false); }
static void check_step_rows(check_env *e) { check_step(e, true); }

static const check_row kernel_checks_rows[] = {
    {"conv_rows", check_conv_rows},
    {"conv_line", check_conv_line},
    {"silu_grad", check_silu_grad},
    {"conv_sums", check_conv_sums},
    {"narrow_in", check_narrow_in},
    {"narrow_out", check_narrow_out},
    {"dot", check_dot},
    {"scale_row", check_scale_row},
    {"norm_grad", check_norm_grad},
    {"gated_row", check_gated_row},
    {"gated_grad", check_gated_grad},
    {"raw_gate", check_raw_gate},
    {"raw_gate_grad", check_raw_gate_grad},
    {"sigmoid_grad", check_sigmoid_grad},
    {"step_columns", check_step_columns},
    {"step_rows", check_step_rows},
    {NULL, NULL},
};

#endif
