/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tensor.c - every rule about one tensor argument, written once: dtype, rank, shape,
 * strides that stay inside 64 bits, outputs whose elements do not share addresses.
 */
#include "core/core.h"

#include "base/half.h"

#include <stdio.h>

static void shape_text(char *text, size_t size, const int64_t *shape, int32_t rank)
{
    size_t at = 0;
    at += (size_t)snprintf(text, size, "[");
    for (int32_t i = 0; i < rank && i < DR_MAX_RANK && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (at < size)
        snprintf(text + at, size - at, "]");
}

bool dr_tensor_empty(const dr_tensor *t)
{
    for (int32_t i = 0; i < t->rank; i++)
        if (t->shape[i] == 0)
            return true;
    return false;
}

static bool expects_nothing(const dr_expect *want)
{
    for (int32_t i = 0; i < want->rank; i++)
        if (want->shape[i] == 0)
            return true;
    return false;
}

/* dtype and rank only: what the shape readers below share. */
static dr_status check_kind(const dr_context *ctx, const dr_tensor *t, const char *name)
{
    if (dr_dtype_size(t->dtype) == 0)
        return dr_fail(DR_ERR_SHAPE, "%s: dtype must be one of f32, bf16, f16, f64, got %d", name,
                       (int)t->dtype);
    if (!ctx->backend->takes(ctx->dev, t->dtype))
        return dr_fail(DR_ERR_SUPPORT, "%s: backend %s does not take dtype %s", name,
                       ctx->backend->name, dr_dtype_name(t->dtype));
    if (t->rank < 1 || t->rank > DR_MAX_RANK)
        return dr_fail(DR_ERR_SHAPE, "%s: rank must be 1 to %d, got %d", name, DR_MAX_RANK, t->rank);
    if ((uintptr_t)t->data % dr_dtype_size(t->dtype) != 0)
        return dr_fail(DR_ERR_ARG, "%s: data must be aligned to its element (%zu bytes), got %p",
                       name, dr_dtype_size(t->dtype), t->data);
    return DR_OK;
}

static int64_t magnitude(int64_t stride) { return stride < 0 ? -stride : stride; } /* not INT64_MIN */

/* Axes of an output must nest: each stride beyond the reach of all smaller ones. Any slice,
 * permutation or padding of a dense array does. */
static dr_status check_distinct(const dr_tensor *t, const char *name)
{
    bool used[DR_MAX_RANK] = {false};
    int64_t reach = 0;
    for (int32_t round = 0; round < t->rank; round++) {
        int32_t next = -1;
        for (int32_t i = 0; i < t->rank; i++)
            if (!used[i] && t->shape[i] > 1 &&
                (next < 0 || magnitude(t->stride[i]) < magnitude(t->stride[next])))
                next = i;
        if (next < 0)
            break;
        used[next] = true;
        if (magnitude(t->stride[next]) <= reach)
            return dr_fail(DR_ERR_SHAPE, "%s: an output needs distinct addresses, got stride[%d] = %lld "
                           "within the reach of the smaller strides (%lld)", name, next,
                           (long long)t->stride[next], (long long)reach);
        reach += (t->shape[next] - 1) * magnitude(t->stride[next]);
    }
    return DR_OK;
}

/* Offsets in bytes must fit 63 bits; outputs must not fold two elements into one. */
static dr_status check_strides(const dr_tensor *t, const char *name, bool output)
{
    int64_t reach = 0;
    for (int32_t i = 0; i < t->rank; i++) {
        int64_t extent;
        if (t->shape[i] <= 1)
            continue;
        int64_t stride = t->stride[i] == INT64_MIN ? INT64_MAX : magnitude(t->stride[i]);
        if (!dr_mul(t->shape[i] - 1, stride, &extent) || !dr_mul(extent, 8, &extent) ||
            !dr_add(reach, extent, &reach))
            return dr_fail(DR_ERR_SHAPE, "%s: shape[%d] x stride[%d] must fit 64 bits, got %lld x %lld",
                           name, i, i, (long long)t->shape[i], (long long)t->stride[i]);
    }
    return output && !dr_tensor_empty(t) ? check_distinct(t, name) : DR_OK;
}

dr_status dr_tensor_check(const dr_context *ctx, const dr_tensor *t, const dr_expect *want,
                          dr_tensor *out)
{
    *out = (dr_tensor)DR_TENSOR_NONE;
    if (t->data == NULL) {
        if (want->required && !expects_nothing(want))
            return dr_fail(DR_ERR_ARG, "%s: must be given", want->name);
        return DR_OK;
    }
    DR_TRY(check_kind(ctx, t, want->name));
    int32_t skip = want->drop_batch && want->shape[0] == 1 && t->rank == want->rank - 1 ? 1 : 0;
    bool fits = t->rank == want->rank - skip;
    for (int32_t i = 0; fits && i < t->rank; i++)
        fits = t->shape[i] == want->shape[i + skip];
    if (!fits) {
        char expected[96], got[96];
        shape_text(expected, sizeof expected, want->shape, want->rank);
        shape_text(got, sizeof got, t->shape, t->rank);
        return dr_fail(DR_ERR_SHAPE, "%s: expected %s = %s, got %s", want->name, want->letters,
                       expected, got);
    }
    DR_TRY(check_strides(t, want->name, want->output));
    out->data = t->data;
    out->dtype = t->dtype;
    out->rank = want->rank;
    for (int32_t i = 0; i < want->rank; i++) {
        out->shape[i] = want->shape[i];
        out->stride[i] = i < skip ? 0 : t->stride[i - skip];
        if (out->shape[i] <= 1) /* ignored by contract; any value would do */
            out->stride[i] = 0;
    }
    return DR_OK;
}

dr_status dr_vector_check(const dr_context *ctx, const dr_tensor *t, const dr_expect *want,
                          dr_tensor *out)
{
    *out = (dr_tensor)DR_TENSOR_NONE;
    if (t->data == NULL) {
        if (want->required)
            return dr_fail(DR_ERR_ARG, "%s: must be given", want->name);
        return DR_OK;
    }
    DR_TRY(check_kind(ctx, t, want->name));
    int64_t n = want->shape[0], stride = 0, all = 1;
    bool fits = true;
    for (int32_t i = 0; i < t->rank; i++) {
        fits = fits && t->shape[i] >= 1 && dr_mul(all, t->shape[i], &all) &&
               (t->shape[i] == 1 || t->shape[i] == n);
        if (t->shape[i] == n && n > 1)
            stride = t->stride[i];
    }
    if (!fits || all != n) {
        char got[96];
        shape_text(got, sizeof got, t->shape, t->rank);
        return dr_fail(DR_ERR_SHAPE, "%s: expected %s = [%lld], got %s", want->name, want->letters,
                       (long long)n, got);
    }
    DR_TRY(check_strides(t, want->name, want->output));
    out->data = t->data;
    out->dtype = t->dtype;
    out->rank = 1;
    out->shape[0] = n;
    out->stride[0] = stride;
    return DR_OK;
}

dr_status dr_bias_check(const dr_context *ctx, const dr_tensor *t, const char *name, bool output,
                        int64_t HV, int64_t K, dr_tensor *out)
{
    if (K > 1 && t->data != NULL && t->rank == 2 && t->shape[0] == HV && t->shape[1] == K) {
        const dr_expect want = {name, "[HV,K]", 2, {HV, K, 0, 0}, false, false, output};
        return dr_tensor_check(ctx, t, &want, out);
    }
    const dr_expect want = {name, K > 1 ? "[HV*K]" : "[HV]", 1, {HV * K, 0, 0, 0}, false, false,
                            output};
    DR_TRY(dr_vector_check(ctx, t, &want, out));
    if (out->data == NULL)
        return DR_OK;
    out->rank = 2;
    out->shape[0] = HV;
    out->shape[1] = K;
    out->stride[1] = K > 1 ? out->stride[0] : 0;
    out->stride[0] *= K;
    return DR_OK;
}

dr_status dr_tensor_absent(const dr_tensor *t, const char *name, const char *rule)
{
    if (t->data == NULL)
        return DR_OK;
    return dr_fail(DR_ERR_ARG, "%s: must be absent %s", name, rule);
}

void dr_tensor_widen(dr_tensor *t)
{
    if (t->data == NULL)
        return;
    t->shape[t->rank] = 1;
    t->stride[t->rank] = 0;
    t->rank++;
}

void dr_tensor_lead(dr_tensor *t)
{
    if (t->data == NULL)
        return;
    int32_t lead = DR_MAX_RANK - t->rank;
    for (int32_t i = DR_MAX_RANK - 1; i >= 0; i--) {
        t->shape[i] = i >= lead ? t->shape[i - lead] : 1;
        t->stride[i] = i >= lead ? t->stride[i - lead] : 0;
    }
    t->rank = DR_MAX_RANK;
}

void dr_tensor_zero_tail(const dr_tensor *t, int64_t from)
{
    if (t->data == NULL)
        return;
    int64_t n2 = t->rank > 2 ? t->shape[2] : 1, n3 = t->rank > 3 ? t->shape[3] : 1;
    for (int64_t b = 0; b < t->shape[0]; b++)
        for (int64_t i = from; i < t->shape[1]; i++)
            for (int64_t j = 0; j < n2; j++)
                for (int64_t k = 0; k < n3; k++)
                    dr_put(dr_at(t, b, i, j, k), t->dtype, 0, 0);
}

/* Sinks order[i] in a heap of n: a sort without recursion or allocation. */
static void sink(int32_t *order, int64_t i, int64_t n)
{
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && order[child + 1] > order[child])
            child++;
        if (order[i] >= order[child])
            return;
        int32_t x = order[i];
        order[i] = order[child];
        order[child] = x;
    }
}

dr_status dr_state_index_check(const int32_t *index, int64_t n, int64_t slots, int32_t *order)
{
    if (index == NULL)
        return DR_OK;
    for (int64_t i = 0; i < n; i++) {
        if (index[i] < -1 || index[i] >= slots)
            return dr_fail(DR_ERR_ARG, "state_index[%lld]: must be -1 or a slot below %lld, got %d",
                           (long long)i, (long long)slots, index[i]);
        order[i] = index[i];
    }
    for (int64_t i = n / 2; i-- > 0;)
        sink(order, i, n);
    for (int64_t i = n; i-- > 1;) {
        int32_t x = order[0];
        order[0] = order[i];
        order[i] = x;
        sink(order, 0, i);
    }
    for (int64_t i = 1; i < n; i++)
        if (order[i] == order[i - 1] && order[i] >= 0)
            return dr_fail(DR_ERR_ARG, "state_index: slots of one call must differ, got slot %d twice",
                           order[i]);
    return DR_OK;
}
