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

/* ------------------------------------------------------------------------ */
/* One stream over many ranks                                               */
/* ------------------------------------------------------------------------ */

/* Tokens [begin, end) of the stream belong to rank. */
typedef struct dr_fragment {
    int64_t begin, end;
    int32_t rank;
} dr_fragment;

/* Who owns what. The fragments tile [0, tokens) exactly, in any order and on any ranks; a
 * rank's tensors hold its fragments end to end, in the order of this table (its span). Empty
 * fragments and ranks without any are fine; a rank without tokens has one empty piece. The same table feeds loaders and operators. */
typedef struct dr_partition {
    uint32_t size;
    int32_t ranks;
    int64_t count;
    const dr_fragment *fragments; /* copied by dr_cp_plan_create */
} dr_partition;
#define DR_PARTITION_INIT {(uint32_t)sizeof(dr_partition), 0, 0, NULL}

/* Fills fragments[ranks]: equal contiguous shares (the first tokens % ranks get one more). */
DR_API dr_status dr_partition_contiguous(int64_t tokens, int32_t ranks, dr_fragment *fragments);
/* Fills fragments[2 * ranks]: rank r owns shares r and 2*ranks-1-r of 2*ranks equal shares. */
DR_API dr_status dr_partition_zigzag(int64_t tokens, int32_t ranks, dr_fragment *fragments);

/* The piece of a sequence that lies in one fragment. States of a context-parallel call
 * are per piece of this rank, in span order. */
typedef struct dr_cp_piece {
    int64_t sequence;     /* its number in the stream */
    int64_t begin, end;   /* tokens of the span */
    int32_t starts, ends; /* nonzero: holds the first, the last token of its sequence */
} dr_cp_piece;

/* A problem of the whole stream (batch 1; tokens and offsets are those of the stream), cut
 * over the ranks of comm by a partition, with a protocol:
 *   "p2p"        states handed on in token order by maps; pruned at document boundaries
 *   "allgather"  every rank receives the maps that precede it within its document
 *   "grouped:G"  maps gathered within groups of G, states handed on between groups
 *   "doubling"   maps combined in log2 rounds; the adjoint is the transposed exchange
 *   "ulysses"    all ranks exchange tokens for heads, U = ranks; H and HV must be multiples of U
 *   "ulysses:U+REST"  rows of U consecutive ranks exchange, protocol REST between the rows.
 *                Both fill final_state for pieces that end a sequence, with zero for the others
 * Collective: all ranks must agree on problem, offsets, partition and protocol; otherwise
 * every rank gets ERR_ARG naming what differs, before any tensor travels. comm and ctx must outlive
 * the plan. */
typedef struct dr_cp_plan dr_cp_plan;
struct dr_comm;
DR_API dr_status dr_cp_plan_create(const dr_context *ctx, struct dr_comm *comm,
                                   const dr_problem *problem, const dr_partition *partition,
                                   const char *protocol, dr_cp_plan **out);
DR_API void dr_cp_plan_destroy(dr_cp_plan *plan); /* NULL is fine */

/* The protocols of this build, for tables and messages: 0 <= index < count, otherwise NULL. */
DR_API int32_t dr_cp_protocol_count(void);
DR_API const char *dr_cp_protocol_name(int32_t index);
DR_API const char *dr_cp_protocol_about(int32_t index);

typedef struct dr_cp_info {
    uint32_t size;
    int64_t tokens;  /* of this rank's span */
    int64_t pieces;  /* N of this rank's state tensors */
    size_t saved_bytes, scratch_bytes;
    int64_t sends[2];      /* messages that this rank sends, forward and adjoint */
    int64_t send_bytes[2]; /* and their bytes */
} dr_cp_info;
#define DR_CP_INFO_INIT {(uint32_t)sizeof(dr_cp_info), 0, 0, 0, 0, {0, 0}, {0, 0}}
DR_API dr_status dr_cp_plan_describe(const dr_cp_plan *plan, dr_cp_info *info);
DR_API dr_status dr_cp_plan_piece(const dr_cp_plan *plan, int64_t index, dr_cp_piece *piece);
DR_API dr_status dr_cp_buffers_create(const dr_cp_plan *plan, dr_buffers *out);

/* As dr_forward and dr_backward on this rank's span [1,T_local,...]; collective. Of
 * initial_state the pieces that start a sequence are read, of d_final_state those that end one;
 * final_state holds the state after each piece (but see "ulysses"), d_initial_state is the gradient
 * for pieces that start a sequence and zero for others. After a failure the communicator can no longer be used. */
DR_API dr_status dr_cp_forward(const dr_cp_plan *plan, const dr_io *io, const dr_buffers *buffers);
DR_API dr_status dr_cp_backward(const dr_cp_plan *plan, const dr_io *io, const dr_buffers *buffers);

/* ------------------------------------------------------------------------ */
/* The halo of a causal convolution                                         */
/* ------------------------------------------------------------------------ */

/* For a depthwise convolution of the same stream cut by the same partition: the tokens that stand
 * before each piece, from as many ranks as it takes, never from before its sequence. A rank then
 * convolves its pieces as sequences of their own, with `history` as the initial state (dr_conv):
 *
 *   dr_halo_forward    x, initial_state -> history;  dr_conv of the pieces
 *   dr_conv_backward   of the pieces -> dx, d_history (its d_initial_state);  dr_halo_backward
 *
 * Channels that pass several convolutions of one width (q, k, v) go together: there is at most
 * one message per ordered pair of ranks. Creation is collective, with agreement as above. */
typedef struct dr_halo_config {
    uint32_t size;
    int64_t tokens;         /* of the stream */
    const int64_t *offsets; /* as dr_problem.offsets */
    int64_t sequences;
    const dr_partition *partition;
    int64_t channels;       /* D */
    int64_t width;          /* (W-1)*dilation tokens; 0: nothing travels */
} dr_halo_config;
#define DR_HALO_CONFIG_INIT {(uint32_t)sizeof(dr_halo_config), 0, NULL, 0, NULL, 0, 0}

typedef struct dr_halo dr_halo;
DR_API dr_status dr_halo_create(const dr_context *ctx, struct dr_comm *comm,
                                const dr_halo_config *config, dr_halo **out);
DR_API void dr_halo_destroy(dr_halo *halo); /* NULL is fine */
/* saved_bytes is 0: nothing is kept between the directions. */
DR_API dr_status dr_halo_describe(const dr_halo *halo, dr_cp_info *info);

/* x [1,T_local,D]; initial_state, history [N,D,width] per piece in span order; all f32. Collective.
 * Of initial_state (absent: zero) the pieces that start a sequence are read. Only buffers->scratch
 * is used. After a failure the communicator can no longer be used. */
DR_API dr_status dr_halo_forward(const dr_halo *halo, const dr_tensor *x,
                                 const dr_tensor *initial_state, const dr_tensor *history,
                                 const dr_buffers *buffers);
/* Adds to dx, in a fixed order, what later pieces found for their history. d_initial_state (may be
 * absent) is overwritten: the gradient for pieces that start a sequence, zero for others. */
DR_API dr_status dr_halo_backward(const dr_halo *halo, const dr_tensor *d_history,
                                  const dr_tensor *dx, const dr_tensor *d_initial_state,
                                  const dr_buffers *buffers);

#ifdef __cplusplus
}
#endif
#endif
