/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_backend.c - the CPU backend's table: the device, what it supports, and which function
 * serves which entry.
 */
#include "cpu/cpu.h"

static const int32_t chunks[] = {16, 32, 64};

enum { DEFAULT_CHUNK = 32 };

static dr_status open_device(const dr_pool *pool, dr_device **out)
{
    dr_device dev = {.pool = *pool};
    DR_TRY(dr_cpu_choose(&dev.kern, dev.reason));
    *out = dr_alloc(sizeof **out);
    if (*out == NULL)
        return dr_fail(DR_ERR_MEMORY, "cpu: no memory for %zu bytes", sizeof **out);
    **out = dev;
    return DR_OK;
}

static void close_device(dr_device *dev) { dr_free(dev); }
static const char *isa(const dr_device *dev) { return dev->kern->isa; }
static const char *isa_reason(const dr_device *dev) { return dev->reason; }

static dr_status supports(const dr_device *dev, const dr_problem *p)
{
    (void)dev;
    for (size_t i = 0; i < DR_COUNT(chunks); i++)
        if (p->chunk == 0 || p->chunk == chunks[i])
            return DR_OK;
    return dr_fail(DR_ERR_SUPPORT, "chunk: must be 0, 16, 32 or 64 on \"cpu\", got %d", p->chunk);
}

static bool takes(const dr_device *dev, dr_dtype dtype)
{
    (void)dev;
    return dtype == DR_F32 || dtype == DR_BF16 || dtype == DR_F16;
}

static int32_t chunk_length(const dr_device *dev, const dr_problem *p)
{
    (void)dev;
    return p->chunk != 0 ? p->chunk : DEFAULT_CHUNK;
}

const dr_backend dr_backend_cpu = {
    .abi = DR_BACKEND_ABI,
    .name = "cpu",
    .open = open_device,
    .close = close_device,
    .isa = isa,
    .isa_reason = isa_reason,
    .supports = supports,
    .takes = takes,
    .chunk = chunk_length,
    .forward = {dr_cpu_forward_layout, dr_cpu_forward_prepare, dr_cpu_forward_summarize,
                dr_cpu_forward_recur, dr_cpu_forward_output},
    .adjoint = {dr_cpu_adjoint_layout, dr_cpu_adjoint_prepare, dr_cpu_adjoint_summarize,
                dr_cpu_adjoint_recur, dr_cpu_adjoint_output},
    .step = dr_cpu_step,
    .apply = dr_cpu_apply,
    .conv = dr_cpu_conv,
    .gate = dr_cpu_gate,
    .beta = dr_cpu_beta,
    .l2norm = dr_cpu_l2norm,
    .norm = dr_cpu_norm,
    .matmul = dr_cpu_matmul,
};
