/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fields.h - shared by the groups test_fields*.c, which hold one test for each kind of fault
 * that libraries of this field have had: both backends, small problems given by value, and a
 * plain recurrence as judge that shares no code with any backend.
 */
#ifndef DR_FIELDS_H
#define DR_FIELDS_H

#include "rig.h"

#include <deltarule/ops.h>

#define BUDGET 1e-5

static const char *const names[] = {"cpu", "ref"};
enum { BACKENDS = 2, REF = 1 };
static dr_context *ctx[BACKENDS];

static const dr_variant variants[] = {DR_GDN, DR_KDA};

/* ---- small problems by value ---------------------------------------------------------------- */

static inline void put(trial *x, int which, const double *values)
{
    view_write(&x->t[which].view, values);
    tensor_remember(&x->t[which]);
}

static inline void fill(trial *x, int which, double value)
{
    int64_t n = view_count(&x->t[which].view);
    double *values = malloc(sizeof *values * (size_t)(n + 1));
    assert_non_null(values);
    for (int64_t i = 0; i < n; i++)
        values[i] = value;
    put(x, which, values);
    free(values);
}

/* scale 1, one head, no states unless asked for. */
static inline spec tiny(dr_variant variant, int64_t T, int32_t K, int32_t V)
{
    spec s = {.p = problem_make(variant, T, 1, 1, K, V), .absent = BIT(initial_state)};
    s.p.scale = 1;
    return s;
}

static inline void expect_values(const char *what, const double *got, const double *want, int64_t n,
                                 double relative)
{
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(got[i] - want[i]) <= relative * fabs(want[i])))
            fail_msg("%s[%lld]: %.9g instead of %.9g", what, (long long)i, got[i], want[i]);
}

static inline void expect_finite(const result *r)
{
    for (int i = 0; i < SLOTS; i++)
        for (int64_t m = 0; m < (r->value[i] ? r->count[i] : 0); m++)
            if (!isfinite(r->value[i][m]))
                fail_msg("%s[%lld] is %g", slots[i].name, (long long)m, r->value[i][m]);
}

static inline double at(const dr_tensor *t, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return dr_get(dr_at(t, a, b, c, d), t->dtype, 0);
}

/* o [B,T,HV,V] and final states [N,HV,K,V] of a problem with a log gate, or none, and beta values.
 */
static inline void recurrence(const trial *x, double *o, double *final)
{
    const dr_problem *p = &x->p;
    int32_t K = p->key_dim, V = p->value_dim, HV = p->value_heads;
    for (int64_t n = 0; n < x->N; n++)
        for (int32_t j = 0; j < HV; j++) {
            double *S = final + (n * HV + j) * K * V;
            int64_t b = p->offsets ? 0 : n;
            for (int32_t i = 0; i < K * V; i++)
                S[i] = x->io.initial_state.data ? at(&x->io.initial_state, n, j, i / V, i % V) : 0;
            for (int64_t t = p->offsets ? p->offsets[n] : 0;
                 t < (p->offsets ? p->offsets[n + 1] : p->tokens); t++)
                for (int32_t c = 0; c < V; c++) {
                    double read = 0, out = 0;
                    int32_t h = j / (HV / p->heads);
                    for (int32_t i = 0; i < K; i++) {
                        double g = x->io.g.data == NULL
                                       ? 0
                                       : at(&x->io.g, b, t, j, p->variant == DR_KDA ? i : 0);
                        S[i * V + c] *= exp(g);
                        read += S[i * V + c] * at(&x->io.k, b, t, h, i);
                    }
                    for (int32_t i = 0; i < K; i++) {
                        S[i * V + c] += at(&x->io.k, b, t, h, i) * at(&x->io.beta, b, t, j, 0) *
                                        (at(&x->io.v, b, t, j, c) - read);
                        out += S[i * V + c] * at(&x->io.q, b, t, h, i);
                    }
                    o[((b * p->tokens + t) * HV + j) * V + c] = p->scale * out;
                }
        }
}

/* The outputs of x, run on backend b, against the recurrence. */
static inline void expect_recurrence(const char *what, int b, trial *x)
{
    result got = trial_run(ctx[b], x, (how){.unwanted = BIT(chunk_states)});
    double *o = calloc((size_t)got.count[S_o] + 1, sizeof *o);
    double *final = calloc((size_t)got.count[S_final_state] + 1, sizeof *final);
    assert_true(o != NULL && final != NULL);
    recurrence(x, o, final);
    expect_near(what, got.value[S_o], o, got.count[S_o], BUDGET);
    expect_near(what, got.value[S_final_state], final, got.count[S_final_state], BUDGET);
    expect_finite(&got);
    free(o);
    free(final);
    result_free(&got);
}

/* Two backends agree on everything about x. */
static inline void expect_backends_agree(const char *what, trial *x)
{
    result got = trial_run(ctx[0], x, (how){0});
    x->p.chunk = got.chunk;
    result want = trial_run(ctx[REF], x, (how){.out = DR_F64});
    expect_close(what, &got, &want, BUDGET, NULL);
    x->p.chunk = x->s.p.chunk;
    result_free(&got);
    result_free(&want);
}

static inline dr_tensor f32(float *data, int32_t rank, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return dr_tensor_make(data, DR_F32, rank, a, b, c, d);
}

static inline int open_contexts(void **state)
{
    (void)state;
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = 2;
    for (int b = 0; b < BACKENDS; b++)
        if (dr_context_create(names[b], &options, &ctx[b]) != DR_OK)
            return 1;
    return 0;
}

static inline int close_contexts(void **state)
{
    (void)state;
    for (int b = 0; b < BACKENDS; b++)
        dr_context_destroy(ctx[b]);
    return 0;
}

#endif
