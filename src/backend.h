/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend.h - what a backend is. The waist of the house: above it nothing knows
 * SIMD or devices, below it nothing knows layouts of the public call.
 *
 * Core hands a backend a pass: one trip through the stages in one direction. Core has
 * checked every argument and brought all tensors to one form, so a backend reads no
 * option twice:
 *
 *   q k dq dk  [B,T,H,K]     v o d_o dv  [B,T,HV,V]     beta dbeta  [B,T,HV,1]
 *   g dg       [B,T,HV,1] (GDN) or [B,T,HV,K] (KDA)     a_log da_log  [HV]
 *   dt_bias ddt_bias  [HV,1] or [HV,K]
 *   initial_state final_state d_...  [N or slots,HV,K,V]   (state_v_first is in the strides)
 *   chunk_states  [NT,HV,K,V]
 *
 * always rank 4 (2 for dt_bias, 1 for a_log), free strides, data NULL when absent. Raw
 * gates, beta logits, decay factors and l2norm are the backend's work: they are cheap
 * where a chunk is loaded and its gradient stored.
 *
 * NOTE [Measure or carve]: a stage starts by carving what it needs from saved and
 * scratch, always the same way for the same plan, direction and staged flag; layout is that
 * carving alone, on empty arenas. An arena whose base is NULL hands out NULLs: saved is
 * then not wanted.
 *
 * NOTE [Slots]: a trip in slots lets a caller pass states on column by column while other heads are
 * under way. It is cut into windows of heads, each of which goes through
 *     prepare    what needs no entry, for the whole window
 *     recur      once for every run of columns: together they cover [0, V), in any order, and
 *                (piece by piece) with the entry of those columns at hand
 *     output     the rest
 * and owns one of `slots` slots of scratch from prepare to output, so that windows in different
 * slots may be at different stages. Forwards recur writes the outputs of its columns and output has
 * nothing to do; in the adjoint what joins the columns waits for output. The bits are those of a trip
 * without slots. The columns of a window have the same cuts in all its pieces.
 */
#ifndef DR_BACKEND_H
#define DR_BACKEND_H

#include "base/arena.h"
#include "base/pool.h"
#include "plan/plan.h"

#include <deltarule/cp.h>
#include <deltarule/ops.h>

#define DR_BACKEND_ABI 1

typedef struct dr_device dr_device; /* what a backend keeps per context */

typedef struct dr_pass {
    dr_device *dev;
    const dr_plan *plan;
    const dr_io *io;        /* the normalised form above */
    int dir;                /* +1 forward, -1 adjoint */
    bool staged;            /* stages are called one by one with work in between; otherwise
                               recur may do everything and the others nothing */
    int32_t head0, head1;   /* value heads of this call, whole groups of a key head */
    int32_t col0, col1;     /* state columns of this call; col0 a multiple of 32 */
    int32_t slots;          /* 0: not a trip in slots, NOTE [Slots] */
    int32_t slot, slot_heads; /* the slot of this call; value heads of the largest window */
    int64_t piece0, piece1; /* pieces of this call. Sums over tokens (da_log, ddt_bias) are right after
                               the last call of their heads */
    dr_arena saved;         /* lives from forward to adjoint */
    dr_arena scratch;       /* dies with the trip */
    float *maps;            /* summarize: [N,HV,V+K,K] = [B; A] or [C; R] */
    const float *entry;     /* [N,HV,V,K] or NULL: io->initial_state / d_final_state, or zero */
    float *exit;            /* [N,HV,V,K] or NULL */
    /* Where only some pieces matter, per piece n: its place in maps (-1: no map wanted), in entry and
     * exit (-1: as if NULL). NULL: place n. Read through the functions below. */
    const int32_t *map_of, *entry_of, *exit_of;
} dr_pass;

/* Map of piece n and value head j, or NULL if none is wanted. */
DR_INLINE float *dr_pass_map(const dr_pass *p, int64_t n, int32_t j)
{
    const dr_problem *q = &p->plan->problem;
    int64_t at = p->map_of != NULL ? p->map_of[n] : n;
    int64_t size = (int64_t)(q->value_dim + q->key_dim) * q->key_dim;
    return at < 0 ? NULL : p->maps + (at * q->value_heads + j) * size;
}

/* Entry [V,K] of piece n and value head j, or NULL: then the io's own state, or zero. */
DR_INLINE const float *dr_pass_entry(const dr_pass *p, int64_t n, int32_t j)
{
    const dr_problem *q = &p->plan->problem;
    int64_t at = p->entry == NULL ? -1 : p->entry_of != NULL ? p->entry_of[n] : n;
    return at < 0 ? NULL : p->entry + (at * q->value_heads + j) * q->value_dim * q->key_dim;
}

/* Where the exit [V,K] of piece n and value head j goes, or NULL. */
DR_INLINE float *dr_pass_exit(const dr_pass *p, int64_t n, int32_t j)
{
    const dr_problem *q = &p->plan->problem;
    int64_t at = p->exit == NULL ? -1 : p->exit_of != NULL ? p->exit_of[n] : n;
    return at < 0 ? NULL : p->exit + (at * q->value_heads + j) * q->value_dim * q->key_dim;
}

typedef dr_status dr_stage(dr_pass *p);

typedef struct dr_stages {
    dr_stage *layout, *prepare, *summarize, *recur, *output;
} dr_stages;

typedef struct dr_backend {
    uint32_t abi;
    const char *name;

    dr_status (*open)(const dr_pool *pool, dr_device **out);
    void (*close)(dr_device *dev);
    const char *(*isa)(const dr_device *dev);
    const char *(*isa_reason)(const dr_device *dev);

    /* DR_OK, or dr_fail(DR_ERR_SUPPORT, the whole reason). The problem is complete. */
    dr_status (*supports)(const dr_device *dev, const dr_problem *p);
    /* Whether tensors of this dtype may be passed. */
    bool (*takes)(const dr_device *dev, dr_dtype dtype);
    /* C for this problem: problem.chunk where nonzero (supports() has agreed). */
    int32_t (*chunk)(const dr_device *dev, const dr_problem *p);

    dr_stages forward, adjoint;
    bool slots;             /* serves trips in slots */
    dr_stage *step;         /* scratch laid out by forward.layout, unstaged */
    /* out[rows,K] = in[rows,K] A + (B on the first V rows), n times; rows is V (apply) or V+K
     * (compose, in = [B1; A1]). in NULL: rows = V, out = B. */
    dr_status (*apply)(const dr_device *dev, int64_t n, int32_t K, int32_t V, int32_t rows,
                       const float *in, const float *map, float *out);

    /* Row operations; arguments are checked, tensors as the caller passed them except: x, y
     * and the like of gate are rank 4 [B,T,HV,1 or K], dt_bias [HV,1 or K]; rows of l2norm, norm
     * and beta are rank 4 with leading ones; conv is rank 3 throughout, dilation and eps filled in. */
    dr_status (*conv)(dr_device *dev, int dir, const dr_conv_args *a);
    dr_status (*gate)(dr_device *dev, int dir, const dr_gate_args *a);
    dr_status (*beta)(dr_device *dev, int dir, const dr_beta_args *a);
    dr_status (*l2norm)(dr_device *dev, int dir, const dr_l2norm_args *a);
    dr_status (*norm)(dr_device *dev, int dir, const dr_norm_args *a);
    /* Refuses what it cannot take: element types, strides. */
    dr_status (*matmul)(dr_device *dev, const dr_matmul_args *a);
} dr_backend;

extern const dr_backend dr_backend_ref, dr_backend_cpu;

#endif
