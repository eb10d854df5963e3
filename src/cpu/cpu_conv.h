/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_conv.h - the convolution of tensors whose tokens are contiguous (channel-major), one
 * channel's line of tokens at a time: shifted lines instead of rows, nothing is transposed.
 * cpu_conv.c cuts the work and has the states; cpu_conv_lines.c is this part of it.
 */
#ifndef DR_CPU_CONV_H
#define DR_CPU_CONV_H

#include "cpu/cpu_rows.h"

enum {
    DR_CPU_LINE = 1024,   /* tokens of a line */
    DR_CPU_LINE_HALO = 256,
    DR_CPU_LINE_TAPS = 32,
    DR_CPU_LINE_ROOM = 5 * DR_CPU_LINE + 6 * DR_CPU_LINE_HALO /* floats of working memory */
};

/* One sequence: its tokens in the tensors, its state, and memory to work in. */
typedef struct dr_cpu_lines {
    const dr_kern *kern;
    const dr_conv_args *a;
    int64_t b, begin, len; /* batch row, first token, tokens */
    int64_t n, slot;       /* the sequence, and its initial state; slot -1: zero */
    float *room;
} dr_cpu_lines;

/* Whether every tensor of the call has its tokens side by side, and enough of them. */
bool dr_cpu_lines_fit(const dr_conv_args *a, int dir);

/* y of channel d at tokens [from, to). */
void dr_cpu_lines_forward(const dr_cpu_lines *l, int64_t d, int64_t from, int64_t to);

/* dx of channel d, where wanted; and if totals is not NULL, its sums for dweight and dbias are
 * added to totals[j * ld], j < W, and totals[W * ld]. */
void dr_cpu_lines_adjoint(const dr_cpu_lines *l, int64_t d, double *totals, int64_t ld);

#endif
