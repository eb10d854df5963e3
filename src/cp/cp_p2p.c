/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_p2p.c - "p2p": the wavefront. Each slot applies its map to what arrives and hands the
 * result on. n-1 messages of one state for a chain of n slots, nothing across a document
 * boundary; the path of n-1 small products is the only thing in order.
 */
#include "cp/cp_plan.h"

static void generate(dr_program *p, const dr_chain *c, int32_t width)
{
    (void)width;
    dr_value state = dr_program_source(p, c->nodes[0]);
    for (int32_t i = 1; i < c->n; i++) {
        state = dr_program_send(p, state, c->nodes[i].rank);
        dr_program_entry(p, state, c->nodes[i]);
        if (i + 1 < c->n)
            state = dr_program_apply(p, state, dr_program_map(p, c->nodes[i]));
    }
}

const dr_cp_protocol dr_cp_p2p = {
    "p2p", "states handed on in token order, by maps", DR_CP_NO_WIDTH, false,
    &dr_cp_programs, generate, NULL,
};
