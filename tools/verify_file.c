/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify_file.c - the records of a file of test vectors, read with their shapes checked, and the
 * table of kinds; see verify.h.
 */
#include "verify.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The first problem stays. */
bool dr_verify_refuse(dr_verify_maker *m, const char *format, ...)
{
    if (m->set->problem[0] == '\0') {
        va_list args;
        va_start(args, format);
        vsnprintf(m->set->problem, sizeof m->set->problem, format, args);
        va_end(args);
    }
    return false;
}

/* ------------------------------------------------------------------------ */
/* Records                                                                  */
/* ------------------------------------------------------------------------ */

static void shape_text(char *text, size_t size, const int64_t *n, int32_t rank)
{
    size_t at = (size_t)snprintf(text, size, "[");
    for (int32_t i = 0; i < rank && at < size; i++) {
        const char *comma = i > 0 ? "," : "";
        if (n[i] < 0)
            at += (size_t)snprintf(text + at, size - at, "%s.", comma);
        else
            at += (size_t)snprintf(text + at, size - at, "%s%lld", comma, (long long)n[i]);
    }
    if (at < size)
        snprintf(text + at, size - at, "]");
}

const dr_record *dr_verify_record(dr_verify_maker *m, const char *name, dr_verify_extents want)
{
    static const dr_record nothing = {.name = "", .shape = {1, 1, 1, 1, 1, 1, 1, 1}};
    dr_record *r = dr_vectors_find(m->file, name);
    if (r == NULL) {
        dr_verify_refuse(m, "record \"%s\" is missing", name);
        return &nothing;
    }
    bool fits = r->rank == want.rank;
    for (int32_t i = 0; fits && i < r->rank; i++)
        fits = want.n[i] >= 0 ? r->shape[i] == want.n[i]
                              : r->shape[i] >= 1 && r->shape[i] <= INT32_MAX;
    if (!fits) {
        char expected[96], got[192];
        shape_text(expected, sizeof expected, want.n, want.rank);
        shape_text(got, sizeof got, r->shape, r->rank);
        dr_verify_refuse(m, "record \"%s\": expected %s, got %s", name, expected, got);
        return &nothing;
    }
    r->used = true;
    return r;
}

bool dr_verify_has(const dr_verify_maker *m, const char *name)
{
    return dr_vectors_find(m->file, name) != NULL;
}

double dr_verify_number(dr_verify_maker *m, const char *name)
{
    const dr_record *r = dr_verify_record(m, name, DR_E0);
    return r->values != NULL ? r->values[0] : 0;
}

int64_t dr_verify_integer(dr_verify_maker *m, const char *name, int64_t low, int64_t high)
{
    double x = dr_verify_number(m, name);
    if (x != floor(x) || x < (double)low || x > (double)high) {
        dr_verify_refuse(m, "record \"%s\": must be a whole number from %lld to %lld, got %g", name,
                         (long long)low, (long long)high, x);
        return low;
    }
    return (int64_t)x;
}

/* Whether a record holds whole numbers that never fall, from 0 to at most last. */
static bool rises(const dr_record *r, int64_t last)
{
    const int64_t n = r->count - 1;
    bool good = n >= 1 && r->values[0] == 0 && r->values[n] <= (double)last;
    for (int64_t i = 0; good && i < n; i++)
        good = r->values[i + 1] >= r->values[i] && r->values[i + 1] == floor(r->values[i + 1]);
    return good;
}

static int64_t *integers(dr_verify_maker *m, const dr_record *r)
{
    int64_t *out = malloc((size_t)r->count * sizeof *out);
    if (out == NULL)
        dr_verify_refuse(m, "no memory for record \"%s\"", r->name);
    for (int64_t i = 0; out != NULL && i < r->count; i++)
        out[i] = (int64_t)r->values[i];
    return out;
}

void dr_verify_cuts(dr_verify_maker *m, dr_case *c)
{
    const dr_record *r = dr_verify_record(m, "cuts", DR_E1(-1));
    if (r->values == NULL)
        return;
    if (!rises(r, c->T) || r->values[r->count - 1] != (double)c->T) {
        dr_verify_refuse(m, "record \"cuts\": must be whole numbers rising from 0 to %lld",
                         (long long)c->T);
        return;
    }
    c->cuts = m->set->cuts = integers(m, r);
    c->ranks = m->set->ranks = (int32_t)(r->count - 1);
    c->cut = DR_CASE_CUTS;
}

void dr_verify_offsets(dr_verify_maker *m, dr_case *c)
{
    const dr_record *r = dr_verify_record(m, "offsets", DR_E1(-1));
    if (r->values == NULL)
        return;
    int64_t n = r->count - 1;
    if (!rises(r, c->T)) {
        dr_verify_refuse(m,
                         "record \"offsets\": must be whole numbers rising from 0 to at most %lld",
                         (long long)c->T);
        return;
    }
    if (n == 1 && r->values[n] == (double)c->T)
        return;
    if (c->B != 1) {
        dr_verify_refuse(m, "record \"offsets\": %lld documents need a batch of 1, got %lld",
                         (long long)n, (long long)c->B);
        return;
    }
    m->set->offsets = integers(m, r);
    c->offsets = m->set->offsets;
    c->N = n;
}

dr_verify_job *dr_verify_start(dr_verify_maker *m, dr_case_op op)
{
    dr_verify_job *job = &m->set->jobs[m->set->count++];
    job->c.name = m->set->kind;
    job->c.op = op;
    return job;
}

/* ------------------------------------------------------------------------ */
/* Items                                                                    */
/* ------------------------------------------------------------------------ */

static dr_verify_item *add(dr_verify_maker *m, dr_verify_item *items, int *count,
                           const char *tensor, const dr_record *r)
{
    if (*count == DR_VERIFY_MAX_ITEMS) {
        dr_verify_refuse(m, "more tensors than this command can hold");
        return &items[0];
    }
    dr_verify_item *item = &items[(*count)++];
    snprintf(item->tensor, sizeof item->tensor, "%s", tensor);
    if (r != NULL) {
        snprintf(item->label, sizeof item->label, "%s", r->name);
        item->values = r->values;
        item->count = r->count;
    }
    return item;
}

dr_verify_item *dr_verify_input(dr_verify_maker *m, dr_verify_job *job, const char *tensor,
                                const dr_record *r)
{
    return add(m, job->inputs, &job->n_inputs, tensor, r);
}

dr_verify_item *dr_verify_output(dr_verify_maker *m, dr_verify_job *job, const char *tensor,
                                 const dr_record *r)
{
    return add(m, job->outputs, &job->n_outputs, tensor, r);
}

/* ------------------------------------------------------------------------ */
/* Kinds                                                                    */
/* ------------------------------------------------------------------------ */

/* The first row whose record is there, with that rank where it is not 0, names the kind. */
static const struct kind {
    const char *name, *record;
    int32_t rank;
    void (*make)(dr_verify_maker *m);
} kinds[] = {
    {"cp", "cuts", 0, dr_verify_cp},
    {"gate", "gdn.x", 0, dr_verify_gate},
    {"layer", "config", 0, dr_verify_layer},
    {"layer-gdn", "param.in_proj_qkv", 0, dr_verify_layer_gdn},
    {"layer-kda", "param.q_proj", 0, dr_verify_layer_kda},
    {"gdn", "g", 3, dr_verify_gdn},
    {"kda", "g", 4, dr_verify_kda},
    {"conv", "w", 0, dr_verify_conv},
};

bool dr_verify_make(dr_vectors *file, dr_verify_set *set)
{
    static const char offered[] =
        "gdn, kda, cp-gdn, cp-kda, conv, gate, layer, layer-gdn and layer-kda";
    *set = (dr_verify_set){0};
    dr_verify_maker m = {file, set};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        const dr_record *r = dr_vectors_find(file, kinds[i].record);
        if (r == NULL || (kinds[i].rank != 0 && r->rank != kinds[i].rank))
            continue;
        set->kind = kinds[i].name;
        set->jobs = calloc(DR_VERIFY_MAX_JOBS, sizeof *set->jobs);
        if (set->jobs == NULL)
            return dr_verify_refuse(&m, "no memory for the jobs");
        kinds[i].make(&m);
        return set->problem[0] == '\0';
    }
    return dr_verify_refuse(&m, "its records name no kind of vectors; this build verifies %s",
                            offered);
}

void dr_verify_free(dr_verify_set *set)
{
    free(set->jobs);
    free(set->offsets);
    free(set->cuts);
    free(set->owned[0]);
    free(set->owned[1]);
    *set = (dr_verify_set){0};
}
