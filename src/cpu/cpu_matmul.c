/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_matmul.c - the projections of layers through CBLAS.
 *
 * NOTE [BLAS on one thread]: the product is cut into tiles of out by a rule that sees the
 * shape alone, the tiles are the tasks of the context's own pool, and each tile is one
 * sgemm call on one thread. So the context's thread count (or the host program's pool) is
 * respected, any number of callers may be inside at once, and the bits do not depend on
 * the number of threads. BLAS's own threads could give none of the three: their number is
 * a process-wide setting that concurrent callers would change under one another. An OpenMP
 * BLAS stays on the calling thread inside a parallel region, and elsewhere once the calling
 * thread's own OpenMP setting says 1, which is set around the call and put back. A BLAS
 * with threads of its own (OpenBLAS built on pthreads) does not see that setting: limit it
 * with its environment variable, or use the OpenMP or the serial build.
 *
 * Letters: out [m,n] = alpha a [m,k] b [k,n].
 */
#include "cpu/cpu.h"

#include <cblas.h>
#include <limits.h>
#include <omp.h>

/* A matrix as sgemm takes it: unit stride along its rows, or along its columns and then
 * the memory holds the transposed matrix. */
typedef struct operand {
    float *data;
    int64_t row, col; /* strides */
    CBLAS_TRANSPOSE order;
    int ld;
} operand;

static dr_tensor transposed(const dr_tensor *t)
{
    dr_tensor x = *t;
    x.shape[0] = t->shape[1], x.shape[1] = t->shape[0];
    x.stride[0] = t->stride[1], x.stride[1] = t->stride[0];
    return x;
}

/* Rows contiguous and apart; the stride of an extent of 1 is nobody's concern. */
static bool has_rows(const dr_tensor *t)
{
    return (t->shape[1] <= 1 || t->stride[1] == 1) &&
           (t->shape[0] <= 1 || t->stride[0] >= dr_max(t->shape[1], 1));
}

static dr_status operand_of(const char *name, const dr_tensor *t, operand *out)
{
    if (t->dtype != DR_F32)
        return dr_fail(DR_ERR_SUPPORT, "%s: the cpu backend multiplies f32 matrices, got %s", name,
                       dr_dtype_name(t->dtype));
    const dr_tensor flipped = transposed(t);
    bool plain = has_rows(t);
    if (!plain && !has_rows(&flipped))
        return dr_fail(DR_ERR_SUPPORT,
                       "%s: the cpu backend needs stride 1 on one axis and at least its extent on "
                       "the other, got strides %lld, %lld for [%lld,%lld]", name,
                       (long long)t->stride[0], (long long)t->stride[1], (long long)t->shape[0],
                       (long long)t->shape[1]);
    const dr_tensor *rows = plain ? t : &flipped;
    int64_t ld = rows->shape[0] > 1 ? rows->stride[0] : dr_max(rows->shape[1], 1);
    if (ld > INT_MAX)
        return dr_fail(DR_ERR_SUPPORT, "%s: the cpu backend takes strides up to %d, got %lld", name,
                       INT_MAX, (long long)ld);
    *out = (operand){t->data, t->stride[0], t->stride[1], plain ? CblasNoTrans : CblasTrans,
                     (int)ld};
    return DR_OK;
}

typedef struct product {
    operand a, b, out;
    int64_t m, n, k;
    int64_t tile_m, tile_n, across; /* across: tiles along n */
    float alpha, beta;
} product;

/* Up to this many rows of out are vectors times b: sgemm packs b, which costs more than it saves
 * (measured: 8 times slower for one row, even at 8 rows). */
enum { FEW_ROWS = 4 };

static void few_rows(const product *p, int64_t m, int64_t n, int64_t i, int64_t j)
{
    const bool turned = p->b.order == CblasTrans; /* the memory of b is [n,k] */
    const float *b = p->b.data + j * p->b.col;
    const int step = p->k > 1 ? (int)p->a.col : 1;
    for (int64_t r = i; r < i + m; r++) {
        float *y = p->out.data + r * p->out.row + j * p->out.col;
        if (p->beta == 0) /* some BLAS multiply what was there by 0, and keep its NaN */
            memset(y, 0, (size_t)n * sizeof *y);
        cblas_sgemv(CblasRowMajor, turned ? CblasNoTrans : CblasTrans, (int)(turned ? n : p->k),
                    (int)(turned ? p->k : n), p->alpha, b, p->b.ld, p->a.data + r * p->a.row, step,
                    1, y, 1);
    }
}

static void one_tile(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const product *p = arg;
    int64_t i = task / p->across * p->tile_m, j = task % p->across * p->tile_n;
    int64_t m = dr_min(p->tile_m, p->m - i), n = dr_min(p->tile_n, p->n - j);
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    if (p->m <= FEW_ROWS)
        few_rows(p, m, n, i, j);
    else
        cblas_sgemm(CblasRowMajor, p->a.order, p->b.order, (int)m, (int)n, (int)p->k, p->alpha,
                    p->a.data + i * p->a.row, p->a.ld, p->b.data + j * p->b.col, p->b.ld, p->beta,
                    p->out.data + i * p->out.row + j * p->out.col, p->out.ld);
    omp_set_num_threads(threads);
}

/* Large tiles keep sgemm's packing cheap, small ones fill many threads: halve the longer
 * side until there are 64 tiles or a tile has little left to do. */
static void choose_tiles(product *p)
{
    const int64_t enough = 64, little = 1 << 21;
    p->tile_m = dr_min(p->m, 512);
    p->tile_n = dr_min(p->n, 1024);
    while (dr_ceil_div(p->m, p->tile_m) * dr_ceil_div(p->n, p->tile_n) < enough &&
           p->tile_m * p->tile_n >= 2 * dr_ceil_div(little, p->k)) {
        int64_t *longer = p->tile_n >= p->tile_m ? &p->tile_n : &p->tile_m;
        if (*longer < 32)
            break;
        *longer = dr_round_up(*longer / 2, 16);
    }
    p->across = dr_ceil_div(p->n, p->tile_n);
}

dr_status dr_cpu_matmul(dr_device *dev, const dr_matmul_args *a)
{
    /* sgemm writes rows: a column-major out is the transposed product. */
    dr_tensor out = transposed(&a->out), left = transposed(&a->b), right = transposed(&a->a);
    bool flip = !has_rows(&a->out) && has_rows(&out);
    if (!flip)
        out = a->out, left = a->a, right = a->b;
    product p = {.m = out.shape[0], .n = out.shape[1], .k = left.shape[1],
                 .alpha = (float)a->alpha, .beta = a->accumulate ? 1 : 0};
    DR_TRY(operand_of("out", &out, &p.out));
    if (p.k == 0) { /* an empty sum; the operands may have no memory */
        for (int64_t i = 0; i < p.m && !a->accumulate; i++)
            for (int64_t j = 0; j < p.n; j++)
                p.out.data[i * p.out.row + j * p.out.col] = 0;
        return DR_OK;
    }
    DR_TRY(operand_of(flip ? "b" : "a", &left, &p.a));
    DR_TRY(operand_of(flip ? "a" : "b", &right, &p.b));
    choose_tiles(&p);
    dr_pool_run(&dev->pool, p.across * dr_ceil_div(p.m, p.tile_m), one_tile, &p);
    return DR_OK;
}
