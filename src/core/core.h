/* SPDX-License-Identifier: Apache-2.0 */
/*
 * core.h - shared by the public entry points: the context, and how a caller's tensor is
 * checked and brought to the one form that backends see. Nothing outside core includes it.
 */
#ifndef DR_CORE_H
#define DR_CORE_H

#include "backend.h"

struct dr_context {
    const dr_backend *backend;
    dr_device *dev;
    dr_pool pool;
};

/* What a call expects of one tensor. */
typedef struct dr_expect {
    const char *name;
    const char *letters; /* the shape in letters, for the sentence: "[B,T,H,K]" */
    int32_t rank;
    int64_t shape[DR_MAX_RANK];
    bool drop_batch;     /* shape[0] == 1 may be left out */
    bool required;
    bool output;         /* distinct elements need distinct addresses */
} dr_expect;

/* Checks t; *out is a view of exactly rank and shape (data NULL when absent). */
dr_status dr_tensor_check(const dr_context *ctx, const dr_tensor *t, const dr_expect *want,
                          dr_tensor *out);
/* The same for a vector of n entries in any shape with one long axis ([HV], [HV,1], [1,1,HV,1]). */
dr_status dr_vector_check(const dr_context *ctx, const dr_tensor *t, const dr_expect *want,
                          dr_tensor *out);
/* dt_bias of either gate: [HV] (K = 1), [HV,K] or [HV*K]; *out is [HV,K]. */
dr_status dr_bias_check(const dr_context *ctx, const dr_tensor *t, const char *name, bool output,
                        int64_t HV, int64_t K, dr_tensor *out);

/* Fails with a sentence if t is present. */
dr_status dr_tensor_absent(const dr_tensor *t, const char *name, const char *rule);
bool dr_tensor_empty(const dr_tensor *t); /* some extent is 0 */

/* Appends a trailing axis of extent 1. */
void dr_tensor_widen(dr_tensor *t);
/* Views t as rank 4 by putting axes of extent 1 in front. */
void dr_tensor_lead(dr_tensor *t);
/* Sets elements [from, extent) of axis 1 (tokens) to zero; absent tensors pass. */
void dr_tensor_zero_tail(const dr_tensor *t, int64_t from);

/* state_index: NULL, or entries in [-1, slots), all but -1 distinct. order: room for n. */
dr_status dr_state_index_check(const int32_t *index, int64_t n, int64_t slots, int32_t *order);

#endif
