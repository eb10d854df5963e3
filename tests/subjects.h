/* SPDX-License-Identifier: Apache-2.0 */
/*
 * subjects.h - shared by the groups that ask for what must hold whatever the numbers are: both
 * backends with the element type of their states inside, and a problem with most options on.
 *
 * Where states are handed on, "cpu" gets f32 and "ref" f64: each its own inner precision, so
 * that handing on rounds nothing and results may be asked to agree bit for bit.
 */
#ifndef DR_SUBJECTS_H
#define DR_SUBJECTS_H

#include "trial.h"

#define BUDGET 1e-5

typedef struct subject {
    const char *name;
    dr_dtype inner; /* element type of its states inside */
    dr_context *ctx;
} subject;

static subject subjects[] = {{"cpu", DR_F32, NULL}, {"ref", DR_F64, NULL}};

static const dr_variant variants[] = {DR_GDN, DR_KDA};

/* A mid-sized problem with most options on. */
static inline spec plain(const subject *u, dr_variant variant, int64_t T)
{
    spec s = {.p = problem_make(variant, T, 2, 4, 40, 24), .state_dtype = u->inner};
    s.p.gate = DR_GATE_SOFTPLUS;
    s.p.beta = DR_BETA_LOGIT;
    s.p.beta_scale = 2;
    s.p.l2norm = 1;
    s.seed = (uint64_t)T;
    return s;
}

static inline how exact(const subject *u) { return (how){.out = u->inner}; }

#define FOR_EACH_SUBJECT(u, variant)                                                        \
    for (const subject *u = subjects; u < subjects + DR_COUNT(subjects); u++)               \
        for (const dr_variant *variant = variants; variant < variants + DR_COUNT(variants); \
             variant++)

static inline int open_subjects(void **state)
{
    (void)state;
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    for (size_t i = 0; i < DR_COUNT(subjects); i++)
        if (dr_context_create(subjects[i].name, &options, &subjects[i].ctx) != DR_OK)
            return 1;
    return 0;
}

static inline int close_subjects(void **state)
{
    (void)state;
    for (size_t i = 0; i < DR_COUNT(subjects); i++)
        dr_context_destroy(subjects[i].ctx);
    return 0;
}

/* A dense state tensor of x with these values. */
static inline tensor carried(const trial *x, dr_dtype dtype, const double *values)
{
    rng r = {3};
    int64_t shape[DR_MAX_RANK];
    int32_t rank = slot_shape(&x->p, 1, 0, S_initial_state, shape);
    tensor t = tensor_make(&r, LAYOUT_DENSE, dtype, rank, shape);
    view_write(&t.view, values);
    return t;
}

#endif
