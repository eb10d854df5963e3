/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roof.h - what this machine can do at best, measured: arithmetic by the matrix product of the
 * linked BLAS, memory by streams a = b + c s and a = a s over arrays larger than caches.
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
double
dr_roof_product(const dr_roof *roof);       /* GFLOP/s of 1024^3 products, f32, the better of two */
double dr_roof_stream(const dr_roof *roof); /* GB/s as the program counts, the better stream */

#endif
