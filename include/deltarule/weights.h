/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights.h - safetensors files: open and look at tensors in place, and write
 * new files atomically. Nothing in a file is trusted: every length, offset and
 * shape is checked before use.
 */
#ifndef DELTARULE_WEIGHTS_H
#define DELTARULE_WEIGHTS_H

#include "deltarule.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A file mapped read-only. Views stay valid until close. Safe to read from many
 * threads. */
typedef struct dr_weights dr_weights;

/* Errors: ERR_IO (cannot open or map), ERR_FORMAT (with the byte or tensor at
 * fault), ERR_MEMORY. Tensors of other element types than f32, f64, bf16, f16 are
 * listed by name but have no view. */
DR_API dr_status dr_weights_open(const char *path, dr_weights **out);
DR_API void dr_weights_close(dr_weights *weights); /* NULL is fine */

DR_API int64_t dr_weights_count(const dr_weights *weights);
DR_API const char *dr_weights_name(const dr_weights *weights, int64_t index); /* NULL past the last */
/* Value of a key of the file's "__metadata__"; NULL if absent. */
DR_API const char *dr_weights_metadata(const dr_weights *weights, const char *key);
/* A read-only view by name. ERR_ARG if there is none, ERR_SUPPORT for an element
 * type or rank (over 4) that has no view. A scalar is a view of rank 1, length 1. */
DR_API dr_status dr_weights_find(const dr_weights *weights, const char *name, dr_tensor *out);

typedef struct dr_weights_entry {
    const char *name;
    dr_tensor tensor; /* contiguous */
} dr_weights_entry;
typedef struct dr_weights_note {
    const char *key, *value;
} dr_weights_note;

/* Writes path by way of a temporary file in the same folder, flushed and renamed:
 * afterwards path holds either the old content or the whole new one. A path that exists and is
 * no regular file (a folder, a pipe, a device) is refused; a symbolic link is replaced by the file.
 * The permissions of a file that is replaced stay. */
DR_API dr_status dr_weights_write(const char *path, const dr_weights_entry *entries, int64_t count,
                                  const dr_weights_note *notes, int64_t note_count);

#ifdef __cplusplus
}
#endif
#endif
