/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp_grouped.c - "grouped:G" and "allgather", which is one group over the whole chain. Within a
 * group every slot receives the maps that precede it; the last slot of a group owns the
 * hand-over: it folds its whole group from the group's entry, sends the result to the next
 * owner, and owners pass their entry to their members.
 *
 * States are folded through maps from left to right, one after another, exactly as p2p does:
 * the three agree bit for bit.
 */
#include "cp/cp_plan.h"

typedef struct group {
    int32_t first, last; /* chain positions */
} group;

/* Entry of node `to`: from the group's entry through the maps of the members before it. Maps travel
 * from their slots; a rank that holds several slots receives each map once per slot. */
static dr_value fold(dr_program *p, const dr_chain *c, group g, int32_t to, dr_value state)
{
    for (int32_t i = g.first; i < to; i++)
        if (i > 0)
            state = dr_program_apply(p, state,
                                     dr_program_send(p, dr_program_map(p, c->nodes[i]), c->nodes[to].rank));
    return state;
}

static void generate_group(dr_program *p, const dr_chain *c, group g, dr_value *entry)
{
    const dr_node *nodes = c->nodes;
    int32_t owner = nodes[g.last].rank;
    /* what stands left of the first map of this group: the chain's source, or the group's entry */
    dr_value left = *entry;
    for (int32_t i = g.first > 0 ? g.first : 1; i < g.last; i++) {
        dr_value state = dr_program_send(p, left, nodes[i].rank);
        dr_program_entry(p, fold(p, c, g, i, state), nodes[i]);
    }
    dr_value state = dr_program_send(p, left, owner);
    state = fold(p, c, g, g.last, state);
    if (g.last > 0)
        dr_program_entry(p, state, nodes[g.last]);
    if (g.last + 1 == c->n)
        return;
    if (g.last > 0)
        state = dr_program_apply(p, state, dr_program_map(p, nodes[g.last]));
    int32_t next = g.last + (g.last - g.first + 1);
    *entry = dr_program_send(p, state, nodes[next < c->n ? next : c->n - 1].rank);
}

static void generate(dr_program *p, const dr_chain *c, int32_t width)
{
    dr_value entry = dr_program_source(p, c->nodes[0]);
    for (int32_t first = 0; first < c->n; first += width) {
        int32_t last = first + width - 1 < c->n ? first + width - 1 : c->n - 1;
        generate_group(p, c, (group){first, last}, &entry);
    }
}

static void generate_whole(dr_program *p, const dr_chain *c, int32_t width)
{
    (void)width;
    generate(p, c, c->n);
}

const dr_cp_protocol dr_cp_grouped = {
    "grouped", "maps gathered within groups of G slots, states handed on between groups", DR_CP_WIDTH, false,
    &dr_cp_programs, generate, NULL,
};

const dr_cp_protocol dr_cp_allgather = {
    "allgather", "every slot receives the maps that precede it in its document", DR_CP_NO_WIDTH, false,
    &dr_cp_programs, generate_whole, NULL,
};
