/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.c - `deltarule verify`: runs a backend on a file of test vectors and compares every
 * tensor it computes with the file's.
 *
 * In f32 (and in f64 on "ref") the file's values are the expected ones. For the narrow types
 * the inputs have to be rounded first, so the expected values are those of "ref" in fp64 on the
 * rounded inputs; that "ref" itself reproduces the file in fp64 is then checked as well.
 */
#include "tool.h"
#include "verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct settings {
    const char *path, *backend;
    dr_dtype dtype;
    int32_t chunk, threads;
    double tolerance; /* of the arithmetic; 0: that of the type */
    bool json;
} settings;

enum { OPTION_DTYPE = 1000, OPTION_CHUNK, OPTION_THREADS, OPTION_TOL, OPTION_JSON };

static error_t parse(int key, char *text, struct argp_state *state)
{
    settings *s = state->input;
    switch (key) {
    case 'b':
        s->backend = text;
        return 0;
    case OPTION_DTYPE:
        s->dtype = (dr_dtype)dr_tool_choice("--dtype", text, dr_tool_dtypes);
        return 0;
    case OPTION_CHUNK:
        s->chunk = (int32_t)dr_tool_int("--chunk", text, 1, INT32_MAX);
        return 0;
    case OPTION_THREADS:
        s->threads = (int32_t)dr_tool_int("--threads", text, 1, 4096);
        return 0;
    case OPTION_TOL:
        s->tolerance = dr_tool_real("--tol", text, 1e-16, 1e3);
        return 0;
    case OPTION_JSON:
        s->json = true;
        return 0;
    case ARGP_KEY_ARG:
        if (s->path != NULL)
            dr_tool_usage("verify takes one file, got \"%s\" too", text);
        s->path = text;
        return 0;
    case ARGP_KEY_NO_ARGS:
        dr_tool_usage("verify needs a file of test vectors");
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ------------------------------------------------------------------------ */
/* Running a job                                                            */
/* ------------------------------------------------------------------------ */

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

enum manner { PLAIN, WIDE, MOVED };

/* Opens and runs all trips; prints what went wrong and sets *code. */
static dr_case_run *run_job(const dr_verify_job *job, const char *path, const dr_case *c,
                            const dr_context *ctx, enum manner manner, int *code)
{
    filler f = {.job = job, .moved = manner == MOVED};
    const bool wide = manner == WIDE;
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
        *code = dr_tool_status(status);
    }
    return NULL;
}

/* An output in the arrangement of its record: item->count values, or NULL if the run has
 * none that fit (*why then says so). The caller frees. */
static double *read_output(const dr_verify_job *job, const dr_verify_item *item,
                           const dr_case_run *run, const char **why)
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

/* ------------------------------------------------------------------------ */
/* Comparing                                                                */
/* ------------------------------------------------------------------------ */

typedef struct verdict {
    int compared, beyond;
    double reference_worst; /* ref in fp64 against the file, narrow types only */
    char reference_where[64];
} verdict;

static void report(const settings *s, const dr_verify_set *set, const dr_context *ctx,
                   const dr_verify_item *item, const dr_case_error *e)
{
    if (s->json)
        dr_tool_json(json_pack("{so ss ss ss ss so so so sb}", "file", dr_tool_text(s->path),
                               "kind", set->kind, "backend", dr_context_backend(ctx), "dtype",
                               dr_dtype_name(s->dtype), "tensor", item->label, "relative_l2",
                               dr_tool_number(e->relative), "max_error", dr_tool_number(e->largest),
                               "limit", dr_tool_number(e->limit), "ok", e->ok));
    else
        printf("  %-28s %9.2e %9.2e %9.2e  %s\n", item->label, e->relative, e->limit, e->largest,
               e->ok ? "ok" : "BEYOND");
}

static double arithmetic_limit(const settings *s)
{
    return s->tolerance > 0 ? s->tolerance : s->dtype == DR_F64 ? DR_CASE_FP64 : DR_CASE_FP32;
}

static bool compare_item(const settings *s, const dr_verify_set *set, const dr_verify_job *job,
                         dr_verify_item *item, const dr_context *ctx, const dr_case_run *got,
                         const dr_case_run *want, verdict *v, int *code)
{
    const char *why;
    double *a = read_output(job, item, got, &why);
    double *b = a != NULL && want != NULL ? read_output(job, item, want, &why) : NULL;
    if (a == NULL || (want != NULL && b == NULL)) {
        dr_tool_error("%s: record \"%s\": %s", s->path, item->label, why);
        *code = DR_TOOL_USAGE;
        free(a);
        return false;
    }
    dr_dtype stored = dr_case_tensor_at(got, dr_case_find(got, item->tensor))->dtype;
    dr_case_error e = dr_case_compare(a, b != NULL ? b : item->values, item->count, stored,
                                      arithmetic_limit(s), b != NULL ? 0 : item->doubt);
    report(s, set, ctx, item, &e);
    v->compared++;
    v->beyond += !e.ok;
    item->beyond = !e.ok;
    free(a);
    free(b);
    return true;
}

static void set_dtypes(dr_case *c, dr_dtype dtype, bool all)
{
    c->dtype = dtype;
    if (all)
        c->gate_dtype = c->state_dtype = dtype;
}

/* ref, fp64, unrounded inputs, against the file. */
static bool check_reference(const settings *s, const dr_verify_job *job, const dr_context *ref,
                            verdict *v, int *code)
{
    dr_case c = job->c;
    set_dtypes(&c, DR_F64, true);
    dr_case_run *run = run_job(job, s->path, &c, ref, WIDE, code);
    if (run == NULL)
        return false;
    for (int i = 0; i < job->n_outputs; i++) {
        const dr_verify_item *item = &job->outputs[i];
        const char *why;
        if (item->chunk != 0 && item->chunk != dr_case_chunk(run))
            continue;
        double *a = read_output(job, item, run, &why);
        if (a == NULL)
            continue; /* the run under test says why */
        dr_dtype stored = dr_case_tensor_at(run, dr_case_find(run, item->tensor))->dtype;
        dr_case_error e =
            dr_case_compare(a, item->values, item->count, stored, DR_CASE_FP64, item->doubt);
        if (!(e.relative / e.limit <= v->reference_worst) && !isnan(v->reference_worst)) {
            v->reference_worst = e.relative / e.limit;
            snprintf(v->reference_where, sizeof v->reference_where, "%s", item->label);
        }
        free(a);
    }
    dr_case_close(run);
    return true;
}

/* How far a tensor beyond its limit moves when the inputs move by their rounding: where that is
 * not far below the limit, the problem in the file is ill-conditioned. */
static bool report_sensitivity(const settings *s, const dr_verify_job *job, const dr_case *c,
                               const dr_context *ctx, const dr_case_run *got, int *code)
{
    dr_case_run *moved = run_job(job, s->path, c, ctx, MOVED, code);
    for (int i = 0; moved != NULL && i < job->n_outputs; i++) {
        const dr_verify_item *item = &job->outputs[i];
        const char *why;
        double *a = item->beyond ? read_output(job, item, got, &why) : NULL;
        double *b = a != NULL ? read_output(job, item, moved, &why) : NULL;
        if (b != NULL) {
            double change = dr_case_compare(b, a, item->count, DR_F32, DR_CASE_FP32, 0).relative;
            if (s->json)
                dr_tool_json(json_pack("{so ss so}", "file", dr_tool_text(s->path), "tensor",
                                       item->label, "moved_by_input_rounding",
                                       dr_tool_number(change)));
            else
                printf("  %-28s %9.2e  when every input moves by its rounding\n", item->label,
                       change);
        }
        free(a);
        free(b);
    }
    dr_case_close(moved);
    return moved != NULL;
}

static bool verify_job(const settings *s, const dr_verify_set *set, dr_verify_job *job,
                       const dr_context *ctx, const dr_context *ref, verdict *v, int *code)
{
    bool narrow = s->dtype == DR_BF16 || s->dtype == DR_F16;
    dr_case c = job->c;
    c.chunk = s->chunk;
    set_dtypes(&c, s->dtype, s->dtype == DR_F64);
    dr_case_run *got = run_job(job, s->path, &c, ctx, PLAIN, code), *want = NULL;
    bool good = got != NULL;
    if (good && narrow) {
        c.chunk = dr_case_chunk(got);
        want = run_job(job, s->path, &c, ref, WIDE, code);
        good = want != NULL && check_reference(s, job, ref, v, code);
    }
    const int before = v->beyond;
    for (int i = 0; good && i < job->n_outputs; i++) {
        dr_verify_item *item = &job->outputs[i];
        if (item->chunk != 0 && item->chunk != dr_case_chunk(got))
            item->skipped = true;
        else
            good = compare_item(s, set, job, item, ctx, got, want, v, code);
    }
    if (good && s->dtype == DR_F32 && v->beyond > before)
        good = report_sensitivity(s, job, &c, ctx, got, code);
    dr_case_close(got);
    dr_case_close(want);
    return good;
}

/* ------------------------------------------------------------------------ */
/* The command                                                              */
/* ------------------------------------------------------------------------ */

/* Whether a record was only there for an item that this run's chunk length leaves out. */
static bool is_skipped(const dr_verify_set *set, const char *name)
{
    if (strncmp(name, "chunk", 5) != 0 || strstr(name, ".H") == NULL)
        return false;
    for (int i = 0; i < set->count; i++)
        for (int j = 0; j < set->jobs[i].n_outputs; j++)
            if (set->jobs[i].outputs[j].skipped)
                return true;
    return false;
}

static void report_end(const settings *s, const dr_verify_set *set, const dr_vectors *file,
                       const dr_context *ctx, const verdict *v, bool ok)
{
    enum { SHOWN = 12 };
    json_t *names = json_array();
    for (int64_t i = 0; i < file->count; i++)
        if (!file->records[i].used || is_skipped(set, file->records[i].name))
            json_array_append_new(names, json_string(file->records[i].name));
    if (s->json) {
        dr_tool_json(json_pack(
            "{sb so ss ss ss si si so so sb}", "summary", 1, "file", dr_tool_text(s->path), "kind",
            set->kind, "backend", dr_context_backend(ctx), "dtype", dr_dtype_name(s->dtype),
            "compared", v->compared, "beyond", v->beyond, "reference_share_of_limit",
            dr_tool_number(v->reference_worst), "not_compared", names, "ok", ok));
        return;
    }
    size_t count = json_array_size(names);
    if (count > 0) {
        printf("not compared:");
        for (size_t i = 0; i < count && i < SHOWN; i++)
            printf(" %s", json_string_value(json_array_get(names, i)));
        if (count > SHOWN)
            printf(" and %zu more", count - SHOWN);
        printf("\n");
    }
    json_decref(names);
    if (v->reference_where[0] != '\0')
        printf(
            "expected values: ref in fp64 on the rounded inputs; it meets the file at %.2g of the "
            "fp64 limit (%s)\n",
            v->reference_worst, v->reference_where);
    printf("%d tensors compared, %d beyond their limit\n", v->compared, v->beyond);
}

static int verify_set(const settings *s, dr_verify_set *set, const dr_vectors *file,
                      const dr_context *ctx, const dr_context *ref)
{
    if (set->f32_only && s->dtype != DR_F32) {
        dr_tool_error("--dtype: layers take f32, got %s", dr_dtype_name(s->dtype));
        return DR_TOOL_USAGE;
    }
    if (!set->has_chunks && s->chunk != 0) {
        dr_tool_error("--chunk: %s vectors have no chunks, got %d", set->kind, s->chunk);
        return DR_TOOL_USAGE;
    }
    if (!s->json) {
        printf("%s: %s on %s (%s, %d threads), %s\n", s->path, set->kind, dr_context_backend(ctx),
               dr_context_isa(ctx), dr_context_threads(ctx), dr_dtype_name(s->dtype));
        printf("  %-28s %9s %9s %9s\n", "tensor", "rel. L2", "limit", "largest");
    }
    verdict v = {0};
    int code = DR_TOOL_OK;
    for (int i = 0; i < set->count; i++)
        if (!verify_job(s, set, &set->jobs[i], ctx, ref, &v, &code))
            return code;
    bool ok = v.beyond == 0 && v.reference_worst <= 1;
    report_end(s, set, file, ctx, &v, ok);
    return ok ? DR_TOOL_OK : DR_TOOL_FAILED;
}

static int verify_file(const settings *s, dr_vectors *file)
{
    dr_verify_set set;
    int code = DR_TOOL_OK;
    if (!dr_verify_make(file, &set)) {
        dr_tool_error("%s: %s", s->path, set.problem);
        code = DR_TOOL_USAGE;
    } else {
        dr_context *ref = NULL, *ctx = dr_tool_context(s->backend, s->threads, &code);
        if (ctx != NULL)
            ref = dr_tool_context("ref", s->threads, &code);
        if (ref != NULL)
            code = verify_set(s, &set, file, ctx, ref);
        dr_context_destroy(ref);
        dr_context_destroy(ctx);
    }
    dr_verify_free(&set);
    return code;
}

int dr_tool_verify(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"backend", 'b', "NAME", 0, "The backend to verify (default: the build's first)", 0},
        {"dtype", OPTION_DTYPE, "TYPE", 0,
         "Element type of q, k, v, beta, o and the like: f32 (default), bf16, f16, or f64 on ref",
         0},
        {"chunk", OPTION_CHUNK, "C", 0, "Chunk length (default: the backend's choice)", 0},
        {"threads", OPTION_THREADS, "N", 0, "Threads (default: OMP_NUM_THREADS, else the cores)",
         0},
        {"tol", OPTION_TOL, "X", 0,
         "Limit of the relative L2 error (default 1e-5, f64 1e-11); the rounding of narrow outputs "
         "is added to it",
         0},
        {"json", OPTION_JSON, NULL, 0, "One JSON object a line", 0},
        {0},
    };
    static const struct argp argp = {
        options,
        parse,
        "FILE",
        "Compares a backend with a file of test vectors: forward, backward, decoding, maps.\vExit "
        "status: 0 all within limits, 1 one beyond, 2 wrong usage or file.",
        NULL,
        NULL,
        NULL};
    settings s = {.dtype = DR_F32};
    dr_tool_parse("verify", &argp, argc, argv, &s);
    char why[512];
    dr_vectors file;
    if (!dr_vectors_read(s.path, &file, why, sizeof why)) {
        dr_tool_error("%s", why);
        return DR_TOOL_USAGE;
    }
    int code = verify_file(&s, &file);
    dr_vectors_free(&file);
    return code;
}
