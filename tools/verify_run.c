/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify_run.c - one job of a file of test vectors as a run: its inputs filled from records, its
 * outputs read back in the arrangement of theirs; see verify.h.
 */
#include "tool.h"
#include "verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct filler {
    const dr_verify_job *job;
    bool moved;              /* every value changed by its unit roundoff in f32, up or down */
    char problem[256];       /* the first tensor that the file cannot fill */
    char name[DR_CASE_NAME]; /* of the tensor in values */
    double *values;          /* a whole tensor, gathered */
} filler;

static const dr_verify_item *input_of(const dr_verify_job *job, const char *tensor)
{
    for (int i = 0; i < job->n_inputs; i++)
        if (strcmp(job->inputs[i].tensor, tensor) == 0)
            return &job->inputs[i];
    return NULL;
}

static void begin_tensor(filler *f, const dr_case_tensor *t)
{
    const dr_verify_item *item = input_of(f->job, t->name);
    snprintf(f->name, sizeof f->name, "%s", t->name);
    free(f->values);
    f->values = calloc((size_t)(t->count > 0 ? t->count : 1), sizeof *f->values);
    if (f->problem[0] != '\0')
        return;
    if (f->values == NULL)
        snprintf(f->problem, sizeof f->problem, "no memory for tensor \"%s\"", t->name);
    else if (item == NULL)
        snprintf(f->problem, sizeof f->problem, "no record for tensor \"%s\"", t->name);
    else if (item->values != NULL && item->gather != NULL)
        item->gather(f->job, item, item->values, f->values);
    else if (item->values != NULL && item->count != t->count)
        snprintf(f->problem, sizeof f->problem,
                 "record \"%s\": tensor \"%s\" takes %lld values, got %lld", item->label, t->name,
                 (long long)t->count, (long long)item->count);
    else if (item->values != NULL)
        memcpy(f->values, item->values, (size_t)item->count * sizeof *f->values);
}

static void fill(void *user, const dr_case_tensor *t, int64_t first, int64_t count, double *out)
{
    filler *f = user;
    if (strcmp(f->name, t->name) != 0)
        begin_tensor(f, t);
    for (int64_t i = first; i < first + count; i++) {
        double x = f->values != NULL ? f->values[i] : NAN;
        double sign = (uint64_t)i * 0x9e3779b97f4a7c15u >> 63 ? 1 : -1;
        out[i - first] = f->moved ? x * (1 + sign * 0x1p-24) : x;
    }
}

dr_case_run *dr_verify_run(const dr_verify_job *job, const char *path, const dr_case *c,
                           const dr_context *ctx, dr_verify_manner manner, int *code)
{
    filler f = {.job = job, .moved = manner == DR_VERIFY_MOVED};
    const bool wide = manner == DR_VERIFY_WIDE;
    dr_case_run *run = NULL;
    dr_status status = dr_case_open(c, ctx, wide, fill, &f, &run);
    free(f.values);
    if (status == DR_OK && f.problem[0] == '\0')
        status = dr_case_call(run, DR_FORWARD);
    if (status == DR_OK && f.problem[0] == '\0' && dr_case_trips(c) == 2)
        status = dr_case_call(run, DR_ADJOINT);
    if (status == DR_OK && f.problem[0] == '\0')
        return run;
    dr_case_close(run);
    if (f.problem[0] != '\0') {
        dr_tool_error("%s: %s", path, f.problem);
        *code = DR_TOOL_USAGE;
    } else {
        *code = dr_tool_failure(status, dr_case_why());
    }
    return NULL;
}

double *dr_verify_read(const dr_verify_job *job, const dr_verify_item *item, const dr_case_run *run,
                       const char **why)
{
    int at = dr_case_find(run, item->tensor);
    *why = "the run has no tensor for it";
    if (at < 0)
        return NULL;
    int64_t count = dr_case_tensor_at(run, at)->count;
    *why = "its size is not the tensor's";
    if (item->gather == NULL && count != item->count)
        return NULL;
    double *tensor = malloc((size_t)(count > 0 ? count : 1) * sizeof *tensor);
    double *out = malloc((size_t)(item->count > 0 ? item->count : 1) * sizeof *out);
    *why = "no memory";
    if (tensor == NULL || out == NULL) {
        free(tensor);
        free(out);
        return NULL;
    }
    dr_case_read(run, at, tensor);
    if (item->gather != NULL)
        item->gather(job, item, tensor, out);
    else
        memcpy(out, tensor, (size_t)count * sizeof *out);
    free(tensor);
    return out;
}
