/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern_avx2.c - the vector vocabulary in AVX2 with FMA and F16C, then every kernel.
 */
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "kern_avx2.c needs -mavx2 -mfma -mf16c"
#endif

#include "cpu/kern.h"
#include "base/cpu.h"

#include <immintrin.h>

#define V_LANES 8
#define NR 16
#define V_MR 4 /* rows of a register tile: 4 x 2 accumulators */
#define V_CALL static inline __attribute__((always_inline, unused))

typedef __m256 v_f;

V_CALL v_f v_load(const float *p) { return _mm256_load_ps(p); }
V_CALL v_f v_loadu(const float *p) { return _mm256_loadu_ps(p); }
V_CALL void v_store(float *p, v_f x) { _mm256_store_ps(p, x); }
V_CALL void v_storeu(float *p, v_f x) { _mm256_storeu_ps(p, x); }
V_CALL v_f v_set(float x) { return _mm256_set1_ps(x); }
V_CALL v_f v_zero(void) { return _mm256_setzero_ps(); }
V_CALL v_f v_add(v_f a, v_f b) { return _mm256_add_ps(a, b); }
V_CALL v_f v_sub(v_f a, v_f b) { return _mm256_sub_ps(a, b); }
V_CALL v_f v_mul(v_f a, v_f b) { return _mm256_mul_ps(a, b); }
V_CALL v_f v_div(v_f a, v_f b) { return _mm256_div_ps(a, b); }
V_CALL v_f v_fma(v_f a, v_f b, v_f c) { return _mm256_fmadd_ps(a, b, c); }
V_CALL v_f v_fnma(v_f a, v_f b, v_f c) { return _mm256_fnmadd_ps(a, b, c); }
V_CALL v_f v_neg(v_f a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
V_CALL v_f v_abs(v_f a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
V_CALL v_f v_max(v_f a, v_f b) { return _mm256_max_ps(a, b); }

V_CALL float v_sum(v_f a)
{
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

/* Lanes 0..n-1 of memory that may end behind them; the others are 0 and stay unwritten. */
V_CALL __m256i v_first(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
V_CALL v_f v_load_part(const float *p, int n) { return _mm256_maskload_ps(p, v_first(n)); }
V_CALL void v_store_part(float *p, int n, v_f x) { _mm256_maskstore_ps(p, v_first(n), x); }

V_CALL v_f v_keep(v_f x, int n) { return _mm256_and_ps(x, _mm256_castsi256_ps(v_first(n))); }
V_CALL v_f v_where_less(v_f a, v_f b, v_f x, v_f y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

V_CALL v_f v_round(v_f x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
V_CALL v_f v_scale2(v_f x, v_f n)
{
    __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), e));
}
V_CALL v_f v_split2(v_f x, v_f *n)
{
    const __m256i half = _mm256_set1_epi32(0x3f3504f3); /* sqrt(1/2) */
    __m256i i = _mm256_sub_epi32(_mm256_castps_si256(x), half);
    *n = _mm256_cvtepi32_ps(_mm256_srai_epi32(i, 23));
    i = _mm256_and_si256(i, _mm256_set1_epi32(0x007fffff));
    return _mm256_castsi256_ps(_mm256_add_epi32(i, half));
}

V_CALL v_f v_load_bf16(const uint16_t *p)
{
    __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
V_CALL v_f v_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
V_CALL void v_store_bf16(uint16_t *p, v_f x)
{
    const __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000)), nan);
    r = _mm256_srli_epi32(r, 16);
    r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(r));
}
V_CALL void v_store_f16(uint16_t *p, v_f x)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

V_CALL void v_transpose(v_f r[V_LANES])
{
    v_f t[8], u[8];
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

V_CALL void v_prefetch2(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }

#include "cpu/kern_body.h"
#include "cpu/kern_grad_body.h"
#include "cpu/kern_rows_body.h"

const dr_kern dr_kern_avx2 = DR_KERN_RECORD("avx2", DR_CPU_AVX2);
