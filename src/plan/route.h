/* SPDX-License-Identifier: Apache-2.0 */
/*
 * route.h - the stream of a context-parallel group as slots and chains: integers in, integers
 * out. A slot is a fragment that holds tokens, numbered in token order. Two neighbouring slots
 * are connected if the cut between them lies inside a sequence. A chain is a longest run of
 * connected slots: state flows along chains and nowhere else.
 *
 * NOTE [Inner slots are single pieces]: a slot that is connected on both sides holds one
 * piece only, so its map is the map of that piece. What leaves the first slot of a chain does
 * not depend on anything before it: a reset needs no multiplication by zero.
 */
#ifndef DR_ROUTE_H
#define DR_ROUTE_H

#include "base/base.h"

#include <deltarule/cp.h>

typedef struct dr_slot {
    int32_t rank;
    int64_t begin, end;      /* tokens of the stream */
    int64_t first, last;     /* pieces of its rank; first == last where it holds one */
    bool from_previous;      /* the cut before it lies inside a sequence */
    bool to_next;
} dr_slot;

typedef struct dr_route {
    int32_t ranks;
    int64_t n_slots;
    dr_slot *slots;          /* in token order */
    int64_t n_pieces;        /* of this rank, in span order */
    dr_cp_piece *pieces;
    int64_t tokens;          /* of this rank's span */
    int64_t *offsets;        /* n_pieces + 1, into the span */
} dr_route;

/* Checks that the fragments tile the stream, and routes it for one rank. offsets NULL: the
 * stream is one sequence. */
dr_status dr_route_build(dr_route *route, const dr_partition *partition, int32_t rank,
                         int64_t tokens, const int64_t *offsets, int64_t sequences);
void dr_route_clear(dr_route *route);

#endif
