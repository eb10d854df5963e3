/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern_avx512.c - the vector vocabulary in AVX-512 (F, BW, DQ, VL), then every kernel. Sixteen
 * lanes are a row of a block of tokens and half a row of a panel: 8 x 2 accumulators, and 16 x 1
 * for products with tokens, leave half of the 32 registers to operands in flight. The conversions
 * to bf16 are done on integers, since the instruction of AVX512_BF16 takes subnormals for zero.
 */
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) ||                   \
    !defined(__AVX512VL__) || !defined(__FMA__) || !defined(__F16C__)
#error "kern_avx512.c needs -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c"
#endif

#include "cpu/kern.h"
#include "base/cpu.h"

#include <immintrin.h>

#define V_LANES 16
#define NR 32
#define V_MR 8   /* rows of a register tile: 8 x 2 accumulators */
#define V_MRB 16 /* with blocks of tokens: 16 x 1 */
#define V_CALL static inline __attribute__((always_inline, unused))

typedef __m512 v_f;

V_CALL v_f v_load(const float *p) { return _mm512_load_ps(p); }
V_CALL v_f v_loadu(const float *p) { return _mm512_loadu_ps(p); }
V_CALL void v_store(float *p, v_f x) { _mm512_store_ps(p, x); }
V_CALL void v_storeu(float *p, v_f x) { _mm512_storeu_ps(p, x); }
V_CALL v_f v_set(float x) { return _mm512_set1_ps(x); }
V_CALL v_f v_zero(void) { return _mm512_setzero_ps(); }
V_CALL v_f v_add(v_f a, v_f b) { return _mm512_add_ps(a, b); }
V_CALL v_f v_sub(v_f a, v_f b) { return _mm512_sub_ps(a, b); }
V_CALL v_f v_mul(v_f a, v_f b) { return _mm512_mul_ps(a, b); }
V_CALL v_f v_div(v_f a, v_f b) { return _mm512_div_ps(a, b); }
V_CALL v_f v_fma(v_f a, v_f b, v_f c) { return _mm512_fmadd_ps(a, b, c); }
V_CALL v_f v_fnma(v_f a, v_f b, v_f c) { return _mm512_fnmadd_ps(a, b, c); }
V_CALL v_f v_neg(v_f a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
V_CALL v_f v_abs(v_f a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
V_CALL v_f v_max(v_f a, v_f b) { return _mm512_max_ps(a, b); }

V_CALL float v_sum(v_f a)
{
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

/* Lanes 0..n-1, whatever n. */
V_CALL __mmask16 v_first(int n)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(n), lane);
}
V_CALL v_f v_load_part(const float *p, int n) { return _mm512_maskz_loadu_ps(v_first(n), p); }
V_CALL void v_store_part(float *p, int n, v_f x) { _mm512_mask_storeu_ps(p, v_first(n), x); }

V_CALL v_f v_keep(v_f x, int n) { return _mm512_maskz_mov_ps(v_first(n), x); }
V_CALL v_f v_where_less(v_f a, v_f b, v_f x, v_f y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}

V_CALL v_f v_round(v_f x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
V_CALL v_f v_scale2(v_f x, v_f n)
{
    __m512i e = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), e));
}
V_CALL v_f v_split2(v_f x, v_f *n)
{
    const __m512i half = _mm512_set1_epi32(0x3f3504f3); /* sqrt(1/2) */
    __m512i i = _mm512_sub_epi32(_mm512_castps_si512(x), half);
    *n = _mm512_cvtepi32_ps(_mm512_srai_epi32(i, 23));
    i = _mm512_and_si512(i, _mm512_set1_epi32(0x007fffff));
    return _mm512_castsi512_ps(_mm512_add_epi32(i, half));
}

V_CALL v_f v_load_bf16(const uint16_t *p)
{
    __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}
V_CALL v_f v_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
V_CALL void v_store_bf16(uint16_t *p, v_f x)
{
    const __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, bits, _mm512_set1_epi32(0x00400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
V_CALL void v_store_f16(uint16_t *p, v_f x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

/* 4 x 4 squares within the quarters of registers, then the quarters as a 4 x 4 matrix. */
V_CALL void v_transpose(v_f r[V_LANES])
{
    v_f t[4], q[16];
    _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) {
        t[0] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
        t[2] = _mm512_unpacklo_ps(r[i + 2], r[i + 3]);
        t[3] = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
        q[i] = _mm512_shuffle_ps(t[0], t[2], 0x44);
        q[i + 1] = _mm512_shuffle_ps(t[0], t[2], 0xee);
        q[i + 2] = _mm512_shuffle_ps(t[1], t[3], 0x44);
        q[i + 3] = _mm512_shuffle_ps(t[1], t[3], 0xee);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        t[0] = _mm512_shuffle_f32x4(q[i], q[i + 4], 0x88);
        t[1] = _mm512_shuffle_f32x4(q[i], q[i + 4], 0xdd);
        t[2] = _mm512_shuffle_f32x4(q[i + 8], q[i + 12], 0x88);
        t[3] = _mm512_shuffle_f32x4(q[i + 8], q[i + 12], 0xdd);
        r[i] = _mm512_shuffle_f32x4(t[0], t[2], 0x88);
        r[i + 4] = _mm512_shuffle_f32x4(t[1], t[3], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[0], t[2], 0xdd);
        r[i + 12] = _mm512_shuffle_f32x4(t[1], t[3], 0xdd);
    }
}

V_CALL void v_prefetch2(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

#include "cpu/kern_body.h"
#include "cpu/kern_grad_body.h"
#include "cpu/kern_rows_body.h"

const dr_kern dr_kern_avx512 = DR_KERN_RECORD("avx512", DR_CPU_AVX512);
