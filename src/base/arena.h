/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena.h - one function lays out a buffer and says how large it must be.
 *
 * The same code runs twice: with an empty arena (base NULL) DR_TAKE only counts,
 * with a real one it carves. Measured and carved sizes therefore cannot disagree.
 * Under AddressSanitizer a poisoned red zone follows every block.
 */
#ifndef DR_ARENA_H
#define DR_ARENA_H

#include "base/base.h"

#if defined(__SANITIZE_ADDRESS__)
#define DR_ARENA_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DR_ARENA_ASAN 1
#endif
#endif
#ifdef DR_ARENA_ASAN
#include <sanitizer/asan_interface.h>
#define DR_RED_ZONE 64
#else
#define DR_RED_ZONE 0
#endif

typedef struct dr_arena {
    char *base;     /* NULL: measure */
    size_t size;    /* bytes at base */
    size_t used;
    bool overflow;  /* a size did not fit into size_t, or into the buffer */
} dr_arena;

DR_INLINE void *dr_arena_take(dr_arena *a, int64_t count, size_t item)
{
    size_t bytes;
    if (count < 0 || __builtin_mul_overflow((size_t)count, item, &bytes) ||
        bytes > (size_t)INT64_MAX / 2) {
        a->overflow = true;
        return NULL;
    }
    size_t padded = (bytes + DR_ALIGN - 1) / DR_ALIGN * DR_ALIGN + DR_RED_ZONE;
    size_t at = a->used;
    if (__builtin_add_overflow(a->used, padded, &a->used) || a->used > (size_t)INT64_MAX / 2) {
        a->overflow = true;
        return NULL;
    }
    if (a->base == NULL)
        return NULL;
    if (a->used > a->size) {
        a->overflow = true;
        return NULL;
    }
#ifdef DR_ARENA_ASAN
    ASAN_UNPOISON_MEMORY_REGION(a->base + at, bytes);
    ASAN_POISON_MEMORY_REGION(a->base + at + bytes, padded - bytes);
#endif
    return a->base + at;
}

/* The allocation idiom: float *w = DR_TAKE(&p->scratch, float, rows, cols); the
 * last argument may be 1. */
#define DR_TAKE(arena, type, n, m) \
    ((type *)dr_arena_take_nm((arena), (int64_t)(n), (int64_t)(m), sizeof(type)))

DR_INLINE void *dr_arena_take_nm(dr_arena *a, int64_t n, int64_t m, size_t item)
{
    int64_t count;
    if (n < 0 || m < 0 || !dr_mul(n, m, &count)) {
        a->overflow = true;
        return NULL;
    }
    return dr_arena_take(a, count, item);
}

/* Gives a caller's buffer back as it was (lifts the red zones). */
DR_INLINE void dr_arena_done(dr_arena *a)
{
#ifdef DR_ARENA_ASAN
    if (a->base != NULL)
        ASAN_UNPOISON_MEMORY_REGION(a->base, a->size);
#else
    (void)a;
#endif
}

#endif
