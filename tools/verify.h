/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.h - a file of test vectors as jobs: cases to run, where the values of their inputs
 * are, and which records their outputs must match. verify_file.c recognises the kind of a file
 * and reads its records, a maker per kind (verify_delta.c, verify_rows.c, verify_layer.c) checks
 * their shapes against each other and pairs them with tensors, verify.c runs the jobs.
 */
#ifndef DR_TOOL_VERIFY_H
#define DR_TOOL_VERIFY_H

#include "cases.h"
#include "vectors.h"

typedef struct dr_verify_item dr_verify_item;
typedef struct dr_verify_job dr_verify_job;

/* Copies what belongs to an item out of values in another arrangement: for an input from
 * its record to the tensor, for an output from the tensor to the record. */
typedef void dr_verify_gather(const dr_verify_job *job, const dr_verify_item *item,
                              const double *from, double *to);

struct dr_verify_item {
    char label[64];            /* outputs: what to call it */
    char tensor[DR_CASE_NAME]; /* of the run */
    const double *values;      /* of the record; NULL: zeros (inputs) */
    int64_t count;             /* of values */
    dr_verify_gather *gather;  /* NULL: the same arrangement */
    const dr_record *factor;   /* the other matrix of a pair */
    double doubt;              /* outputs: L2 error that the record itself may have */
    int64_t chunk;             /* outputs: only if the run's C is this; 0: always */
    bool skipped, beyond;      /* outputs: that C was another; not within the limit */
};

enum { DR_VERIFY_MAX_ITEMS = 40, DR_VERIFY_MAX_JOBS = 4 };
/* Largest array made here that no record of the file is as large as. */
#define DR_VERIFY_MAX_VALUES (INT64_C(1) << 27)

struct dr_verify_job {
    dr_case c;
    dr_verify_item inputs[DR_VERIFY_MAX_ITEMS], outputs[DR_VERIFY_MAX_ITEMS];
    int n_inputs, n_outputs;
    int64_t history; /* conv: tokens of it in the file */
};

typedef struct dr_verify_set {
    const char *kind;    /* "gdn", ... */
    bool f32_only;       /* layers */
    bool has_chunks;     /* the delta rule */
    dr_verify_job *jobs; /* room for DR_VERIFY_MAX_JOBS */
    int count;
    int64_t *offsets, *cuts;
    int32_t ranks;    /* of cuts; 0: the file has none */
    double *owned[2]; /* values made from several records */
    char problem[256];
} dr_verify_set;

/* Recognises the kind of a file and makes its jobs; records that take part are marked used.
 * false: set->problem holds a sentence. The file must outlive the set. */
bool dr_verify_make(dr_vectors *file, dr_verify_set *set);
void dr_verify_free(dr_verify_set *set);

/* How the values of a run are: as they are, kept in f64 whatever the type (ref), or every one
 * moved by its unit roundoff in f32. */
typedef enum dr_verify_manner { DR_VERIFY_PLAIN, DR_VERIFY_WIDE, DR_VERIFY_MOVED } dr_verify_manner;

/* Opens a case with the inputs of a job and runs all trips. NULL: what went wrong has been
 * printed and *code set; path is the file's. */
dr_case_run *dr_verify_run(const dr_verify_job *job, const char *path, const dr_case *c,
                           const dr_context *ctx, dr_verify_manner manner, int *code);
/* An output in the arrangement of its record: item->count values, or NULL if the run has
 * none that fit (*why then says so). The caller frees. */
double *dr_verify_read(const dr_verify_job *job, const dr_verify_item *item, const dr_case_run *run,
                       const char **why);

/* ------------------------------------------------------------------------ */
/* For makers                                                               */
/* ------------------------------------------------------------------------ */

typedef struct dr_verify_maker {
    dr_vectors *file;
    dr_verify_set *set;
} dr_verify_maker;

void dr_verify_cp(dr_verify_maker *m);
void dr_verify_gdn(dr_verify_maker *m);
void dr_verify_kda(dr_verify_maker *m);
void dr_verify_conv(dr_verify_maker *m);
void dr_verify_gate(dr_verify_maker *m);
void dr_verify_layer(dr_verify_maker *m);
void dr_verify_layer_gdn(dr_verify_maker *m);
void dr_verify_layer_kda(dr_verify_maker *m);

/* Stores a sentence, unless there is one; returns false. */
bool dr_verify_refuse(dr_verify_maker *m, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

typedef struct dr_verify_extents {
    int32_t rank;
    int64_t n[4]; /* -1: anything from 1 to 2^31 - 1 */
} dr_verify_extents;

#define DR_E0 ((dr_verify_extents){0, {0}})
#define DR_E1(a) ((dr_verify_extents){1, {a}})
#define DR_E2(a, b) ((dr_verify_extents){2, {a, b}})
#define DR_E3(a, b, c) ((dr_verify_extents){3, {a, b, c}})
#define DR_E4(a, b, c, d) ((dr_verify_extents){4, {a, b, c, d}})

/* The record, marked used, if it has that shape; else a refusal, and a record of no values
 * whose extents are all 1. */
const dr_record *dr_verify_record(dr_verify_maker *m, const char *name, dr_verify_extents want);
bool dr_verify_has(const dr_verify_maker *m, const char *name);
double dr_verify_number(dr_verify_maker *m, const char *name);
int64_t dr_verify_integer(dr_verify_maker *m, const char *name, int64_t low, int64_t high);
/* Reads "cuts", of c->T tokens, into c. */
void dr_verify_cuts(dr_verify_maker *m, dr_case *c);
/* Reads "offsets" into c. Two offsets mean rows of T tokens, more mean documents of one row. */
void dr_verify_offsets(dr_verify_maker *m, dr_case *c);

dr_verify_job *dr_verify_start(dr_verify_maker *m, dr_case_op op);
/* Pairs a tensor with a record; NULL: zeros, or to be filled in by the caller. */
dr_verify_item *dr_verify_input(dr_verify_maker *m, dr_verify_job *job, const char *tensor,
                                const dr_record *r);
dr_verify_item *dr_verify_output(dr_verify_maker *m, dr_verify_job *job, const char *tensor,
                                 const dr_record *r);

#endif
