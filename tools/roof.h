/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roof.h - what this machine can do at best, measured: arithmetic by the matrix product of the
 * linked BLAS, memory by a stream a = b + c s over arrays larger than caches.
 */
#ifndef DR_TOOL_ROOF_H
#define DR_TOOL_ROOF_H

#include <stdbool.h>

typedef struct dr_roof {
    int threads;
    float *a, *b, *c;
} dr_roof;

/* false: no memory. Close it in either case. */
bool dr_roof_open(dr_roof *roof, int threads);
void dr_roof_close(dr_roof *roof);
double dr_roof_product(const dr_roof *roof); /* GFLOP/s of one 2048^3 product, f32 */
double dr_roof_stream(const dr_roof *roof);  /* GB/s, three arrays counted */

#endif
