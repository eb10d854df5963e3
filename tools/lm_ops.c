/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lm_ops.c - see lm_ops.h. Inner loops run along rows, so that the compiler makes vectors of
 * them; the exponential is written out for the same reason.
 */
#include "lm_ops.h"

#include <math.h>
#include <string.h>

/* Rows that spend their time in the exponential are compiled for wider vectors as well; the
 * loader picks what the processor has. */
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1 /* gcc defines it itself; such a program dies in the loader's choice */
#endif
#endif
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define WIDE __attribute__((target_clones("default", "avx2")))
#else
#define WIDE
#endif

/* First token of range i (NOTE [Same bits]). */
static inline int64_t range(int64_t T, int64_t i) { return T * i / DR_LM_BLOCKS; }

/* exp(x) to 2 ulp for x from -87 to 88, a number from 0 to exp(88) for anything else, NaN
 * included: gates and softmax see no more. x = n ln 2 + r, the polynomial gives exp(r), adding
 * n to the exponent bits multiplies by 2^n. The limit of 88 to both sides goes by way of the
 * bits, because a comparison would keep compilers from making vectors of the loops around it. */
static inline float exp_of(float x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: the sum's last bits are the whole number n */
    const int32_t high = 0x42b00000; /* the bits of 88 */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int32_t size = (int32_t)(bits & 0x7fffffff), over = (high - size) >> 31;
    bits = (bits & 0x80000000) | (uint32_t)((size & ~over) | (high & over));
    memcpy(&x, &bits, sizeof x);
    float sum = x * 1.44269504f + round, n = sum - round;
    float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    float scale;
    memcpy(&bits, &sum, sizeof bits);
    bits = (bits + 127) << 23;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

void dr_lm_embed(int threads, int64_t T, int64_t D, const int32_t *symbols, const float *table,
                 float *x)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < T; t++)
        memcpy(x + t * D, table + symbols[t] * D, (size_t)D * sizeof *x);
}

void dr_lm_embed_backward(int threads, int64_t T, int64_t D, int64_t S, const int32_t *symbols,
                          const float *dx, float *dtable, int64_t *order)
{
    int64_t *first = order + T; /* tokens sorted by symbol: symbol s has [first[s], first[s+1]) */
    memset(first, 0, (size_t)(S + 1) * sizeof *first);
    for (int64_t t = 0; t < T; t++)
        first[symbols[t] + 1]++;
    for (int64_t s = 0; s < S; s++)
        first[s + 1] += first[s];
    for (int64_t t = 0; t < T; t++)
        order[first[symbols[t]]++] = t;
    for (int64_t s = S; s > 0; s--)
        first[s] = first[s - 1];
    first[0] = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (int64_t s = 0; s < S; s++) {
        float *d = dtable + s * D;
        memset(d, 0, (size_t)D * sizeof *d);
        for (int64_t i = first[s]; i < first[s + 1]; i++) {
            const float *row = dx + order[i] * D;
            for (int64_t k = 0; k < D; k++)
                d[k] += row[k];
        }
    }
}

void dr_lm_norm(int threads, int64_t T, int64_t D, float eps, const float *x, const float *add,
                const float *w, float *sum, float *rstd, float *y)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < T; t++) {
        const float *row = x + t * D;
        float *out = y + t * D, square = 0;
        if (add != NULL) {
            float *total = sum + t * D;
            for (int64_t k = 0; k < D; k++)
                total[k] = row[k] + add[t * D + k];
            row = total;
        }
#pragma omp simd reduction(+ : square)
        for (int64_t k = 0; k < D; k++)
            square += row[k] * row[k];
        float r = 1 / sqrtf(square / (float)D + eps);
        rstd[t] = r;
        for (int64_t k = 0; k < D; k++)
            out[k] = row[k] * r * w[k];
    }
}

void dr_lm_norm_backward(int threads, int64_t T, int64_t D, const float *x, const float *w,
                         const float *rstd, const float *dy, float *dx, float *dw, float *partial)
{
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < DR_LM_BLOCKS; i++) {
        float *sums = partial + i * D;
        memset(sums, 0, (size_t)D * sizeof *sums);
        for (int64_t t = range(T, i); t < range(T, i + 1); t++) {
            const float *row = x + t * D, *g = dy + t * D;
            float *d = dx + t * D, r = rstd[t], dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t k = 0; k < D; k++)
                dot += g[k] * w[k] * row[k];
            dot *= r * r * r / (float)D;
            for (int64_t k = 0; k < D; k++) {
                d[k] += g[k] * w[k] * r - row[k] * dot;
                sums[k] += g[k] * row[k] * r;
            }
        }
    }
    memset(dw, 0, (size_t)D * sizeof *dw);
    for (int64_t i = 0; i < DR_LM_BLOCKS; i++)
        for (int64_t k = 0; k < D; k++)
            dw[k] += partial[i * D + k];
}

WIDE static void swiglu_row(int64_t F, const float *gate, const float *up, float *out)
{
#pragma omp simd
    for (int64_t k = 0; k < F; k++) {
        float e = exp_of(gate[k]);
        out[k] = gate[k] * (e / (1 + e)) * up[k];
    }
}

/* d_gate and d_up may be gate and up. */
WIDE static void swiglu_row_backward(int64_t F, const float *gate, const float *up, const float *g,
                                     float *d_gate, float *d_up)
{
#pragma omp simd
    for (int64_t k = 0; k < F; k++) {
        float z = gate[k], other = up[k], e = exp_of(z);
        float s = e / (1 + e), rest = 1 / (1 + e);
        d_up[k] = g[k] * z * s;
        d_gate[k] = g[k] * other * s * (1 + z * rest);
    }
}

void dr_lm_swiglu(int threads, int64_t T, int64_t F, const float *u, float *h)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < T; t++)
        swiglu_row(F, u + t * 2 * F, u + t * 2 * F + F, h + t * F);
}

void dr_lm_swiglu_backward(int threads, int64_t T, int64_t F, const float *u, const float *dh,
                           float *du)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < T; t++)
        swiglu_row_backward(F, u + t * 2 * F, u + t * 2 * F + F, dh + t * F, du + t * 2 * F,
                            du + t * 2 * F + F);
}

/* row becomes exp(row - most); returns the sum. */
WIDE static float exponentials(int64_t S, float most, float *row)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < S; k++) {
        row[k] = exp_of(row[k] - most);
        sum += row[k];
    }
    return sum;
}

double dr_lm_cross_entropy(int threads, int64_t T, int64_t whole, int64_t S, float *logits,
                           const int32_t *target, int gradient, double *rows)
{
    const float share = 1 / (float)whole;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < T; t++) {
        float *row = logits + t * S, most = row[0], hit = row[target[t]];
        for (int64_t k = 0; k < S; k++)
            most = row[k] > most ? row[k] : most;
        float sum = exponentials(S, most, row);
        rows[t] = log((double)sum) + (double)most - (double)hit;
        float scale = share / sum;
        for (int64_t k = 0; gradient && k < S; k++)
            row[k] *= scale;
        if (gradient)
            row[target[t]] -= share;
    }
    double loss = 0;
    for (int64_t t = 0; t < T; t++)
        loss += rows[t];
    return loss / (double)whole;
}

double dr_lm_square_sum(int threads, int64_t n, const float *x)
{
    double sums[DR_LM_BLOCKS], all = 0;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < DR_LM_BLOCKS; i++) {
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = range(n, i); k < range(n, i + 1); k++)
            sum += (double)x[k] * (double)x[k];
        sums[i] = sum;
    }
    for (int64_t i = 0; i < DR_LM_BLOCKS; i++)
        all += sums[i];
    return all;
}

void dr_lm_adamw_step(int threads, int64_t n, const dr_lm_adamw *how, const float *g, float *w,
                      float *m, float *v)
{
    const float b1 = (float)how->beta1, b2 = (float)how->beta2, eps = (float)how->eps;
    const float scale = (float)how->gradient_scale;
    const float rate = (float)(how->rate / (1 - pow(how->beta1, (double)how->step)));
    const float root = (float)(1 / sqrt(1 - pow(how->beta2, (double)how->step)));
    const float keep = (float)(1 - how->rate * how->decay);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < DR_LM_BLOCKS; i++)
        for (int64_t k = range(n, i); k < range(n, i + 1); k++) {
            float d = g[k] * scale;
            m[k] = b1 * m[k] + (1 - b1) * d;
            v[k] = b2 * v[k] + (1 - b2) * d * d;
            w[k] = w[k] * keep - rate * m[k] / (sqrtf(v[k]) * root + eps);
        }
}
