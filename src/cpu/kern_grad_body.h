/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern_grad_body.h - the kernels of kern_grad.h, over the vector vocabulary and the tiles of
 * kern_body.h. The stages on a panel mirror the forward's: X is solved downwards, Z upwards,
 * each within the register tile that has just formed its right-hand side.
 */

/* ---- squares ----------------------------------------------------------------------- */

V_CALL void square_load(v_f r[V_LANES], const float *p, int ldc)
{
    V_LOOP for (int x = 0; x < V_LANES; x++)
        r[x] = v_load(p + (int64_t)x * ldc);
}

V_CALL void square_store(const v_f r[V_LANES], float *p, int ldc)
{
    V_LOOP for (int x = 0; x < V_LANES; x++)
        v_store(p + (int64_t)x * ldc, r[x]);
}

/* A 16 x 16 block of row stride 16, transposed. */
V_CALL void block_turn(const float *src, float *dst)
{
    for (int i = 0; i < 16; i += V_LANES)
        for (int j = 0; j < 16; j += V_LANES) {
            v_f r[V_LANES];
            square_load(r, src + i * 16 + j, 16);
            v_transpose(r);
            square_store(r, dst + j * 16 + i, 16);
        }
}

/* ---- stages on a panel ------------------------------------------------------------- */

/* acc holds -X until the end. */
V_CALL void tile_x(const int mr, const dr_kern_chunk *c, const float *v, const float *N, float *R,
                   float *X, float *Xd, int r)
{
    v_f acc[V_MR][NV];
    const float *L = c->L + (int64_t)r * c->ldc;
    V_LOOP for (int m = 0; m < mr; m++)
        V_LOOP for (int j = 0; j < NV; j++) {
            const int at = (r + m) * NR + j * V_LANES;
            v_f x = v_sub(v_load(v + at), v_load(N + at));
            if (R != NULL)
                v_store(R + at, x);
            acc[m][j] = v_mul(v_set(-c->b[r + m]), x);
        }
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
    if (Xd != NULL) {
        tile_scale(mr, NV, acc, c->lam + r);
        tile_store(mr, NV, acc, Xd + r * NR, NR);
    }
}

static void k_grad_x(const dr_kern_chunk *c, const float *v, const float *N, float *R, float *X,
                     float *Xd)
{
    int r = 0;
    for (; r + V_MR <= c->rows; r += V_MR)
        tile_x(V_MR, c, v, N, R, X, Xd, r);
    for (; r < c->rows; r += 4)
        tile_x(4, c, v, N, R, X, Xd, r);
}

/* Rows r .. r + mr, all later rows done. A tile lies within a block of 16, so the part of P
 * above the diagonal that it meets is stored, and zero. */
V_CALL void tile_z(const int mr, const dr_kern_chunk *c, const float *D, const float *dO,
                   const float *R, float *Zn, float *zr, int r)
{
    v_f acc[V_MR][NV];
    const int64_t ldc = c->ldc;
    const float *L = c->L + r * ldc + r;
    tile_zero(mr, NV, acc);
    tile_mul(mr, NV, acc, c->ku + (int64_t)r * c->ldk, c->ldk, 1, D, NR, c->k);
    if (c->lam != NULL)
        tile_scale(mr, NV, acc, c->lam + r);
    if (dO != NULL)
        tile_mul(mr, NV, acc, c->P + r * ldc + r, 1, ldc, dO + r * NR, NR, c->rows - r);
    tile_mul(mr, NV, acc, L + mr * ldc, 1, ldc, Zn + (r + mr) * NR, NR, c->rows - r - mr);
    V_LOOP for (int m = mr - 1; m > 0; m--)
        V_LOOP for (int n = 0; n < m; n++) {
            v_f l = v_set(L[m * ldc + n]);
            V_LOOP for (int j = 0; j < NV; j++)
                acc[n][j] = v_fnma(l, acc[m][j], acc[n][j]);
        }
    V_LOOP for (int m = 0; m < mr; m++) {
        v_f s = v_zero();
        V_LOOP for (int j = 0; j < NV; j++) {
            const int at = (r + m) * NR + j * V_LANES;
            v_store(Zn + at, v_neg(acc[m][j]));
            if (R != NULL)
                s = v_fma(acc[m][j], v_load(R + at), s);
        }
        if (R != NULL)
            zr[r + m] = v_sum(s);
    }
}

static void k_grad_z(const dr_kern_chunk *c, const float *D, const float *dO, const float *R,
                     float *Zn, float *zr)
{
    int r = c->rows;
    while (r % V_MR != 0)
        tile_z(4, c, D, dO, R, Zn, zr, r -= 4);
    while (r > 0)
        tile_z(V_MR, c, D, dO, R, Zn, zr, r -= V_MR);
}

V_CALL void tile_d(const int mr, const dr_kern_chunk *c, const float *D, const float *H,
                   const float *qg, const float *dO, const float *kg, const float *Zn, float *out,
                   float *hd, int d)
{
    v_f acc[V_MR][NV];
    tile_load(mr, NV, acc, D + d * NR, NR);
    if (H != NULL)
        V_LOOP for (int m = 0; m < mr; m++) {
            v_f s = v_mul(acc[m][0], v_load(H + (d + m) * NR));
            V_LOOP for (int j = 1; j < NV; j++)
                s = v_fma(acc[m][j], v_load(H + (d + m) * NR + j * V_LANES), s);
            hd[d + m] = v_sum(s);
        }
    tile_scale(mr, NV, acc, c->dec + d);
    if (dO != NULL)
        tile_mul(mr, NV, acc, qg + d, 1, c->ldk, dO, NR, c->rows);
    tile_mul(mr, NV, acc, kg + d, 1, c->ldk, Zn, NR, c->rows);
    tile_store(mr, NV, acc, out + d * NR, NR);
}

static void k_grad_d(const dr_kern_chunk *c, const float *D, const float *H, const float *qg,
                     const float *dO, const float *kg, const float *Zn, float *out, float *hd,
                     dr_kern_ahead *ahead)
{
    int d = 0;
    for (; d + V_MR <= c->k; d += V_MR) {
        tile_d(V_MR, c, D, H, qg, dO, kg, Zn, out, hd, d);
        if (ahead != NULL)
            ahead_some(ahead);
    }
    for (; d < c->k; d += 4)
        tile_d(4, c, D, H, qg, dO, kg, Zn, out, hd, d);
}

static void k_grad_scaled(int rows, int ldk, const float *x, const float *y, const float *src,
                          float *dst)
{
    for (int64_t i = 0; i < rows; i++) {
        const v_f s = v_set(y != NULL ? x[i] * y[i] : x[i]);
        for (int d = 0; d < ldk; d += V_LANES)
            v_store(dst + i * ldk + d, v_mul(s, v_load(src + i * ldk + d)));
    }
}

/* ---- products over the value columns ------------------------------------------------ */

/* out [mr][16] of stride ldo = rows a, `ps` apart from panel to panel, times tokens t. */
V_CALL void tile_tokens(const int mr, int panels, int64_t ps, const float *a, const float *t,
                        float *out, int64_t ldo)
{
    v_f acc[V_MRB][NV];
    tile_zero(mr, NB, acc);
    for (int64_t p = 0; p < panels; p++)
        tile_mul(mr, NB, acc, a + p * ps, NR, 1, t + p * (NR * 16), 16, NR);
    tile_store(mr, NB, acc, out, ldo);
}

static void k_grad_pair(int rows, int panels, int64_t ps, const float *a, const float *t, float *c,
                        int ldc)
{
    int r = 0;
    for (; r + V_MRB <= rows; r += V_MRB)
        tile_tokens(V_MRB, panels, ps, a + r * NR, t, c + (int64_t)r * ldc, ldc);
    for (; r < rows; r += 4)
        tile_tokens(4, panels, ps, a + r * NR, t, c + (int64_t)r * ldc, ldc);
}

static void k_grad_left(int k, int panels, const float *S, const float *t, float *out,
                        dr_kern_ahead *ahead)
{
    int d = 0;
    for (; d + V_MRB <= k; d += V_MRB) {
        tile_tokens(V_MRB, panels, (int64_t)k * NR, S + d * NR, t, out + d * 16, 16);
        if (ahead != NULL)
            ahead_some(ahead);
    }
    for (; d < k; d += 4)
        tile_tokens(4, panels, (int64_t)k * NR, S + d * NR, t, out + d * 16, 16);
}

/* ---- scalar gates ------------------------------------------------------------------- */

static void k_grad_gdn_pairs(int rows, int ldc, const float *b, const float *kk, const float *qk,
                             const float *E, const float *ox, const float *zx, float *w, float *m,
                             float *B, float *db)
{
    for (int i = 0; i < rows; i++) {
        const v_f bi = v_set(b[i]);
        const int64_t row = (int64_t)i * ldc;
        v_f s = v_zero();
        for (int j = 0; j < i / 16 * 16 + 16; j += V_LANES) {
            const int64_t at = row + j;
            const v_f e = v_load(E + at), x = v_load(kk + at), o = v_load(ox + at);
            const v_f z = v_keep(v_load(zx + at), i - j), ze = v_mul(z, e);
            v_store(w + at, v_keep(v_mul(o, e), i - j + 1));
            v_store(m + at, v_mul(bi, ze));
            v_store(B + at, v_fma(v_mul(bi, x), z, v_keep(v_mul(o, v_load(qk + at)), i - j)));
            s = v_fma(ze, x, s);
        }
        db[i] += v_sum(s);
    }
    for (int i = rows; i % 16 != 0; i++)
        for (int j = 0; j < i / 16 * 16 + 16; j += V_LANES) {
            v_store(w + (int64_t)i * ldc + j, v_zero());
            v_store(m + (int64_t)i * ldc + j, v_zero());
            v_store(B + (int64_t)i * ldc + j, v_zero());
        }
}

static void k_grad_gdn_mirror(int n, int ldc, const float *w, const float *m, float *wt, float *ms)
{
    for (int i = 0; i < n; i += V_LANES)
        for (int j = 0; j < i / 16 * 16 + 16; j += V_LANES) {
            const int64_t at = (int64_t)i * ldc + j, back = (int64_t)j * ldc + i;
            v_f r[V_LANES], t[V_LANES];
            square_load(r, w + at, ldc);
            v_transpose(r);
            square_store(r, wt + back, ldc);
            if (j > i)
                continue;
            square_load(r, m + at, ldc);
            V_LOOP for (int x = 0; x < V_LANES; x++)
                t[x] = r[x];
            v_transpose(t);
            if (i == j)
                V_LOOP for (int x = 0; x < V_LANES; x++)
                    t[x] = v_add(t[x], r[x]);
            else
                square_store(r, ms + at, ldc);
            square_store(t, ms + back, ldc);
        }
}

/* s[j] += sum over the tile's rows of acc times f. */
V_CALL void tile_dot(const int mr, v_f s[NB], v_f acc[][NV], const float *f)
{
    V_LOOP for (int m = 0; m < mr; m++)
        V_LOOP for (int j = 0; j < NB; j++)
            s[j] = v_fma(acc[m][j], v_load(f + m * 16 + j * V_LANES), s[j]);
}

typedef struct gdn_block {
    const dr_kern_chunk *c;
    const float *kt, *qt, *hq, *hz, *dx, *w, *wt, *ms;
    float *dq, *dk;
    v_f gam[NB], bg[NB], lam[NB]; /* of the block's tokens */
    v_f sq[NB], sz[NB], sx[NB];   /* running sums over d */
    int t0, seen;                 /* first token; tokens up to the end of the block */
} gdn_block;

V_CALL void tile_block(const int mr, gdn_block *x, int d)
{
    const dr_kern_chunk *c = x->c;
    const int64_t ldc = c->ldc, ldk = c->ldk;
    v_f acc[V_MRB][NV], more[V_MRB][NV];
    tile_load(mr, NB, acc, x->hq + d * 16, 16);
    tile_dot(mr, x->sq, acc, x->qt + d * 16);
    V_LOOP for (int m = 0; m < mr; m++)
        V_LOOP for (int j = 0; j < NB; j++)
            acc[m][j] = v_mul(acc[m][j], x->gam[j]);
    tile_mul(mr, NB, acc, c->kl + d, 1, ldk, x->wt + x->t0, ldc, x->seen);
    tile_store(mr, NB, acc, x->dq + d * 16, 16);

    tile_load(mr, NB, acc, x->hz + d * 16, 16);
    tile_load(mr, NB, more, x->dx + d * 16, 16);
    tile_dot(mr, x->sz, acc, x->kt + d * 16);
    tile_dot(mr, x->sx, more, x->kt + d * 16);
    V_LOOP for (int m = 0; m < mr; m++)
        V_LOOP for (int j = 0; j < NB; j++)
            acc[m][j] = v_fma(acc[m][j], x->bg[j], v_mul(more[m][j], x->lam[j]));
    tile_mul(mr, NB, acc, c->kl + d, 1, ldk, x->ms + x->t0, ldc, c->rows);
    tile_mul(mr, NB, acc, c->ql + x->t0 * ldk + d, 1, ldk, x->w + x->t0 * ldc + x->t0, ldc,
             c->rows - x->t0);
    tile_store(mr, NB, acc, x->dk + d * 16, 16);
}

static void k_grad_gdn_block(const dr_kern_chunk *c, int block, const float *kt, const float *qt,
                             const float *hq, const float *hz, const float *dx, const float *w,
                             const float *wt, const float *ms, float *dq, float *dk, float *b0,
                             float *bx)
{
    const int t0 = block * 16, end = t0 + 16 < c->rows ? t0 + 16 : c->rows;
    gdn_block x = {.c = c, .kt = kt, .qt = qt, .hq = hq, .hz = hz, .dx = dx, .w = w, .wt = wt,
                   .ms = ms, .dq = dq, .dk = dk, .t0 = t0, .seen = end};
    v_f b[NB];
    V_LOOP for (int j = 0; j < NB; j++) {
        const int at = t0 + j * V_LANES, left = c->rows - at;
        b[j] = v_keep(v_load(c->b + at), left);
        x.gam[j] = v_keep(v_load(c->gam + at), left);
        x.lam[j] = v_keep(v_load(c->lam + at), left);
        x.bg[j] = v_mul(b[j], x.gam[j]);
        x.sq[j] = x.sz[j] = x.sx[j] = v_zero();
    }
    int d = 0;
    for (; d + V_MRB <= c->k; d += V_MRB)
        tile_block(V_MRB, &x, d);
    for (; d < c->k; d += 4)
        tile_block(4, &x, d);
    V_LOOP for (int j = 0; j < NB; j++) {
        v_store(b0 + t0 + j * V_LANES, v_fma(b[j], x.sz[j], x.sq[j]));
        v_store(bx + t0 + j * V_LANES, x.sx[j]);
    }
}

/* R_j = sum over later readers i >= t (the exit included) of B_ij times the decay from t to i. */
static void k_grad_gdn_decay(int rows, int ldc, const float *gam, const float *E, const float *B,
                             const float *b0, const float *bx, float corner, float *da)
{
    _Alignas(64) float R[64];
    const int n = (rows + 15) / 16 * 16;
    float entry = corner;
    for (int j = 0; j < n; j++)
        R[j] = j < rows ? bx[j] : 0;
    for (int t = rows - 1; t >= 0; t--) {
        const float *Bt = B + (int64_t)t * ldc, *before = E + (int64_t)(t - 1) * ldc;
        const float a = t + 1 < rows ? E[(int64_t)(t + 1) * ldc + t] : 1.0f;
        entry = a * entry + b0[t];
        v_f s = v_zero();
        for (int j = 0; j < t; j += V_LANES) {
            v_f r = v_fma(v_set(a), v_load(R + j), v_load(Bt + j));
            v_store(R + j, r);
            s = v_fma(v_keep(r, t - j), v_load(before + j), s);
        }
        da[t] = t > 0 ? gam[t - 1] * entry + v_sum(s) : entry;
    }
}

/* ---- gates per channel --------------------------------------------------------------- */

static void k_grad_kda_pairs(int rows, int ldc, const float *b, const float *kk, const float *zx,
                             float *m, float *db)
{
    for (int i = 0; i < rows; i++) {
        const v_f bi = v_set(b[i]);
        const int64_t row = (int64_t)i * ldc;
        v_f s = v_zero();
        for (int j = 0; j < i; j += V_LANES) {
            v_f z = v_keep(v_load(zx + row + j), i - j);
            v_store(m + row + j, v_mul(bi, z));
            s = v_fma(z, v_load(kk + row + j), s);
        }
        db[i] += v_sum(s);
    }
}

/* Sixteen channels of a chunk, every pair of tokens once. At token t, R_j is what all later
 * readers want from writer j, decayed back to t; zq and zk run over the writers j < t from the
 * entry on, decayed forwards; their meeting is the gradient of the decay of t. */
static void k_grad_kda_mix(int rows, int ldk, int ldc, const float *k, const float *q,
                           const float *a, const float *b, const float *hq, const float *hz,
                           const float *dx, const float *hd, const float *dp, const float *m,
                           float *dq, float *dk, float *da, bool add, float *work)
{
    const int n = (rows + 15) / 16 * 16;
    float *ks = work, *as = ks + n * 16, *oq = as + n * 16, *oz = oq + n * 16, *R = oz + n * 16;
    for (int d = 0; d < ldk; d += 16) {
        for (int i = 0; i < n; i += 16) {
            const int64_t at = (int64_t)i * ldk + d * 16;
            block_turn(hq + at, oq + i * 16);
            block_turn(hz + at, oz + i * 16);
            block_turn(dx + at, R + i * 16);
        }
        for (int i = 0; i < rows; i++)
            V_LOOP for (int x = 0; x < NB; x++) {
                const int64_t at = (int64_t)i * ldk + d + x * V_LANES;
                v_store(ks + i * 16 + x * V_LANES, v_load(k + at));
                v_store(as + i * 16 + x * V_LANES, v_load(a + at));
            }
        v_f entry[NB], next[NB];
        V_LOOP for (int x = 0; x < NB; x++) {
            entry[x] = v_load(hd + d + x * V_LANES);
            next[x] = v_set(1.0f);
        }
        for (int t = rows - 1; t >= 0; t--) {
            const float *pt = dp + (int64_t)t * ldc, *mt = m + (int64_t)t * ldc;
            const int64_t row = (int64_t)t * ldk + d;
            v_f qt[NB], kt[NB], zq[NB], zk[NB], met[NB];
            V_LOOP for (int x = 0; x < NB; x++) {
                const int at = t * 16 + x * V_LANES;
                qt[x] = v_load(q + row + x * V_LANES);
                kt[x] = v_load(ks + at);
                zq[x] = v_load(oq + at);
                zk[x] = v_mul(v_set(b[t]), v_load(oz + at));
                v_f wants = v_fma(kt[x], zk[x], v_mul(qt[x], zq[x]));
                met[x] = entry[x] = v_fma(next[x], entry[x], wants);
            }
            for (int j = 0; j < t; j++) {
                const v_f pj = v_set(pt[j]), mj = v_set(mt[j]);
                V_LOOP for (int x = 0; x < NB; x++) {
                    const int at = j * 16 + x * V_LANES;
                    const v_f kj = v_load(ks + at), aj = v_load(as + at);
                    v_f r = v_fma(next[x], v_load(R + at), v_fma(qt[x], pj, v_mul(kt[x], mj)));
                    v_store(R + at, r);
                    met[x] = v_fma(met[x], aj, v_mul(kj, r));
                    zq[x] = v_fma(zq[x], aj, v_mul(kj, pj));
                    zk[x] = v_fma(zk[x], aj, v_mul(kj, mj));
                }
            }
            const v_f self = v_set(pt[t]);
            V_LOOP for (int x = 0; x < NB; x++) {
                const int64_t at = row + x * V_LANES;
                const v_f at_t = v_load(as + t * 16 + x * V_LANES);
                v_f r = v_load(R + t * 16 + x * V_LANES);
                v_f gq = v_fma(at_t, zq[x], v_mul(self, kt[x]));
                v_f gk = v_fma(at_t, zk[x], v_fma(self, qt[x], v_mul(next[x], r)));
                v_store(dq + at, add ? v_add(v_load(dq + at), gq) : gq);
                v_store(dk + at, add ? v_add(v_load(dk + at), gk) : gk);
                v_store(da + at, met[x]);
                next[x] = at_t;
            }
        }
    }
}

/* ---- back to rows -------------------------------------------------------------------- */

static void k_grad_rows(int n, const float *src, float *dst, int64_t ldd, bool add)
{
    for (int i = 0; i < 16; i += V_LANES)
        for (int d = 0; d < n; d += V_LANES) {
            v_f r[V_LANES];
            square_load(r, src + d * 16 + i, 16);
            v_transpose(r);
            V_LOOP for (int x = 0; x < V_LANES; x++) {
                float *to = dst + (i + x) * ldd + d;
                v_store(to, add ? v_add(v_load(to), r[x]) : r[x]);
            }
        }
}

static void k_grad_dv(int rows, int panels, int64_t ps, const float *b, const float *Zn, float *dv)
{
    for (int64_t p = 0; p < panels; p++)
        for (int i = 0; i < rows; i++) {
            const v_f s = v_set(-b[i]);
            V_LOOP for (int j = 0; j < NV; j++) {
                const int64_t at = p * ps + i * NR + j * V_LANES;
                v_store(dv + at, v_mul(s, v_load(Zn + at)));
            }
        }
}

static void k_grad_norm(int rows, int ldk, float s, const float *y, const float *rstd, float *d)
{
    for (int i = 0; i < rows; i++) {
        const float *yi = y + (int64_t)i * ldk;
        float *di = d + (int64_t)i * ldk;
        v_f dot = v_zero();
        for (int x = 0; rstd != NULL && x < ldk; x += V_LANES)
            dot = v_fma(v_load(yi + x), v_load(di + x), dot);
        const float r = rstd != NULL ? rstd[i] : 1.0f;
        const v_f out = v_set(r * s), along = v_set(rstd != NULL ? r / s * v_sum(dot) : 0.0f);
        for (int x = 0; x < ldk; x += V_LANES)
            v_store(di + x, v_fnma(along, v_load(yi + x), v_mul(out, v_load(di + x))));
    }
}
