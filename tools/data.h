/* SPDX-License-Identifier: Apache-2.0 */
/*
 * data.h - text files as documents, and documents as batches of packed sequences.
 *
 * A model reads symbols: the 256 bytes, and one that starts a document. Each byte is
 * predicted from what stands before it in its document, the first from the start symbol.
 */
#ifndef DR_LM_DATA_H
#define DR_LM_DATA_H

#include "lm.h"

enum { DR_LM_BYTES = 256, DR_LM_START = 256, DR_LM_SYMBOLS = 257 };

typedef struct dr_lm_document {
    char *name;     /* path below the folder */
    int64_t begin;  /* of its bytes in the data */
    int64_t length; /* >= 1 */
    uint64_t hash;  /* of the name */
    bool held_out;
} dr_lm_document;

typedef struct dr_lm_data {
    unsigned char *bytes; /* documents back to back */
    dr_lm_document *documents; /* by name */
    int64_t n_documents;
    int64_t n_held_out;
    int64_t train_bytes, held_out_bytes;
    int64_t skipped;  /* files that matched but hold no text */
    uint64_t digest;  /* of names and bytes */
} dr_lm_data;

/* Reads every file below path (or path itself) whose name matches glob, NULL: any. The
 * documents whose names have the smallest hashes are held out, a twentieth of all bytes but
 * at most held_out_most; of one document alone the end is held out. ERR_ARG where there is
 * no text. */
dr_status dr_lm_data_load(const char *path, const char *glob, int64_t held_out_most,
                          dr_lm_data *out);
void dr_lm_data_free(dr_lm_data *data);

/* Where a feed stands; numbers only, so that a checkpoint can hold it. */
typedef struct dr_lm_cursor {
    int64_t epoch, piece, at;
} dr_lm_cursor;

/* Documents cut into pieces of at most `context` bytes. For training the pieces come in an
 * order drawn anew for every epoch, without end; otherwise once, in their own order. */
typedef struct dr_lm_piece {
    int64_t begin;
    int32_t length;
    bool starts; /* its first byte is its document's first */
} dr_lm_piece;
typedef struct dr_lm_feed {
    const dr_lm_data *data;
    bool training;
    uint64_t seed;
    int64_t n_pieces;
    dr_lm_piece *pieces;
    int64_t *order;
    dr_lm_cursor cursor;
} dr_lm_feed;
dr_status dr_lm_feed_create(const dr_lm_data *data, bool training, int64_t context, uint64_t seed,
                            dr_lm_feed *out);
void dr_lm_feed_free(dr_lm_feed *feed);
/* ERR_FORMAT if the feed has no such place. */
dr_status dr_lm_feed_seek(dr_lm_feed *feed, dr_lm_cursor cursor);

typedef struct dr_lm_batch {
    int64_t room;      /* tokens that fit */
    int64_t tokens;
    int64_t sequences;
    int64_t *offsets;  /* [sequences + 1] */
    int32_t *input;    /* symbols */
    int32_t *target;   /* bytes */
} dr_lm_batch;
dr_status dr_lm_batch_create(int64_t room, dr_lm_batch *out);
void dr_lm_batch_free(dr_lm_batch *batch);
/* Fills the batch, to the last token when training; tokens is 0 at the end of the data. A
 * piece that does not fit goes on in the next batch, as a sequence of its own. */
void dr_lm_feed_next(dr_lm_feed *feed, dr_lm_batch *batch);

#endif
