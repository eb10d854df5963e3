/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rig.h - a delta-rule call made ready to be spoilt: plan, buffers that hold a finished
 * forward, and every tensor of dr_io in memory of its own, outputs UNWRITTEN. A spoilt call
 * must be refused and leave all of it byte for byte as it was.
 */
#ifndef DR_RIG_H
#define DR_RIG_H

#include "trial.h"

typedef struct rig {
    trial x;
    dr_context *ctx;
    dr_plan *plan;
    dr_plan_info info;
    fenced_buffers b;
    tensor made[SLOTS];
    dr_io io;
} rig;

static inline void rig_forget_outputs(rig *r)
{
    for (int i = 0; i < SLOTS; i++)
        if (r->made[i].memory.map != NULL) {
            memset(r->made[i].memory.data, UNWRITTEN, r->made[i].memory.bytes);
            tensor_remember(&r->made[i]);
        }
}

static inline rig rig_make(const char *backend, const spec *s)
{
    rig r = {.x = trial_make(s), .info = DR_PLAN_INFO_INIT};
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    MUST(dr_context_create(backend, &options, &r.ctx));
    MUST(dr_plan_create(r.ctx, &r.x.p, &r.plan));
    MUST(dr_plan_describe(r.plan, &r.info));
    size_t scratch = r.info.forward_scratch;
    scratch = r.info.backward_scratch > scratch ? r.info.backward_scratch : scratch;
    scratch = r.info.staged_scratch > scratch ? r.info.staged_scratch : scratch;
    r.b = buffers_make(r.info.saved_bytes, scratch, UNWRITTEN);
    r.io = r.x.io;
    for (int i = 0; i < SLOTS; i++) {
        if ((slots[i].role != ROLE_OUTPUT && slots[i].role != ROLE_GRADIENT) || !slot_used(&r.x, i))
            continue;
        int64_t shape[DR_MAX_RANK];
        int32_t rank = slot_shape(&r.x.p, r.x.N, r.info.chunks, i, shape);
        r.made[i] = tensor_make(&r.x.random, LAYOUT_DENSE, slot_dtype(s, i), rank, shape);
        *io_slot(&r.io, i) = r.made[i].view;
    }
    MUST(dr_forward(r.plan, &r.io, &r.b.b));
    rig_forget_outputs(&r);
    return r;
}

/* Inputs, outputs and fences are as they were. */
static inline void rig_untouched(rig *r)
{
    for (int i = 0; i < SLOTS; i++) {
        tensor_check(&r->made[i], slots[i].name, false);
        tensor_check(&r->x.t[i], slots[i].name, false);
    }
    fence_check(&r->b.saved, "buffers.saved");
    fence_check(&r->b.scratch, "buffers.scratch");
}

static inline void rig_free(rig *r)
{
    for (int i = 0; i < SLOTS; i++)
        tensor_free(&r->made[i]);
    buffers_free(&r->b);
    trial_free(&r->x);
    dr_plan_destroy(r->plan);
    dr_context_destroy(r->ctx);
}

/* ---- the entry points that take an io ----------------------------------------------------- */

typedef dr_status rig_call(const rig *r, const dr_io *io, const dr_buffers *b);

static inline dr_status rig_forward(const rig *r, const dr_io *io, const dr_buffers *b)
{
    return dr_forward(r->plan, io, b);
}

static inline dr_status rig_backward(const rig *r, const dr_io *io, const dr_buffers *b)
{
    return dr_backward(r->plan, io, b);
}

static inline dr_status rig_step(const rig *r, const dr_io *io, const dr_buffers *b)
{
    dr_io step = io != NULL ? *io : (dr_io)DR_IO_INIT;
    if (step.chunk_states.data == r->io.chunk_states.data)
        step.chunk_states.data = NULL;
    return dr_step(r->plan, io != NULL ? &step : NULL, b);
}

static inline dr_status rig_prepare(const rig *r, const dr_io *io, const dr_buffers *b)
{
    return dr_prepare(r->plan, DR_FORWARD, io, b);
}

static inline dr_status rig_prepare_back(const rig *r, const dr_io *io, const dr_buffers *b)
{
    return dr_prepare(r->plan, DR_ADJOINT, io, b);
}

static const struct rig_entry {
    const char *name;
    rig_call *call;
    int dir;
    bool staged, saved; /* which sizes it needs; saved: also without anybody asking */
} rig_entries[] = {
    {"dr_forward", rig_forward, +1, false, false},
    {"dr_backward", rig_backward, -1, false, true},
    {"dr_step", rig_step, +1, false, false},
    {"dr_prepare", rig_prepare, +1, true, false},
    {"dr_prepare adjoint", rig_prepare_back, -1, true, true},
};

#endif
