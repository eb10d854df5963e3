/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern_rows_body.h - the kernels of kern_rows.h, over the vector vocabulary and the functions
 * at the head of kern_body.h. Each kernel is an inline step on up to V_LANES elements; ROW_LOOP
 * runs it on whole vectors, where its loads need no mask, and once on what is left.
 */
#define ROW_LOOP(n, step, ...)                         \
    do {                                               \
        int at = 0;                                    \
        for (; at + V_LANES <= (n); at += V_LANES)     \
            step(at, V_LANES, __VA_ARGS__);            \
        if (at < (n))                                  \
            step(at, (n) - at, __VA_ARGS__);           \
    } while (0)

/* sigmoid(x), and 1 - sigmoid(x) without cancellation, from one exponential; what lies below
 * sigmoid(-87) counts as that. */
V_CALL v_f v_logistic(v_f x, v_f *rest)
{
    v_f e = v_exp(v_neg(v_max(v_set(-87.0f), x)));
    v_f s = v_div(v_set(1.0f), v_add(v_set(1.0f), e));
    *rest = v_mul(e, s);
    return s;
}

V_CALL v_f v_silu(v_f x) { return v_div(x, v_add(v_set(1.0f), v_exp(v_neg(x)))); }

/* silu(x), and its derivative. */
V_CALL v_f v_silu_slope(v_f x, v_f *slope)
{
    v_f rest, s = v_logistic(x, &rest);
    *slope = v_mul(s, v_fma(x, rest, v_set(1.0f)));
    return v_mul(x, s);
}

/* ---- convolution ------------------------------------------------------------------- */

/* `tokens` rows of output at once, nv vectors of each. With `taps` known, an input row is loaded
 * once for all the outputs that it enters. Two vectors are a cache line, which thus is met once:
 * rows that are a power of two apart share few places in the cache. */
V_CALL void conv_step(int i, int left, const int nv, const int tokens, const int taps,
                      const bool known, const float *const *row, const float *w, int64_t ldw,
                      const float *init, int64_t ldi, const bool silu, float *out, int64_t ldo,
                      const char *ahead, int64_t hop, int size)
{
    v_f p[4][2], tap[4][2];
    V_LOOP for (int t = 0; t < tokens; t++)
        V_LOOP for (int v = 0; v < nv; v++)
            p[t][v] = init != NULL ? v_get(init + t * ldi + i + v * V_LANES, left) : v_zero();
    if (known) {
        V_LOOP for (int j = 0; j < taps; j++)
            V_LOOP for (int v = 0; v < nv; v++)
                tap[j][v] = v_get(w + j * ldw + i + v * V_LANES, left);
        V_LOOP for (int r = 0; r < tokens + taps - 1; r++)
            V_LOOP for (int v = 0; v < nv; v++) {
                v_f x = v_get(row[r] + i + v * V_LANES, left);
                V_LOOP for (int t = 0; t < tokens; t++)
                    if (r - t >= 0 && r - t < taps)
                        p[t][v] = v_fma(tap[r - t][v], x, p[t][v]);
            }
    } else {
        for (int j = 0; j < taps; j++)
            V_LOOP for (int v = 0; v < nv; v++) {
                v_f y = v_get(w + j * ldw + i + v * V_LANES, left);
                V_LOOP for (int t = 0; t < tokens; t++)
                    p[t][v] = v_fma(y, v_get(row[t + j] + i + v * V_LANES, left), p[t][v]);
            }
    }
    V_LOOP for (int t = 0; t < tokens; t++)
        V_LOOP for (int v = 0; v < nv; v++)
            v_put(out + t * ldo + i + v * V_LANES, left, silu ? v_silu(p[t][v]) : p[t][v]);
    if (ahead != NULL && i * size % 64 == 0)
        V_LOOP for (int t = 0; t < tokens; t++)
            v_prefetch2(ahead + t * hop + i * size);
}

V_CALL void conv_some(int n, const int tokens, int taps, const float *const *row, const float *w,
                      int64_t ldw, const float *init, int64_t ldi, const bool silu, float *out,
                      int64_t ldo, const char *ahead, int64_t hop, int size)
{
    int at = 0;
    if (taps == 4) {
        const float *seven[7];
        V_LOOP for (int r = 0; r < tokens + 3; r++)
            seven[r] = row[r];
        for (; at + 2 * V_LANES <= n; at += 2 * V_LANES)
            conv_step(at, V_LANES, 2, tokens, 4, true, seven, w, ldw, init, ldi, silu, out, ldo,
                      ahead, hop, size);
    } else {
        for (; at + 2 * V_LANES <= n; at += 2 * V_LANES)
            conv_step(at, V_LANES, 2, tokens, taps, false, row, w, ldw, init, ldi, silu, out, ldo,
                      ahead, hop, size);
    }
    for (; at < n; at += V_LANES)
        conv_step(at, n - at, 1, tokens, taps, false, row, w, ldw, init, ldi, silu, out, ldo, NULL,
                  0, 0);
}

static void k_conv_rows(int n, int tokens, int taps, const float *const *row, const float *w,
                        int64_t ldw, const float *init, int64_t ldi, bool silu, float *out,
                        int64_t ldo, const char *ahead, int64_t hop, int size)
{
    int t = 0;
    for (; t + 4 <= tokens; t += 4) {
        const float *from = init != NULL ? init + t * ldi : NULL;
        const char *soon = ahead != NULL ? ahead + t * hop : NULL;
        if (silu)
            conv_some(n, 4, taps, row + t, w, ldw, from, ldi, true, out + t * ldo, ldo, soon, hop,
                      size);
        else
            conv_some(n, 4, taps, row + t, w, ldw, from, ldi, false, out + t * ldo, ldo, soon, hop,
                      size);
    }
    for (; t < tokens; t++) {
        const float *from = init != NULL ? init + t * ldi : NULL;
        const char *soon = ahead != NULL ? ahead + t * hop : NULL;
        if (silu)
            conv_some(n, 1, taps, row + t, w, ldw, from, ldi, true, out + t * ldo, ldo, soon, hop,
                      size);
        else
            conv_some(n, 1, taps, row + t, w, ldw, from, ldi, false, out + t * ldo, ldo, soon, hop,
                      size);
    }
}

/* nv vectors of tokens, `left` of them present (all, for more than one vector). */
V_CALL void line_step(int i, int left, const int nv, int taps, int64_t step, const float *x,
                      const float *w, v_f bias, const bool silu, float *out)
{
    v_f p[4];
    V_LOOP for (int v = 0; v < nv; v++)
        p[v] = bias;
    for (int j = 0; j < taps; j++) {
        const float *from = x + i - (taps - 1 - j) * step;
        v_f y = v_set(w[j]);
        V_LOOP for (int v = 0; v < nv; v++)
            p[v] = v_fma(y, v_get(from + v * V_LANES, left), p[v]);
    }
    V_LOOP for (int v = 0; v < nv; v++)
        v_put(out + i + v * V_LANES, left, silu ? v_silu(p[v]) : p[v]);
}

V_CALL void line_all(int n, int taps, int64_t step, const float *x, const float *w, float bias,
                     const bool silu, float *out)
{
    const v_f start = v_set(bias);
    int i = 0;
    for (; i + 4 * V_LANES <= n; i += 4 * V_LANES)
        line_step(i, V_LANES, 4, taps, step, x, w, start, silu, out);
    for (; i < n; i += V_LANES)
        line_step(i, n - i, 1, taps, step, x, w, start, silu, out);
}

static void k_conv_line(int n, int taps, int64_t step, const float *x, const float *w, float bias,
                        bool silu, float *out)
{
    if (silu)
        line_all(n, taps, step, x, w, bias, true, out);
    else
        line_all(n, taps, step, x, w, bias, false, out);
}

V_CALL void silu_grad_step(int i, int left, const float *p, const float *dy, float *d)
{
    v_f slope;
    v_silu_slope(v_get(p + i, left), &slope);
    v_put(d + i, left, v_mul(v_get(dy + i, left), slope));
}

static void k_silu_grad(int n, const float *p, const float *dy, float *d)
{
    ROW_LOOP(n, silu_grad_step, p, dy, d);
}

/* Taps [j, j + taps) and, with `plain`, the sum of d itself, of nv vectors, kept in registers
 * over the tokens. */
V_CALL void conv_sums_step(int i, int left, const int nv, int tokens, int j, const int taps,
                           const bool plain, const float *d, int64_t ldd, const float *const *row,
                           float *sums, float *sum, int64_t lds)
{
    v_f acc[4][2], all[2];
    V_LOOP for (int v = 0; v < nv; v++) {
        all[v] = v_zero();
        V_LOOP for (int x = 0; x < taps; x++)
            acc[x][v] = v_zero();
    }
    for (int t = 0; t < tokens; t++)
        V_LOOP for (int v = 0; v < nv; v++) {
            const int at = i + v * V_LANES;
            v_f y = v_get(d + t * ldd + at, left);
            V_LOOP for (int x = 0; x < taps; x++)
                acc[x][v] = v_fma(y, v_get(row[t + j + x] + at, left), acc[x][v]);
            if (plain)
                all[v] = v_add(all[v], y);
        }
    V_LOOP for (int v = 0; v < nv; v++) {
        const int at = i + v * V_LANES;
        V_LOOP for (int x = 0; x < taps; x++) {
            float *to = sums + (j + x) * lds + at;
            v_put(to, left, v_add(v_get(to, left), acc[x][v]));
        }
        if (plain)
            v_put(sum + at, left, v_add(v_get(sum + at, left), all[v]));
    }
}

V_CALL void conv_sums_some(int n, int tokens, int j, const int taps, const bool plain,
                           const float *d, int64_t ldd, const float *const *row, float *sums,
                           float *sum, int64_t lds)
{
    int at = 0;
    for (; at + 2 * V_LANES <= n; at += 2 * V_LANES)
        conv_sums_step(at, V_LANES, 2, tokens, j, taps, plain, d, ldd, row, sums, sum, lds);
    for (; at < n; at += V_LANES)
        conv_sums_step(at, n - at, 1, tokens, j, taps, plain, d, ldd, row, sums, sum, lds);
}

static void k_conv_sums(int n, int tokens, int taps, const float *d, int64_t ldd,
                        const float *const *row, float *sums, int64_t lds)
{
    float *sum = sums + taps * lds;
    int j = taps >= 4 ? 4 : 1;
    if (taps >= 4)
        conv_sums_some(n, tokens, 0, 4, true, d, ldd, row, sums, sum, lds);
    else
        conv_sums_some(n, tokens, 0, 1, true, d, ldd, row, sums, sum, lds);
    for (; j + 4 <= taps; j += 4)
        conv_sums_some(n, tokens, j, 4, false, d, ldd, row, sums, sum, lds);
    for (; j < taps; j++)
        conv_sums_some(n, tokens, j, 1, false, d, ldd, row, sums, sum, lds);
}

/* ---- narrow matrices ---------------------------------------------------------------- */

/* Whole vectors are read and written although a row has n elements. Reading, what follows a row
 * is dropped; writing, it is overwritten by the rows that follow. The last rows, past whose end
 * that would go too far, come one element at a time, as do rows that exceed a vector. */

static void k_narrow_in(int m, int n, const float *src, int64_t lds, float *dst, int64_t ldd)
{
    const int64_t all = (m - 1) * lds + n;
    int i = 0;
    for (; n <= V_LANES && (i + V_LANES - 1) * lds + V_LANES <= all; i += V_LANES) {
        v_f r[V_LANES];
        V_LOOP for (int x = 0; x < V_LANES; x++)
            r[x] = v_loadu(src + (i + x) * lds);
        v_transpose(r);
        V_LOOP for (int j = 0; j < V_LANES; j++)
            if (j < n)
                v_storeu(dst + j * ldd + i, r[j]);
    }
    for (; i < m; i++)
        for (int j = 0; j < n; j++)
            dst[j * ldd + i] = src[i * lds + j];
}

static void k_narrow_out(int m, int n, const float *src, int64_t lds, float *dst)
{
    const int64_t all = (int64_t)m * n;
    int i = 0;
    for (; n <= V_LANES && (int64_t)(i + V_LANES - 1) * n + V_LANES <= all; i += V_LANES) {
        v_f r[V_LANES];
        V_LOOP for (int x = 0; x < V_LANES; x++)
            r[x] = x < n ? v_loadu(src + x * lds + i) : v_zero();
        v_transpose(r);
        V_LOOP for (int x = 0; x < V_LANES; x++)
            v_storeu(dst + (int64_t)(i + x) * n, r[x]);
    }
    for (; i < m; i++)
        for (int j = 0; j < n; j++)
            dst[(int64_t)i * n + j] = src[j * lds + i];
}

/* ---- norms ------------------------------------------------------------------------- */

static float k_dot(int n, const float *a, const float *b)
{
    v_f s[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    int i = 0;
    for (; i + 4 * V_LANES <= n; i += 4 * V_LANES)
        V_LOOP for (int x = 0; x < 4; x++)
            s[x] = v_fma(v_loadu(a + i + x * V_LANES), v_loadu(b + i + x * V_LANES), s[x]);
    for (; i < n; i += V_LANES)
        s[0] = v_fma(v_get(a + i, n - i), v_get(b + i, n - i), s[0]);
    return v_sum(v_add(v_add(s[0], s[1]), v_add(s[2], s[3])));
}

V_CALL void scale_step(int i, int left, v_f s, const float *x, float *y)
{
    v_put(y + i, left, v_mul(s, v_get(x + i, left)));
}

static void k_scale_row(int n, float s, const float *x, float *y)
{
    const v_f by = v_set(s);
    ROW_LOOP(n, scale_step, by, x, y);
}

V_CALL void norm_grad_step(int i, int left, v_f r, v_f c, const float *x, const float *dy,
                           float *dx)
{
    v_f z = v_mul(r, v_get(x + i, left));
    v_put(dx + i, left, v_mul(r, v_fnma(c, z, v_get(dy + i, left))));
}

static void k_norm_grad(int n, float r, float c, const float *x, const float *dy, float *dx)
{
    const v_f vr = v_set(r), vc = v_set(c);
    ROW_LOOP(n, norm_grad_step, vr, vc, x, dy, dx);
}

V_CALL void gated_step(int i, int left, const bool silu, v_f r, const float *x, const float *w,
                       const float *gate, float *y)
{
    v_f u = v_get(gate + i, left);
    v_f a = v_div(silu ? u : v_set(1.0f), v_add(v_set(1.0f), v_exp(v_neg(u))));
    v_f z = v_mul(r, v_get(x + i, left));
    v_put(y + i, left, v_mul(v_mul(z, v_get(w + i, left)), a));
}

static void k_gated_row(int n, bool silu, float r, const float *x, const float *w,
                        const float *gate, float *y)
{
    const v_f vr = v_set(r);
    if (silu)
        ROW_LOOP(n, gated_step, true, vr, x, w, gate, y);
    else
        ROW_LOOP(n, gated_step, false, vr, x, w, gate, y);
}

V_CALL void gated_grad_step(int i, int left, const bool silu, v_f r, const float *x,
                            const float *w, const float *gate, const float *dy, float *dz,
                            float *dgate, float *dw, v_f *sum)
{
    v_f u = v_get(gate + i, left), z = v_mul(r, v_get(x + i, left)), slope, a;
    if (silu) {
        a = v_silu_slope(u, &slope);
    } else {
        a = v_logistic(u, &slope);
        slope = v_mul(a, slope);
    }
    v_f up = v_get(dy + i, left), down = v_mul(up, v_get(w + i, left));
    v_f inner = v_mul(down, a);
    v_put(dw + i, left, v_fma(v_mul(up, z), a, v_get(dw + i, left)));
    v_put(dgate + i, left, v_mul(v_mul(down, z), slope));
    v_put(dz + i, left, inner);
    *sum = v_fma(inner, z, *sum);
}

static float k_gated_grad(int n, bool silu, float r, const float *x, const float *w,
                          const float *gate, const float *dy, float *dz, float *dgate, float *dw)
{
    const v_f vr = v_set(r);
    v_f sum = v_zero();
    if (silu)
        ROW_LOOP(n, gated_grad_step, true, vr, x, w, gate, dy, dz, dgate, dw, &sum);
    else
        ROW_LOOP(n, gated_grad_step, false, vr, x, w, gate, dy, dz, dgate, dw, &sum);
    return v_sum(sum);
}

/* ---- gates ------------------------------------------------------------------------- */

/* What both forms of the raw gate are made of: z, and exp(-|z|). */
V_CALL v_f gate_exp(const bool lower, v_f a, v_f x, v_f bias, v_f *e)
{
    v_f z = v_add(x, bias);
    if (lower) {
        z = v_mul(a, z);
        *e = v_exp(v_neg(v_abs(z)));
        return z;
    }
    /* What the rounding of the sum lost, as long as the sum is finite: |z| units in the last
     * place of exp(z). */
    v_f part = v_sub(z, x);
    v_f lost = v_add(v_sub(x, v_sub(z, part)), v_sub(bias, part));
    lost = v_where_less(v_abs(z), v_set(1e30f), lost, v_zero());
    lost = v_where_less(z, v_zero(), lost, v_neg(lost));
    *e = v_exp(v_neg(v_abs(z)));
    *e = v_fma(*e, lost, *e);
    return z;
}

V_CALL v_f gate_value(const bool lower, v_f bound, v_f a, v_f z, v_f e)
{
    if (!lower)
        return v_neg(v_mul(a, v_add(v_max(v_zero(), z), v_log1p(e))));
    v_f top = v_where_less(z, v_zero(), e, v_set(1.0f));
    return v_mul(bound, v_div(top, v_add(v_set(1.0f), e)));
}

V_CALL void raw_gate_step(int i, int left, const bool lower, v_f bound, const float *ea,
                          const float *bias, const float *x, float *g)
{
    v_f e, a = v_get(ea + i, left);
    v_f z = gate_exp(lower, a, v_get(x + i, left), v_get(bias + i, left), &e);
    v_put(g + i, left, gate_value(lower, bound, a, z, e));
}

static void k_raw_gate(int n, bool lower, float bound, const float *ea, const float *bias,
                       const float *x, float *g)
{
    const v_f low = v_set(bound);
    if (lower)
        ROW_LOOP(n, raw_gate_step, true, low, ea, bias, x, g);
    else
        ROW_LOOP(n, raw_gate_step, false, low, ea, bias, x, g);
}

V_CALL void raw_gate_grad_step(int i, int left, const bool lower, v_f bound, const float *ea,
                               const float *bias, const float *x, const float *dg, float *dx,
                               float *da, float *db)
{
    v_f e, a = v_get(ea + i, left), up = v_get(dg + i, left);
    v_f z = gate_exp(lower, a, v_get(x + i, left), v_get(bias + i, left), &e);
    v_f large = v_div(v_set(1.0f), v_add(v_set(1.0f), e)), small = v_mul(e, large), dz, slope;
    if (lower) { /* sigmoid' = large small, whichever is the sigmoid */
        slope = v_mul(up, v_mul(bound, v_mul(large, small)));
        dz = v_mul(slope, a);
        slope = v_mul(slope, z);
    } else {
        dz = v_neg(v_mul(up, v_mul(a, v_where_less(z, v_zero(), small, large))));
        slope = v_mul(up, gate_value(false, bound, a, z, e));
    }
    v_put(dx + i, left, dz);
    v_put(da + i, left, v_add(v_get(da + i, left), slope));
    v_put(db + i, left, v_add(v_get(db + i, left), dz));
}

static void k_raw_gate_grad(int n, bool lower, float bound, const float *ea, const float *bias,
                            const float *x, const float *dg, float *dx, float *da, float *db)
{
    const v_f low = v_set(bound);
    if (lower)
        ROW_LOOP(n, raw_gate_grad_step, true, low, ea, bias, x, dg, dx, da, db);
    else
        ROW_LOOP(n, raw_gate_grad_step, false, low, ea, bias, x, dg, dx, da, db);
}

V_CALL void sigmoid_grad_step(int i, int left, v_f scale, const float *x, const float *dy,
                              float *dx)
{
    v_f rest, s = v_logistic(v_get(x + i, left), &rest);
    v_put(dx + i, left, v_mul(v_mul(scale, v_get(dy + i, left)), v_mul(s, rest)));
}

static void k_sigmoid_grad(int n, float scale, const float *x, const float *dy, float *dx)
{
    const v_f by = v_set(scale);
    ROW_LOOP(n, sigmoid_grad_step, by, x, dy, dx);
}

/* ---- decoding ---------------------------------------------------------------------- */

enum { STEP_NV = 32 / V_LANES }; /* vectors of a strip of columns */

/* nv vectors of columns, `left` of them present (all, for more than one vector): one sweep
 * down the rows for what the state predicts, one for the update and the output; both fetch what
 * comes next, at the pace at which the whole state is read. */
V_CALL void step_strip(const int nv, int left, int K, const float *d, const float *dk,
                       const float *k, const float *q, float b, const float *v, const float *in,
                       int64_t ldi, float *out, int64_t ldo, float *o, const float *ahead)
{
    v_f r[2][STEP_NV], u[STEP_NV];
    const int64_t half = (int64_t)K / 2 * nv * V_LANES; /* floats to fetch in a sweep */
    V_LOOP for (int j = 0; j < nv; j++)
        r[0][j] = r[1][j] = v_zero();
    int i = 0;
    for (; i + 2 <= K; i += 2) {
        v_f x = v_set(dk[i]), y = v_set(dk[i + 1]);
        V_LOOP for (int j = 0; j < nv; j++) {
            r[0][j] = v_fma(x, v_get(in + i * ldi + j * V_LANES, left), r[0][j]);
            r[1][j] = v_fma(y, v_get(in + (i + 1) * ldi + j * V_LANES, left), r[1][j]);
        }
        if (ahead != NULL)
            V_LOOP for (int j = 0; j < nv * V_LANES; j += 16)
                v_prefetch2(ahead + i / 2 * nv * V_LANES + j);
    }
    for (; i < K; i++)
        V_LOOP for (int j = 0; j < nv; j++)
            r[0][j] = v_fma(v_set(dk[i]), v_get(in + i * ldi + j * V_LANES, left), r[0][j]);
    V_LOOP for (int j = 0; j < nv; j++) {
        u[j] = v_sub(v_get(v + j * V_LANES, left), v_add(r[0][j], r[1][j]));
        u[j] = v_mul(v_set(b), u[j]);
        r[0][j] = r[1][j] = v_zero();
    }
    for (i = 0; i + 2 <= K; i += 2) {
        V_LOOP for (int y = 0; y < 2; y++) {
            v_f decay = v_set(d[i + y]), key = v_set(k[i + y]), query = v_set(q[i + y]);
            V_LOOP for (int j = 0; j < nv; j++) {
                v_f s = v_mul(decay, v_get(in + (i + y) * ldi + j * V_LANES, left));
                s = v_fma(key, u[j], s);
                v_put(out + (i + y) * ldo + j * V_LANES, left, s);
                r[y][j] = v_fma(query, s, r[y][j]);
            }
        }
        if (ahead != NULL)
            V_LOOP for (int j = 0; j < nv * V_LANES; j += 16)
                v_prefetch2(ahead + half + i / 2 * nv * V_LANES + j);
    }
    for (; i < K; i++)
        V_LOOP for (int j = 0; j < nv; j++) {
            v_f s = v_mul(v_set(d[i]), v_get(in + i * ldi + j * V_LANES, left));
            s = v_fma(v_set(k[i]), u[j], s);
            v_put(out + i * ldo + j * V_LANES, left, s);
            r[0][j] = v_fma(v_set(q[i]), s, r[0][j]);
        }
    V_LOOP for (int j = 0; j < nv; j++)
        v_put(o + j * V_LANES, left, v_add(r[0][j], r[1][j]));
}

static void k_step_columns(int K, int n, const float *d, const float *dk, const float *k,
                           const float *q, float b, const float *v, const float *in, int64_t ldi,
                           float *out, int64_t ldo, float *o, const float *ahead)
{
    int j = 0;
    for (; j + 32 <= n; j += 32)
        step_strip(STEP_NV, V_LANES, K, d, dk, k, q, b, v + j, in + j, ldi, out + j, ldo, o + j,
                   ahead != NULL ? ahead + (int64_t)j * K : NULL);
    for (; j < n; j += V_LANES)
        step_strip(1, n - j, K, d, dk, k, q, b, v + j, in + j, ldi, out + j, ldo, o + j,
                   NULL);
}

/* The sweeps over `rows` rows at channels [i, i + left): what they predict, and the update. */
V_CALL void rows_predict(const int rows, int i, int left, const float *dk, const float *in,
                         int64_t ldi, v_f *acc)
{
    v_f y = v_get(dk + i, left);
    V_LOOP for (int x = 0; x < rows; x++)
        acc[x] = v_fma(y, v_get(in + x * ldi + i, left), acc[x]);
}

V_CALL void rows_update(const int rows, int i, int left, const float *d, const float *k,
                        const float *q, const v_f *u, const float *in, int64_t ldi, float *out,
                        int64_t ldo, v_f *acc)
{
    v_f decay = v_get(d + i, left), key = v_get(k + i, left), query = v_get(q + i, left);
    V_LOOP for (int x = 0; x < rows; x++) {
        v_f s = v_fma(key, u[x], v_mul(decay, v_get(in + x * ldi + i, left)));
        v_put(out + x * ldo + i, left, s);
        acc[x] = v_fma(query, s, acc[x]);
    }
}

/* `rows` rows at a time, so that the sums across lanes overlap; two sums a row, by turns. */
V_CALL void step_some_rows(const int rows, int K, const float *d, const float *dk, const float *k,
                           const float *q, float b, const float *v, const float *in, int64_t ldi,
                           float *out, int64_t ldo, float *o, const float *ahead)
{
    const int pair = 2 * V_LANES;
    v_f acc[2][4], u[4];
    int i = 0;
    V_LOOP for (int x = 0; x < rows; x++)
        acc[0][x] = acc[1][x] = v_zero();
    for (; i + pair <= K; i += pair) {
        rows_predict(rows, i, V_LANES, dk, in, ldi, acc[0]);
        rows_predict(rows, i + V_LANES, V_LANES, dk, in, ldi, acc[1]);
        if (ahead != NULL)
            V_LOOP for (int j = 0; j < rows * V_LANES; j += 16)
                v_prefetch2(ahead + i / 2 * rows + j);
    }
    for (; i < K; i += V_LANES)
        rows_predict(rows, i, K - i, dk, in, ldi, acc[0]);
    V_LOOP for (int x = 0; x < rows; x++) {
        u[x] = v_set(b * (v[x] - v_sum(v_add(acc[0][x], acc[1][x]))));
        acc[0][x] = acc[1][x] = v_zero();
    }
    for (i = 0; i + pair <= K; i += pair) {
        rows_update(rows, i, V_LANES, d, k, q, u, in, ldi, out, ldo, acc[0]);
        rows_update(rows, i + V_LANES, V_LANES, d, k, q, u, in, ldi, out, ldo, acc[1]);
        if (ahead != NULL)
            V_LOOP for (int j = 0; j < rows * V_LANES; j += 16)
                v_prefetch2(ahead + (K + i) / 2 * rows + j);
    }
    for (; i < K; i += V_LANES)
        rows_update(rows, i, K - i, d, k, q, u, in, ldi, out, ldo, acc[0]);
    V_LOOP for (int x = 0; x < rows; x++)
        o[x] = v_sum(v_add(acc[0][x], acc[1][x]));
}

static void k_step_rows(int K, int n, const float *d, const float *dk, const float *k,
                        const float *q, float b, const float *v, const float *in, int64_t ldi,
                        float *out, int64_t ldo, float *o, const float *ahead)
{
    int j = 0;
    for (; j + 4 <= n; j += 4)
        step_some_rows(4, K, d, dk, k, q, b, v + j, in + j * ldi, ldi, out + j * ldo, ldo, o + j,
                       ahead != NULL ? ahead + (int64_t)j * K : NULL);
    for (; j < n; j++)
        step_some_rows(1, K, d, dk, k, q, b, v + j, in + j * ldi, ldi, out + j * ldo, ldo, o + j,
                       ahead != NULL ? ahead + (int64_t)j * K : NULL);
}
