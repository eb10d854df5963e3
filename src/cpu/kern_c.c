/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern_c.c - the vector vocabulary without an instruction set, then every kernel: runs
 * anywhere, and says what each word of the vocabulary means. Four floats are the compiler's own
 * vector type (gcc and clang alike), which it maps to whatever the machine has; arrays in its place
 * cost minutes of compile time.
 *
 * The words that are not self-evident:
 *   v_max             a where a > b, else b: the second operand where either is NaN
 *   v_load_part(p, n), v_store_part(p, n, x)   touch only the first n lanes; others load as 0
 *   v_keep(x, n)      lanes from n on become 0; n may be negative or above V_LANES
 *   v_where_less(a, b, x, y)   x where a < b, else y
 *   v_round           to the nearest integer, ties to even
 *   v_scale2(x, n)    x * 2^n by adding to the exponent; n integral, the result normal or next to
 *                     it; unspecified for other n, but never a trap
 *   v_split2(x, &n)   x = m * 2^n with m in [sqrt(1/2), sqrt(2)), for normal x > 0
 *   v_transpose(r)    r as a V_LANES x V_LANES matrix
 *   v_prefetch2       into the second level of cache
 */
#include "cpu/kern.h"
#include "base/half.h"

#define V_LANES 4
#define NR 16
#define V_MR 4
#define V_CALL static inline __attribute__((always_inline, unused))

typedef float v_f __attribute__((vector_size(4 * V_LANES)));
typedef int32_t v_i __attribute__((vector_size(4 * V_LANES)));
typedef uint32_t v_u __attribute__((vector_size(4 * V_LANES)));

#define V_EACH(expression)                \
    v_f y = {0};                          \
    for (int i = 0; i < V_LANES; i++)     \
        y[i] = (expression);              \
    return y

V_CALL v_f v_load(const float *p)
{
    v_f x;
    memcpy(&x, p, sizeof x);
    return x;
}
V_CALL v_f v_loadu(const float *p) { return v_load(p); }
V_CALL void v_store(float *p, v_f x) { memcpy(p, &x, sizeof x); }
V_CALL void v_storeu(float *p, v_f x) { v_store(p, x); }
V_CALL v_f v_set(float x) { return (v_f){x, x, x, x}; }
V_CALL v_f v_zero(void) { return v_set(0); }
V_CALL v_f v_add(v_f a, v_f b) { return a + b; }
V_CALL v_f v_sub(v_f a, v_f b) { return a - b; }
V_CALL v_f v_mul(v_f a, v_f b) { return a * b; }
V_CALL v_f v_div(v_f a, v_f b) { return a / b; }
V_CALL v_f v_fma(v_f a, v_f b, v_f c) { return a * b + c; }
V_CALL v_f v_fnma(v_f a, v_f b, v_f c) { return c - a * b; }
V_CALL v_f v_neg(v_f a) { return -a; }
V_CALL v_f v_abs(v_f a) { return (v_f)((v_i)a & 0x7fffffff); }

V_CALL v_f v_select(v_i mask, v_f x, v_f y) { return (v_f)((mask & (v_i)x) | (~mask & (v_i)y)); }
V_CALL v_f v_max(v_f a, v_f b) { return v_select(a > b, a, b); }
V_CALL v_f v_where_less(v_f a, v_f b, v_f x, v_f y) { return v_select(a < b, x, y); }
V_CALL v_f v_keep(v_f x, int n) { return v_select((v_i){0, 1, 2, 3} < n, x, v_zero()); }

V_CALL float v_sum(v_f a) { return (a[0] + a[2]) + (a[1] + a[3]); }

V_CALL v_f v_load_part(const float *p, int n) { V_EACH(i < n ? p[i] : 0); }
V_CALL void v_store_part(float *p, int n, v_f x)
{
    for (int i = 0; i < V_LANES && i < n; i++)
        p[i] = x[i];
}

V_CALL v_f v_round(v_f x)
{
    const v_f whole = v_set(8388608.0f), size = v_abs(x); /* from here on all are integers */
    v_f y = (v_f)((v_i)((size + whole) - whole) | ((v_i)x & INT32_MIN));
    return v_select(size < whole, y, x);
}
V_CALL v_f v_scale2(v_f x, v_f n)
{
    n = v_select(v_abs(n) < 1000.0f, n, v_zero());
    return (v_f)((v_u)x + (v_u)__builtin_convertvector(n, v_i) * (1u << 23)); /* may wrap */
}
V_CALL v_f v_split2(v_f x, v_f *n)
{
    const int32_t half = 0x3f3504f3; /* sqrt(1/2) */
    v_i bits = (v_i)((v_u)x - (uint32_t)half);
    *n = __builtin_convertvector(bits >> 23, v_f);
    return (v_f)((bits & 0x007fffff) + half);
}

/* By way of a copy: p may point into memory of another type. */
V_CALL v_f v_load_bf16(const uint16_t *p)
{
    uint16_t h[V_LANES];
    memcpy(h, p, sizeof h);
    V_EACH(dr_bf16_to_f32(h[i]));
}
V_CALL v_f v_load_f16(const uint16_t *p)
{
    uint16_t h[V_LANES];
    memcpy(h, p, sizeof h);
    V_EACH(dr_f16_to_f32(h[i]));
}
V_CALL void v_store_bf16(uint16_t *p, v_f x)
{
    uint16_t h[V_LANES];
    for (int i = 0; i < V_LANES; i++)
        h[i] = dr_f32_to_bf16(x[i]);
    memcpy(p, h, sizeof h);
}
V_CALL void v_store_f16(uint16_t *p, v_f x)
{
    uint16_t h[V_LANES];
    for (int i = 0; i < V_LANES; i++)
        h[i] = dr_f32_to_f16(x[i]);
    memcpy(p, h, sizeof h);
}

V_CALL void v_transpose(v_f r[V_LANES])
{
    const v_f a = r[0], b = r[1], c = r[2], d = r[3];
    for (int i = 0; i < V_LANES; i++)
        r[i] = (v_f){a[i], b[i], c[i], d[i]};
}

V_CALL void v_prefetch2(const void *p) { __builtin_prefetch(p, 0, 2); }

#include "cpu/kern_body.h"
#include "cpu/kern_grad_body.h"
#include "cpu/kern_rows_body.h"

const dr_kern dr_kern_c = DR_KERN_RECORD("c", 0);
