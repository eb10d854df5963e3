/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.h - what the reader and the writer of safetensors files agree on. A file is
 *
 *     8 bytes    n, little endian: length of the header
 *     n bytes    the header, a JSON object: name -> {"dtype", "shape", "data_offsets"},
 *                and "__metadata__" -> {key: text}; spaces may follow it
 *     the rest   the tensors' bytes, back to back without gaps; data_offsets count from here
 *
 * The limits hold in both directions: what we write we can read.
 */
#ifndef DR_SAFETENSORS_H
#define DR_SAFETENSORS_H

#include "base/base.h"

#include <deltarule/weights.h>

#define DR_SAFETENSORS_PREFIX 8               /* bytes in front of the header */
#define DR_SAFETENSORS_HEADER_MAX 100000000   /* bytes; the limit of the format */
#define DR_SAFETENSORS_TENSORS_MAX (1 << 20)
#define DR_SAFETENSORS_NOTES_MAX (1 << 16)
#define DR_SAFETENSORS_NAME_MAX 4096          /* bytes of a tensor's name or a note's key */
#define DR_SAFETENSORS_RANK_MAX 32
#define DR_SAFETENSORS_NOTES "__metadata__"

typedef struct dr_safetensors_type {
    const char *name;
    int32_t bits;
    dr_dtype dtype; /* 0: has no view */
} dr_safetensors_type;

const dr_safetensors_type *dr_safetensors_type_named(const char *name);   /* NULL if unknown */
const dr_safetensors_type *dr_safetensors_type_of(dr_dtype dtype);        /* NULL if unknown */

/* Length of the UTF-8 character at text, 0 if there is no valid one in the bytes left. */
int32_t dr_utf8_length(const unsigned char *text, size_t left);

/* A name or path from outside, fit to stand in a sentence: bytes that are not printable
 * ASCII become '?', a long one loses its middle. */
typedef struct dr_shown {
    char text[100];
} dr_shown;
dr_shown dr_show(const char *name);

#endif
