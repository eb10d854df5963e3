/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_map.c - arithmetic of maps: rows times K x K plus a bias on the first V rows. One product
 * serves applying a map to states, composing two maps, and moving a cotangent.
 */
#include "cpu/cpu.h"

enum { ROWS = 32 }; /* of a task; the same at any thread count */

typedef struct product {
    const dr_kern *kern;
    int32_t K, V, rows;
    int64_t blocks; /* tasks of one map */
    const float *in, *map;
    float *out;
} product;

static void multiply(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const product *x = arg;
    const int64_t n = task / x->blocks, r0 = task % x->blocks * ROWS;
    const int64_t r1 = dr_min(r0 + ROWS, x->rows), K = x->K, biased = dr_max(dr_min(r1, x->V), r0);
    const float *B = x->map + n * (x->V + K) * K, *A = B + x->V * K;
    float *out = x->out + n * x->rows * K;
    memcpy(out + r0 * K, B + r0 * K, (size_t)((biased - r0) * K) * sizeof *out);
    if (x->in == NULL)
        return;
    const float *in = x->in + n * x->rows * K;
    x->kern->gemm((int)(biased - r0), (int)K, (int)K, in + r0 * K, K, A, K, out + r0 * K, K, true);
    x->kern->gemm((int)(r1 - biased), (int)K, (int)K, in + biased * K, K, A, K, out + biased * K, K,
                  false);
}

dr_status dr_cpu_apply(const dr_device *dev, int64_t n, int32_t K, int32_t V, int32_t rows,
                       const float *in, const float *map, float *out)
{
    product x = {dev->kern, K, V, rows, dr_ceil_div(rows, ROWS), in, map, out};
    dr_pool_run(&dev->pool, n * x.blocks, multiply, &x);
    return DR_OK;
}
