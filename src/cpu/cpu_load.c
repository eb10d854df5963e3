/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_load.c - between the caller's tensors (any element type, any strides) and the padded
 * fp32 arrays of kern.h. One move in each direction serves rows, values and states: a matrix
 * with a stride for its rows and one for its elements. Elements side by side go straight
 * through the kernels; rows side by side (channel-major tensors, V-major states) go through them by
 * way of a small transposed block; anything else goes one by one.
 */
#include "cpu/cpu_chunk.h"
#include "base/half.h"

/* A matrix in the caller's memory. */
typedef struct matrix {
    char *at;
    dr_dtype dtype;
    int64_t row, element; /* strides in elements */
    int rows, n;
} matrix;

/* The other side: element (i, j) at base[i * ld + j / nr * panel + j % nr]. */
typedef struct padded {
    float *at;
    int64_t ld, panel, nr;
} padded;

typedef void load_fn(int rows, int n, int pad, const void *src, int64_t stride, float scale,
                     float *dst, int64_t ldd, int64_t pd);
typedef void store_fn(int rows, int n, const float *src, int64_t lds, int64_t ps, void *dst,
                      int64_t stride);

enum { TURN_ROWS = 64, TURN_COLS = 16 }; /* the transposed block: 4 KiB of stack */

static load_fn *loader(const dr_kern *k, dr_dtype t)
{
    load_fn *const by_type[] = {k->load_f32, k->load_bf16, k->load_f16};
    return by_type[t - DR_F32];
}

static store_fn *storer(const dr_kern *k, dr_dtype t)
{
    store_fn *const by_type[] = {k->store_f32, k->store_bf16, k->store_f16};
    return by_type[t - DR_F32];
}

static char *element_at(const matrix *m, int64_t i, int64_t j)
{
    return m->at + (i * m->row + j * m->element) * (int64_t)dr_dtype_size(m->dtype);
}

static float *padded_at(const padded *d, int64_t i, int64_t j)
{
    return d->at + i * d->ld + j / d->nr * d->panel + j % d->nr;
}

static bool side_by_side(const matrix *m) { return m->element == 1 || m->n == 1; }
static bool turned(const matrix *m) { return m->row == 1 && m->rows >= 8; }

/* Columns from m->n to pad become zero, pad a multiple of 16. */
static void load(const dr_kern *k, const matrix *m, float scale, const padded *d, int pad)
{
    if (side_by_side(m)) {
        loader(k, m->dtype)(m->rows, m->n, pad, m->at, m->row, scale, d->at, d->ld, d->panel);
        return;
    }
    _Alignas(DR_ALIGN) float block[TURN_COLS][TURN_ROWS];
    for (int j = 0; j < m->n; j += TURN_COLS)
        for (int i = 0; i < m->rows; i += TURN_ROWS) {
            int cols = (int)dr_min(TURN_COLS, m->n - j), rows = (int)dr_min(TURN_ROWS, m->rows - i);
            if (turned(m)) {
                loader(k, m->dtype)(cols, rows, (int)dr_round_up(rows, 16), element_at(m, i, j),
                                    m->element, scale, block[0], TURN_ROWS, k->nr);
                k->transpose(cols, rows, block[0], TURN_ROWS, padded_at(d, i, j), d->ld);
                continue;
            }
            for (int x = 0; x < rows; x++)
                for (int y = 0; y < cols; y++)
                    padded_at(d, i + x, j)[y] =
                        scale * (float)dr_get(element_at(m, i + x, j + y), m->dtype, 0);
        }
    for (int64_t i = 0; i < m->rows; i++)
        for (int64_t j = m->n; j < pad; j++)
            *padded_at(d, i, j) = 0;
}

static void store(const dr_kern *k, const padded *d, const matrix *m)
{
    if (side_by_side(m)) {
        storer(k, m->dtype)(m->rows, m->n, d->at, d->ld, d->panel, m->at, m->row);
        return;
    }
    _Alignas(DR_ALIGN) float block[TURN_COLS][TURN_ROWS];
    for (int j = 0; j < m->n; j += TURN_COLS)
        for (int i = 0; i < m->rows; i += TURN_ROWS) {
            int cols = (int)dr_min(TURN_COLS, m->n - j), rows = (int)dr_min(TURN_ROWS, m->rows - i);
            if (turned(m)) {
                k->transpose(rows, cols, padded_at(d, i, j), d->ld, block[0], TURN_ROWS);
                storer(k, m->dtype)(cols, rows, block[0], TURN_ROWS, k->nr, element_at(m, i, j),
                                    m->element);
                continue;
            }
            for (int x = 0; x < rows; x++)
                for (int y = 0; y < cols; y++)
                    dr_put(element_at(m, i + x, j + y), m->dtype, 0, padded_at(d, i + x, j)[y]);
        }
}

/* ---- tokens ----------------------------------------------------------------------- */

/* Elements [n0, n1) of a head at the tokens of a span; t is [B,T,heads,n]. */
static matrix tokens_of(const dr_tensor *t, const dr_cpu_span *s, int32_t head, int32_t n0,
                        int32_t n1)
{
    matrix m = {dr_at(t, s->batch, s->t0, head, n0), t->dtype, t->stride[1], t->stride[3], s->c,
                n1 - n0};
    return m;
}

/* Rows [c, c rounded up to a block) of `width` floats. */
static void clear_rows(float *at, int64_t ld, int64_t c, int64_t width)
{
    for (int64_t i = c; i < dr_round_up(c, DR_CPU_BLOCK); i++)
        memset(at + i * ld, 0, (size_t)width * sizeof *at);
}

void dr_cpu_load_rows(const dr_cpu_dims *d, const dr_tensor *t, const dr_cpu_span *s, int32_t head,
                      int32_t n, float scale, float *dst, int64_t ld)
{
    matrix m = tokens_of(t, s, head, 0, n);
    padded to = {dst, ld, d->NR, d->NR};
    load(d->kern, &m, scale, &to, (int)ld);
    clear_rows(dst, ld, s->c, ld);
}

void dr_cpu_store_rows(const dr_cpu_dims *d, const float *src, int64_t ld, const dr_cpu_span *s,
                       int32_t head, int32_t n, const dr_tensor *t)
{
    matrix m = tokens_of(t, s, head, 0, n);
    padded from = {(float *)src, ld, d->NR, d->NR};
    store(d->kern, &from, &m);
}

static padded panels_at(const dr_cpu_dims *d, const float *base, int32_t n0, int64_t rows)
{
    padded p = {(float *)base + n0 / d->NR * rows * d->NR, d->NR, rows * d->NR, d->NR};
    return p;
}

void dr_cpu_load_values(const dr_cpu_dims *d, const dr_tensor *t, const dr_cpu_span *s,
                        int32_t head, int32_t n0, int32_t n1, float *dst)
{
    matrix m = tokens_of(t, s, head, n0, n1);
    padded to = panels_at(d, dst, n0, d->C);
    int64_t pad = dr_round_up(m.n, d->NR);
    load(d->kern, &m, 1, &to, (int)pad);
    for (int64_t j = 0; j < pad; j += d->NR)
        clear_rows(padded_at(&to, 0, j), d->NR, s->c, d->NR);
}

void dr_cpu_store_values(const dr_cpu_dims *d, const float *src, const dr_cpu_span *s,
                         int32_t head, int32_t n0, int32_t n1, const dr_tensor *t)
{
    matrix m = tokens_of(t, s, head, n0, n1);
    padded from = panels_at(d, src, n0, d->C);
    store(d->kern, &from, &m);
}

/* ---- states ----------------------------------------------------------------------- */

static matrix state_of(const dr_cpu_dims *d, const dr_tensor *t, int64_t slot, int32_t head,
                       int32_t n0, int32_t n1)
{
    matrix m = {dr_at(t, slot, head, 0, n0), t->dtype, t->stride[2], t->stride[3], d->K, n1 - n0};
    return m;
}

void dr_cpu_load_state(const dr_cpu_dims *d, const dr_tensor *t, int64_t slot, int32_t head,
                       int32_t n0, int32_t n1, float *S)
{
    padded to = panels_at(d, S, n0, d->K4);
    int64_t pad = dr_round_up(n1 - n0, d->NR);
    if (t->data == NULL || slot < 0) {
        memset(to.at, 0, (size_t)(pad * d->K4) * sizeof *S);
        return;
    }
    matrix m = state_of(d, t, slot, head, n0, n1);
    load(d->kern, &m, 1, &to, (int)pad);
    for (int64_t j = 0; j < pad; j += d->NR)
        memset(padded_at(&to, d->K, j), 0, (size_t)((d->K4 - d->K) * d->NR) * sizeof *S);
}

void dr_cpu_store_state(const dr_cpu_dims *d, const float *S, int64_t slot, int32_t head,
                        int32_t n0, int32_t n1, const dr_tensor *t)
{
    if (t->data == NULL || slot < 0)
        return;
    matrix m = state_of(d, t, slot, head, n0, n1);
    padded from = panels_at(d, S, n0, d->K4);
    store(d->kern, &from, &m);
}

dr_tensor dr_cpu_turned(const float *data, int64_t K, int64_t n)
{
    dr_tensor t = dr_tensor_make((void *)data, DR_F32, 4, 1, 1, K, n);
    t.stride[2] = 1;
    t.stride[3] = K;
    return t;
}
