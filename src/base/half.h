/* SPDX-License-Identifier: Apache-2.0 */
/*
 * half.h - one element of any dtype, read and written. Rounds to nearest even;
 * NaNs stay NaNs (quiet). Scalar code: rows of elements go through the kernel table.
 */
#ifndef DR_HALF_H
#define DR_HALF_H

#include "base/base.h"

#include <math.h>

DR_INLINE float dr_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

DR_INLINE uint32_t dr_to_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

DR_INLINE float dr_bf16_to_f32(uint16_t h) { return dr_from_bits((uint32_t)h << 16); }

DR_INLINE uint16_t dr_f32_to_bf16(float f)
{
    uint32_t u = dr_to_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

DR_INLINE float dr_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 1023;
    if (exp == 31)
        return dr_from_bits(sign | 0x7f800000u | (man ? man << 13 | 0x400000u : 0));
    if (exp == 0) /* zero or subnormal: man * 2^-24, exact */
        return dr_from_bits(sign | dr_to_bits((float)man * 5.9604644775390625e-8f));
    return dr_from_bits(sign | ((exp + 112) << 23) | man << 13);
}

DR_INLINE uint16_t dr_f32_to_f16(float f)
{
    uint32_t u = dr_to_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x1ff));
    if (a >= 0x477ff000u) /* rounds to or above 65520 */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000u) { /* below 2^-14: the sum's rounding does the work */
        float r = dr_from_bits(a) + 0.5f;
        return (uint16_t)(sign | (dr_to_bits(r) - 0x3f000000u));
    }
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | (a - 0x38000000u) >> 13);
}

DR_INLINE double dr_get(const void *data, dr_dtype dtype, int64_t i)
{
    switch (dtype) {
    case DR_F32: return ((const float *)data)[i];
    case DR_BF16: return dr_bf16_to_f32(((const uint16_t *)data)[i]);
    case DR_F16: return dr_f16_to_f32(((const uint16_t *)data)[i]);
    case DR_F64: return ((const double *)data)[i];
    }
    return NAN;
}

DR_INLINE void dr_put(void *data, dr_dtype dtype, int64_t i, double x)
{
    switch (dtype) {
    case DR_F32: ((float *)data)[i] = (float)x; break;
    case DR_BF16: ((uint16_t *)data)[i] = dr_f32_to_bf16((float)x); break;
    case DR_F16: ((uint16_t *)data)[i] = dr_f32_to_f16((float)x); break;
    case DR_F64: ((double *)data)[i] = x; break;
    }
}

/* Address of an element of a view. */
DR_INLINE void *dr_at(const dr_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    int64_t at = i0 * t->stride[0];
    if (t->rank > 1)
        at += i1 * t->stride[1];
    if (t->rank > 2)
        at += i2 * t->stride[2];
    if (t->rank > 3)
        at += i3 * t->stride[3];
    return (char *)t->data + at * (int64_t)dr_dtype_size(t->dtype);
}

#endif
