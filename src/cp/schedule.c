/* SPDX-License-Identifier: Apache-2.0 */
/*
 * schedule.c - the building blocks of schedule.h. A failure (no memory) is remembered in the
 * program and reported by whoever runs the generator.
 */
#include "cp/schedule.h"

static bool grow(dr_program *p, void **table, int64_t count, int64_t *room, size_t item)
{
    if (count < *room)
        return true;
    int64_t more = 2 * *room + 64;
    void *larger = p->status == DR_OK ? dr_alloc((size_t)more * item) : NULL;
    if (larger == NULL) {
        if (p->status == DR_OK)
            p->status = dr_fail(DR_ERR_MEMORY, "protocol: no memory for %lld steps", (long long)more);
        return false;
    }
    if (count > 0)
        memcpy(larger, *table, (size_t)count * item);
    dr_free(*table);
    *table = larger;
    *room = more;
    return true;
}

static void emit(dr_program *p, dr_step_op op)
{
    void *table = p->ops;
    if (!grow(p, &table, p->n_ops, &p->room_ops, sizeof *p->ops))
        return;
    p->ops = table;
    p->ops[p->n_ops++] = op;
}

static dr_value new_value(dr_program *p, dr_value_kind kind, int32_t rank)
{
    dr_value v = {kind, rank, -1};
    if (rank != p->me)
        return v;
    void *table = p->kinds;
    int64_t room = p->room_values;
    if (!grow(p, &table, p->n_values, &room, 1))
        return v;
    p->kinds = table;
    p->room_values = (int32_t)room;
    p->kinds[p->n_values] = (uint8_t)kind;
    v.reg = p->n_values++;
    return v;
}

/* A value computed where its operands are. */
static dr_value computed(dr_program *p, dr_op op, dr_value_kind kind, int32_t rank, int32_t a,
                         int32_t b)
{
    dr_value v = new_value(p, kind, rank);
    if (rank == p->me)
        emit(p, (dr_step_op){op, v.reg, a, b, -1});
    return v;
}

dr_value dr_program_source(dr_program *p, dr_node node)
{
    return computed(p, DR_OP_SOURCE, DR_VALUE_STATE, node.rank, node.slot, -1);
}

dr_value dr_program_map(dr_program *p, dr_node node)
{
    return computed(p, DR_OP_MAP, DR_VALUE_MAP, node.rank, node.slot, -1);
}

dr_value dr_program_send(dr_program *p, dr_value value, int32_t to)
{
    if (value.rank == to)
        return value;
    if (value.rank == p->me)
        emit(p, (dr_step_op){DR_OP_SEND, -1, value.reg, -1, to});
    dr_value there = new_value(p, value.kind, to);
    if (to == p->me)
        emit(p, (dr_step_op){DR_OP_RECEIVE, there.reg, -1, -1, value.rank});
    return there;
}

dr_value dr_program_apply(dr_program *p, dr_value state, dr_value map)
{
    assert(state.rank == map.rank && state.kind == DR_VALUE_STATE && map.kind == DR_VALUE_MAP);
    return computed(p, DR_OP_APPLY, DR_VALUE_STATE, map.rank, state.reg, map.reg);
}

dr_value dr_program_compose(dr_program *p, dr_value first, dr_value second)
{
    assert(first.rank == second.rank && first.kind == DR_VALUE_MAP && second.kind == DR_VALUE_MAP);
    return computed(p, DR_OP_COMPOSE, DR_VALUE_MAP, second.rank, first.reg, second.reg);
}

dr_value dr_program_add(dr_program *p, dr_value a, dr_value b)
{
    assert(a.rank == b.rank && a.kind == DR_VALUE_STATE && b.kind == DR_VALUE_STATE);
    return computed(p, DR_OP_ADD, DR_VALUE_STATE, a.rank, a.reg, b.reg);
}

void dr_program_entry(dr_program *p, dr_value state, dr_node node)
{
    assert(state.rank == node.rank && state.kind == DR_VALUE_STATE);
    if (node.rank == p->me)
        emit(p, (dr_step_op){DR_OP_ENTRY, -1, state.reg, node.slot, -1});
}

void dr_program_keep_transposed(dr_program *p, dr_value map, int32_t kept)
{
    assert(map.kind == DR_VALUE_MAP);
    if (map.rank != p->me)
        return;
    emit(p, (dr_step_op){DR_OP_TRANSPOSE, kept, map.reg, -1, -1});
    if (kept >= p->n_kept)
        p->n_kept = kept + 1;
}

dr_value dr_program_pull(dr_program *p, dr_value state, int32_t kept)
{
    return computed(p, DR_OP_PULL, DR_VALUE_STATE, state.rank, state.reg, kept);
}

void dr_program_clear(dr_program *p)
{
    dr_free(p->ops);
    dr_free(p->kinds);
    *p = (dr_program){0};
}
