/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_kern.h - what the checks of CPU kernels share: fenced memory, hostile inputs and
 * error bounds that are known beforehand.
 *
 * A check is one function per row of the kernel table, registered by name in a table that ends
 * with {NULL, NULL}: kernel_checks (test_kernels.c), kernel_checks_grad (check_kern_grad.h) and
 * kernel_checks_rows (check_kern_rows.h). It runs the kernel of e->kern against a plain computation
 * in double on memory from fence(), and reports every element to expect(). A row of the table
 * without a check fails the test.
 */
#ifndef CHECK_KERN_H
#define CHECK_KERN_H

#include "base/base.h"
#include "base/half.h"
#include "cpu/kern.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct check_block {
    char *map, *user;
    size_t bytes, user_bytes;
} check_block;

typedef struct check_env {
    const dr_kern *kern;
    const char *row; /* name of the kernel under test */
    uint64_t state;  /* of the random numbers */
    int64_t failures, compared;
    double worst;    /* largest error in units of its bound */
    check_block blocks[64];
    int n_blocks;
} check_env;

typedef void check_fn(check_env *e);
typedef struct check_row {
    const char *name;
    check_fn *run;
} check_row;

/* ---- random numbers ---- */

static inline uint64_t draw(check_env *e)
{
    uint64_t z = e->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static inline double uniform(check_env *e) { return (double)(draw(e) >> 11) * 0x1p-53; }
static inline int draw_int(check_env *e, int low, int high) /* in [low, high] */
{
    return low + (int)(draw(e) % (uint64_t)(high - low + 1));
}

/* Kinds of data; a check goes through all of them. */
enum { FILL_RANDOM, FILL_ZERO, FILL_EQUAL, FILL_CANCEL, FILL_DENORMAL, FILL_KINDS };

static inline float fill_one(check_env *e, int kind, int64_t i)
{
    double u = 2 * uniform(e) - 1;
    switch (kind) {
    case FILL_ZERO: return 0;
    case FILL_EQUAL: return 0.75f;
    case FILL_CANCEL: return (float)((i & 1 ? -1 : 1) * (1 + 1e-6 * u));
    case FILL_DENORMAL: return (float)(u * 1e-41);
    default: return (float)u;
    }
}
static inline void fill(check_env *e, int kind, float *p, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        p[i] = fill_one(e, kind, i);
}
/* rows x cols inside rows of ld floats; what lies between is NaN (or zero: padding). */
static inline void fill_matrix(check_env *e, int kind, float *p, int64_t rows, int64_t cols,
                               int64_t ld, float padding)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < ld; j++)
            p[i * ld + j] = j < cols ? fill_one(e, kind, i + j) : padding;
}
/* ln decays: weak, middling, or a mix with 0, -20 and -1e30. */
static inline float fill_gate(check_env *e, int kind)
{
    double u = uniform(e);
    switch (kind % 3) {
    case 0: return (float)(-1e-3 * u);
    case 1: return (float)(-2 * u);
    default: return u < .3 ? 0.0f : u < .4 ? -20.0f : u < .45 ? -1e30f : (float)(-u);
    }
}

/* ---- memory ---- */

/* bytes that end at an unreadable page and start behind a canary, all 0xff (NaN) at first.
 * Aligned as far as its size is: 64 bytes when bytes is a multiple of 64. */
static inline void *fence_bytes(check_env *e, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (bytes + 64 + page - 1) / page * page;
    if (e->n_blocks == (int)DR_COUNT(e->blocks))
        abort();
    char *map = mmap(NULL, body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED || mprotect(map + body, page, PROT_NONE) != 0)
        abort();
    memset(map, 0xff, body);
    check_block *b = &e->blocks[e->n_blocks++];
    *b = (check_block){map, map + body - bytes, body + page, bytes};
    return b->user;
}
static inline float *fence(check_env *e, int64_t floats)
{
    return fence_bytes(e, (size_t)floats * sizeof(float));
}
static inline double *fence_double(check_env *e, int64_t n)
{
    return fence_bytes(e, (size_t)n * sizeof(double));
}

static inline void complain(check_env *e, const char *what, int64_t i, double got, double want,
                            double bound)
{
    if (++e->failures <= 10)
        fprintf(stderr, "%s %s: %s[%lld]: got %.9g, expected %.9g +- %.3g\n", e->kern->isa, e->row,
                what, (long long)i, got, want, bound);
}

/* Checks the canaries of all blocks and gives them back. */
static inline void fence_done(check_env *e)
{
    while (e->n_blocks > 0) {
        check_block *b = &e->blocks[--e->n_blocks];
        for (char *p = b->map; p < b->user; p++)
            if (*p != (char)0xff) {
                complain(e, "canary before a block", p - b->user, *p, -1, 0);
                break;
            }
        munmap(b->map, b->bytes);
    }
}

/* ---- bounds ---- */

/* got within bound of want; NaN and Inf must agree exactly. */
static inline void expect(check_env *e, const char *what, int64_t i, double got, double want,
                          double bound)
{
    e->compared++;
    if (isnan(want) ? isnan(got) : isinf(want) ? got == want : fabs(got - want) <= bound) {
        if (bound > 0 && isfinite(want))
            e->worst = fmax(e->worst, fabs(got - want) / bound);
        return;
    }
    complain(e, what, i, got, want, bound);
}

/* Bound of a sum of n products whose absolute values sum to abs, c such sums deep. FLT_MIN
 * allows for products that vanish below the normal range. */
static inline double sum_bound(double c, int64_t n, double abs)
{
    return c * (double)(n + 2) * (FLT_EPSILON / 2) * abs + (double)(n + 2) * FLT_MIN;
}
/* Bound of a pointwise function: u units in the last place, and the normal range. */
static inline double ulp_bound(double u, double want)
{
    return u * FLT_EPSILON * fabs(want) + 1.5 * FLT_MIN;
}
/* Elements that must still hold what fence() put there. */
static inline void expect_untouched(check_env *e, const char *what, const void *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (((const unsigned char *)p)[i] != 0xff) {
            complain(e, what, (int64_t)i, ((const unsigned char *)p)[i], 0xff, 0);
            return;
        }
}

#endif
