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
    const char *cp;   /* NULL: one rank */
    int32_t ranks;    /* 0: those of the file */
    bool json;
} settings;

enum { MAX_RANKS = 64 };
enum {
    OPTION_DTYPE = 1000,
    OPTION_CHUNK,
    OPTION_THREADS,
    OPTION_TOL,
    OPTION_JSON,
    OPTION_CP,
    OPTION_RANKS
};

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
    case OPTION_CP:
        s->cp = text;
        return 0;
    case OPTION_RANKS:
        s->ranks = (int32_t)dr_tool_int("--ranks", text, 1, MAX_RANKS);
        return 0;
    case ARGP_KEY_ARG:
        if (s->path != NULL)
            dr_tool_usage("verify takes one file, got \"%s\" too", text);
        s->path = text;
        return 0;
    case ARGP_KEY_NO_ARGS:
        dr_tool_usage("verify needs a file of test vectors");
    case ARGP_KEY_END:
        if (s->ranks > 0 && s->cp == NULL)
            dr_tool_usage("--ranks: needs --cp, which says how the ranks exchange states");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
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

/* Between ranks states are f32, whatever the tensors are. */
static double arithmetic_limit(const settings *s)
{
    const bool exact = s->dtype == DR_F64 && s->cp == NULL;
    return s->tolerance > 0 ? s->tolerance : exact ? DR_CASE_FP64 : DR_CASE_FP32;
}

static bool compare_item(const settings *s, const dr_verify_set *set, const dr_verify_job *job,
                         dr_verify_item *item, const dr_context *ctx, const dr_case_run *got,
                         const dr_case_run *want, verdict *v, int *code)
{
    const char *why;
    double *a = dr_verify_read(job, item, got, &why);
    double *b = a != NULL && want != NULL ? dr_verify_read(job, item, want, &why) : NULL;
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
    dr_case_run *run = dr_verify_run(job, s->path, &c, ref, DR_VERIFY_WIDE, code);
    if (run == NULL)
        return false;
    for (int i = 0; i < job->n_outputs; i++) {
        const dr_verify_item *item = &job->outputs[i];
        const char *why;
        if (item->chunk != 0 && item->chunk != dr_case_chunk(run))
            continue;
        double *a = dr_verify_read(job, item, run, &why);
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
    dr_case_run *moved = dr_verify_run(job, s->path, c, ctx, DR_VERIFY_MOVED, code);
    for (int i = 0; moved != NULL && i < job->n_outputs; i++) {
        const dr_verify_item *item = &job->outputs[i];
        const char *why;
        double *a = item->beyond ? dr_verify_read(job, item, got, &why) : NULL;
        double *b = a != NULL ? dr_verify_read(job, item, moved, &why) : NULL;
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

/* The whole pass goes over ranks: those of the file with its cuts, or as many equal shares as were
 * asked for. */
static void spread_case(const settings *s, dr_case *c)
{
    c->op = DR_CASE_CP;
    c->cp = s->cp;
    c->flags &= ~(uint32_t)DR_CASE_CHUNK_STATES;
    if (s->ranks > 0) {
        c->ranks = s->ranks;
        c->cut = DR_CASE_CONTIGUOUS;
    }
}

/* Chunk states are those of one cut into chunks; ranks have their own. */
static bool applies(const settings *s, const dr_verify_item *item, const dr_case_run *run)
{
    return item->chunk == 0 || (s->cp == NULL && item->chunk == dr_case_chunk(run));
}

static bool verify_job(const settings *s, const dr_verify_set *set, dr_verify_job *job,
                       const dr_context *ctx, const dr_context *ref, verdict *v, int *code)
{
    bool narrow = s->dtype == DR_BF16 || s->dtype == DR_F16;
    dr_case c = job->c;
    c.chunk = s->chunk;
    set_dtypes(&c, s->dtype, s->dtype == DR_F64);
    dr_case one_rank = c;
    if (s->cp != NULL && c.op != DR_CASE_DELTA)
        return true; /* decoding and maps are no exchange */
    if (s->cp != NULL)
        spread_case(s, &c);
    dr_case_run *got = dr_verify_run(job, s->path, &c, ctx, DR_VERIFY_PLAIN, code), *want = NULL;
    bool good = got != NULL;
    if (good && narrow) {
        one_rank.chunk = s->cp == NULL ? dr_case_chunk(got) : s->chunk;
        want = dr_verify_run(job, s->path, &one_rank, ref, DR_VERIFY_WIDE, code);
        good = want != NULL && check_reference(s, job, ref, v, code);
    }
    const int before = v->beyond;
    for (int i = 0; good && i < job->n_outputs; i++) {
        dr_verify_item *item = &job->outputs[i];
        if (!applies(s, item, got))
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
        dr_tool_json(json_pack("{sb so ss ss ss si ss si si so so sb}", "summary", 1, "file",
                               dr_tool_text(s->path), "kind", set->kind, "backend",
                               dr_context_backend(ctx), "dtype", dr_dtype_name(s->dtype), "ranks",
                               (int)(s->cp == NULL  ? 1
                                     : s->ranks > 0 ? s->ranks
                                                    : set->ranks),
                               "cp", s->cp != NULL ? s->cp : "none", "compared", v->compared,
                               "beyond", v->beyond, "reference_share_of_limit",
                               dr_tool_number(v->reference_worst), "not_compared", names, "ok",
                               ok));
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
    const int64_t ranks = s->ranks > 0 ? s->ranks : set->ranks;
    if (s->cp != NULL && !set->has_chunks) {
        dr_tool_error("--cp: %s vectors are not for ranks; gdn, kda, cp-gdn and cp-kda are",
                      set->kind);
        return DR_TOOL_USAGE;
    }
    if (s->cp != NULL && (ranks < 1 || ranks > MAX_RANKS)) {
        dr_tool_error(ranks < 1 ? "--ranks: must be given, since the file has no record \"cuts\""
                                : "--ranks: the file cuts for more than 64 ranks; give fewer");
        return DR_TOOL_USAGE;
    }
    if (!s->json) {
        printf("%s: %s on %s (%s, %d threads), %s\n", s->path, set->kind, dr_context_backend(ctx),
               dr_context_isa(ctx), dr_context_threads(ctx), dr_dtype_name(s->dtype));
        if (s->cp != NULL)
            printf("over %lld ranks, %s, %s\n", (long long)ranks, s->cp,
                   s->ranks > 0 ? "equal shares" : "cut as in the file");
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
        dr_context *ref = NULL,
                   *ctx = dr_tool_context(s->backend,
                                          s->threads == 0 && s->cp != NULL ? 1 : s->threads, &code);
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
        {"threads", OPTION_THREADS, "N", 0,
         "Threads (default: OMP_NUM_THREADS, else the cores; with --cp 1 for each rank)", 0},
        {"tol", OPTION_TOL, "X", 0,
         "Limit of the relative L2 error (default 1e-5, f64 on one rank 1e-11); the rounding of narrow outputs "
         "is added to it",
         0},
        {"cp", OPTION_CP, "SPEC", 0,
         "Run the pass over ranks, a thread each, with this protocol, such as p2p or grouped:2", 0},
        {"ranks", OPTION_RANKS, "N", 0,
         "Ranks for --cp, with equal shares (default: as the record \"cuts\" of the file says)", 0},
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
