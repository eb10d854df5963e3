/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_kern_grad.h - checks of the rows of cpu/kern_grad.h; see check_kern.h. Every kernel is
 * compared with its definition in double. Solves carry their bound through the substitution:
 * what a row adds to the error, plus |L| times the errors it reads.
 *
 * Letters: kern_grad.h. E_ij decay from token j to a later token i, here a product of factors.
 */
#ifndef CHECK_KERN_GRAD_H
#define CHECK_KERN_GRAD_H

#include "check_kern.h"

enum { GRAD_TRIES = 4, GRAD_PANELS = 2 };

/* A chunk with random operands; outside the blocks that a square has, NaN. */
typedef struct grad_case {
    dr_kern_chunk c;
    int rows, n, k, ldk, C, nr; /* n: rows rounded up to a block */
    float *kl, *ql, *ku, *L, *P, *b, *gam, *lam, *dec;
} grad_case;

static float *grad_floats(check_env *e, int kind, int64_t n)
{
    float *p = fence(e, n);
    fill(e, kind, p, n);
    return p;
}

static bool grad_stored(int i, int j) { return j < i / 16 * 16 + 16; }

/* Square: values where i - j >= from, zero elsewhere in the stored blocks. */
static float *grad_square(check_env *e, int kind, int rows, int C, int from, double scale)
{
    float *p = fence(e, (int64_t)C * C);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < C; j++)
            if (grad_stored(i, j))
                p[i * C + j] = i - j >= from ? (float)(scale * fill_one(e, kind, i + j)) : 0;
    return p;
}

static float *grad_rows_of(check_env *e, int kind, const grad_case *g)
{
    float *p = fence(e, (int64_t)g->C * g->ldk);
    fill_matrix(e, kind, p, g->C, g->k, g->ldk, 0);
    for (int64_t i = (int64_t)g->rows * g->ldk; i < (int64_t)g->C * g->ldk; i++)
        p[i] = 0;
    return p;
}

/* [C][nr] of a panel: rows up to g->rows, then zero. */
static float *grad_values(check_env *e, int kind, const grad_case *g, int panels)
{
    float *p = grad_floats(e, kind, (int64_t)panels * g->C * g->nr);
    for (int x = 0; x < panels; x++)
        for (int i = g->rows * g->nr; i < g->C * g->nr; i++)
            p[x * g->C * g->nr + i] = 0;
    return p;
}

static grad_case grad_make(check_env *e, int kind, bool scalar)
{
    grad_case g = {.nr = e->kern->nr};
    const int lengths[] = {16, 32, 64};
    g.C = lengths[draw_int(e, 0, 2)];
    g.rows = 4 * draw_int(e, 1, g.C / 4);
    g.n = (g.rows + 15) / 16 * 16;
    g.k = 4 * draw_int(e, 1, 9);
    g.ldk = (g.k + 15) / 16 * 16;
    g.kl = grad_rows_of(e, kind, &g);
    g.ql = grad_rows_of(e, kind, &g);
    g.ku = scalar ? g.kl : grad_rows_of(e, kind, &g);
    g.L = grad_square(e, FILL_RANDOM, g.rows, g.C, 1, .3);
    g.P = grad_square(e, kind, g.rows, g.C, 0, 1);
    g.b = grad_floats(e, FILL_RANDOM, g.C);
    g.dec = grad_floats(e, FILL_RANDOM, g.ldk);
    if (scalar) {
        g.gam = grad_floats(e, FILL_RANDOM, g.C);
        g.lam = grad_floats(e, FILL_RANDOM, g.C);
    }
    g.c = (dr_kern_chunk){g.rows, g.k, g.ldk, g.C, g.kl, g.ql, g.ku, g.L, g.P, g.b, g.gam, g.lam,
                          g.dec};
    return g;
}

/* Runs body for every kind of data, a few sizes each, scalar gates and not. */
static void grad_every(check_env *e, void (*body)(check_env *e, int kind, bool scalar))
{
    for (int kind = 0; kind < FILL_KINDS; kind++)
        for (int i = 0; i < GRAD_TRIES; i++) {
            body(e, kind, i % 2 == 0);
            fence_done(e);
        }
}

/* ---- stages ---- */

static void grad_x_case(check_env *e, int kind, bool scalar)
{
    const grad_case g = grad_make(e, kind, scalar);
    const float *v = grad_values(e, kind, &g, 1), *N = grad_values(e, kind, &g, 1);
    float *R = fence(e, g.C * g.nr), *X = fence(e, g.C * g.nr);
    float *Xd = scalar ? fence(e, g.C * g.nr) : NULL;
    e->kern->grad_x(&g.c, v, N, R, X, Xd);
    for (int j = 0; j < g.nr; j++) {
        double x[64], err[64];
        for (int i = 0; i < g.rows; i++) {
            const int at = i * g.nr + j;
            double abs = fabs((double)g.b[i]) * (fabs((double)v[at]) + fabs((double)N[at]));
            double carried = 0;
            x[i] = (double)g.b[i] * ((double)v[at] - N[at]);
            for (int m = 0; m < i; m++) {
                const double l = g.L[i * g.C + m];
                x[i] -= l * x[m];
                abs += fabs(l * x[m]);
                carried += fabs(l) * err[m];
            }
            err[i] = sum_bound(2, i + 4, abs) + carried;
            expect(e, "R", at, R[at], (double)v[at] - N[at],
                   sum_bound(1, 1, fabs((double)v[at]) + fabs((double)N[at])));
            expect(e, "X", at, X[at], x[i], err[i]);
            if (Xd != NULL)
                expect(e, "Xd", at, Xd[at], (double)g.lam[i] * X[at],
                       ulp_bound(1, (double)g.lam[i] * X[at]));
        }
    }
}
static void check_grad_x(check_env *e) { grad_every(e, grad_x_case); }

static void grad_z_case(check_env *e, int kind, bool scalar)
{
    const grad_case g = grad_make(e, kind, scalar);
    const float *D = grad_floats(e, kind, g.k * g.nr), *R = grad_values(e, kind, &g, 1);
    const float *dO = draw_int(e, 0, 3) > 0 ? grad_values(e, kind, &g, 1) : NULL;
    float *Zn = fence(e, g.C * g.nr), *zr = fence(e, g.C);
    double sum[64] = {0}, bound[64] = {0}, abs_sum[64] = {0};
    e->kern->grad_z(&g.c, D, dO, R, Zn, zr);
    for (int j = 0; j < g.nr; j++) {
        double z[64], err[64];
        for (int i = g.rows - 1; i >= 0; i--) {
            const double lam = scalar ? g.lam[i] : 1;
            double abs = 0, carried = 0;
            z[i] = 0;
            for (int d = 0; d < g.k; d++) {
                const double y = lam * g.ku[i * g.ldk + d] * D[d * g.nr + j];
                z[i] += y;
                abs += fabs(y);
            }
            for (int m = i; dO != NULL && m < g.rows; m++) {
                const double y = (double)g.P[m * g.C + i] * dO[m * g.nr + j];
                z[i] += y;
                abs += fabs(y);
            }
            for (int m = i + 1; m < g.rows; m++) {
                const double l = g.L[m * g.C + i];
                z[i] -= l * z[m];
                abs += fabs(l * z[m]);
                carried += fabs(l) * err[m];
            }
            err[i] = sum_bound(2, g.k + 2 * g.rows, abs) + carried;
            expect(e, "Zn", i * g.nr + j, Zn[i * g.nr + j], -z[i], err[i]);
            const double r = R[i * g.nr + j];
            sum[i] += z[i] * r;
            abs_sum[i] += fabs(z[i] * r);
            bound[i] += fabs(r) * err[i];
        }
    }
    for (int i = 0; i < g.rows; i++)
        expect(e, "zr", i, zr[i], sum[i], bound[i] * 1.001 + sum_bound(2, g.nr, abs_sum[i]));
}
static void check_grad_z(check_env *e) { grad_every(e, grad_z_case); }

static void grad_d_case(check_env *e, int kind, bool scalar)
{
    const grad_case g = grad_make(e, kind, scalar);
    const float *D = grad_floats(e, kind, g.k * g.nr), *H = grad_floats(e, kind, g.k * g.nr);
    const float *dO = draw_int(e, 0, 3) > 0 ? grad_values(e, kind, &g, 1) : NULL;
    const float *Zn = grad_values(e, kind, &g, 1);
    float *out = fence(e, g.k * g.nr), *hd = fence(e, g.ldk);
    e->kern->grad_d(&g.c, D, H, g.ql, dO, g.kl, Zn, out, hd, NULL);
    for (int d = 0; d < g.k; d++) {
        double dot = 0, dot_abs = 0;
        for (int j = 0; j < g.nr; j++) {
            double y = (double)g.dec[d] * D[d * g.nr + j], abs = fabs(y);
            for (int i = 0; i < g.rows; i++) {
                const double q = dO == NULL ? 0 : (double)g.ql[i * g.ldk + d] * dO[i * g.nr + j];
                const double k = (double)g.kl[i * g.ldk + d] * Zn[i * g.nr + j];
                y += q + k;
                abs += fabs(q) + fabs(k);
            }
            expect(e, "out", d * g.nr + j, out[d * g.nr + j], y, sum_bound(1, 2 * g.rows + 1, abs));
            dot += (double)D[d * g.nr + j] * H[d * g.nr + j];
            dot_abs += fabs((double)D[d * g.nr + j] * H[d * g.nr + j]);
        }
        expect(e, "hd", d, hd[d], dot, sum_bound(1, g.nr, dot_abs));
    }
}
static void check_grad_d(check_env *e) { grad_every(e, grad_d_case); }

static void grad_scaled_case(check_env *e, int kind, bool scalar)
{
    const grad_case g = grad_make(e, kind, scalar);
    float *out = fence(e, (int64_t)g.rows * g.ldk);
    e->kern->grad_scaled(g.rows, g.ldk, g.b, g.gam, g.kl, out);
    for (int i = 0; i < g.rows * g.ldk; i++) {
        const double s = (double)g.b[i / g.ldk] * (scalar ? g.gam[i / g.ldk] : 1) * g.kl[i];
        expect(e, "dst", i, out[i], s, ulp_bound(1.5, s));
    }
}
static void check_grad_scaled(check_env *e) { grad_every(e, grad_scaled_case); }

/* ---- products over the value columns ---- */

static void grad_products_case(check_env *e, int kind, bool pair)
{
    const grad_case g = grad_make(e, kind, true);
    const int n = GRAD_PANELS * g.nr, rows = pair ? g.rows : g.k;
    const int64_t ps = (int64_t)(pair ? g.C : g.k) * g.nr;
    const float *a = grad_floats(e, kind, GRAD_PANELS * ps), *t = grad_floats(e, kind, n * 16);
    const int ldo = pair ? g.C : 16;
    float *out = fence(e, (int64_t)rows * ldo);
    if (pair)
        e->kern->grad_pair(rows, GRAD_PANELS, ps, a, t, out, ldo);
    else
        e->kern->grad_left(rows, GRAD_PANELS, a, t, out, NULL);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < 16; j++) {
            double y = 0, abs = 0;
            for (int x = 0; x < n; x++) {
                const double z = (double)a[x / g.nr * ps + i * g.nr + x % g.nr] * t[x * 16 + j];
                y += z;
                abs += fabs(z);
            }
            expect(e, "out", i * ldo + j, out[i * ldo + j], y, sum_bound(1, n, abs));
        }
}
static void grad_pair_case(check_env *e, int kind, bool scalar)
{
    (void)scalar;
    grad_products_case(e, kind, true);
}
static void grad_left_case(check_env *e, int kind, bool scalar)
{
    (void)scalar;
    grad_products_case(e, kind, false);
}
static void check_grad_pair(check_env *e) { grad_every(e, grad_pair_case); }
static void check_grad_left(check_env *e) { grad_every(e, grad_left_case); }

/* ---- scalar gates ---- */

/* Decay factors of a chunk, some 0, and E in double; out: the square in fp32. */
static void grad_decays(check_env *e, const grad_case *g, float *a, double *E, float *out)
{
    for (int i = 0; i < g->rows; i++)
        a[i] = expf(fill_gate(e, (int)draw(e) & 3));
    for (int i = 0; i < g->rows; i++)
        for (int j = 0; j < g->C; j++) {
            double y = j == i ? 1 : j < i ? E[(i - 1) * g->C + j] * a[i] : 0;
            E[i * g->C + j] = y;
            if (out != NULL && grad_stored(i, j))
                out[i * g->C + j] = (float)y;
        }
}

static void grad_gdn_pairs_case(check_env *e, int kind, bool scalar)
{
    (void)scalar;
    const grad_case g = grad_make(e, kind, true);
    const int C = g.C;
    float *E = grad_square(e, FILL_RANDOM, g.rows, C, 0, 1), *sq[4], *out[3];
    for (int i = 0; i < 4; i++) /* kk, qk, ox, zx: full within the diagonal blocks */
        sq[i] = grad_square(e, kind, g.rows, C, -16, 1);
    for (int i = 0; i < 3; i++)
        out[i] = fence(e, C * C);
    float *db = grad_floats(e, kind, C), before[64];
    memcpy(before, db, sizeof(float) * (size_t)C);
    e->kern->grad_gdn_pairs(g.rows, C, g.b, sq[0], sq[1], E, sq[2], sq[3], out[0], out[1], out[2],
                            db);
    for (int i = 0; i < g.n; i++) {
        double sum = before[i], abs = fabs(sum);
        for (int j = 0; j < C; j++) {
            const int at = i * C + j;
            if (!grad_stored(i, j))
                continue;
            const bool in = i < g.rows;
            const double kk = in ? sq[0][at] : 0, qk = in ? sq[1][at] : 0, b = g.b[i];
            const double ox = in && j <= i ? sq[2][at] : 0, zx = in && j < i ? sq[3][at] : 0;
            const double ee = in ? E[at] : 0, oq = j < i ? ox * qk : 0;
            expect(e, "w", at, out[0][at], ox * ee, ulp_bound(1, ox * ee));
            expect(e, "m", at, out[1][at], b * zx * ee, ulp_bound(2, b * zx * ee));
            expect(e, "B", at, out[2][at], oq + b * kk * zx,
                   sum_bound(2, 3, fabs(oq) + fabs(b * kk * zx)));
            sum += zx * kk * ee;
            abs += fabs(zx * kk * ee);
        }
        if (i < g.rows)
            expect(e, "db", i, db[i], sum, sum_bound(2, i + 3, abs));
    }
}
static void check_grad_gdn_pairs(check_env *e) { grad_every(e, grad_gdn_pairs_case); }

static void grad_gdn_mirror_case(check_env *e, int kind, bool scalar)
{
    (void)scalar;
    const grad_case g = grad_make(e, kind, true);
    const int C = g.C;
    const float *w = grad_square(e, kind, g.n, C, 0, 1), *m = grad_square(e, kind, g.n, C, 1, 1);
    float *wt = fence(e, C * C), *ms = fence(e, C * C);
    e->kern->grad_gdn_mirror(g.n, C, w, m, wt, ms);
    for (int i = 0; i < g.n; i++)
        for (int j = 0; j < g.n; j++) {
            if (grad_stored(j, i))
                expect(e, "wt", i * C + j, wt[i * C + j], w[j * C + i], 0);
            const double both = j < i ? m[i * C + j] : j > i ? m[j * C + i] : 0;
            expect(e, "ms", i * C + j, ms[i * C + j], both, 0);
        }
}
static void check_grad_gdn_mirror(check_env *e) { grad_every(e, grad_gdn_mirror_case); }

static void grad_gdn_block_case(check_env *e, int kind, bool scalar)
{
    (void)scalar;
    const grad_case g = grad_make(e, kind, true);
    const int C = g.C, block = draw_int(e, 0, g.n / 16 - 1), t0 = block * 16;
    float *w = grad_square(e, kind, g.n, C, 0, 1), *wt = fence(e, C * C), *tokens[5];
    float *ms = grad_floats(e, kind, C * C), *b0 = fence(e, C), *bx = fence(e, C);
    float *dq = fence(e, g.k * 16), *dk = fence(e, g.k * 16);
    for (int i = 0; i < g.n; i++)
        for (int j = 0; j < g.n; j++)
            if (grad_stored(j, i))
                wt[i * C + j] = w[j * C + i];
    for (int i = 0; i < 5; i++) /* kt, qt, hq, hz, dx */
        tokens[i] = grad_floats(e, kind, g.k * 16);
    e->kern->grad_gdn_block(&g.c, block, tokens[0], tokens[1], tokens[2], tokens[3], tokens[4], w,
                            wt, ms, dq, dk, b0, bx);
    for (int x = 0; x < 16 && t0 + x < g.rows; x++) {
        const int t = t0 + x;
        double sq = 0, sx = 0, abs_q = 0, abs_x = 0;
        for (int d = 0; d < g.k; d++) {
            const int at = d * 16 + x;
            const double hq = tokens[2][at], hz = tokens[3][at], dx = tokens[4][at];
            double y = g.gam[t] * hq, ya = fabs(y);
            double z = (double)g.b[t] * g.gam[t] * hz + g.lam[t] * dx;
            double za = fabs((double)g.b[t] * g.gam[t] * hz) + fabs(g.lam[t] * dx);
            for (int i = 0; i < g.rows; i++) {
                const double k = g.kl[i * g.ldk + d], q = g.ql[i * g.ldk + d];
                const double a = i <= t ? k * w[t * C + i] : 0, b = k * ms[i * C + t];
                const double c = i >= t ? q * w[i * C + t] : 0;
                y += a;
                ya += fabs(a);
                z += b + c;
                za += fabs(b) + fabs(c);
            }
            expect(e, "dq", at, dq[at], y, sum_bound(2, g.rows + 2, ya));
            expect(e, "dk", at, dk[at], z, sum_bound(2, 2 * g.rows + 3, za));
            const double q0 = tokens[1][at] * hq, k0 = g.b[t] * tokens[0][at] * hz;
            sq += q0 + k0;
            abs_q += fabs(q0) + fabs(k0);
            sx += tokens[0][at] * dx;
            abs_x += fabs(tokens[0][at] * dx);
        }
        expect(e, "b0", t, b0[t], sq, sum_bound(2, 2 * g.k, abs_q));
        expect(e, "bx", t, bx[t], sx, sum_bound(1, g.k, abs_x));
    }
}
static void check_grad_gdn_block(check_env *e) { grad_every(e, grad_gdn_block_case); }

/* The sum of NOTE [Gradients of decays] by its definition: B(i, j) with j = -1 the entry and
 * i = rows the exit; E by products of a. */
typedef struct grad_met {
    double sum, abs;
} grad_met;

static grad_met grad_meet(int rows, int t, const double *E, int C, const double *to_entry,
                          double (*B)(const void *arg, int i, int j), const void *arg)
{
    grad_met s = {0, 0};
    const double past = E[(rows - 1) * C + t];
    for (int i = t; i <= rows; i++)
        for (int j = -1; j < t; j++) {
            const double after = i < rows ? E[i * C + t] : past;
            const double before = j >= 0 ? E[(t - 1) * C + j] : t > 0 ? to_entry[t - 1] : 1;
            const double y = after * B(arg, i, j) * before;
            s.sum += y;
            s.abs += fabs(y);
        }
    return s;
}

typedef struct grad_bordered {
    const float *B, *b0, *bx;
    double corner;
    int rows, C;
} grad_bordered;

static double grad_bordered_at(const void *arg, int i, int j)
{
    const grad_bordered *x = arg;
    if (i == x->rows)
        return j < 0 ? x->corner : x->bx[j];
    return j < 0 ? x->b0[i] : x->B[i * x->C + j];
}

static void grad_gdn_decay_case(check_env *e, int kind, bool scalar)
{
    (void)scalar;
    const grad_case g = grad_make(e, kind, true);
    const int C = g.C;
    float *a = fence(e, C), *Ef = fence(e, C * C), *da = fence(e, C);
    double *E = fence_double(e, (int64_t)C * C), to_entry[64], run = 1;
    grad_decays(e, &g, a, E, Ef);
    for (int i = 0; i < g.rows; i++) {
        to_entry[i] = run *= a[i];
        g.gam[i] = (float)run;
    }
    const float *B = grad_square(e, kind, g.n, C, 1, 1);
    grad_bordered x = {B, grad_floats(e, kind, C), grad_floats(e, kind, C),
                       fill_one(e, kind, 0), g.rows, C};
    e->kern->grad_gdn_decay(g.rows, C, g.gam, Ef, B, x.b0, x.bx, (float)x.corner, da);
    for (int t = 0; t < g.rows; t++) {
        const grad_met s = grad_meet(g.rows, t, E, C, to_entry, grad_bordered_at, &x);
        expect(e, "da", t, da[t], s.sum, sum_bound(4, 2 * C, s.abs));
    }
}
static void check_grad_gdn_decay(check_env *e) { grad_every(e, grad_gdn_decay_case); }

/* ---- gates per channel ---- */

static void grad_kda_pairs_case(check_env *e, int kind, bool scalar)
{
    (void)scalar;
    const grad_case g = grad_make(e, kind, false);
    const int C = g.C;
    const float *kk = grad_square(e, kind, g.rows, C, -16, 1);
    const float *zx = grad_square(e, kind, g.rows, C, -16, 1);
    float *m = fence(e, C * C), *db = grad_floats(e, kind, C), before[64];
    memcpy(before, db, sizeof(float) * (size_t)C);
    e->kern->grad_kda_pairs(g.rows, C, g.b, kk, zx, m, db);
    for (int i = 0; i < g.rows; i++) {
        double sum = before[i], abs = fabs(sum);
        for (int j = 0; j < i; j++) {
            const double y = (double)zx[i * C + j] * kk[i * C + j];
            const double z = (double)g.b[i] * zx[i * C + j];
            expect(e, "m", i * C + j, m[i * C + j], z, ulp_bound(1, z));
            sum += y;
            abs += fabs(y);
        }
        expect(e, "db", i, db[i], sum, sum_bound(1, i + 2, abs));
    }
}
static void check_grad_kda_pairs(check_env *e) { grad_every(e, grad_kda_pairs_case); }

typedef struct grad_channel {
    const grad_case *g;
    const float *dp, *m;
    double k[64], q[64], hq[64], hz[64], dx[64], corner; /* hz with b */
} grad_channel;

static double grad_channel_at(const void *arg, int i, int j)
{
    const grad_channel *x = arg;
    const int at = i * x->g->C + j;
    if (i == x->g->rows)
        return j < 0 ? x->corner : x->k[j] * x->dx[j];
    if (j < 0)
        return x->q[i] * x->hq[i] + x->k[i] * x->hz[i];
    return x->k[j] * (x->q[i] * x->dp[at] + x->k[i] * x->m[at]);
}

static void grad_mix_channel(check_env *e, const grad_channel *x, int d, const double *E,
                             const double *to_entry, const float *const out[3], const float *old)
{
    const grad_case *g = x->g;
    for (int t = 0; t < g->rows; t++) {
        const int64_t at = (int64_t)t * g->ldk + d;
        const double self = x->dp[t * g->C + t], past = E[(g->rows - 1) * g->C + t];
        double q = to_entry[t] * x->hq[t] + self * x->k[t], qa = fabs(to_entry[t] * x->hq[t]);
        double k = to_entry[t] * x->hz[t] + past * x->dx[t] + self * x->q[t];
        double ka = fabs(to_entry[t] * x->hz[t]) + fabs(past * x->dx[t]) + fabs(self * x->q[t]);
        qa += fabs(self * x->k[t]);
        for (int j = 0; j < t; j++) {
            const double f = E[t * g->C + j] * x->k[j];
            q += f * x->dp[t * g->C + j];
            k += f * x->m[t * g->C + j];
            qa += fabs(f * x->dp[t * g->C + j]);
            ka += fabs(f * x->m[t * g->C + j]);
        }
        for (int i = t + 1; i < g->rows; i++) {
            const double f = E[i * g->C + t];
            k += f * (x->q[i] * x->dp[i * g->C + t] + x->k[i] * x->m[i * g->C + t]);
            ka += f * (fabs(x->q[i] * x->dp[i * g->C + t]) + fabs(x->k[i] * x->m[i * g->C + t]));
        }
        if (old != NULL) {
            q += old[at];
            k += old[at];
            qa += fabs((double)old[at]);
            ka += fabs((double)old[at]);
        }
        const grad_met s = grad_meet(g->rows, t, E, g->C, to_entry, grad_channel_at, x);
        /* B_i,entry and B_ij are sums of two: their terms, not they, bound the rounding. */
        expect(e, "dq", at, out[0][at], q, sum_bound(4, 2 * g->C, qa));
        expect(e, "dk", at, out[1][at], k, sum_bound(4, 2 * g->C, ka));
        grad_channel abs = *x;
        for (int i = 0; i < g->rows; i++) {
            abs.k[i] = fabs(x->k[i]);
            abs.q[i] = fabs(x->q[i]);
            abs.hq[i] = fabs(x->hq[i]);
            abs.hz[i] = fabs(x->hz[i]);
            abs.dx[i] = fabs(x->dx[i]);
        }
        abs.corner = fabs(x->corner);
        float *dp = fence(e, g->C * g->C), *m = fence(e, g->C * g->C);
        for (int i = 0; i < g->C * g->C; i++) {
            dp[i] = fabsf(x->dp[i]);
            m[i] = fabsf(x->m[i]);
        }
        abs.dp = dp;
        abs.m = m;
        const grad_met a = grad_meet(g->rows, t, E, g->C, to_entry, grad_channel_at, &abs);
        for (int i = 0; i < 2; i++) { /* those two blocks again, at once: there are many tokens */
            check_block *b = &e->blocks[--e->n_blocks];
            munmap(b->map, b->bytes);
        }
        expect(e, "da", at, out[2][at], s.sum, sum_bound(4, 2 * g->C, a.sum));
    }
}

static void grad_kda_mix_case(check_env *e, int kind, bool add)
{
    const grad_case g = grad_make(e, kind, false);
    const int C = g.C;
    const int64_t n = (int64_t)C * g.ldk;
    float *a = fence(e, n), *tokens[3], *hd = grad_floats(e, kind, g.ldk);
    double *E = fence_double(e, (int64_t)g.ldk * C * C), *entry = fence_double(e, g.ldk * 64);
    for (int d = 0; d < g.ldk; d++) {
        float column[64];
        double run = 1;
        grad_decays(e, &g, column, E + (int64_t)d * C * C, NULL);
        for (int i = 0; i < g.rows; i++) {
            a[i * g.ldk + d] = column[i];
            entry[d * 64 + i] = run *= column[i];
        }
    }
    for (int i = 0; i < 3; i++)
        tokens[i] = grad_floats(e, kind, n);
    const float *dp = grad_square(e, kind, g.rows, C, 0, 1);
    const float *m = grad_square(e, kind, g.rows, C, 1, 1);
    float *old = grad_floats(e, kind, n), *work = fence(e, 5 * g.n * 16), *out[3];
    for (int i = 0; i < 3; i++)
        out[i] = fence(e, n);
    if (add)
        for (int i = 0; i < 2; i++)
            memcpy(out[i], old, sizeof(float) * (size_t)n);
    e->kern->grad_kda_mix(g.rows, g.ldk, C, g.kl, g.ql, a, g.b, tokens[0], tokens[1], tokens[2], hd,
                          dp, m, out[0], out[1], out[2], add, work);
    for (int d = 0; d < g.k; d += 3) {
        grad_channel x = {.g = &g, .dp = dp, .m = m, .corner = hd[d]};
        for (int i = 0; i < g.rows; i++) {
            const int64_t at = (int64_t)(i / 16 * 16) * g.ldk + d * 16 + i % 16;
            x.k[i] = g.kl[i * g.ldk + d];
            x.q[i] = g.ql[i * g.ldk + d];
            x.hq[i] = tokens[0][at];
            x.hz[i] = (double)g.b[i] * tokens[1][at];
            x.dx[i] = tokens[2][at];
        }
        grad_mix_channel(e, &x, d, E + (int64_t)d * C * C, entry + d * 64,
                         (const float *const[]){out[0], out[1], out[2]}, add ? old : NULL);
    }
}
static void check_grad_kda_mix(check_env *e) { grad_every(e, grad_kda_mix_case); }

/* ---- back to rows ---- */

static void grad_rows_case(check_env *e, int kind, bool add)
{
    const int n = 16 * draw_int(e, 1, 4), ldd = n + 16;
    const float *src = grad_floats(e, kind, n * 16), *old = grad_floats(e, kind, 16 * ldd);
    float *dst = fence(e, 16 * ldd);
    memcpy(dst, old, sizeof(float) * 16 * (size_t)ldd);
    e->kern->grad_rows(n, src, dst, ldd, add);
    for (int i = 0; i < 16; i++)
        for (int d = 0; d < ldd; d++) {
            const double was = old[i * ldd + d], x = d < n ? src[d * 16 + i] : 0;
            expect(e, "dst", i * ldd + d, dst[i * ldd + d], d < n ? x + (add ? was : 0) : was,
                   d < n && add ? sum_bound(1, 0, fabs(x) + fabs(was)) : 0);
        }
}
static void check_grad_rows(check_env *e) { grad_every(e, grad_rows_case); }

static void grad_dv_case(check_env *e, int kind, bool scalar)
{
    const grad_case g = grad_make(e, kind, scalar);
    const int64_t ps = (int64_t)g.C * g.nr;
    const float *Zn = grad_values(e, kind, &g, GRAD_PANELS);
    float *dv = fence(e, GRAD_PANELS * ps);
    e->kern->grad_dv(g.rows, GRAD_PANELS, ps, g.b, Zn, dv);
    for (int p = 0; p < GRAD_PANELS; p++)
        for (int i = 0; i < g.rows * g.nr; i++) {
            const double y = -(double)g.b[i / g.nr] * Zn[p * ps + i];
            expect(e, "dv", p * ps + i, dv[p * ps + i], y, ulp_bound(1, y));
        }
}
static void check_grad_dv(check_env *e) { grad_every(e, grad_dv_case); }

static void grad_norm_case(check_env *e, int kind, bool norm)
{
    const grad_case g = grad_make(e, kind, true);
    const float s = 0.3f, *rstd = norm ? g.lam : NULL;
    float *d = grad_rows_of(e, kind, &g), *old = fence(e, (int64_t)g.C * g.ldk);
    memcpy(old, d, sizeof(float) * (size_t)(g.C * g.ldk));
    e->kern->grad_norm(g.rows, g.ldk, s, g.kl, rstd, d);
    for (int i = 0; i < g.rows; i++) {
        const double r = norm ? rstd[i] : 1;
        double dot = 0, abs = 0;
        for (int x = 0; norm && x < g.ldk; x++) {
            dot += (double)g.kl[i * g.ldk + x] * old[i * g.ldk + x];
            abs += fabs((double)g.kl[i * g.ldk + x] * old[i * g.ldk + x]);
        }
        for (int x = 0; x < g.ldk; x++) {
            const int at = i * g.ldk + x;
            expect(e, "d", at, d[at], r * (s * (double)old[at] - g.kl[at] / (double)s * dot),
                   sum_bound(3, g.ldk, fabs(r) * (s * fabs((double)old[at]) +
                                                  fabs((double)g.kl[at]) / s * abs)));
        }
    }
}
static void check_grad_norm(check_env *e) { grad_every(e, grad_norm_case); }

static const check_row kernel_checks_grad[] = {
    {"grad_x", check_grad_x},
    {"grad_z", check_grad_z},
    {"grad_d", check_grad_d},
    {"grad_scaled", check_grad_scaled},
    {"grad_pair", check_grad_pair},
    {"grad_left", check_grad_left},
    {"grad_gdn_pairs", check_grad_gdn_pairs},
    {"grad_gdn_mirror", check_grad_gdn_mirror},
    {"grad_gdn_block", check_grad_gdn_block},
    {"grad_gdn_decay", check_grad_gdn_decay},
    {"grad_kda_pairs", check_grad_kda_pairs},
    {"grad_kda_mix", check_grad_kda_mix},
    {"grad_rows", check_grad_rows},
    {"grad_dv", check_grad_dv},
    {"grad_norm", check_grad_norm},
    {NULL, NULL},
};

#endif
