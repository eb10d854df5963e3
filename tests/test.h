/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test.h - what the test groups share: seeded numbers, memory that ends at an unreadable
 * page and starts behind a canary, tensors with any strides whose gaps hold NaN, and the
 * error budgets by which two results are compared.
 *
 * Budgets. An f32 result may differ from fp64 by 1e-5 of the tensor's own L2 norm, and
 * no single element by more than ten times that of the largest one. A bf16 or f16 result
 * of the same inputs adds the roundoff of its one final store. Inputs are rounded before
 * anybody reads them, so they add nothing.
 */
#ifndef DR_TEST_H
#define DR_TEST_H

#include <deltarule/deltarule.h>

#include "base/half.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- statuses --------------------------------------------------------------------------- */

#define MUST(call)                                                                       \
    do {                                                                                 \
        dr_status must_status = (call);                                                  \
        if (must_status != DR_OK)                                                        \
            fail_msg("%s: %s: %s", #call, dr_status_text(must_status), dr_last_error()); \
    } while (0)

/* The call fails with this status and a sentence that contains the text. */
#define REFUSED(call, expected_status, text)                                                 \
    do {                                                                                     \
        dr_status refused_status = (call);                                                   \
        if (refused_status != (expected_status))                                             \
            fail_msg("%s: expected %s, got %s (%s)", #call, dr_status_text(expected_status), \
                     dr_status_text(refused_status),                                         \
                     refused_status == DR_OK ? "" : dr_last_error());                        \
        if (strstr(dr_last_error(), (text)) == NULL)                                         \
            fail_msg("%s: expected \"%s\" in the sentence \"%s\"", #call, (text),            \
                     dr_last_error());                                                       \
    } while (0)

/* ---- numbers ---------------------------------------------------------------------------- */

typedef struct rng {
    uint64_t state;
} rng;

static inline uint64_t rng_bits(rng *r) /* splitmix64 */
{
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline double rng_uniform(rng *r, double low, double high)
{
    return low + (high - low) * ((double)(rng_bits(r) >> 11) * 0x1p-53);
}

static inline double rng_normal(rng *r)
{
    double u = rng_uniform(r, 1e-300, 1), w = rng_uniform(r, 0, 6.283185307179586);
    return sqrt(-2 * log(u)) * cos(w);
}

static inline int64_t rng_below(rng *r, int64_t n) { return (int64_t)(rng_bits(r) % (uint64_t)n); }

/* One of the entries of a constant array. */
#define RNG_PICK(r, array) ((array)[rng_below((r), (int64_t)DR_COUNT(array))])

/* ---- fenced memory ---------------------------------------------------------------------- */

enum { CANARY = 0xa5, UNWRITTEN = 0xff /* a NaN in every element type */ };

typedef struct fence {
    unsigned char *map, *data;
    size_t body, bytes; /* body: readable bytes at map */
} fence;

/* bytes of memory, filled with `fill`, whose end (rounded up to align) is the end of the
 * readable world. */
static inline fence fence_make(size_t bytes, size_t align, int fill)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t rounded = (bytes + align - 1) / align * align;
    fence f = {.bytes = bytes, .body = (rounded + 64 + page - 1) / page * page};
    f.map = mmap(NULL, f.body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (f.map == MAP_FAILED)
        fail_msg("no address space for %zu bytes", bytes);
    if (mprotect(f.map + f.body, page, PROT_NONE) != 0)
        fail_msg("the page behind %zu bytes cannot be protected", bytes);
    memset(f.map, CANARY, f.body);
    f.data = f.map + f.body - rounded;
    memset(f.data, fill, bytes);
    return f;
}

static inline void fence_check(const fence *f, const char *what)
{
    for (const unsigned char *c = f->map; c < f->map + f->body; c++)
        if ((c < f->data || c >= f->data + f->bytes) && *c != CANARY)
            fail_msg("%s: a byte %td from the start of its %zu bytes was overwritten", what,
                     c - f->data, f->bytes);
}

static inline void fence_free(fence *f)
{
    if (f->map != NULL)
        munmap(f->map, f->body + (size_t)sysconf(_SC_PAGESIZE));
    *f = (fence){0};
}

/* Buffers of exactly the given sizes, filled with `fill`. */
typedef struct fenced_buffers {
    dr_buffers b;
    fence saved, scratch;
} fenced_buffers;

static inline fenced_buffers buffers_make(size_t saved, size_t scratch, int fill)
{
    fenced_buffers f = {DR_BUFFERS_INIT, fence_make(saved, DR_ALIGN, fill),
                        fence_make(scratch, DR_ALIGN, fill)};
    f.b.saved = f.saved.data;
    f.b.saved_bytes = saved;
    f.b.scratch = f.scratch.data;
    f.b.scratch_bytes = scratch;
    return f;
}

static inline void buffers_free(fenced_buffers *f)
{
    fence_check(&f->saved, "buffers.saved");
    fence_check(&f->scratch, "buffers.scratch");
    fence_free(&f->saved);
    fence_free(&f->scratch);
}

/* ---- tensors ---------------------------------------------------------------------------- */

typedef enum layout {
    LAYOUT_DENSE = 0,
    LAYOUT_PADDED,   /* gaps after every axis but a contiguous last one */
    LAYOUT_SPACED,   /* the last axis with a stride of 2 or 3 */
    LAYOUT_TURNED,   /* axes stored in another order */
    LAYOUT_REVERSED, /* negative strides */
    LAYOUT_ANY       /* one of them for each tensor */
} layout;

typedef struct tensor {
    dr_tensor view;
    fence memory; /* map NULL: borrowed */
    unsigned char *before;
} tensor;

typedef void view_fn(void *element, int64_t i, void *arg);

/* Calls fn for every element in row-major order of its indices. */
static inline void view_walk(const dr_tensor *t, view_fn *fn, void *arg)
{
    int64_t n[DR_MAX_RANK] = {1, 1, 1, 1}, s[DR_MAX_RANK] = {0}, i = 0;
    for (int32_t a = 0; a < t->rank; a++) {
        n[DR_MAX_RANK - t->rank + a] = t->shape[a];
        s[DR_MAX_RANK - t->rank + a] = t->stride[a];
    }
    char *data = t->data;
    int64_t size = (int64_t)dr_dtype_size(t->dtype);
    for (int64_t a = 0; a < n[0]; a++)
        for (int64_t b = 0; b < n[1]; b++)
            for (int64_t c = 0; c < n[2]; c++)
                for (int64_t d = 0; d < n[3]; d++)
                    fn(data + (a * s[0] + b * s[1] + c * s[2] + d * s[3]) * size, i++, arg);
}

static inline int64_t view_count(const dr_tensor *t)
{
    int64_t count = 1;
    for (int32_t a = 0; a < t->rank; a++)
        count *= t->shape[a];
    return count;
}

typedef struct view_data {
    double *values;
    dr_dtype dtype;
} view_data;

static inline void view_put_one(void *element, int64_t i, void *arg)
{
    const view_data *d = arg;
    dr_put(element, d->dtype, 0, d->values[i]);
}

static inline void view_get_one(void *element, int64_t i, void *arg)
{
    const view_data *d = arg;
    d->values[i] = dr_get(element, d->dtype, 0);
}

static inline void view_write(const dr_tensor *t, const double *values)
{
    view_data d = {(double *)values, t->dtype};
    view_walk(t, view_put_one, &d);
}

/* The elements as a new array; the caller frees it. */
static inline double *view_read(const dr_tensor *t)
{
    view_data d = {malloc(sizeof(double) * (size_t)(view_count(t) + 1)), t->dtype};
    assert_non_null(d.values);
    view_walk(t, view_get_one, &d);
    return d.values;
}

/* The entries [from, to) of an axis. */
static inline dr_tensor view_cut(dr_tensor t, int32_t axis, int64_t from, int64_t to)
{
    if (t.data != NULL)
        t.data = (char *)t.data + from * t.stride[axis] * (int64_t)dr_dtype_size(t.dtype);
    t.shape[axis] = to - from;
    return t;
}

/* A tensor of this shape in memory of its own, all bytes UNWRITTEN. */
static inline tensor tensor_make(rng *r, layout how, dr_dtype dtype, int32_t rank,
                                 const int64_t *shape)
{
    if (how == LAYOUT_ANY)
        how = (layout)rng_below(r, LAYOUT_ANY);
    int32_t order[DR_MAX_RANK] = {0, 1, 2, 3}; /* slowest first */
    for (int32_t a = rank - 1; how == LAYOUT_TURNED && a > 0; a--) {
        int32_t b = (int32_t)rng_below(r, a + 1), kept = order[a];
        order[a] = order[b];
        order[b] = kept;
    }
    tensor t = {.view = dr_tensor_make(NULL, dtype, rank, 0, 0, 0, 0)};
    int64_t span = how == LAYOUT_SPACED ? 2 + rng_below(r, 2) : 1, first = 0;
    for (int32_t i = rank - 1; i >= 0; i--) {
        int32_t a = order[i];
        t.view.shape[a] = shape[a];
        t.view.stride[a] = span;
        if (how == LAYOUT_REVERSED && rng_below(r, 2)) {
            first += dr_max(shape[a] - 1, 0) * span;
            t.view.stride[a] = -span;
        }
        span = span * dr_max(shape[a], 1) + (how == LAYOUT_DENSE ? 0 : rng_below(r, 4));
    }
    size_t size = dr_dtype_size(dtype);
    t.memory = fence_make((size_t)span * size, size, UNWRITTEN);
    t.view.data = t.memory.data + (size_t)first * size;
    return t;
}

/* Remembers the bytes, for tensor_check. */
static inline void tensor_remember(tensor *t)
{
    t->before = realloc(t->before, t->memory.bytes + 1);
    assert_non_null(t->before);
    memcpy(t->before, t->memory.data, t->memory.bytes);
}

static inline void tensor_unmark_one(void *element, int64_t i, void *arg)
{
    (void)i;
    const tensor *t = arg;
    memcpy(t->before + ((unsigned char *)element - t->memory.data), element,
           dr_dtype_size(t->view.dtype));
}

/* Nothing outside the memory was written; inside it nothing but, of an output, its
 * elements, and of an input not even those. */
static inline void tensor_check(tensor *t, const char *what, bool output)
{
    if (t->memory.map == NULL)
        return;
    fence_check(&t->memory, what);
    if (t->before == NULL)
        return;
    if (output)
        view_walk(&t->view, tensor_unmark_one, t);
    for (size_t i = 0; i < t->memory.bytes; i++)
        if (t->before[i] != t->memory.data[i])
            fail_msg("%s: byte %zu of %zu was overwritten", what, i, t->memory.bytes);
}

static inline void tensor_free(tensor *t)
{
    fence_free(&t->memory);
    free(t->before);
    *t = (tensor){0};
}

/* ---- errors ----------------------------------------------------------------------------- */

/* Largest relative error of one store, and the spacing of the smallest numbers. */
static inline double dtype_roundoff(dr_dtype dtype)
{
    return dtype == DR_BF16 ? 0x1p-8 : dtype == DR_F16 ? 0x1p-11 : 0;
}

static inline double dtype_floor(dr_dtype dtype)
{
    return dtype == DR_F16 ? 0x1p-24 : dtype == DR_F64 ? 1e-300 : 0x1p-126;
}

typedef struct difference {
    double l2, max; /* relative to the norm and the largest element of what is wanted, or to
                       the size at which the element type runs out of small numbers */
    bool allowed;
} difference;

static inline double norm_of(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += isfinite(x[i]) ? x[i] * x[i] : 0;
    return sqrt(sum);
}

/* got, stored as dtype, against want; budget is the relative L2 error before the store. base is
 * the norm of the terms where want is a sum over all tokens, whose own norm may cancel; else 0. */
static inline difference compare(const double *got, const double *want, int64_t n, dr_dtype dtype,
                                 double budget, double base)
{
    double error = 0, norm = fmax(norm_of(want, n), base), worst = 0, largest = base;
    for (int64_t i = 0; i < n; i++) {
        double e = fabs(got[i] - want[i]);
        if (!isfinite(got[i]) || !isfinite(want[i]))
            e = got[i] == want[i] ? 0 : INFINITY;
        error += e * e;
        worst = fmax(worst, e);
        largest = fmax(largest, isfinite(want[i]) ? fabs(want[i]) : 0);
    }
    error = sqrt(error);
    double u = dtype_roundoff(dtype), low = dtype_floor(dtype), limit = budget + u;
    difference d = {error / (norm + low * sqrt((double)(n + 1)) / limit),
                    worst / (largest + low / (limit + 9 * budget)), false};
    d.allowed = d.l2 <= limit && d.max <= limit + 9 * budget; /* false for NaN */
    return d;
}

/* Plain arrays against each other; for the small tests. base: see compare. */
static inline void expect_near_to(const char *what, const double *got, const double *want,
                                  int64_t n, double budget, double base)
{
    difference d = compare(got, want, n, DR_F32, budget, base);
    if (!d.allowed)
        fail_msg("%s: relative L2 error %.3g, largest %.3g, allowed %.3g", what, d.l2, d.max,
                 budget);
}

static inline void expect_near(const char *what, const double *got, const double *want, int64_t n,
                               double budget)
{
    expect_near_to(what, got, want, n, budget, 0);
}

#endif
