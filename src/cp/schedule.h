/* SPDX-License-Identifier: Apache-2.0 */
/*
 * schedule.h - what a context-parallel protocol is: a program over states and maps, written
 * once from the view of all ranks. Every rank runs the same generator; each keeps only the
 * instructions that concern it. A transfer between two ranks appears in both programs at the
 * same place in the common order, so programs cannot deadlock, receives can be posted before
 * anything else happens, and waits come where a value is first read.
 *
 * The generators see one chain at a time, in the direction of travel: node 0 lets a state out
 * that nothing before it can change (its `source`), inner nodes have a map, the last node
 * only wants its entry. The adjoint is the same chain run from the other end, with [C; R] in
 * place of [B; A]: no generator needs to know, except the transposed one of doubling.
 *
 * Values are written once (no register is reused), so the order of waits is free.
 */
#ifndef DR_SCHEDULE_H
#define DR_SCHEDULE_H

#include "base/base.h"

#include <deltarule/cp.h>

typedef enum dr_value_kind {
    DR_VALUE_STATE = 1, /* [HV,V,K] */
    DR_VALUE_MAP = 2    /* [HV,V+K,K] */
} dr_value_kind;

typedef enum dr_op {
    DR_OP_SOURCE,    /* dst = the state that leaves slot a, whatever came before it */
    DR_OP_MAP,       /* dst = the map of slot a */
    DR_OP_RECEIVE,   /* dst from rank peer */
    DR_OP_SEND,      /* a to rank peer */
    DR_OP_APPLY,     /* dst = state a through map b */
    DR_OP_COMPOSE,   /* dst = map a, then map b */
    DR_OP_ADD,       /* dst = a + b, states */
    DR_OP_TRANSPOSE, /* kept register dst = [0; A^T] of map a, for the adjoint */
    DR_OP_PULL,      /* dst = state a through kept register b (no bias) */
    DR_OP_ENTRY      /* state a is the entry of slot b */
} dr_op;

typedef struct dr_step_op {
    dr_op op;
    int32_t dst, a, b, peer;
} dr_step_op;

typedef struct dr_program {
    int32_t me;
    int64_t n_ops, room_ops;
    dr_step_op *ops;
    int32_t n_values, room_values;
    uint8_t *kinds;          /* of every register */
    int32_t n_kept;          /* kept registers (maps in saved), shared by both directions */
    dr_status status;        /* first failure while generating */
} dr_program;

/* A value as all ranks see it. */
typedef struct dr_value {
    dr_value_kind kind;
    int32_t rank; /* where it is */
    int32_t reg;  /* there; -1 on other ranks */
} dr_value;

typedef struct dr_node {
    int32_t rank;
    int32_t slot;
} dr_node;

typedef struct dr_chain {
    int32_t n;             /* nodes, at least 2 */
    const dr_node *nodes;  /* in the direction of travel */
} dr_chain;

/* Writes a chain's part of the program. Every rank calls it with the same chains in the same
 * order; the adjoint gets the chain from its other end, a transposed generator in token order. */
typedef void dr_generate(dr_program *p, const dr_chain *chain, int32_t width);

/* Building blocks of generators; every rank calls all of them in the same order. */
dr_value dr_program_source(dr_program *p, dr_node node);
dr_value dr_program_map(dr_program *p, dr_node node);
dr_value dr_program_send(dr_program *p, dr_value value, int32_t to); /* itself if already there */
dr_value dr_program_apply(dr_program *p, dr_value state, dr_value map);
dr_value dr_program_compose(dr_program *p, dr_value first, dr_value second);
dr_value dr_program_add(dr_program *p, dr_value a, dr_value b);
void dr_program_entry(dr_program *p, dr_value state, dr_node node);
/* A kept register number is the same on all ranks that call in the same order. */
void dr_program_keep_transposed(dr_program *p, dr_value map, int32_t kept);
dr_value dr_program_pull(dr_program *p, dr_value state, int32_t kept);

void dr_program_clear(dr_program *p);

#endif
