/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops_trial.h - one row operation on random data: the list of its tensors says what is read
 * and what is written, and check_trial compares backend cpu with backend ref, for any element
 * types and strides, with fenced memory, and bit by bit between thread counts.
 */
#ifndef DR_OPS_TRIAL_H
#define DR_OPS_TRIAL_H

#include "test.h"

#include <deltarule/ops.h>

#define BUDGET 1e-6 /* the row operations keep ten times below what the library promises */

enum { THREADS = 3, ARGS = 16 };

static const dr_dtype dtypes[] = {DR_F32, DR_BF16, DR_F16};

static const int32_t thread_counts[THREADS] = {1, 2, 5};
static dr_context *ref, *cpu[THREADS];

static inline int contexts_open(void **state)
{
    (void)state;
    dr_context_options o = DR_CONTEXT_OPTIONS_INIT;
    dr_status s = dr_context_create("ref", NULL, &ref);
    for (int i = 0; i < THREADS && s == DR_OK; i++) {
        o.threads = thread_counts[i];
        s = dr_context_create("cpu", &o, &cpu[i]);
    }
    return s == DR_OK ? 0 : -1;
}

static inline int contexts_close(void **state)
{
    (void)state;
    for (int i = 0; i < THREADS; i++)
        dr_context_destroy(cpu[i]);
    dr_context_destroy(ref);
    return 0;
}

typedef enum role { INPUT, OUTPUT } role;

typedef struct op_arg {
    const char *name;
    size_t at; /* of the dr_tensor in the argument struct */
    role role;
    dr_dtype dtype;
    int32_t rank;
    int64_t shape[DR_MAX_RANK];
    double spread, shift; /* of normal numbers */
    double budget;        /* relative L2 error before the store */
    bool swap;            /* the last two axes change places in memory */
} op_arg;

typedef dr_status op_fn(const dr_context *c, const void *args);

/* One call: args is the argument struct, complete but for its tensors. */
typedef struct trial {
    char what[160];
    op_fn *forward, *backward;
    void *args;
    op_arg arg[ARGS];
    int n;
    layout how;
    tensor in[ARGS];
} trial;

static inline op_arg *trial_add(trial *x, const char *name, size_t at, role as, dr_dtype dtype,
                             int32_t rank, int64_t a, int64_t b, int64_t c, int64_t d)
{
    assert_true(x->n < ARGS);
    x->arg[x->n] = (op_arg){name, at, as, dtype, rank, {a, b, c, d}, 1, 0, BUDGET, false};
    return &x->arg[x->n++];
}

static inline dr_tensor *trial_tensor(const trial *x, int i)
{
    return (dr_tensor *)((char *)x->args + x->arg[i].at);
}

static inline tensor arg_make(rng *r, layout how, const op_arg *a)
{
    int64_t shape[DR_MAX_RANK];
    memcpy(shape, a->shape, sizeof shape);
    const int32_t x = a->rank - 2, y = a->rank - 1;
    if (!a->swap)
        return tensor_make(r, how, a->dtype, a->rank, shape);
    shape[x] = a->shape[y], shape[y] = a->shape[x];
    tensor t = tensor_make(r, how, a->dtype, a->rank, shape);
    int64_t stride = t.view.stride[x];
    t.view.stride[x] = t.view.stride[y], t.view.stride[y] = stride;
    t.view.shape[x] = a->shape[x], t.view.shape[y] = a->shape[y];
    return t;
}

static inline void trial_fill(trial *x, rng *r)
{
    for (int i = 0; i < x->n; i++) {
        const op_arg *a = &x->arg[i];
        if (a->role == OUTPUT)
            continue;
        x->in[i] = arg_make(r, x->how, a);
        int64_t n = view_count(&x->in[i].view);
        double *values = malloc(sizeof *values * (size_t)(n + 1));
        assert_non_null(values);
        for (int64_t e = 0; e < n; e++)
            values[e] = a->shift + a->spread * rng_normal(r);
        view_write(&x->in[i].view, values);
        free(values);
        tensor_remember(&x->in[i]);
        *trial_tensor(x, i) = x->in[i].view;
    }
}

static inline dr_status trial_call(const trial *x, const dr_context *c)
{
    dr_status s = x->forward != NULL ? x->forward(c, x->args) : DR_OK;
    return s == DR_OK && x->backward != NULL ? x->backward(c, x->args) : s;
}

/* What ref makes of the inputs, per output. */
static inline void trial_want(const trial *x, double **want)
{
    for (int i = 0; i < x->n; i++) {
        const op_arg *a = &x->arg[i];
        want[i] = NULL;
        if (a->role == INPUT)
            continue;
        dr_tensor t = dr_tensor_make(NULL, DR_F64, a->rank, a->shape[0], a->shape[1], a->shape[2],
                                     a->shape[3]);
        t.data = want[i] = malloc(sizeof(double) * (size_t)(view_count(&t) + 1));
        assert_non_null(want[i]);
        *trial_tensor(x, i) = t;
    }
    dr_status s = trial_call(x, ref);
    if (s != DR_OK)
        fail_msg("%s: ref: %s", x->what, dr_last_error());
}

static inline void check_trial(trial *x, rng *r)
{
    double *want[ARGS];
    tensor out[ARGS];
    unsigned char *first[ARGS] = {NULL};
    trial_fill(x, r);
    trial_want(x, want);
    const uint64_t layouts = r->state;
    /* More threads than cores wait for one another: every fourth time is enough. */
    const int counts = layouts % 4 == 0 ? THREADS : THREADS - 1;
    for (int c = 0; c < counts; c++) {
        r->state = layouts; /* the same strides every time */
        for (int i = 0; i < x->n; i++)
            if (x->arg[i].role == OUTPUT) {
                out[i] = arg_make(r, x->how, &x->arg[i]);
                tensor_remember(&out[i]);
                *trial_tensor(x, i) = out[i].view;
            }
        dr_status s = trial_call(x, cpu[c]);
        if (s != DR_OK)
            fail_msg("%s: cpu: %s", x->what, dr_last_error());
        for (int i = 0; i < x->n; i++) {
            const op_arg *a = &x->arg[i];
            if (a->role == INPUT) {
                tensor_check(&x->in[i], a->name, false);
                continue;
            }
            double *got = view_read(&out[i].view);
            difference d = compare(got, want[i], view_count(&out[i].view), a->dtype, a->budget, 0);
            if (!d.allowed)
                fail_msg("%s: %s (%s): relative L2 error %.3g, largest %.3g", x->what, a->name,
                         dr_dtype_name(a->dtype), d.l2, d.max);
            free(got);
            if (c == 0) {
                first[i] = malloc(out[i].memory.bytes + 1);
                assert_non_null(first[i]);
                memcpy(first[i], out[i].memory.data, out[i].memory.bytes);
            } else if (memcmp(first[i], out[i].memory.data, out[i].memory.bytes) != 0) {
                fail_msg("%s: %s: other bits with %d threads than with %d", x->what, a->name,
                         thread_counts[c], thread_counts[0]);
            }
            tensor_check(&out[i], a->name, true);
            tensor_free(&out[i]);
        }
    }
    for (int i = 0; i < x->n; i++) {
        if (x->arg[i].role == INPUT)
            tensor_free(&x->in[i]);
        free(want[i]);
        free(first[i]);
    }
}

/* ---- by hand ------------------------------------------------------------------------- */

static inline dr_tensor f32(float *data, int32_t rank, int64_t a, int64_t b, int64_t c)
{
    return dr_tensor_make(data, DR_F32, rank, a, b, c, 0);
}

#define EXPECT(got, ...)                                                      \
    do {                                                                      \
        const float expect_want[] = {__VA_ARGS__};                            \
        assert_int_equal(DR_COUNT(expect_want), DR_COUNT(got));               \
        for (size_t at = 0; at < DR_COUNT(got); at++)                         \
            if ((got)[at] != expect_want[at])                                 \
                fail_msg("%s[%zu]: got %g, expected %g", #got, at, (got)[at], expect_want[at]); \
    } while (0)

#endif
