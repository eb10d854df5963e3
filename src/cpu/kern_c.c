/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern_c.c - the vector vocabulary in plain C, then every kernel: runs anywhere, and says
 * what each word of the vocabulary means. The compiler makes vectors of the loops as well
 * as it can.
 *
 * The words that are not self-evident:
 *   v_max, v_min      a where a > b (a < b), else b: the second operand where either is NaN
 *   v_stream          a store that need not enter the cache; v_fence orders it before later stores
 *   v_load_part(p, n), v_store_part(p, n, x)   touch only the first n lanes; others load as 0
 *   v_keep(x, n)      lanes from n on become 0; n may be negative or above V_LANES
 *   v_where_less(a, b, x, y)   x where a < b, else y
 *   v_scale2(x, n)    x * 2^n by adding to the exponent; n integral, the result normal or
 *                     next to it
 *   v_split2(x, &n)   x = m * 2^n with m in [sqrt(1/2), sqrt(2)), for normal x > 0
 *   v_transpose(r)    r as a V_LANES x V_LANES matrix
 *   v_prefetch, v_prefetch2   into the first, the second level of cache
 */
#include "cpu/kern.h"
#include "base/half.h"

#include <math.h>

#define V_LANES 8
#define NR 16
#define V_MR 4
#define V_CALL static inline __attribute__((always_inline, unused))

typedef struct v_f {
    float x[V_LANES];
} v_f;

#define V_EACH(expression)                \
    v_f y;                                \
    for (int i = 0; i < V_LANES; i++)     \
        y.x[i] = (expression);            \
    return y

V_CALL v_f v_load(const float *p) { V_EACH(p[i]); }
V_CALL v_f v_loadu(const float *p) { V_EACH(p[i]); }
V_CALL void v_store(float *p, v_f a)
{
    for (int i = 0; i < V_LANES; i++)
        p[i] = a.x[i];
}
V_CALL void v_storeu(float *p, v_f a) { v_store(p, a); }
V_CALL void v_stream(float *p, v_f a) { v_store(p, a); }
V_CALL void v_fence(void) {}
V_CALL v_f v_set(float a) { V_EACH(a); }
V_CALL v_f v_zero(void) { return v_set(0); }
V_CALL v_f v_add(v_f a, v_f b) { V_EACH(a.x[i] + b.x[i]); }
V_CALL v_f v_sub(v_f a, v_f b) { V_EACH(a.x[i] - b.x[i]); }
V_CALL v_f v_mul(v_f a, v_f b) { V_EACH(a.x[i] * b.x[i]); }
V_CALL v_f v_div(v_f a, v_f b) { V_EACH(a.x[i] / b.x[i]); }
V_CALL v_f v_sqrt(v_f a) { V_EACH(sqrtf(a.x[i])); }
V_CALL v_f v_fma(v_f a, v_f b, v_f c) { V_EACH(a.x[i] * b.x[i] + c.x[i]); }
V_CALL v_f v_fnma(v_f a, v_f b, v_f c) { V_EACH(c.x[i] - a.x[i] * b.x[i]); }
V_CALL v_f v_neg(v_f a) { V_EACH(-a.x[i]); }
V_CALL v_f v_abs(v_f a) { V_EACH(fabsf(a.x[i])); }
V_CALL v_f v_max(v_f a, v_f b) { V_EACH(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
V_CALL v_f v_min(v_f a, v_f b) { V_EACH(a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }

V_CALL float v_sum(v_f a)
{
    return ((a.x[0] + a.x[4]) + (a.x[2] + a.x[6])) + ((a.x[1] + a.x[5]) + (a.x[3] + a.x[7]));
}

V_CALL v_f v_load_part(const float *p, int n) { V_EACH(i < n ? p[i] : 0); }
V_CALL void v_store_part(float *p, int n, v_f a)
{
    for (int i = 0; i < V_LANES && i < n; i++)
        p[i] = a.x[i];
}
V_CALL v_f v_keep(v_f a, int n) { V_EACH(i < n ? a.x[i] : 0); }
V_CALL v_f v_where_less(v_f a, v_f b, v_f x, v_f z) { V_EACH(a.x[i] < b.x[i] ? x.x[i] : z.x[i]); }

V_CALL v_f v_round(v_f a) { V_EACH(rintf(a.x[i])); }
/* NaN has no integer: it counts as 0 here and stays in a. */
V_CALL v_f v_scale2(v_f a, v_f n)
{
    V_EACH(dr_from_bits(dr_to_bits(a.x[i]) +
                        ((uint32_t)(int32_t)(n.x[i] == n.x[i] ? n.x[i] : 0) << 23)));
}
V_CALL v_f v_split2(v_f a, v_f *n)
{
    const uint32_t half = 0x3f3504f3; /* sqrt(1/2) */
    for (int i = 0; i < V_LANES; i++)
        n->x[i] = (float)((int32_t)(dr_to_bits(a.x[i]) - half) >> 23);
    V_EACH(dr_from_bits(((dr_to_bits(a.x[i]) - half) & 0x007fffff) + half));
}

V_CALL v_f v_load_bf16(const uint16_t *p) { V_EACH(dr_bf16_to_f32(p[i])); }
V_CALL v_f v_load_f16(const uint16_t *p) { V_EACH(dr_f16_to_f32(p[i])); }
V_CALL void v_store_bf16(uint16_t *p, v_f a)
{
    for (int i = 0; i < V_LANES; i++)
        p[i] = dr_f32_to_bf16(a.x[i]);
}
V_CALL void v_store_f16(uint16_t *p, v_f a)
{
    for (int i = 0; i < V_LANES; i++)
        p[i] = dr_f32_to_f16(a.x[i]);
}

V_CALL void v_transpose(v_f r[V_LANES])
{
    for (int i = 0; i < V_LANES; i++)
        for (int j = 0; j < i; j++) {
            float t = r[i].x[j];
            r[i].x[j] = r[j].x[i];
            r[j].x[i] = t;
        }
}

V_CALL void v_prefetch(const void *p) { (void)p; }
V_CALL void v_prefetch2(const void *p) { (void)p; }

#include "cpu/kern_body.h"
#include "cpu/kern_grad_body.h"
#include "cpu/kern_rows_body.h"

const dr_kern dr_kern_c = DR_KERN_RECORD("c", 0);
