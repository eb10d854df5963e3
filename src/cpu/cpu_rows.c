/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_rows.c - the row operations of the CPU backend except the convolution: gate
 * activation, beta, l2norm, gated norm, and their adjoints.
 *
 * Tensors are walked in rectangles of rows and columns (cpu_rows.h); every rectangle is a few
 * KiB of floats in L1 when the kernels see it.
 *
 * NOTE [Sums over tokens]: gradients of parameters are sums over all rows. Who adds what is
 * fixed by the shape: fp32 inside runs of FLUSH rows, double between runs, and the partial
 * sums of a call's tasks stand on the caller's stack and are added in their order.
 */
#include "cpu/cpu_rows.h"
#include "base/half.h"

#include <math.h>

enum {
    COLS = 512,   /* columns of a tile */
    TILE = 1024,  /* floats of a tile */
    FLUSH = 64,   /* rows summed in fp32 */
    WORK = 16384  /* elements of a task, about */
};

/* ---- walking tensors of one shape ---------------------------------------------------- */

enum { MOST = 6 };

typedef struct walk walk;
/* Works on rows [0, rows) of one view per tensor. */
typedef void walk_fn(const walk *w, const dr_cpu_view *v, int64_t rows, int64_t cols, float *sums);

struct walk {
    const dr_kern *kern;
    walk_fn *work;
    int n;
    dr_tensor t[MOST];        /* rank 4, merged where all of them allow it */
    int64_t shape[DR_MAX_RANK];
    int64_t rows, cols;       /* of a block */
    int64_t blocks[DR_MAX_RANK];
    int64_t all, per_task;    /* blocks, and how many in a row are one task */
    const void *args;
    /* Sums over all rows of one round's columns [col0, col1); NULL: none wanted */
    double *partial;          /* [tasks][col1 - col0] */
    int64_t col0, col1;
    bool again;               /* not the first round: outputs are there already */
};

/* Folds leading axes into later ones where every tensor lets one stride stand for both. */
static void merge(walk *w, int axes)
{
    int into = axes - 1;
    for (int i = axes - 2; i >= 0; i--) {
        if (w->shape[i] <= 1)
            continue;
        bool fits = true;
        for (int x = 0; x < w->n && w->shape[into] > 1; x++)
            if (w->t[x].data != NULL &&
                w->t[x].stride[i] != w->shape[into] * w->t[x].stride[into])
                fits = false;
        if (!fits) {
            into = i;
            continue;
        }
        for (int x = 0; x < w->n; x++) {
            dr_tensor *t = &w->t[x];
            if (w->shape[into] <= 1)
                t->stride[into] = t->stride[i];
            t->shape[into] *= t->shape[i];
            t->shape[i] = 1;
        }
        w->shape[into] *= w->shape[i];
        w->shape[i] = 1;
    }
}

/* Tensors of x's shape, rank 4. whole: the columns of a row stay together, so only the first
 * three axes may merge. */
static walk walk_of(const dr_device *dev, walk_fn *work, const void *args, bool whole, int n,
                    const dr_tensor *const *t)
{
    walk w = {.kern = dev->kern, .work = work, .n = n, .args = args};
    for (int x = 0; x < n; x++)
        w.t[x] = *t[x];
    memcpy(w.shape, t[0]->shape, sizeof w.shape);
    merge(&w, whole ? 3 : 4);
    w.cols = whole ? dr_max(w.shape[3], 1) : dr_min(dr_max(w.shape[3], 1), WORK);
    w.rows = dr_max(1, dr_min(256, WORK / w.cols));
    w.all = 1;
    for (int i = 0; i < DR_MAX_RANK; i++) {
        int64_t size = i == 2 ? w.rows : i == 3 ? w.cols : 1;
        w.blocks[i] = dr_ceil_div(w.shape[i], size);
        w.all *= w.blocks[i];
    }
    w.per_task = 1;
    return w;
}

static void walk_block(const walk *w, int64_t block, float *sums)
{
    int64_t c = block % w->blocks[3] * w->cols;
    block /= w->blocks[3];
    int64_t r = block % w->blocks[2] * w->rows;
    block /= w->blocks[2];
    dr_cpu_view v[MOST];
    for (int x = 0; x < w->n; x++)
        v[x] = dr_cpu_view_at(
            dr_cpu_view_of(&w->t[x], 2, 3, block / w->blocks[1], block % w->blocks[1], 0), r, c);
    w->work(w, v, dr_min(w->rows, w->shape[2] - r), dr_min(w->cols, w->shape[3] - c), sums);
}

static void walk_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const walk *w = arg;
    int64_t end = dr_min(w->all, (task + 1) * w->per_task);
    for (int64_t block = task * w->per_task; block < end; block++)
        walk_block(w, block, NULL);
}

static void walk_run(const dr_device *dev, const walk *w)
{
    dr_pool_run(&dev->pool, dr_ceil_div(w->all, w->per_task), walk_task, (void *)w);
}

/* Rows of a tile of so many columns. */
static int64_t tile_rows(int64_t rows, int64_t cols)
{
    return dr_min(rows, TILE / dr_round_up(dr_min(cols, COLS), 16));
}

/* The tile at (i, j) of a view, and one that is about to be written there. */
static dr_cpu_tile read_tile(const walk *w, const dr_cpu_view *v, int64_t i, int64_t j,
                             int64_t rows, int64_t cols, float *tile)
{
    dr_cpu_view at = dr_cpu_view_at(*v, i, j);
    return dr_cpu_tile_in(w->kern, &at, rows, cols, tile, dr_round_up(cols, 16));
}
static dr_cpu_tile write_tile(const dr_cpu_view *v, int64_t i, int64_t j, int64_t cols, float *tile)
{
    dr_cpu_view at = dr_cpu_view_at(*v, i, j);
    return dr_cpu_tile_out(&at, tile, dr_round_up(cols, 16));
}
static void finish_tile(const walk *w, const dr_cpu_view *v, int64_t i, int64_t j, int64_t rows,
                        int64_t cols, dr_cpu_tile t)
{
    dr_cpu_view at = dr_cpu_view_at(*v, i, j);
    dr_cpu_tile_done(w->kern, t, rows, cols, &at);
}

/* ---- beta -------------------------------------------------------------------------- */

static void beta_work(const walk *w, const dr_cpu_view *v, int64_t rows, int64_t cols, float *sums)
{
    (void)sums;
    const dr_beta_args *a = w->args;
    _Alignas(DR_ALIGN) float tile[3][TILE];
    const int out = w->n - 1; /* x, beta or x, dbeta, dx */
    const int64_t step = tile_rows(rows, cols);
    for (int64_t i = 0; i < rows; i += step)
        for (int64_t j = 0; j < cols; j += COLS) {
            int64_t m = dr_min(step, rows - i), n = dr_min(COLS, cols - j);
            dr_cpu_tile x = read_tile(w, &v[0], i, j, m, n, tile[0]);
            dr_cpu_tile y = write_tile(&v[out], i, j, n, tile[1]);
            dr_cpu_tile d = out == 2 ? read_tile(w, &v[1], i, j, m, n, tile[2]) : x;
            for (int64_t r = 0; r < m; r++) {
                if (out == 2)
                    w->kern->sigmoid_grad((int)n, (float)a->scale, x.at + r * x.ld,
                                          d.at + r * d.ld, y.at + r * y.ld);
                else
                    w->kern->sigmoid((int)n, (float)a->scale, x.at + r * x.ld, y.at + r * y.ld,
                                     NULL);
            }
            finish_tile(w, &v[out], i, j, m, n, y);
        }
}

dr_status dr_cpu_beta(dr_device *dev, int dir, const dr_beta_args *a)
{
    const dr_tensor *t[] = {&a->x, dir > 0 ? &a->beta : &a->dbeta, &a->dx};
    walk w = walk_of(dev, beta_work, a, false, dir > 0 ? 2 : 3, t);
    walk_run(dev, &w);
    return DR_OK;
}

/* ---- l2norm ------------------------------------------------------------------------ */

static void l2norm_work(const walk *w, const dr_cpu_view *v, int64_t rows, int64_t cols,
                        float *sums)
{
    (void)sums;
    const dr_l2norm_args *a = w->args;
    const dr_kern *kern = w->kern;
    _Alignas(DR_ALIGN) float tile[3][TILE];
    const int out = w->n - 1; /* x, y or x, dy, dx */
    const int64_t step = tile_rows(rows, cols);
    for (int64_t i = 0; i < rows; i += step) {
        int64_t m = dr_min(step, rows - i);
        double xx[TILE / 16] = {0}, xd[TILE / 16] = {0};
        dr_cpu_tile x = {0}, d = {0};
        for (int64_t j = 0; j < cols; j += COLS) {
            int64_t n = dr_min(COLS, cols - j);
            x = read_tile(w, &v[0], i, j, m, n, tile[0]);
            d = out == 2 ? read_tile(w, &v[1], i, j, m, n, tile[1]) : x;
            for (int64_t r = 0; r < m; r++) {
                xx[r] += kern->dot((int)n, x.at + r * x.ld, x.at + r * x.ld);
                if (out == 2)
                    xd[r] += kern->dot((int)n, x.at + r * x.ld, d.at + r * d.ld);
            }
        }
        for (int64_t j = 0; j < cols; j += COLS) {
            int64_t n = dr_min(COLS, cols - j);
            if (cols > COLS) {
                x = read_tile(w, &v[0], i, j, m, n, tile[0]);
                d = out == 2 ? read_tile(w, &v[1], i, j, m, n, tile[1]) : x;
            }
            dr_cpu_tile y = write_tile(&v[out], i, j, n, tile[2]);
            for (int64_t r = 0; r < m; r++) {
                double rstd = 1 / sqrt(xx[r] + a->eps);
                if (out == 2 && cols == 1) /* no direction to turn to: 1 - y^2 would cancel */
                    y.at[r * y.ld] = (float)(a->eps * rstd * rstd * rstd * d.at[r * d.ld]);
                else if (out == 2)
                    kern->norm_grad((int)n, (float)rstd, (float)(rstd * xd[r]), x.at + r * x.ld,
                                    d.at + r * d.ld, y.at + r * y.ld);
                else
                    kern->scale_row((int)n, (float)rstd, x.at + r * x.ld, y.at + r * y.ld);
            }
            finish_tile(w, &v[out], i, j, m, n, y);
        }
    }
}

dr_status dr_cpu_l2norm(dr_device *dev, int dir, const dr_l2norm_args *a)
{
    const dr_tensor *t[] = {&a->x, dir > 0 ? &a->y : &a->dy, &a->dx};
    walk w = walk_of(dev, l2norm_work, a, true, dir > 0 ? 2 : 3, t);
    walk_run(dev, &w);
    return DR_OK;
}

/* ---- gated norm --------------------------------------------------------------------- */

/* rsqrt(mean x^2 + eps) of rows [i, i + m); where a row fits a tile, x is left in it. */
static dr_cpu_tile norm_rstd(const walk *w, const dr_cpu_view *v, int64_t i, int64_t m,
                             int64_t cols, float *tile, double *rstd)
{
    const dr_norm_args *a = w->args;
    dr_cpu_tile x = {0};
    for (int64_t r = 0; r < m; r++)
        rstd[r] = 0;
    for (int64_t j = 0; j < cols; j += COLS) {
        int64_t n = dr_min(COLS, cols - j);
        x = read_tile(w, &v[0], i, j, m, n, tile);
        for (int64_t r = 0; r < m; r++)
            rstd[r] += w->kern->dot((int)n, x.at + r * x.ld, x.at + r * x.ld);
    }
    for (int64_t r = 0; r < m; r++)
        rstd[r] = 1 / sqrt(rstd[r] / (double)cols + a->eps);
    return x;
}

static const float *norm_weight(const walk *w, int64_t j, int64_t n, float *tile)
{
    const dr_norm_args *a = w->args;
    dr_cpu_view v = dr_cpu_view_at(dr_cpu_view_of(&a->weight, 0, 0, 0, 0, 0), 0, j);
    return dr_cpu_tile_in(w->kern, &v, 1, n, tile, dr_round_up(n, 16)).at;
}

static void norm_work(const walk *w, const dr_cpu_view *v, int64_t rows, int64_t cols, float *sums)
{
    (void)sums;
    const dr_norm_args *a = w->args;
    const bool silu = a->activation == DR_ACT_SILU;
    _Alignas(DR_ALIGN) float tile[3][TILE], own_weight[COLS];
    const int64_t step = tile_rows(rows, cols);
    double rstd[TILE / 16];
    for (int64_t i = 0; i < rows; i += step) {
        int64_t m = dr_min(step, rows - i);
        dr_cpu_tile x = norm_rstd(w, v, i, m, cols, tile[0], rstd);
        for (int64_t j = 0; j < cols; j += COLS) {
            int64_t n = dr_min(COLS, cols - j);
            if (cols > COLS)
                x = read_tile(w, &v[0], i, j, m, n, tile[0]);
            const float *weight = norm_weight(w, j, n, own_weight);
            dr_cpu_tile gate = read_tile(w, &v[1], i, j, m, n, tile[1]);
            dr_cpu_tile y = write_tile(&v[2], i, j, n, tile[2]);
            for (int64_t r = 0; r < m; r++)
                w->kern->gated_row((int)n, silu, (float)rstd[r], x.at + r * x.ld, weight,
                                   gate.at + r * gate.ld, y.at + r * y.ld);
            finish_tile(w, &v[2], i, j, m, n, y);
        }
    }
}

/* Views: x, gate, dy, dx, dgate. sums [col1 - col0]: of dweight, added to. The columns of a
 * row that fits a tile are seen once; longer rows once more for dx, which needs the sum. */
static void norm_grad_work(const walk *w, const dr_cpu_view *v, int64_t rows, int64_t cols,
                           float *sums)
{
    const dr_norm_args *a = w->args;
    const dr_kern *kern = w->kern;
    const bool silu = a->activation == DR_ACT_SILU, once = cols <= COLS;
    const dr_cpu_view none = {0};
    const dr_cpu_view *dx = w->again ? &none : &v[3], *dgate = w->again ? &none : &v[4];
    _Alignas(DR_ALIGN) float tile[5][TILE], own_weight[COLS], unwanted[COLS] = {0};
    const int64_t step = tile_rows(rows, cols);
    double rstd[TILE / 16];
    for (int64_t i = 0; i < rows; i += step) {
        int64_t m = dr_min(step, rows - i);
        double dot[TILE / 16] = {0};
        dr_cpu_tile x = norm_rstd(w, v, i, m, cols, tile[0], rstd);
        for (int pass = 0; pass < (once ? 1 : 2); pass++)
            for (int64_t j = 0; j < cols; j += COLS) {
                int64_t n = dr_min(COLS, cols - j);
                if (!once)
                    x = read_tile(w, &v[0], i, j, m, n, tile[0]);
                const float *weight = norm_weight(w, j, n, own_weight);
                bool ours = sums != NULL && pass == 0 && j >= w->col0 && j < w->col1;
                float *dw = ours ? sums + (j - w->col0) : unwanted;
                dr_cpu_tile gate = read_tile(w, &v[1], i, j, m, n, tile[1]);
                dr_cpu_tile dy = read_tile(w, &v[2], i, j, m, n, tile[2]);
                dr_cpu_tile dz = write_tile(pass == 0 && !once ? &none : dx, i, j, n, tile[3]);
                dr_cpu_tile dg = write_tile(pass == 0 ? dgate : &none, i, j, n, tile[4]);
                for (int64_t r = 0; r < m; r++) {
                    float *row = x.at + r * x.ld, *z = dz.at + r * dz.ld;
                    float sum = kern->gated_grad((int)n, silu, (float)rstd[r], row, weight,
                                                 gate.at + r * gate.ld, dy.at + r * dy.ld, z,
                                                 dg.at + r * dg.ld, dw);
                    if (pass == 0)
                        dot[r] += sum;
                    if (once || pass == 1)
                        kern->norm_grad((int)n, (float)rstd[r], (float)(dot[r] / (double)cols), row,
                                        z, z);
                }
                if (once || pass == 1)
                    finish_tile(w, dx, i, j, m, n, dz);
                if (pass == 0)
                    finish_tile(w, dgate, i, j, m, n, dg);
            }
    }
}

/* Partial sums of dweight: 32 KiB whatever the width, in rounds where that is not enough. */
enum { PARTIAL = 4096, ROUND = 1024 };

static void norm_grad_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const walk *w = arg;
    _Alignas(DR_ALIGN) float sums[ROUND];
    const int64_t n = w->col1 - w->col0;
    double *total = w->partial + task * n;
    for (int64_t c = 0; c < n; c++)
        total[c] = 0;
    int64_t end = dr_min(w->all, (task + 1) * w->per_task);
    for (int64_t block = task * w->per_task; block < end; block++) {
        memset(sums, 0, sizeof sums);
        walk_block(w, block, sums);
        for (int64_t c = 0; c < n; c++)
            total[c] += sums[c];
    }
}

static void norm_backward(dr_device *dev, const dr_norm_args *a)
{
    const dr_tensor *t[] = {&a->x, &a->gate, &a->dy, &a->dx, &a->dgate};
    walk w = walk_of(dev, norm_grad_work, a, true, 5, t);
    if (a->dweight.data == NULL) {
        walk_run(dev, &w);
        return;
    }
    double partial[PARTIAL];
    w.rows = dr_min(w.rows, FLUSH);
    w.blocks[2] = dr_ceil_div(w.shape[2], w.rows);
    w.all = w.blocks[0] * w.blocks[1] * w.blocks[2] * w.blocks[3];
    w.partial = partial;
    for (w.col0 = 0; w.col0 < w.shape[3]; w.col0 += ROUND) {
        w.col1 = dr_min(w.shape[3], w.col0 + ROUND);
        int64_t n = w.col1 - w.col0, most = dr_min(32, PARTIAL / n);
        w.per_task = dr_max(1, dr_ceil_div(w.all, most));
        int64_t tasks = dr_ceil_div(w.all, w.per_task);
        dr_pool_run(&dev->pool, tasks, norm_grad_task, &w);
        for (int64_t c = 0; c < n; c++) {
            double sum = 0;
            for (int64_t task = 0; task < tasks; task++)
                sum += partial[task * n + c];
            dr_put(dr_at(&a->dweight, w.col0 + c, 0, 0, 0), a->dweight.dtype, 0, sum);
        }
        w.again = true;
    }
}

dr_status dr_cpu_norm(dr_device *dev, int dir, const dr_norm_args *a)
{
    if (dir < 0) {
        norm_backward(dev, a);
        return DR_OK;
    }
    const dr_tensor *t[] = {&a->x, &a->gate, &a->y};
    walk w = walk_of(dev, norm_work, a, true, 3, t);
    walk_run(dev, &w);
    return DR_OK;
}

/* ---- gate -------------------------------------------------------------------------- */

/* Rows are tokens. One decay per head: the columns are the heads; one per channel: the columns
 * are the channels, a head at a time. */
typedef struct gate_call {
    const dr_kern *kern;
    const dr_gate_args *a;
    int64_t B, T, groups, cols; /* groups of columns: 1 or HV */
    bool per_channel, lower;
    int64_t rows;               /* tokens of a forward task */
    int64_t block;              /* columns of an adjoint task */
} gate_call;

static dr_cpu_view gate_view(const gate_call *c, const dr_tensor *t, int64_t b, int64_t group)
{
    return dr_cpu_view_of(t, 1, c->per_channel ? 3 : 2, b, 0, group);
}

/* exp(a_log) and dt_bias of n columns from j on. */
static void gate_params(const gate_call *c, int64_t group, int64_t j, int64_t n, float *ea,
                        float *bias)
{
    const dr_tensor *log = &c->a->a_log, *dt = &c->a->dt_bias;
    for (int64_t i = 0; i < n; i++) {
        int64_t head = c->per_channel ? group : j + i, channel = c->per_channel ? j + i : 0;
        if (log->data == NULL)
            ea[i] = 1;
        else if (i > 0 && c->per_channel)
            ea[i] = ea[0];
        else
            ea[i] = (float)exp(dr_get(dr_at(log, head, 0, 0, 0), log->dtype, 0));
        bias[i] = dt->data ? (float)dr_get(dr_at(dt, head, channel, 0, 0), dt->dtype, 0) : 0;
    }
}

static void gate_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const gate_call *c = arg;
    int64_t blocks = dr_ceil_div(c->T, c->rows), b = task / blocks, t0 = task % blocks * c->rows;
    int64_t tokens = dr_min(c->rows, c->T - t0), step = tile_rows(tokens, c->cols);
    _Alignas(DR_ALIGN) float tile[2][TILE], ea[COLS], bias[COLS];
    for (int64_t group = 0; group < c->groups; group++)
        for (int64_t j = 0; j < c->cols; j += COLS) {
            int64_t n = dr_min(COLS, c->cols - j), ld = dr_round_up(n, 16);
            gate_params(c, group, j, n, ea, bias);
            for (int64_t i = 0; i < tokens; i += step) {
                int64_t m = dr_min(step, tokens - i);
                dr_cpu_view from = dr_cpu_view_at(gate_view(c, &c->a->x, b, group), t0 + i, j);
                dr_cpu_view to = dr_cpu_view_at(gate_view(c, &c->a->g, b, group), t0 + i, j);
                dr_cpu_tile x = dr_cpu_tile_in(c->kern, &from, m, n, tile[0], ld);
                dr_cpu_tile g = dr_cpu_tile_out(&to, tile[1], ld);
                for (int64_t r = 0; r < m; r++)
                    c->kern->raw_gate((int)n, c->lower, (float)c->a->lower_bound, ea, bias,
                                      x.at + r * x.ld, g.at + r * g.ld);
                dr_cpu_tile_done(c->kern, g, m, n, &to);
            }
        }
}

typedef struct gate_sums {
    double a[COLS], bias[COLS];
    float run_a[COLS], run_bias[COLS];
} gate_sums;

static void gate_flush(gate_sums *s, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        s->a[i] += s->run_a[i];
        s->bias[i] += s->run_bias[i];
        s->run_a[i] = s->run_bias[i] = 0;
    }
}

/* All tokens on n columns. */
static void gate_grad_columns(const gate_call *c, int64_t group, int64_t j, int64_t n, gate_sums *s)
{
    _Alignas(DR_ALIGN) float tile[3][TILE], ea[COLS], bias[COLS];
    const int64_t ld = dr_round_up(n, 16), step = dr_min(FLUSH, TILE / ld);
    int64_t summed = 0;
    gate_params(c, group, j, n, ea, bias);
    for (int64_t b = 0; b < c->B; b++)
        for (int64_t i = 0; i < c->T; i += step) {
            int64_t m = dr_min(step, c->T - i);
            dr_cpu_view x = dr_cpu_view_at(gate_view(c, &c->a->x, b, group), i, j);
            dr_cpu_view dg = dr_cpu_view_at(gate_view(c, &c->a->dg, b, group), i, j);
            dr_cpu_view dx = dr_cpu_view_at(gate_view(c, &c->a->dx, b, group), i, j);
            dr_cpu_tile xt = dr_cpu_tile_in(c->kern, &x, m, n, tile[0], ld);
            dr_cpu_tile dgt = dr_cpu_tile_in(c->kern, &dg, m, n, tile[1], ld);
            dr_cpu_tile dxt = dr_cpu_tile_out(&dx, tile[2], ld);
            for (int64_t r = 0; r < m; r++)
                c->kern->raw_gate_grad((int)n, c->lower, (float)c->a->lower_bound, ea, bias,
                                       xt.at + r * xt.ld, dgt.at + r * dgt.ld, dxt.at + r * dxt.ld,
                                       s->run_a, s->run_bias);
            dr_cpu_tile_done(c->kern, dxt, m, n, &dx);
            summed += m;
            if (summed >= FLUSH) {
                gate_flush(s, n);
                summed = 0;
            }
        }
    gate_flush(s, n);
}

static void gate_grad_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const gate_call *c = arg;
    const dr_tensor *da = &c->a->da_log, *db = &c->a->ddt_bias;
    int64_t group = c->per_channel ? task : 0, begin = c->per_channel ? 0 : task * c->block;
    int64_t end = dr_min(c->cols, begin + c->block);
    double head = 0;
    for (int64_t j = begin; j < end; j += COLS) {
        int64_t n = dr_min(COLS, end - j);
        gate_sums s = {0};
        gate_grad_columns(c, group, j, n, &s);
        for (int64_t i = 0; i < n; i++) {
            head = c->per_channel ? head + s.a[i] : s.a[i];
            if (da->data != NULL && !c->per_channel)
                dr_put(dr_at(da, j + i, 0, 0, 0), da->dtype, 0, head);
            if (db->data != NULL)
                dr_put(c->per_channel ? dr_at(db, group, j + i, 0, 0) : dr_at(db, j + i, 0, 0, 0),
                       db->dtype, 0, s.bias[i]);
        }
    }
    if (da->data != NULL && c->per_channel)
        dr_put(dr_at(da, group, 0, 0, 0), da->dtype, 0, head);
}

dr_status dr_cpu_gate(dr_device *dev, int dir, const dr_gate_args *a)
{
    int64_t HV = a->x.shape[2], K = a->x.shape[3];
    gate_call c = {.kern = dev->kern, .a = a, .B = a->x.shape[0], .T = a->x.shape[1],
                   .per_channel = K > 1, .lower = a->gate == DR_GATE_LOWER_BOUND};
    c.groups = c.per_channel ? HV : 1;
    c.cols = c.per_channel ? K : HV;
    if (dir > 0) {
        c.rows = dr_max(16, dr_min(256, WORK / dr_max(HV * K, 1)));
        dr_pool_run(&dev->pool, c.B * dr_ceil_div(c.T, c.rows), gate_task, &c);
    } else {
        c.block = c.per_channel ? K : 16;
        dr_pool_run(&dev->pool, c.groups * dr_ceil_div(c.cols, c.block), gate_grad_task, &c);
    }
    return DR_OK;
}
