/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lm.c - see lm.h.
 */
#include "lm.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local char last_sentence[1024];

dr_status dr_lm_fail(dr_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_sentence, sizeof last_sentence, format, args);
    va_end(args);
    return status;
}

const char *dr_lm_error(void) { return last_sentence; }

bool dr_lm_asked(dr_status status)
{
    return status == DR_ERR_ARG || status == DR_ERR_SHAPE || status == DR_ERR_SUPPORT ||
           status == DR_ERR_IO || status == DR_ERR_FORMAT;
}

void *dr_lm_alloc(int64_t count, size_t element, const char *what)
{
    size_t bytes;
    bool fits = count >= 0 && !__builtin_mul_overflow((size_t)count, element, &bytes) &&
                bytes < (size_t)INT64_MAX / 2;
    size_t padded = fits ? (bytes + 64) / 64 * 64 : 0;
    void *memory = fits ? aligned_alloc(64, padded) : NULL;
    if (memory == NULL) {
        dr_lm_fail(DR_ERR_MEMORY, "%s: no memory for %lld elements of %zu bytes", what,
                   (long long)count, element);
        return NULL;
    }
    memset(memory, 0, padded);
    return memory;
}

uint64_t dr_lm_bits(dr_lm_random *r)
{
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double dr_lm_uniform(dr_lm_random *r, double low, double high)
{
    return low + (high - low) * ((double)(dr_lm_bits(r) >> 11) * 0x1p-53);
}

double dr_lm_normal(dr_lm_random *r)
{
    double u = 1 - dr_lm_uniform(r, 0, 1), turn = dr_lm_uniform(r, 0, 6.283185307179586);
    return sqrt(-2 * log(u)) * cos(turn);
}

uint64_t dr_lm_hash(uint64_t hash, const void *bytes, size_t n)
{
    const unsigned char *at = bytes;
    for (; n > 0;) {
        uint64_t word = 0;
        size_t step = n < sizeof word ? n : sizeof word;
        memcpy(&word, at, step);
        hash = (hash ^ word ^ (uint64_t)step << 56) * 0x9fb21c651e98df25u;
        hash ^= hash >> 29;
        at += step;
        n -= step;
    }
    return hash;
}

uint64_t dr_lm_hash_text(uint64_t hash, const char *text)
{
    return dr_lm_hash(hash, text, strlen(text) + 1);
}
