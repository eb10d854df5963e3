/* SPDX-License-Identifier: Apache-2.0 */
/*
 * status.c - texts of status values, the sentence of the last failure (one per
 * thread), the log callback, names of element types, and the library's allocator.
 */
#include "base/base.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static _Thread_local char last_error[512];
static _Thread_local uint64_t fail_count;

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static dr_log_fn *log_fn;
static void *log_user;

const char *dr_status_text(dr_status status)
{
    static const struct {
        dr_status status;
        const char *text;
    } table[] = {
#define ROW(name, value, text) {DR_##name, text},
        DR_STATUS_LIST(ROW)
#undef ROW
    };
    for (size_t i = 0; i < DR_COUNT(table); i++)
        if (table[i].status == status)
            return table[i].text;
    return "unknown status";
}

const char *dr_last_error(void) { return last_error; }

int dr_version(void) { return DR_VERSION; }

void dr_set_log(dr_log_fn *fn, void *user)
{
    pthread_mutex_lock(&log_lock);
    log_fn = fn;
    log_user = user;
    pthread_mutex_unlock(&log_lock);
}

dr_status dr_fail(dr_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    fail_count++;
    pthread_mutex_lock(&log_lock);
    dr_log_fn *fn = log_fn;
    void *user = log_user;
    pthread_mutex_unlock(&log_lock);
    if (fn != NULL)
        fn(user, status, last_error);
    return status;
}

uint64_t dr_fail_count(void) { return fail_count; }

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {
    [DR_F32] = {"f32", 4},
    [DR_BF16] = {"bf16", 2},
    [DR_F16] = {"f16", 2},
    [DR_F64] = {"f64", 8},
};

static bool dtype_known(dr_dtype dtype)
{
    return (int)dtype > 0 && (size_t)dtype < DR_COUNT(dtypes);
}

const char *dr_dtype_name(dr_dtype dtype) { return dtype_known(dtype) ? dtypes[dtype].name : "?"; }

size_t dr_dtype_size(dr_dtype dtype) { return dtype_known(dtype) ? dtypes[dtype].size : 0; }

dr_tensor dr_tensor_make(void *data, dr_dtype dtype, int32_t rank, int64_t n0, int64_t n1,
                         int64_t n2, int64_t n3)
{
    const int64_t shape[DR_MAX_RANK] = {n0, n1, n2, n3};
    dr_tensor t = DR_TENSOR_NONE;
    t.data = data;
    t.dtype = dtype;
    t.rank = rank;
    int64_t stride = 1;
    for (int32_t i = rank < DR_MAX_RANK ? rank - 1 : DR_MAX_RANK - 1; i >= 0; i--) {
        t.shape[i] = shape[i];
        t.stride[i] = stride;
        stride *= dr_max(shape[i], 1);
    }
    return t;
}

/* calloc and not aligned_alloc: large blocks come as pages that are zero until they are written, so
 * that memory which a plan provides for and a trip does not use costs nothing. What calloc gave is
 * kept in front of the aligned block. */
void *dr_alloc(size_t bytes)
{
    char *base = bytes > (size_t)INT64_MAX / 2 ? NULL : calloc(1, bytes + 2 * DR_ALIGN);
    if (base == NULL)
        return NULL;
    char *ptr = base + DR_ALIGN + (DR_ALIGN - (uintptr_t)base % DR_ALIGN) % DR_ALIGN;
    ((void **)ptr)[-1] = base;
    return ptr;
}

void dr_free(void *ptr)
{
    if (ptr != NULL)
        free(((void **)ptr)[-1]);
}
