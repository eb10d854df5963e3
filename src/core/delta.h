/* SPDX-License-Identifier: Apache-2.0 */
/*
 * delta.h - how core prepares a pass: memory, stamps, normalised tensors. Shared by
 * plan_api.c, delta.c and io.c; layers use the two buffer functions.
 */
#ifndef DR_DELTA_H
#define DR_DELTA_H

#include "core/core.h"

/*
 * NOTE [Stamps]: core puts 64 bytes in front of saved and of staged scratch. They hold a
 * digest of the plan and how far the trip has come, so that a backward without its
 * forward, or a stage out of order, is refused instead of computing with garbage.
 */
typedef struct dr_stamp {
    uint64_t magic, plan;
    int32_t dir, stage;      /* of a trip, as the two below */
    const void *saved;       /* the memory it began with */
    uint64_t scratch;        /* bytes: the layout depends on the context's threads */
    char pad[DR_ALIGN - 40];
} dr_stamp;

/* Fills *p for a trip over all heads and columns; buffers NULL: empty arenas. Afterwards
 * the arenas stand behind core's own blocks. */
void dr_pass_open(dr_pass *p, const dr_plan *plan, const dr_buffers *buffers, int dir, bool staged);
/* Runs the layout stage of the pass's direction. */
dr_status dr_pass_layout(dr_pass *p);

/* Checks every tensor of io for a direction and writes the form of backend.h. order: room for
 * one int32_t per piece, used to check state_index. */
dr_status dr_io_normalise(const dr_plan *plan, const dr_io *io, int dir, int32_t *order, dr_io *out);

/* dr_summarize and dr_recur for some pieces only: map_of and entry_of of dr_pass. */
dr_status dr_summarize_some(const dr_plan *plan, dr_direction dir, const dr_io *io,
                            const dr_buffers *buffers, float *maps, const int32_t *map_of);
dr_status dr_recur_some(const dr_plan *plan, dr_direction dir, const dr_io *io,
                        const dr_buffers *buffers, const float *entry, const int32_t *entry_of,
                        float *exit);

/*
 * NOTE [Windows]: one trip cut into windows of heads (whole groups of a key head) and pieces, in any
 * order that gives every head and piece once. What a window computes does not depend on the others,
 * so the order changes no bit. A plain forward or backward is one window. In a trip in slots
 * (backend.h, NOTE [Slots]) a window is also cut into columns, and its stages are called one by one.
 */
typedef struct dr_window {
    int32_t head0, head1;
    int64_t piece0, piece1;
    int32_t slot, col0, col1; /* in slots */
    const float *entry;       /* as in dr_pass */
    float *exit;
    const int32_t *entry_of, *exit_of;
} dr_window;

typedef struct dr_windows {
    dr_pass pass;
    dr_io normal;
    dr_stamp *saved;
} dr_windows;

typedef enum dr_window_stage { DR_WINDOW_PREPARE, DR_WINDOW_RECUR, DR_WINDOW_OUTPUT } dr_window_stage;

/* Scratch of a trip in `slots` slots for windows of up to `heads` value heads; slots 0: of a fused
 * trip. ERR_MEMORY where none can hold it. The backend must serve slots. */
dr_status dr_windows_scratch(const dr_plan *plan, int dir, int32_t slots, int32_t heads,
                             size_t *bytes);

/* After a success dr_windows_close must follow; its status: whether all windows have run. */
dr_status dr_windows_open(dr_windows *w, const dr_plan *plan, const dr_io *io,
                          const dr_buffers *buffers, int dir, int32_t slots, int32_t heads);
dr_status dr_windows_run(const dr_windows *w, const dr_window *x); /* NULL: all. Without slots */
dr_status dr_windows_stage(const dr_windows *w, const dr_window *x, dr_window_stage stage);
void dr_windows_close(dr_windows *w, dr_status status);

/* Scratch of a fused trip in either direction. */
DR_INLINE size_t dr_plan_fused_scratch(const dr_plan *plan)
{
    return plan->forward_scratch > plan->backward_scratch ? plan->forward_scratch
                                                          : plan->backward_scratch;
}

dr_status dr_buffers_alloc(size_t saved, size_t scratch, dr_buffers *out);
dr_status dr_buffers_check(const dr_buffers *b, size_t saved, bool saved_required, size_t scratch);

#endif
