/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lm.h - what the parts of the language model (data, model, checkpoint, the commands train
 * and generate) share: failing with one sentence, memory, seeded numbers, a hash.
 *
 * As in the library, whoever detects a failure says why (dr_lm_fail) and everyone above
 * passes the status on (LM_TRY). A sentence of the library is taken over by LM_LIBRARY.
 */
#ifndef DR_LM_H
#define DR_LM_H

#include <deltarule/deltarule.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LM_COUNT(array) (sizeof(array) / sizeof(array)[0])

dr_status dr_lm_fail(dr_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
const char *dr_lm_error(void); /* this thread's last sentence */
/* Whether a failure lies in what was asked for (arguments, files), not in carrying it out. */
bool dr_lm_asked(dr_status status);

#define LM_TRY(call)                         \
    do {                                     \
        dr_status lm_status = (call);        \
        if (lm_status != DR_OK)              \
            return lm_status;                \
    } while (0)

#define LM_LIBRARY(call)                                         \
    do {                                                         \
        dr_status lm_status = (call);                            \
        if (lm_status != DR_OK)                                  \
            return dr_lm_fail(lm_status, "%s", dr_last_error()); \
    } while (0)

/* Zeroed, 64-byte aligned, for free(); NULL with a sentence about what it was for. */
void *dr_lm_alloc(int64_t count, size_t element, const char *what);

/* splitmix64: any state is a good one. */
typedef struct dr_lm_random {
    uint64_t state;
} dr_lm_random;
uint64_t dr_lm_bits(dr_lm_random *r);
double dr_lm_uniform(dr_lm_random *r, double low, double high);
double dr_lm_normal(dr_lm_random *r);

/* Continues a hash over more bytes; start with any seed. Not for adversaries. */
uint64_t dr_lm_hash(uint64_t hash, const void *bytes, size_t n);
uint64_t dr_lm_hash_text(uint64_t hash, const char *text); /* the end counts too */

#endif
