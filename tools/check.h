/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.h - what the two halves of `deltarule check` share: check.c walks the table of cases on
 * each backend, check_cp.c walks those of the delta rule over worlds of ranks.
 */
#ifndef DR_TOOL_CHECK_H
#define DR_TOOL_CHECK_H

#include "cases.h"
#include "tool.h"

enum { DR_CHECK_MAX_RANKS = 64, DR_CHECK_MAX_WORLDS = 32 };

typedef struct dr_check_settings {
    const char *backend; /* NULL: all but ref */
    const char *op;      /* NULL: all */
    const char *cp;      /* NULL: no ranks; a protocol, or "all" */
    int32_t ranks[DR_CHECK_MAX_WORLDS];
    int worlds; /* entries of ranks */
    bool quick, json;
    int64_t seed;
    int32_t threads; /* 0: the library's choice, with --cp one for each rank */
} dr_check_settings;

typedef struct dr_check_tally {
    int cases, tensors, failed, refused;
    double worst; /* the largest error as a share of its limit */
    char where[96];
    double relative, limit; /* of the f32 tensor nearest to its limit, where nothing rounds but */
    double share;           /* the arithmetic; and the share */
    char tensor[96];
    char refusal[256]; /* the first */
} dr_check_tally;

/* What a JSON line says beside the numbers; ranks 0: no context parallelism. */
typedef struct dr_check_place {
    const dr_case *c;
    const dr_context *ctx;
    const char *cp, *partition;
    int32_t ranks;
} dr_check_place;

bool dr_check_matches(const char *op, const dr_case *c);
/* Opens a case and runs all trips; *out is NULL on failure. */
dr_status dr_check_run(const dr_case *c, const dr_context *ctx, bool wide, uint64_t *seed,
                       dr_case_run **out);
/* Every output of got against want's, within the budget of f32. */
void dr_check_compare(const dr_check_settings *s, const dr_check_place *at, const dr_case_run *got,
                      const dr_case_run *want, dr_check_tally *total);
/* A case without numbers: refused, or failed. */
void dr_check_word(const dr_check_settings *s, const dr_check_place *at, const char *word,
                   const char *sentence);

/* The ranks of --ranks; wrong usage ends the process. */
void dr_check_read_ranks(const char *text, dr_check_settings *s);
/* Context parallelism on one backend; an exit code. */
int dr_check_cp(const dr_check_settings *s, const char *backend, const dr_context *ref);

#endif
