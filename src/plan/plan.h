/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - a problem checked, completed and cut into pieces and chunks: integers in,
 * integers out, no device, no thread. Everything above reads it, nothing writes it
 * after dr_plan_create.
 *
 * Letters as in deltarule.h. A piece is one sequence of the span; chunks are counted
 * from each piece's first token, the last may be short, and none crosses a piece.
 */
#ifndef DR_PLAN_H
#define DR_PLAN_H

#include "base/base.h"

#define DR_MAX_DIM 256 /* largest K and V */

typedef struct dr_piece {
    int64_t batch;      /* row of the tensors; 0 when packed */
    int64_t begin, end; /* tokens [begin, end) of that row */
    int64_t chunk0;     /* global index of its first chunk */
    int64_t chunks;     /* 0 for an empty piece */
} dr_piece;

struct dr_plan {
    const dr_context *ctx;
    dr_problem problem; /* every default filled in: value_heads, scale, eps, beta_scale, chunk;
                           offsets points to the plan's own copy */
    dr_piece *pieces;
    int64_t n_pieces;   /* N */
    int64_t n_chunks;   /* NT */
    int64_t longest;    /* most chunks in a piece */
    int64_t tail;       /* first token of batch row 0 that no piece owns (= tokens if none) */
    size_t saved, forward_scratch, backward_scratch, staged_scratch;
};

/* What sets the variants apart, one row each; see recipe (d) in CONTRIBUTING.md. */
typedef struct dr_variant_row {
    dr_variant variant;
    const char *name;
    bool gate_per_channel; /* g has a trailing axis K */
} dr_variant_row;
const dr_variant_row *dr_variant_find(dr_variant variant); /* NULL if unknown */

/* Checks every field of problem and writes it completed to *out (offsets still the
 * caller's, chunk as given). */
dr_status dr_problem_complete(const dr_problem *problem, dr_problem *out);

/* Cuts a completed problem, chunk set, into plan->pieces. Owns pieces and offsets. */
dr_status dr_plan_cut(dr_plan *plan, const dr_problem *completed);
void dr_plan_clear(dr_plan *plan);

/* Checks packed offsets: used by every call that takes them. what names the argument. */
dr_status dr_offsets_check(const char *what, const int64_t *offsets, int64_t sequences,
                           int64_t batch, int64_t tokens);

/* Key head that value head j reads. */
DR_INLINE int32_t dr_key_head(const dr_problem *p, int32_t j)
{
    return p->head_map == DR_HEADS_TILED ? j % p->heads : j / (p->value_heads / p->heads);
}

/* i-th value head (0 <= i < HV/H) of key head h. */
DR_INLINE int32_t dr_value_head(const dr_problem *p, int32_t h, int32_t i)
{
    return p->head_map == DR_HEADS_TILED ? i * p->heads + h : h * (p->value_heads / p->heads) + i;
}

/* Width of g per token and value head: 1 or K. */
DR_INLINE int32_t dr_gate_width(const dr_problem *p)
{
    return p->variant == DR_KDA ? p->key_dim : 1;
}

#endif
