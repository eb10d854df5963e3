/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vectors.h - files of test vectors: named arrays of float64. Little endian, no padding:
 *
 *     8 bytes "DRORACL1", then records:
 *     u32 name length | name, ASCII | u32 rank | rank x i64 extents | values, float64, C order
 *
 * A record of rank 0 is one number. Nothing in a file is trusted.
 */
#ifndef DR_TOOL_VECTORS_H
#define DR_TOOL_VECTORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DR_VECTORS_MAX_RANK 8

typedef struct dr_record {
    char *name;
    int32_t rank;
    int64_t shape[DR_VECTORS_MAX_RANK];
    int64_t count;
    double *values;
    bool used; /* for readers of the whole file */
} dr_record;

typedef struct dr_vectors {
    dr_record *records;
    int64_t count;
} dr_vectors;

/* false: *out is empty and why holds a sentence that names the byte or record at fault. */
bool dr_vectors_read(const char *path, dr_vectors *out, char *why, size_t why_size);
void dr_vectors_free(dr_vectors *vectors);
dr_record *dr_vectors_find(const dr_vectors *vectors, const char *name); /* NULL if absent */

#endif
