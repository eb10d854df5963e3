/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base.h - the few idioms every file uses: failing with a sentence, passing a
 * failure on, checked size arithmetic. Depends on libc and the public header.
 *
 * NOTE [The first to know explains]: whoever detects a failure calls dr_fail
 * with the argument, the rule and the value; everyone above passes the status on
 * with DR_TRY and adds nothing.
 */
#ifndef DR_BASE_H
#define DR_BASE_H

#include <deltarule/deltarule.h>

#include <assert.h>
#include <stdbool.h>
#include <string.h>

#define DR_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define DR_INLINE static inline __attribute__((always_inline, unused))
#define DR_NOINLINE __attribute__((noinline))
#define DR_ALIGN 64 /* bytes: a cache line, and the widest vector */

/* Stores the sentence for dr_last_error, logs it, returns status. */
dr_status dr_fail(dr_status status, const char *format, ...) DR_PRINTF(2, 3);
/* How often this thread has called dr_fail: whether code from elsewhere left a sentence. */
uint64_t dr_fail_count(void);

#define DR_TRY(call)                         \
    do {                                     \
        dr_status dr_try_status = (call);    \
        if (dr_try_status != DR_OK)          \
            return dr_try_status;            \
    } while (0)

#define DR_COUNT(array) (sizeof(array) / sizeof(array)[0])

DR_INLINE int64_t dr_min(int64_t a, int64_t b) { return a < b ? a : b; }
DR_INLINE int64_t dr_max(int64_t a, int64_t b) { return a > b ? a : b; }
DR_INLINE int64_t dr_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
DR_INLINE int64_t dr_round_up(int64_t a, int64_t b) { return dr_ceil_div(a, b) * b; }

/* false when the product does not fit. */
DR_INLINE bool dr_mul(int64_t a, int64_t b, int64_t *out) { return !__builtin_mul_overflow(a, b, out); }
DR_INLINE bool dr_add(int64_t a, int64_t b, int64_t *out) { return !__builtin_add_overflow(a, b, out); }

/* The only allocator of the library; tests make it fail. Zeroed, 64-byte aligned. */
void *dr_alloc(size_t bytes);
void dr_free(void *ptr);

#endif
