/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_doubling.c - "doubling": an exclusive scan in about log2(n) rounds, for any n. In round d a
 * slot receives the summary of the d slots that end d before it and puts it in front of its own; a
 * summary that reaches back to the start of the chain is a state, not a map, and takes no further
 * part. At the end everything moves one slot on.
 *
 * The forward keeps, for every round in which a slot received, the transpose of its own linear part.
 * The adjoint is the transpose of the whole exchange: rounds in reverse, only cotangents travel, and
 * what a round added is sent back through the kept transpose, taken before this round's sum.
 */
#include "cp/cp_plan.h"

/* Rounds d = 1, 2, 4, ... below n. Register kept for slot i in round number k; chains are generated in
 * the same order in both directions, so p->n_kept at the start of a chain names its first. */
enum { MAX_ROUNDS = 32 };

static int32_t rounds_of(int32_t n)
{
    int32_t rounds = 0;
    while (rounds < MAX_ROUNDS - 1 && (int64_t)1 << rounds < n - 1)
        rounds++;
    return rounds;
}

static void generate(dr_program *p, const dr_chain *c, int32_t width)
{
    (void)width;
    int32_t n = c->n - 1; /* the last slot only wants its entry: it takes no part in the rounds */
    int32_t rounds = rounds_of(c->n), kept = p->n_kept;
    dr_value *now = dr_alloc((size_t)c->n * sizeof *now), *was = dr_alloc((size_t)c->n * sizeof *was);
    if (now == NULL || was == NULL)
        p->status = dr_fail(DR_ERR_MEMORY, "doubling: no memory for %d slots", c->n);
    for (int32_t i = 0; p->status == DR_OK && i < n; i++)
        now[i] = i == 0 ? dr_program_source(p, c->nodes[0]) : dr_program_map(p, c->nodes[i]);
    for (int32_t k = 0; p->status == DR_OK && k < rounds; k++) {
        int32_t d = (int32_t)1 << k;
        memcpy(was, now, (size_t)n * sizeof *now);
        for (int32_t i = d; i < n; i++) {
            dr_value before = dr_program_send(p, was[i - d], c->nodes[i].rank);
            if (c->nodes[i].rank == p->me)
                dr_program_keep_transposed(p, was[i], kept++);
            now[i] = before.kind == DR_VALUE_STATE ? dr_program_apply(p, before, was[i])
                                                   : dr_program_compose(p, before, was[i]);
        }
    }
    for (int32_t i = 0; p->status == DR_OK && i < n; i++)
        dr_program_entry(p, dr_program_send(p, now[i], c->nodes[i + 1].rank), c->nodes[i + 1]);
    dr_free(now);
    dr_free(was);
}

/* chain in token order; SOURCE of the last node and MAP of inner nodes are those of the adjoint: the
 * cotangent that leaves a slot towards its past, and [C; R], of which only C is wanted. */
static void generate_adjoint(dr_program *p, const dr_chain *c, int32_t width)
{
    (void)width;
    int32_t n = c->n - 1, rounds = rounds_of(c->n), kept = 0;
    int32_t *first = dr_alloc((size_t)c->n * MAX_ROUNDS * sizeof *first);
    dr_value *a = dr_alloc((size_t)c->n * sizeof *a), *b = dr_alloc((size_t)c->n * sizeof *b);
    if (first == NULL || a == NULL || b == NULL)
        p->status = dr_fail(DR_ERR_MEMORY, "doubling: no memory for %d slots", c->n);
    for (int32_t k = 0; p->status == DR_OK && k < rounds; k++) /* number them as the forward did */
        for (int32_t i = (int32_t)1 << k; i < n; i++)
            if (c->nodes[i].rank == p->me)
                first[i * MAX_ROUNDS + k] = p->n_kept + kept++;
    for (int32_t i = 0; p->status == DR_OK && i < n; i++) /* everything moves one slot back */
        a[i] = dr_program_send(p, dr_program_source(p, c->nodes[i + 1]), c->nodes[i].rank);
    for (int32_t k = rounds; p->status == DR_OK && k-- > 0;) {
        int32_t d = (int32_t)1 << k;
        memcpy(b, a, (size_t)n * sizeof *a);
        for (int32_t i = d; i < n; i++) {
            dr_value back = dr_program_pull(p, a[i], first[i * MAX_ROUNDS + k]);
            back = dr_program_send(p, back, c->nodes[i - d].rank);
            b[i - d] = dr_program_add(p, b[i - d], back);
        }
        memcpy(a, b, (size_t)n * sizeof *a);
    }
    for (int32_t i = 0; p->status == DR_OK && i < n; i++)
        dr_program_entry(p, a[i], c->nodes[i]);
    if (p->status == DR_OK)
        p->n_kept += kept;
    dr_free(first);
    dr_free(a);
    dr_free(b);
}

const dr_cp_protocol dr_cp_doubling = {
    "doubling", "maps combined in log2 rounds; the adjoint is the transposed exchange", DR_CP_NO_WIDTH, false,
    &dr_cp_programs, generate, generate_adjoint,
};
