/* SPDX-License-Identifier: Apache-2.0 */
/*
 * alloc_watch.h - the library's allocations counted, watched and made to fail. A test that
 * includes it is linked with --wrap for each name below (tests/CMakeLists.txt), so that
 * every call from the library's objects comes here first.
 */
#ifndef DR_ALLOC_WATCH_H
#define DR_ALLOC_WATCH_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

static struct {
    atomic_long live;    /* blocks of dr_alloc not yet freed */
    atomic_long fail_at; /* the n-th dr_alloc from now returns NULL; 0: none does */
    atomic_long calls;   /* of any allocator, by the library or by the test */
} allocs;

void *__real_dr_alloc(size_t bytes);
void *__wrap_dr_alloc(size_t bytes);
void __real_dr_free(void *ptr);
void __wrap_dr_free(void *ptr);
void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__real_realloc(void *ptr, size_t bytes);
void *__wrap_realloc(void *ptr, size_t bytes);
void *__real_aligned_alloc(size_t align, size_t bytes);
void *__wrap_aligned_alloc(size_t align, size_t bytes);
int __real_posix_memalign(void **out, size_t align, size_t bytes);
int __wrap_posix_memalign(void **out, size_t align, size_t bytes);

void *__wrap_dr_alloc(size_t bytes)
{
    allocs.calls++;
    if (allocs.fail_at > 0 && --allocs.fail_at == 0)
        return NULL;
    void *ptr = __real_dr_alloc(bytes);
    if (ptr != NULL)
        allocs.live++;
    return ptr;
}

void __wrap_dr_free(void *ptr)
{
    if (ptr != NULL)
        allocs.live--;
    __real_dr_free(ptr);
}

void *__wrap_malloc(size_t bytes)
{
    allocs.calls++;
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t n, size_t bytes)
{
    allocs.calls++;
    return __real_calloc(n, bytes);
}

void *__wrap_realloc(void *ptr, size_t bytes)
{
    allocs.calls++;
    return __real_realloc(ptr, bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t bytes)
{
    allocs.calls++;
    return __real_aligned_alloc(align, bytes);
}

int __wrap_posix_memalign(void **out, size_t align, size_t bytes)
{
    allocs.calls++;
    return __real_posix_memalign(out, align, bytes);
}

#endif
