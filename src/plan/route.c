/* SPDX-License-Identifier: Apache-2.0 */
/*
 * route.c - see route.h. Fragments are sorted by their first token once; everything else is
 * one walk along the stream.
 */
#include "plan/route.h"

#include <stdlib.h>

static int by_begin(const void *a, const void *b)
{
    const dr_fragment *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

dr_status dr_partition_contiguous(int64_t tokens, int32_t ranks, dr_fragment *fragments)
{
    if (tokens < 0 || ranks < 1 || fragments == NULL)
        return dr_fail(DR_ERR_ARG, "tokens, ranks, fragments: must be >= 0, >= 1, given; got %lld, %d, %p",
                       (long long)tokens, ranks, (void *)fragments);
    int64_t share = tokens / ranks, more = tokens % ranks, at = 0;
    for (int32_t r = 0; r < ranks; r++) {
        int64_t end = at + share + (r < more);
        fragments[r] = (dr_fragment){at, end, r};
        at = end;
    }
    return DR_OK;
}

dr_status dr_partition_zigzag(int64_t tokens, int32_t ranks, dr_fragment *fragments)
{
    if (ranks > INT32_MAX / 2)
        return dr_fail(DR_ERR_ARG, "ranks: must be at most %d, got %d", INT32_MAX / 2, ranks);
    DR_TRY(dr_partition_contiguous(tokens, 2 * ranks, fragments));
    for (int32_t i = 0; i < 2 * ranks; i++)
        fragments[i].rank = i < ranks ? i : 2 * ranks - 1 - i;
    return DR_OK;
}

static dr_status check_partition(const dr_partition *p, int64_t tokens)
{
    if (p == NULL || p->size != sizeof *p)
        return dr_fail(DR_ERR_ARG, "partition: must be given, with size %zu (DR_PARTITION_INIT)",
                       sizeof *p);
    if (p->ranks < 1 || p->count < 0 || p->count > INT32_MAX || (p->count > 0 && p->fragments == NULL))
        return dr_fail(DR_ERR_ARG, "partition: needs ranks >= 1 and a table of count >= 0 fragments, got %d "
                       "ranks, %lld fragments", p->ranks, (long long)p->count);
    for (int64_t i = 0; i < p->count; i++) {
        const dr_fragment *f = &p->fragments[i];
        if (f->rank < 0 || f->rank >= p->ranks)
            return dr_fail(DR_ERR_ARG, "partition.fragments[%lld].rank: must be 0 to %d, got %d",
                           (long long)i, p->ranks - 1, f->rank);
        if (f->begin < 0 || f->end < f->begin || f->end > tokens)
            return dr_fail(DR_ERR_ARG, "partition.fragments[%lld]: must lie in [0, %lld), got [%lld, %lld)",
                           (long long)i, (long long)tokens, (long long)f->begin, (long long)f->end);
    }
    return DR_OK;
}

/* The sequence that holds token t. */
static int64_t sequence_of(const int64_t *offsets, int64_t n, int64_t t)
{
    int64_t low = 0, high = n;
    while (high - low > 1) {
        int64_t mid = low + (high - low) / 2;
        if (offsets[mid] <= t)
            low = mid;
        else
            high = mid;
    }
    while (low + 1 < n && offsets[low + 1] <= t) /* empty neighbours share a start */
        low++;
    return low;
}

/* An empty sequence belongs to the fragment that starts at or before its place and ends after it;
 * at the very end of the stream, to the last slot. */
static bool owns_empty(int64_t at, const dr_fragment *f, int64_t tokens)
{
    return (at >= f->begin && at < f->end) || (at == tokens && f->end == tokens && f->begin < f->end);
}

/* Walks the sequences that touch fragment f; counts, and writes pieces where asked. */
static int64_t cut_fragment(const dr_fragment *f, int64_t span, const int64_t *offsets, int64_t n,
                            int64_t tokens, dr_cp_piece *pieces)
{
    int64_t count = 0, s = 0;
    if (f->begin == f->end)
        return 0;
    /* step back over empty sequences that start exactly here */
    s = sequence_of(offsets, n, f->begin);
    while (s > 0 && offsets[s - 1] == f->begin)
        s--;
    for (; s < n && offsets[s] <= f->end; s++) {
        int64_t b = dr_max(offsets[s], f->begin), e = dr_min(offsets[s + 1], f->end);
        bool empty = offsets[s] == offsets[s + 1];
        if (empty ? !owns_empty(offsets[s], f, tokens) : b >= e)
            continue;
        if (pieces != NULL)
            pieces[count] = (dr_cp_piece){s, span + b - f->begin, span + e - f->begin,
                                          offsets[s] == b, offsets[s + 1] == e};
        count++;
    }
    return count;
}

static dr_status no_memory(void) { return dr_fail(DR_ERR_MEMORY, "route: no memory for its tables"); }

dr_status dr_route_build(dr_route *route, const dr_partition *partition, int32_t rank,
                         int64_t tokens, const int64_t *offsets, int64_t sequences)
{
    *route = (dr_route){0};
    DR_TRY(check_partition(partition, tokens));
    const int64_t whole[2] = {0, tokens};
    const int64_t *o = offsets ? offsets : whole;
    int64_t n = offsets ? sequences : 1, F = partition->count;
    if (o[n] != tokens)
        return dr_fail(DR_ERR_ARG, "offsets[%lld]: must be the number of tokens (%lld) under context "
                       "parallelism, got %lld", (long long)n, (long long)tokens, (long long)o[n]);
    route->ranks = partition->ranks;
    dr_fragment *sorted = dr_alloc((size_t)dr_max(F, 1) * sizeof *sorted);
    int64_t *first = dr_alloc((size_t)dr_max(F, 1) * sizeof *first); /* per table entry, on its rank */
    int64_t *per_rank = dr_alloc((size_t)partition->ranks * sizeof *per_rank);
    dr_status status = sorted && first && per_rank ? DR_OK : no_memory();
    for (int64_t i = 0; status == DR_OK && i < F; i++) { /* pieces before each fragment on its rank */
        const dr_fragment *f = &partition->fragments[i];
        first[i] = per_rank[f->rank];
        per_rank[f->rank] += cut_fragment(f, 0, o, n, tokens, NULL);
        sorted[i] = *f;
        sorted[i].rank = (int32_t)i; /* the table entry, while sorting */
    }
    if (status == DR_OK) {
        qsort(sorted, (size_t)F, sizeof *sorted, by_begin);
        route->slots = dr_alloc((size_t)dr_max(F, 1) * sizeof *route->slots);
        route->n_pieces = per_rank[rank];
        route->pieces = dr_alloc((size_t)(route->n_pieces + 1) * sizeof *route->pieces);
        route->offsets = dr_alloc((size_t)(route->n_pieces + 1) * sizeof *route->offsets);
        if (route->slots == NULL || route->pieces == NULL || route->offsets == NULL)
            status = no_memory();
    }
    int64_t at = 0;
    for (int64_t i = 0; status == DR_OK && i < F; i++) {
        const dr_fragment *f = &sorted[i];
        if (f->begin == f->end)
            continue;
        if (f->begin != at)
            status = dr_fail(DR_ERR_ARG, "partition: fragments must tile the stream, but token %lld is owned %s",
                             (long long)dr_min(f->begin, at), f->begin > at ? "by nobody" : "twice");
        at = f->end;
        int64_t entry = f->rank, pieces = cut_fragment(f, 0, o, n, tokens, NULL);
        int64_t s = f->begin > 0 ? sequence_of(o, n, f->begin) : 0;
        int64_t e = f->end < tokens ? sequence_of(o, n, f->end) : 0;
        route->slots[route->n_slots++] = (dr_slot){
            .rank = partition->fragments[entry].rank, .begin = f->begin, .end = f->end,
            .first = first[entry], .last = first[entry] + pieces - 1,
            .from_previous = f->begin > 0 && o[s] < f->begin,
            .to_next = f->end < tokens && o[e] < f->end};
    }
    if (status == DR_OK && at != tokens)
        status = dr_fail(DR_ERR_ARG, "partition: fragments must tile the stream, but token %lld is owned by "
                         "nobody", (long long)at);
    int64_t piece = 0;
    for (int64_t i = 0; status == DR_OK && i < F; i++) {
        const dr_fragment *f = &partition->fragments[i];
        if (f->rank != rank)
            continue;
        piece += cut_fragment(f, route->tokens, o, n, tokens, route->pieces + piece);
        route->tokens += f->end - f->begin;
    }
    if (status == DR_OK && route->n_pieces == 0) /* a rank without tokens has one empty piece */
        route->n_pieces = 1;
    for (int64_t i = 0; status == DR_OK && i < route->n_pieces; i++)
        route->offsets[i + 1] = route->pieces[i].end;
    dr_free(sorted);
    dr_free(first);
    dr_free(per_rank);
    if (status != DR_OK)
        dr_route_clear(route);
    return status;
}

void dr_route_clear(dr_route *route)
{
    dr_free(route->slots);
    dr_free(route->pieces);
    dr_free(route->offsets);
    *route = (dr_route){0};
}
