/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roof.c - see roof.h. Both measures use the same memory.
 */
#include "roof.h"

#include "tool.h"

#include <cblas.h>
#include <omp.h>
#include <stdlib.h>

enum { PRODUCT = 1024, STREAM = 1 << 24 }; /* rows of a matrix; floats of an array */

bool dr_roof_open(dr_roof *r, int threads)
{
    const size_t bytes = STREAM * sizeof(float);
    _Static_assert(STREAM >= PRODUCT * PRODUCT, "the matrices live in the stream's memory");
    *r = (dr_roof){threads, malloc(bytes), malloc(bytes), malloc(bytes)};
    if (r->a == NULL || r->b == NULL || r->c == NULL)
        return false;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < STREAM; i++) {
        r->a[i] = (float)(i % 7) - 3;
        r->b[i] = (float)(i % 5) - 2;
        r->c[i] = 0;
    }
    return true;
}

void dr_roof_close(dr_roof *r)
{
    free(r->a);
    free(r->b);
    free(r->c);
}

double dr_roof_product(const dr_roof *r)
{
#ifdef DR_HAVE_OPENBLAS
    openblas_set_num_threads(r->threads);
#endif
    double best = 0;
    for (int pass = 0; pass < 2; pass++) {
        double start = dr_tool_now();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, PRODUCT, PRODUCT, PRODUCT, 1, r->a,
                    PRODUCT, r->b, PRODUCT, 0, r->c, PRODUCT);
        double rate = 2e-9 * PRODUCT * PRODUCT * PRODUCT / (dr_tool_now() - start);
        best = rate > best ? rate : best;
    }
    return best;
}

double dr_roof_stream(const dr_roof *r)
{
    double best = 0;
    float *c = r->c;
    const float *a = r->a, *b = r->b;
    for (int pass = 0; pass < 4; pass++) {
        const bool in_place = pass % 2 == 1; /* what is written has been read: no third transfer */
        double start = dr_tool_now();
        if (in_place) {
#pragma omp parallel for simd num_threads(r->threads) schedule(static)
            for (int64_t i = 0; i < STREAM; i++)
                c[i] = 0.5f * c[i];
        } else {
#pragma omp parallel for simd num_threads(r->threads) schedule(static)
            for (int64_t i = 0; i < STREAM; i++)
                c[i] = a[i] + 0.5f * b[i];
        }
        double rate = (in_place ? 8e-9 : 12e-9) * STREAM / (dr_tool_now() - start);
        best = rate > best ? rate : best;
    }
    return best;
}
