/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint.h - a model and its training in one safetensors file: the parameters under
 * their names, the optimiser's moments as adamw.m.NAME and adamw.v.NAME, everything else as
 * notes. A folder keeps two, the current and the one before it.
 *
 * A checksum over names, shapes, bytes and notes is one of the notes: a file that was
 * damaged anywhere is refused.
 */
#ifndef DR_LM_CHECKPOINT_H
#define DR_LM_CHECKPOINT_H

#include "model.h"

#include <deltarule/weights.h>

#define DR_LM_CURRENT "model.safetensors"
#define DR_LM_PREVIOUS "previous.safetensors"

/* What a training run needs beside the blocks to go on where it stopped. */
typedef struct dr_lm_training {
    int64_t context, batch_tokens;
    int64_t steps;          /* planned; 0: no limit */
    double seconds;         /* planned; 0: no limit */
    double rate;            /* of learning, at its highest */
    uint64_t seed;
    uint64_t data_digest;
    int64_t held_out_most;
    int64_t step;           /* done */
    double elapsed;         /* seconds, of the steps done */
    dr_lm_cursor cursor;
} dr_lm_training;

typedef struct dr_lm_checkpoint {
    dr_weights *weights;
    dr_lm_config config;
    dr_lm_training training;
} dr_lm_checkpoint;

/* path/name if path is a folder, else path; size bytes at out. */
dr_status dr_lm_checkpoint_path(const char *path, const char *name, char *out, size_t size);

/* Opens a file and checks all of it. */
dr_status dr_lm_checkpoint_open(const char *path, dr_lm_checkpoint *out);
void dr_lm_checkpoint_close(dr_lm_checkpoint *checkpoint);
/* Fills the model's weights, and the moments where they are not NULL. */
dr_status dr_lm_checkpoint_read(const dr_lm_checkpoint *checkpoint, const dr_lm_model *model,
                                float *m, float *v);

/* Writes folder/model.safetensors; the file that was there becomes previous.safetensors if
 * keep says so. At every moment one of the two is whole. */
dr_status dr_lm_checkpoint_save(const char *folder, const dr_lm_model *model, const float *m,
                                const float *v, const dr_lm_training *training, bool keep);

#endif
