/* SPDX-License-Identifier: Apache-2.0 */
/*
 * finite.h - gradients of backend ref against differences of its own forward, in fp64
 * through the public calls. What holds here makes ref's adjoint the yardstick of the
 * other backends.
 *
 * A case is a scalar loss, the sum of fixed weights times outputs, and a list of leaves:
 * an input array, and the gradient that the library wrote for it. The weights are what
 * the adjoint was given as gradients of the outputs.
 */
#ifndef DR_FINITE_H
#define DR_FINITE_H

#include "test.h"

#define ALLOWED 1e-7

static dr_context *ctx;

/* ---- differences -------------------------------------------------------------------- */

typedef struct leaf {
    const char *name;
    double *x;
    const double *dx;
    int64_t n;
} leaf;

typedef double loss_fn(void *op);

static inline double loss_at(loss_fn *loss, void *op, double *x, double shift)
{
    double kept = *x;
    *x = kept + shift;
    double value = loss(op);
    *x = kept;
    return value;
}

/* Five points: the error falls with the fourth power of the step. */
static inline double difference_at(loss_fn *loss, void *op, double *x)
{
    const double h = 1e-3;
    double near = loss_at(loss, op, x, h) - loss_at(loss, op, x, -h);
    double far = loss_at(loss, op, x, 2 * h) - loss_at(loss, op, x, -2 * h);
    return (8 * near - far) / (12 * h);
}

static inline void check_leaves(const char *what, const leaf *leaves, size_t n_leaves,
                                loss_fn *loss, void *op)
{
    for (size_t i = 0; i < n_leaves; i++) {
        const leaf *l = &leaves[i];
        double error = 0, norm = 0;
        for (int64_t e = 0; l->x != NULL && e < l->n; e++) {
            double want = difference_at(loss, op, &l->x[e]), d = l->dx[e] - want;
            error += d * d;
            norm += want * want;
        }
        if (!(sqrt(error) <= ALLOWED * sqrt(norm) + 1e-11))
            fail_msg("%s: %s: error %.3g of a gradient of norm %.3g", what, l->name, sqrt(error),
                     sqrt(norm));
    }
}

/* n numbers; the arrays of a case are freed together by arrays_free. */
static double *arrays[64];
static size_t n_arrays;

static inline double *array(int64_t n, double fill)
{
    double *x = malloc(sizeof *x * (size_t)(n + 1));
    assert_non_null(x);
    assert_true(n_arrays < DR_COUNT(arrays));
    arrays[n_arrays++] = x;
    for (int64_t i = 0; i < n; i++)
        x[i] = fill;
    return x;
}

static inline double *normals(rng *r, int64_t n)
{
    double *x = array(n, 0);
    for (int64_t i = 0; i < n; i++)
        x[i] = rng_normal(r);
    return x;
}

static inline double *uniforms(rng *r, int64_t n, double low, double high)
{
    double *x = array(n, 0);
    for (int64_t i = 0; i < n; i++)
        x[i] = rng_uniform(r, low, high);
    return x;
}

static inline double *unwritten(int64_t n) { return array(n, NAN); }

static inline void arrays_free(void)
{
    while (n_arrays > 0)
        free(arrays[--n_arrays]);
}

static inline double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; a != NULL && b != NULL && i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static inline int64_t count(const dr_tensor *t) { return view_count(t); }

/* Loss of one output: its weights are the gradient that the adjoint is given. */
static inline double share(const dr_tensor *out, const dr_tensor *d_out)
{
    return out->data && d_out->data ? dot(out->data, d_out->data, count(out)) : 0;
}

static inline dr_tensor f64(double *x, int32_t rank, int64_t a, int64_t b, int64_t c, int64_t d)
{
    return dr_tensor_make(x, DR_F64, rank, a, b, c, d);
}

static inline leaf leaf_of(const char *name, const dr_tensor *x, const dr_tensor *dx)
{
    return (leaf){name, dx->data ? x->data : NULL, dx->data, count(x)};
}

/* A gradient tensor for x, unwritten. */
static inline dr_tensor gradient_of(const dr_tensor *x)
{
    dr_tensor d = *x;
    if (x->data != NULL)
        d.data = unwritten(count(x));
    return d;
}

/* ---- what the cases share ------------------------------------------------------------ */

enum { T = 9, H = 2, HV = 4, K = 3, V = 2 };
static const int64_t packed_offsets[] = {0, 0, 4, 5, 5, 8}; /* two empty, one token unowned */
enum { SEQUENCES = DR_COUNT(packed_offsets) - 1 };

typedef struct gate_row {
    const char *name;
    dr_gate gate;
    bool a_log, dt_bias;
} gate_row;
static const gate_row gates[] = {
    {"none", DR_GATE_NONE, false, false},
    {"log", DR_GATE_LOG, false, false},
    {"factor", DR_GATE_FACTOR, false, false},
    {"softplus", DR_GATE_SOFTPLUS, true, true},
    {"softplus, no bias", DR_GATE_SOFTPLUS, true, false},
    {"lower bound", DR_GATE_LOWER_BOUND, true, true},
    {"lower bound, no a_log", DR_GATE_LOWER_BOUND, false, true},
};

static inline int finite_setup(void **state)
{
    (void)state;
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = 1; /* the cases are tiny */
    return dr_context_create("ref", &options, &ctx) == DR_OK ? 0 : -1;
}

static inline int finite_teardown(void **state)
{
    (void)state;
    dr_context_destroy(ctx);
    return 0;
}

#endif
