/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_ulysses.h - what the files of Ulysses share: who holds which tokens and heads, the parcels
 * that carry them, and the communicator of a column.
 *
 * Rank r = row * U + u. The U ranks of a row (its members) exchange tokens for heads: afterwards
 * member u holds the tokens of the whole row in token order, with key heads [u H/U, (u+1) H/U) and
 * the value heads that read them. The R = N / U ranks of equal u form a column; there the heads
 * are the same and the stream is cut into R rows.
 *
 * NOTE [Parcels are fp32]: whatever the element types of the tensors, a parcel holds floats. Narrow
 * types widen exactly and are rounded once, where they are stored, as on one rank; and the size of
 * a message is known to the plan.
 */
#ifndef DR_CP_ULYSSES_H
#define DR_CP_ULYSSES_H

#include "cp/cp_plan.h"

enum { DR_PARCEL_FIELDS = 5 }; /* q k v g beta, or their gradients */

typedef struct dr_field {
    int32_t heads, width; /* of one member; width 0: not there */
    bool value_heads;
} dr_field;

/* The two shapes of a parcel: the inputs with the states that sequences start from, the output
 * with the states that they end in. Gradients have the shape of what they belong to. */
typedef enum dr_parcel_kind { DR_PARCEL_INPUTS, DR_PARCEL_OUTPUTS, DR_PARCEL_KINDS } dr_parcel_kind;

/* Tokens of a row that lie together in a member's span. */
typedef struct dr_run {
    int32_t member;
    int64_t at_member, at_row, tokens;
} dr_run;

/* A state of a member's piece, and its place in the states of the row. */
typedef struct dr_state_place {
    int32_t member;
    int64_t piece, at_row;
} dr_state_place;

typedef struct dr_parcel {
    dr_field field[DR_PARCEL_FIELDS];
    int64_t n_states;
    dr_state_place *states; /* by member, then by piece */
    int64_t *at;            /* [U + 1]: the parcels of all members end to end, in floats */
} dr_parcel;

typedef struct dr_row {
    int32_t U, u, first;     /* first: the rank of member 0 */
    int32_t heads, key_heads, K, V; /* of a member: value heads, key heads */
    int32_t all_key_heads;
    bool tiled;
    int64_t tokens, n_runs;
    dr_run *runs;            /* in token order */
    int64_t *member_tokens;  /* [U] */
    dr_parcel parcel[DR_PARCEL_KINDS];
} dr_row;

/* Floats of the parcel that carries the tokens of a member. */
DR_INLINE int64_t dr_parcel_floats(const dr_row *row, dr_parcel_kind kind, int32_t member)
{
    return row->parcel[kind].at[member + 1] - row->parcel[kind].at[member];
}

/* What a parcel is filled from on the rank's side, and on the row's side. */
typedef struct dr_spans {
    dr_tensor field[DR_PARCEL_FIELDS], state; /* normalised; absent: zero, or not wanted */
} dr_spans;

typedef struct dr_row_data {
    float *field[DR_PARCEL_FIELDS], *state; /* [tokens, heads, width], [N, heads, K, V] */
} dr_row_data;

/* cp_ulysses_row.c */
dr_status dr_row_build(dr_row *row, const dr_cp_plan *plan, const dr_problem *problem,
                       const dr_partition *partition);
void dr_row_clear(dr_row *row);
int32_t dr_row_value_head(const dr_row *row, int32_t member, int32_t head); /* of the whole problem */
/* Packs a parcel from, or unpacks it to, this rank's span: its tokens with the heads of a member. */
void dr_parcel_span(const dr_row *row, dr_parcel_kind kind, int32_t member, const dr_spans *span,
                    float *parcel, bool pack);
/* The same with the row: a member's tokens with this rank's heads. */
void dr_parcel_row(const dr_row *row, dr_parcel_kind kind, int32_t member, const dr_row_data *data,
                   float *parcel, bool pack);

/* cp_ulysses_column.c: ranks first, first + step, ... of a communicator, as one. It shares the
 * fate of whole and leaves it open when closed. */
dr_status dr_column_create(dr_comm *whole, int32_t first, int32_t step, int32_t size, dr_comm **out);

#endif
