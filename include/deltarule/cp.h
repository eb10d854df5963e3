/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cp.h - the passes taken apart at the state boundary, and the affine maps that
 * stand for ranges of tokens. This is what context parallelism is built from:
 * whoever splits one sequence over processes runs the stages and exchanges maps
 * or states in between.
 *
 * A range of tokens maps its entry state affinely: with states V-major,
 *     H_out = H_in A + B        H [V,K], A [K,K], B [V,K]
 * stored as one block [V+K,K] = [B; A], fp32, per value head. In the adjoint
 * the same block is [C; R]: dH_entry = dH_exit R + C. Composition of first and
 * second: A = A1 A2, B = B1 A2 + B2, which is "apply the second map to the rows
 * [B1; A1]", biased on the first V rows.
 *
 * A piece is one sequence of the plan (its tokens on this machine). States at
 * piece edges ("entry", "exit") are fp32 [N,HV,V,K], contiguous, V-major.
 */
#ifndef DELTARULE_CP_H
#define DELTARULE_CP_H

#include "deltarule.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dr_direction { DR_FORWARD = 1, DR_ADJOINT = -1 } dr_direction;

/* The stages of one trip, in this order, on one dr_buffers (scratch of
 * staged_scratch bytes, untouched in between by other calls):
 *
 *   dr_prepare     everything that needs no entry state
 *   dr_summarize   optional: one map per piece, from the same prepared factors
 *   dr_recur       entry -> the states of all chunks, exit
 *   dr_output      outputs (forward) or gradients (adjoint)
 *
 * The adjoint trip needs the `saved` of a staged or plain forward of the same
 * inputs; its entry is the gradient of each piece's final state and its exit
 * the gradient of the entry state. entry NULL: io->initial_state, or in the
 * adjoint io->d_final_state, or zero. exit may be NULL. io->final_state and
 * io->d_initial_state are written by dr_recur as well where present.
 * An empty piece hands its entry on and has the neutral map [0; I].
 *
 * Threads   one trip at a time per dr_buffers. Order: finished on return.
 * Errors    ERR_ARG, ERR_SHAPE, ERR_BUFFER, ERR_SUPPORT.
 */
DR_API dr_status dr_prepare(const dr_plan *plan, dr_direction dir, const dr_io *io,
                            const dr_buffers *buffers);
/* maps: [N,HV,V+K,K] fp32, the caller's. */
DR_API dr_status dr_summarize(const dr_plan *plan, dr_direction dir, const dr_io *io,
                              const dr_buffers *buffers, float *maps);
DR_API dr_status dr_recur(const dr_plan *plan, dr_direction dir, const dr_io *io,
                          const dr_buffers *buffers, const float *entry, float *exit);
DR_API dr_status dr_output(const dr_plan *plan, dr_direction dir, const dr_io *io,
                           const dr_buffers *buffers);

/* out[n,V,K] = states[n,V,K] A + B for n maps [V+K,K] each; states NULL means
 * zero, and then B itself is copied: a NaN in A does not spread. out must not
 * overlap states. fp32 throughout. */
DR_API dr_status dr_map_apply(const dr_context *ctx, int64_t n, int32_t K, int32_t V,
                              const float *states, const float *maps, float *out);
/* out = first, then second, n times; out must not overlap the inputs. */
DR_API dr_status dr_map_compose(const dr_context *ctx, int64_t n, int32_t K, int32_t V,
                                const float *first, const float *second, float *out);

#ifdef __cplusplus
}
#endif
#endif
