/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - `deltarule check`: every case of the table on every backend, against the backend
 * "ref" in fp64 on the same rounded inputs. Tells whether this build computes the right
 * numbers on this machine. With --cp the cases of the delta rule run over ranks (check_cp.c).
 */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    OPTION_OP = 1000,
    OPTION_QUICK,
    OPTION_SEED,
    OPTION_THREADS,
    OPTION_JSON,
    OPTION_CP,
    OPTION_RANKS
};

bool dr_check_matches(const char *op, const dr_case *c)
{
    const char *variant = c->variant == DR_GDN ? "gdn" : c->variant == DR_KDA ? "kda" : "";
    return op == NULL || strcmp(op, dr_case_op_name(c->op)) == 0 || strcmp(op, variant) == 0;
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    dr_check_settings *s = state->input;
    switch (key) {
    case 'b':
        s->backend = text;
        return 0;
    case OPTION_OP: {
        s->op = text;
        for (int i = 0; dr_case_at(i) != NULL; i++)
            if (dr_check_matches(text, dr_case_at(i)))
                return 0;
        dr_tool_usage("--op: must be gdn, kda, delta, step, stages, conv, conv-step, gate, beta, "
                      "l2norm, norm, matmul, layer or layer-step, got \"%s\"",
                      text);
    }
    case OPTION_QUICK:
        s->quick = true;
        return 0;
    case OPTION_SEED:
        s->seed = dr_tool_int("--seed", text, 0, INT64_MAX);
        return 0;
    case OPTION_THREADS:
        s->threads = (int32_t)dr_tool_int("--threads", text, 1, 4096);
        return 0;
    case OPTION_JSON:
        s->json = true;
        return 0;
    case OPTION_CP:
        s->cp = text;
        return 0;
    case OPTION_RANKS:
        dr_check_read_ranks(text, s);
        return 0;
    case ARGP_KEY_ARG:
        dr_tool_usage("check takes no argument, got \"%s\"", text);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

dr_status dr_check_run(const dr_case *c, const dr_context *ctx, bool wide, uint64_t *seed,
                       dr_case_run **out)
{
    dr_status status = dr_case_open(c, ctx, wide, dr_case_seeded, seed, out);
    if (status != DR_OK)
        return status;
    dr_case_watch(*out);
    status = dr_case_call(*out, DR_FORWARD);
    if (status == DR_OK && dr_case_trips(c) == 2)
        status = dr_case_call(*out, DR_ADJOINT);
    if (status != DR_OK) {
        dr_case_close(*out);
        *out = NULL;
    }
    return status;
}

/* ------------------------------------------------------------------------ */
/* Reports                                                                  */
/* ------------------------------------------------------------------------ */

/* The place of a line: with ranks it says which. */
static json_t *place_of(const dr_check_place *at)
{
    json_t *o = json_pack("{ss ss ss}", "case", at->c->name, "op", dr_case_op_name(at->c->op),
                          "backend", dr_context_backend(at->ctx));
    if (o != NULL && at->ranks > 0)
        json_object_update_new(o, json_pack("{ss si ss}", "cp", at->cp, "ranks", at->ranks,
                                            "partition", at->partition));
    return o;
}

static void report_tensor(const dr_check_settings *s, const dr_check_place *at,
                          const dr_case_tensor *t, const dr_case_error *e)
{
    if (s->json) {
        json_t *o = place_of(at);
        json_object_update_new(o, json_pack("{ss ss so so so sb}", "tensor", t->name, "dtype",
                                            dr_dtype_name(t->dtype), "relative_l2",
                                            dr_tool_number(e->relative), "max_error",
                                            dr_tool_number(e->largest), "limit",
                                            dr_tool_number(e->limit), "ok", e->ok));
        dr_tool_json(o);
    } else if (at->ranks == 0) {
        printf("%-20s %-5s %-24s %-4s %9.2e %9.2e %9.2e  %s\n", at->c->name,
               dr_context_backend(at->ctx), t->name, dr_dtype_name(t->dtype), e->relative, e->limit,
               e->largest, e->ok ? "ok" : "BEYOND");
    } else if (!e->ok) {
        printf("  %s: %s is off by %.2e, limit %.2e  BEYOND\n", at->c->name, t->name, e->relative,
               e->limit);
    }
}

void dr_check_word(const dr_check_settings *s, const dr_check_place *at, const char *word,
                   const char *sentence)
{
    if (s->json) {
        json_t *o = place_of(at);
        json_object_set_new(o, word, dr_tool_text(sentence));
        dr_tool_json(o);
    } else if (at->ranks > 0) {
        printf("  %s %s: %s\n", at->c->name, word, sentence);
    } else {
        printf("%-20s %-5s %s: %s\n", at->c->name, dr_context_backend(at->ctx), word, sentence);
    }
}

void dr_check_compare(const dr_check_settings *s, const dr_check_place *at, const dr_case_run *got,
                      const dr_case_run *want, dr_check_tally *total)
{
    for (int i = 0; i < dr_case_tensors(got); i++) {
        const dr_case_tensor *t = dr_case_tensor_at(got, i);
        if (!t->output)
            continue;
        size_t bytes = (size_t)(t->count > 0 ? t->count : 1) * sizeof(double);
        double *a = malloc(bytes), *b = malloc(bytes);
        if (a == NULL || b == NULL) {
            dr_tool_error("no memory for the values of %s", t->name);
            exit(DR_TOOL_FAILED);
        }
        dr_case_read(got, i, a);
        dr_case_read(want, i, b);
        dr_case_error e = dr_case_compare(a, b, t->count, t->dtype, DR_CASE_FP32, 0);
        report_tensor(s, at, t, &e);
        total->tensors++;
        total->failed += !e.ok;
        const double share = e.relative / e.limit;
        if (!(share <= total->worst) && !isnan(total->worst)) {
            total->worst = share;
            snprintf(total->where, sizeof total->where, "%s of %s", t->name, at->c->name);
        }
        if (t->dtype == DR_F32 && !(share <= total->share) && !isnan(total->share)) {
            total->share = share;
            total->relative = e.relative;
            total->limit = e.limit;
            snprintf(total->tensor, sizeof total->tensor, "%s of %s", t->name, at->c->name);
        }
        free(a);
        free(b);
    }
    const char *damaged = dr_case_damage(got);
    if (damaged != NULL) {
        dr_check_word(s, at, "wrote outside its outputs, at", damaged);
        total->failed++;
    }
}

/* ------------------------------------------------------------------------ */
/* The table on one backend                                                 */
/* ------------------------------------------------------------------------ */

static void check_case(const dr_check_settings *s, const dr_case *c, const dr_context *ctx,
                       const dr_context *ref, dr_check_tally *total)
{
    uint64_t seed = (uint64_t)s->seed;
    const dr_check_place at = {.c = c, .ctx = ctx};
    dr_case_run *got = NULL, *want = NULL;
    total->cases++;
    dr_status status = dr_check_run(c, ctx, false, &seed, &got);
    if (status == DR_ERR_SUPPORT) {
        dr_check_word(s, &at, "refused", dr_case_why());
        total->refused++;
        return;
    }
    if (status != DR_OK) {
        dr_check_word(s, &at, "failed", dr_case_why());
        total->failed++;
        return;
    }
    dr_case same = *c; /* chunk_states exist per chunk: both must cut alike */
    if (same.flags & DR_CASE_CHUNK_STATES)
        same.chunk = dr_case_chunk(got);
    status = dr_check_run(&same, ref, true, &seed, &want);
    if (status == DR_OK) {
        dr_check_compare(s, &at, got, want, total);
    } else {
        dr_check_word(s, &(dr_check_place){.c = c, .ctx = ref}, "failed", dr_case_why());
        total->failed++;
    }
    dr_case_close(got);
    dr_case_close(want);
}

static void report_total(const dr_check_settings *s, const dr_context *ctx, const dr_check_tally *t)
{
    const char *backend = dr_context_backend(ctx);
    if (s->json)
        dr_tool_json(json_pack("{sb ss ss si si si si si so ss sb}", "summary", 1, "backend",
                               backend, "isa", dr_context_isa(ctx), "threads",
                               dr_context_threads(ctx), "cases", t->cases, "tensors", t->tensors,
                               "failed", t->failed, "refused", t->refused, "worst_share_of_limit",
                               dr_tool_number(t->worst), "worst", t->where, "ok", t->failed == 0));
    else
        printf("%s (%s, %d threads): %d cases, %d tensors, %d beyond limit or failed, %d refused; "
               "worst %.0f%% of its limit, %s\n",
               backend, dr_context_isa(ctx), dr_context_threads(ctx), t->cases, t->tensors,
               t->failed, t->refused, 100 * t->worst, t->where[0] ? t->where : "nothing compared");
}

static int check_backend(const dr_check_settings *s, const char *name, const dr_context *ref)
{
    int code = DR_TOOL_OK;
    dr_context *ctx = dr_tool_context(name, s->threads, &code);
    if (ctx == NULL)
        return code;
    dr_check_tally total = {0};
    if (!s->json)
        printf("%-20s %-5s %-24s %-4s %9s %9s %9s\n", "case", "on", "tensor", "type", "rel. L2",
               "limit", "largest");
    for (int i = 0; dr_case_at(i) != NULL; i++) {
        const dr_case *c = dr_case_at(i);
        if (dr_check_matches(s->op, c) && !(s->quick && c->flags & DR_CASE_FULL))
            check_case(s, c, ctx, ref, &total);
    }
    report_total(s, ctx, &total);
    dr_context_destroy(ctx);
    return total.failed == 0 ? DR_TOOL_OK : DR_TOOL_FAILED;
}

int dr_tool_check(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"backend", 'b', "NAME", 0, "The backend to check (default: all but ref)", 0},
        {"op", OPTION_OP, "OP", 0,
         "Only this operation: gdn, kda, delta, step, stages, conv, conv-step, gate, beta, l2norm, "
         "norm, matmul, layer or layer-step",
         0},
        {"quick", OPTION_QUICK, NULL, 0, "Leave out the large cases", 0},
        {"seed", OPTION_SEED, "N", 0, "Seed of the values (default 1)", 0},
        {"threads", OPTION_THREADS, "N", 0,
         "Threads (default: OMP_NUM_THREADS, else the cores; with --cp 1 for each rank)", 0},
        {"cp", OPTION_CP, "SPEC", 0,
         "Check context parallelism instead: a protocol such as p2p or grouped:2, or all", 0},
        {"ranks", OPTION_RANKS, "N,...", 0, "Ranks for --cp, a thread each (default 1,2,3,5,8)", 0},
        {"json", OPTION_JSON, NULL, 0, "One JSON object a line", 0},
        {0},
    };
    static const struct argp argp = {
        options,
        parse,
        NULL,
        "Compares backends with the fp64 reference, one tensor a line: relative L2 error, its "
        "limit, the largest error. With --cp one line for each protocol, number of ranks and "
        "partition: the f32 tensor nearest to its limit, and the largest share of a limit "
        "among all types.\vExit status: 0 all within limits, 1 one beyond, 2 wrong usage.",
        NULL,
        NULL,
        NULL};
    dr_check_settings s = {.seed = 1};
    dr_tool_parse("check", &argp, argc, argv, &s);
    if (s.cp == NULL && s.worlds > 0)
        dr_tool_usage("--ranks: needs --cp, which says how the ranks exchange states");
    int code = DR_TOOL_OK;
    dr_context *ref = dr_tool_context("ref", s.threads, &code);
    if (ref == NULL)
        return code;
    for (int i = 0; dr_backend_name(i) != NULL || (i == 0 && s.backend != NULL); i++) {
        const char *name = s.backend != NULL ? s.backend : dr_backend_name(i);
        if (s.backend == NULL && strcmp(name, "ref") == 0)
            continue;
        int result = s.cp != NULL ? dr_check_cp(&s, name, ref) : check_backend(&s, name, ref);
        code = result > code ? result : code;
        if (s.backend != NULL)
            break;
    }
    dr_context_destroy(ref);
    return code;
}
