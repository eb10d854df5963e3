/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_check.h - a plan against a count that walks every token: slow, obvious, and sharing
 * no arithmetic with plan.c. Used by test_plan.c and fuzz_plan.c; includes no test framework.
 */
#ifndef DR_PLAN_CHECK_H
#define DR_PLAN_CHECK_H

#include "plan/plan.h"

/* NULL if the cut plan is what the problem says, else the rule it breaks. */
static inline const char *plan_disagrees(const dr_plan *plan, const dr_problem *p)
{
    int64_t N = p->offsets ? p->sequences : p->batch, chunk = 0, longest = 0;
    if (plan->n_pieces != N)
        return "number of pieces";
    for (int64_t n = 0; n < N; n++) {
        const dr_piece *x = &plan->pieces[n];
        int64_t begin = p->offsets ? p->offsets[n] : 0;
        int64_t end = p->offsets ? p->offsets[n + 1] : p->tokens;
        int64_t chunks = 0, filled = p->chunk; /* tokens in the chunk that is open */
        for (int64_t t = begin; t < end; t++) {
            if (filled == p->chunk) {
                chunks++;
                filled = 0;
            }
            filled++;
        }
        if (x->batch != (p->offsets ? 0 : n))
            return "batch row of a piece";
        if (x->begin != begin || x->end != end)
            return "tokens of a piece";
        if (x->chunk0 != chunk || x->chunks != chunks)
            return "chunks of a piece";
        chunk += chunks;
        longest = chunks > longest ? chunks : longest;
    }
    if (plan->n_chunks != chunk)
        return "number of chunks";
    if (plan->longest != longest)
        return "longest piece";
    if (plan->tail != (p->offsets ? p->offsets[N] : p->tokens))
        return "first token that nobody owns";
    if (p->offsets != NULL && plan->problem.offsets == p->offsets)
        return "a copy of the offsets";
    return NULL;
}

#endif
