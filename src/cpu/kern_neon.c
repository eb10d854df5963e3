/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern_neon.c - the vector vocabulary in NEON (Advanced SIMD of AArch64, which every such
 * processor has), then every kernel. A register tile is 4 x 4 accumulators, which leaves half of
 * the 32 registers to operands in flight.
 */
#if !defined(__aarch64__) || !defined(__ARM_NEON)
#error "kern_neon.c needs AArch64"
#endif

#include "cpu/kern.h"
#include "base/cpu.h"

#include <arm_neon.h>

#define V_LANES 4
#define NR 16
#define V_MR 4
#define V_CALL static inline __attribute__((always_inline, unused))

typedef float32x4_t v_f;

V_CALL v_f v_load(const float *p) { return vld1q_f32(p); }
V_CALL v_f v_loadu(const float *p) { return vld1q_f32(p); }
V_CALL void v_store(float *p, v_f x) { vst1q_f32(p, x); }
V_CALL void v_storeu(float *p, v_f x) { vst1q_f32(p, x); }
V_CALL v_f v_set(float x) { return vdupq_n_f32(x); }
V_CALL v_f v_zero(void) { return vdupq_n_f32(0); }
V_CALL v_f v_add(v_f a, v_f b) { return vaddq_f32(a, b); }
V_CALL v_f v_sub(v_f a, v_f b) { return vsubq_f32(a, b); }
V_CALL v_f v_mul(v_f a, v_f b) { return vmulq_f32(a, b); }
V_CALL v_f v_div(v_f a, v_f b) { return vdivq_f32(a, b); }
V_CALL v_f v_fma(v_f a, v_f b, v_f c) { return vfmaq_f32(c, a, b); }
V_CALL v_f v_fnma(v_f a, v_f b, v_f c) { return vfmsq_f32(c, a, b); }
V_CALL v_f v_neg(v_f a) { return vnegq_f32(a); }
V_CALL v_f v_abs(v_f a) { return vabsq_f32(a); }

/* By comparison: the instruction for the maximum has rules of its own for NaN. */
V_CALL v_f v_max(v_f a, v_f b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
V_CALL v_f v_where_less(v_f a, v_f b, v_f x, v_f y)
{
    return vbslq_f32(vcltq_f32(a, b), x, y);
}

V_CALL float v_sum(v_f a) { return vaddvq_f32(a); }

/* There are no masked loads and stores. */
V_CALL v_f v_load_part(const float *p, int n)
{
    float whole[V_LANES] = {0};
    for (int i = 0; i < V_LANES && i < n; i++)
        whole[i] = p[i];
    return vld1q_f32(whole);
}
V_CALL void v_store_part(float *p, int n, v_f x)
{
    float whole[V_LANES];
    vst1q_f32(whole, x);
    for (int i = 0; i < V_LANES && i < n; i++)
        p[i] = whole[i];
}

V_CALL v_f v_keep(v_f x, int n)
{
    static const int32_t lane[V_LANES] = {0, 1, 2, 3};
    const uint32x4_t first = vcltq_s32(vld1q_s32(lane), vdupq_n_s32(n));
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), first));
}

V_CALL v_f v_round(v_f x) { return vrndnq_f32(x); }
V_CALL v_f v_scale2(v_f x, v_f n)
{
    const int32x4_t e = vshlq_n_s32(vcvtq_s32_f32(n), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), e));
}
V_CALL v_f v_split2(v_f x, v_f *n)
{
    const int32x4_t half = vdupq_n_s32(0x3f3504f3); /* sqrt(1/2) */
    int32x4_t i = vsubq_s32(vreinterpretq_s32_f32(x), half);
    *n = vcvtq_f32_s32(vshrq_n_s32(i, 23));
    i = vandq_s32(i, vdupq_n_s32(0x007fffff));
    return vreinterpretq_f32_s32(vaddq_s32(i, half));
}

/* By way of a copy: p may point into memory of another type. */
V_CALL uint16x4_t v_load_half(const uint16_t *p)
{
    uint64_t bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return vcreate_u16(bits);
}
V_CALL void v_store_half(uint16_t *p, uint16x4_t x)
{
    const uint64_t bits = vget_lane_u64(vreinterpret_u64_u16(x), 0);
    __builtin_memcpy(p, &bits, sizeof bits);
}
V_CALL v_f v_load_bf16(const uint16_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(v_load_half(p), 16));
}
V_CALL v_f v_load_f16(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(v_load_half(p)));
}
V_CALL void v_store_bf16(uint16_t *p, v_f x)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t near = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
    v_store_half(p, vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), near, quiet), 16));
}
V_CALL void v_store_f16(uint16_t *p, v_f x)
{
    v_store_half(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}

V_CALL void v_transpose(v_f r[V_LANES])
{
    const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
    r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
    r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
    r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}

V_CALL void v_prefetch2(const void *p) { __builtin_prefetch(p, 0, 2); }

#include "cpu/kern_body.h"
#include "cpu/kern_grad_body.h"
#include "cpu/kern_rows_body.h"

const dr_kern dr_kern_neon = DR_KERN_RECORD("neon", DR_CPU_NEON);
