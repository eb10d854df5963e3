/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.c - `deltarule bench`: times operations and sets each beside the limit of the machine,
 * measured in the same run and between the same calls: the matrix product of the linked BLAS
 * (1024^3, f32, as many threads) where arithmetic rules, the stream bandwidth (a = b + c s,
 * or a = a s) where memory does. With --cp the delta rule runs over ranks; with --plot curves are
 * drawn.
 */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------ */
/* Reports                                                                  */
/* ------------------------------------------------------------------------ */

static void report_json(const dr_bench_row *r, const dr_context *ctx, const dr_bench_result *m)
{
    json_t *o = json_pack(
        "{ss ss ss ss ss sI sI sI sI sI sI si si ss so so so so so so sI}", "op", r->op, "pass",
        dr_tool_word_of(dr_bench_passes, r->pass), "backend", dr_context_backend(ctx), "isa",
        dr_context_isa(ctx), "dtype", dr_dtype_name(r->dtype), "B", (json_int_t)r->B, "T",
        (json_int_t)r->T, "H", (json_int_t)r->H, "HV", (json_int_t)r->HV, "K", (json_int_t)r->K,
        "V", (json_int_t)r->V, "threads", dr_context_threads(ctx), "ranks",
        r->ranks > 0 ? r->ranks : 1, "cp", r->cp != NULL ? r->cp : "none", "ms_median",
        dr_tool_number(1e3 * m->median), "ms_min", dr_tool_number(1e3 * m->fastest),
        "us_per_token_head", dr_tool_number(dr_bench_unit_time(r, m)), "gflops",
        dr_tool_number(dr_bench_gflops(r, m)), "roof_gflops", dr_tool_number(m->roof_gflops),
        "share_of_roof", dr_tool_number(dr_bench_share(r, m)), "workspace_bytes",
        (json_int_t)m->workspace);
    if (dr_bench_keeps_something(r))
        json_object_set_new(o, "keep", json_string(dr_tool_word_of(dr_bench_keeps, r->keep)));
    if (r->shortest > 0)
        json_object_set_new(o, "documents",
                            json_pack("[I,I]", (json_int_t)r->shortest, (json_int_t)r->longest));
    if (r->states)
        json_object_set_new(o, "states", json_true());
    if (r->layers > 0)
        json_object_set_new(o, "layers", json_integer(r->layers));
    if (r->lengths > 0) {
        json_object_set_new(o, "lengths", json_integer(r->lengths));
        json_object_set_new(o, "first_over_second", dr_tool_number(m->first));
    }
    if (r->cp != NULL)
        json_object_set_new(o, "efficiency", dr_tool_number(m->efficiency));
    dr_tool_json(o);
}

/* What is special about a row. */
static void note_of(const dr_bench_row *r, const dr_bench_result *m, char *text, size_t size)
{
    const long long shortest = r->shortest, longest = r->longest;
    text[0] = '\0';
    if (r->cp != NULL)
        snprintf(text, size, "%d ranks %s, efficiency %.0f%%", r->ranks, r->cp,
                 100 * m->efficiency);
    else if (r->lengths > 0)
        snprintf(text, size, "T to %lld in turn, first/second call %.2f",
                 (long long)(r->T + r->lengths - 1), m->first);
    else if (r->layers > 0)
        snprintf(text, size, "%lld layers", (long long)r->layers);
    else if (r->states)
        snprintf(text, size, "initial states");
    size_t used = strlen(text);
    if (r->shortest > 0 && used < size)
        snprintf(text + used, size - used,
                 longest > shortest ? "%sdocuments %lld-%lld" : "%sdocuments %lld",
                 used > 0 ? ", " : "", shortest, longest);
}

static void report(const dr_bench_row *r, const dr_context *ctx, const dr_bench_result *m,
                   bool json)
{
    if (json) {
        report_json(r, ctx, m);
        fflush(stdout);
        return;
    }
    char shape[64], limit[32], note[96];
    const char *keep = dr_bench_keeps_something(r) ? dr_tool_word_of(dr_bench_keeps, r->keep) : "";
    note_of(r, m, note, sizeof note);
    snprintf(shape, sizeof shape, "%lld,%lld,%lld,%lld,%lld,%lld", (long long)r->B, (long long)r->T,
             (long long)r->H, (long long)r->HV, (long long)r->K, (long long)r->V);
    snprintf(limit, sizeof limit, m->by_memory ? "%.1f GB/s" : "%.0f GF/s", m->roof_rate);
    printf("%-9s %-8s %-7s %-4s %-21s %3d %9.3f %9.3f %4.0f%% %8.4f %8.2f %4.0f%% of %-10s %8.1f  "
           "%s\n",
           r->op, dr_tool_word_of(dr_bench_passes, r->pass), keep, dr_dtype_name(r->dtype), shape,
           dr_context_threads(ctx), 1e3 * m->median, 1e3 * m->fastest, 100 * m->spread,
           dr_bench_unit_time(r, m), dr_bench_gflops(r, m), 100 * dr_bench_share(r, m), limit,
           (double)m->workspace / (1 << 20), note);
    fflush(stdout);
}

/* ------------------------------------------------------------------------ */
/* Options                                                                  */
/* ------------------------------------------------------------------------ */

typedef struct settings {
    const char *op, *backend;
    int pass, keep; /* -1: not given */
    dr_dtype dtype;
    int64_t shape[6]; /* B = 0: not given */
    int32_t threads;  /* 0: those of the rows */
    const char *cp;
    int32_t ranks;
    const char *plot; /* a folder */
    double seconds;
    bool json;
} settings;

enum {
    OPTION_OP = 1000,
    OPTION_SHAPE,
    OPTION_DTYPE,
    OPTION_KEEP,
    OPTION_PASS,
    OPTION_THREADS,
    OPTION_SECONDS,
    OPTION_CP,
    OPTION_RANKS,
    OPTION_PLOT,
    OPTION_JSON
};

static error_t parse(int key, char *text, struct argp_state *state)
{
    settings *s = state->input;
    switch (key) {
    case 'b':
        s->backend = text;
        return 0;
    case OPTION_OP:
        if (!dr_bench_known(text) && strcmp(text, "step") != 0)
            dr_tool_usage("--op: must be one of gdn, kda, conv, norm, gate, layer-gdn, layer-kda, "
                          "step, got \"%s\"",
                          text);
        s->op = text;
        return 0;
    case OPTION_SHAPE:
        dr_tool_ints("--shape", text, 1, 1 << 24, 6, s->shape);
        return 0;
    case OPTION_DTYPE:
        s->dtype = (dr_dtype)dr_tool_choice("--dtype", text, dr_tool_dtypes);
        return 0;
    case OPTION_KEEP:
        s->keep = dr_tool_choice("--keep", text, dr_bench_keeps);
        return 0;
    case OPTION_PASS:
        s->pass = dr_tool_choice("--pass", text, dr_bench_passes);
        return 0;
    case OPTION_THREADS:
        s->threads = (int32_t)dr_tool_int("--threads", text, 1, 4096);
        return 0;
    case OPTION_SECONDS:
        s->seconds = dr_tool_real("--seconds", text, 0.001, 3600);
        return 0;
    case OPTION_CP:
        s->cp = text;
        return 0;
    case OPTION_RANKS:
        s->ranks = (int32_t)dr_tool_int("--ranks", text, 1, DR_BENCH_MAX_RANKS);
        return 0;
    case OPTION_PLOT:
        s->plot = text;
        return 0;
    case OPTION_JSON:
        s->json = true;
        return 0;
    case ARGP_KEY_END:
        if ((s->cp == NULL) != (s->ranks == 0))
            dr_tool_usage("--cp, --ranks: both or neither, got %s alone",
                          s->cp != NULL ? "--cp" : "--ranks");
        if (s->cp != NULL && s->plot != NULL)
            dr_tool_usage("--plot: draws one rank, and cannot go with --cp");
        return 0;
    case ARGP_KEY_ARG:
        dr_tool_usage("bench takes no argument, got \"%s\"", text);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static bool wanted(const settings *s, const dr_bench_row *r)
{
    const bool op = s->op == NULL || strcmp(s->op, r->op) == 0 ||
                    (strcmp(s->op, "step") == 0 && r->pass == DR_BENCH_STEP);
    const bool delta = strcmp(r->op, "gdn") == 0 || strcmp(r->op, "kda") == 0;
    const bool ranks = delta && r->pass != DR_BENCH_STEP && r->lengths == 0;
    return op && (s->cp == NULL || ranks) && (s->pass < 0 || s->pass == (int)r->pass);
}

/* Puts the options into a row; wrong usage where the row has no such option. */
static void override(const settings *s, dr_bench_row *r)
{
    if (s->keep >= 0) {
        if (!dr_bench_keeps_something(r))
            dr_tool_usage("--keep: %s %s keeps nothing; choose others with --op and --pass", r->op,
                          dr_tool_word_of(dr_bench_passes, r->pass));
        if (s->keep == DR_BENCH_KEEP_NONE && r->pass == DR_BENCH_BACKWARD)
            dr_tool_usage("--keep: a backward pass needs inputs, factors or states, got \"none\"");
        r->keep = s->keep;
    }
    if (s->dtype != 0) {
        if (strncmp(r->op, "layer", 5) == 0 && s->dtype != DR_F32)
            dr_tool_usage("--dtype: layers take f32, got %s; choose others with --op",
                          dr_dtype_name(s->dtype));
        r->dtype = s->dtype;
    }
    if (s->shape[0] > 0) {
        *r = (dr_bench_row){.op = r->op, .pass = r->pass, .keep = r->keep, .dtype = r->dtype};
        int64_t *fields[] = {&r->B, &r->T, &r->H, &r->HV, &r->K, &r->V};
        for (size_t i = 0; i < DR_TOOL_COUNT(fields); i++)
            *fields[i] = s->shape[i];
        if (dr_bench_channels(r) > INT32_MAX || r->HV % r->H != 0)
            dr_tool_usage("--shape: HV must be a multiple of H and 2 H K + HV V below 2^31");
    }
    if (s->threads > 0)
        r->threads = s->threads;
    r->cp = s->cp;
    r->ranks = s->cp != NULL ? s->ranks : 0;
}

static bool same_row(const dr_bench_row *a, const dr_bench_row *b)
{
    return strcmp(a->op, b->op) == 0 && a->pass == b->pass && a->keep == b->keep &&
           a->dtype == b->dtype && a->B == b->B && a->T == b->T && a->H == b->H && a->HV == b->HV &&
           a->K == b->K && a->V == b->V && a->shortest == b->shortest && a->longest == b->longest &&
           a->states == b->states && a->layers == b->layers && a->lengths == b->lengths &&
           a->threads == b->threads;
}

/* The standard rows that are wanted, with the options put in, each once. */
static int choose_rows(const settings *s, dr_plot_point *out)
{
    int count = 0;
    for (int i = 0; dr_bench_standard(i) != NULL && count < DR_BENCH_MAX_ROWS; i++) {
        if (!wanted(s, dr_bench_standard(i)))
            continue;
        dr_bench_row *r = &out[count].row;
        out[count].where = DR_PLOT_CHOSEN;
        *r = *dr_bench_standard(i);
        override(s, r);
        bool known = false;
        for (int j = 0; j < count; j++)
            known = known || same_row(&out[j].row, r);
        count += !known;
    }
    if (count == 0 && s->cp != NULL)
        dr_tool_usage("--cp: ranks are for the forward and backward passes of gdn and kda");
    if (count == 0)
        dr_tool_usage("%s has no pass %s", s->op != NULL ? s->op : "no operation",
                      dr_tool_word_of(dr_bench_passes, s->pass));
    return count;
}

/* ------------------------------------------------------------------------ */
/* The command                                                              */
/* ------------------------------------------------------------------------ */

static int bench_rows(const settings *s, dr_plot_point *points, int count)
{
    dr_roof machine;
    int code = DR_TOOL_OK, most = 1;
    for (int i = 0; i < count; i++)
        most = points[i].row.threads > most ? points[i].row.threads : most;
    if (!dr_roof_open(&machine, most)) {
        dr_tool_error("no memory to measure the machine");
        code = DR_TOOL_FAILED;
    }
    for (int i = 0; i < count && code == DR_TOOL_OK; i++) {
        dr_plot_point *p = &points[i];
        dr_context *ctx =
            dr_tool_context(s->backend, p->row.threads > 0 ? p->row.threads : 1, &code);
        if (ctx == NULL)
            break;
        if (i == 0 && !s->json)
            printf("%s (%s), warm; spread is of the middle half of the calls\n"
                   "%-9s %-8s %-7s %-4s %-21s %3s %9s %9s %5s %8s %8s %-19s %8s\n",
                   dr_context_backend(ctx), dr_context_isa(ctx), "op", "pass", "keep", "type",
                   "B,T,H,HV,K,V", "thr", "ms med.", "ms min", "sprd", "us/tk-hd", "GFLOP/s",
                   "share of roof", "MiB work");
        dr_status status = dr_bench_measure(&p->row, ctx, &machine, s->seconds, &p->result);
        code = dr_tool_failure(status, dr_case_why());
        if (code == DR_TOOL_OK)
            report(&p->row, ctx, &p->result, s->json);
        dr_context_destroy(ctx);
    }
    dr_roof_close(&machine);
    return code;
}

int dr_tool_bench(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"backend", 'b', "NAME", 0, "The backend to measure (default: the build's first)", 0},
        {"op", OPTION_OP, "OP", 0,
         "Only this operation: gdn, kda, conv, norm, gate, layer-gdn, layer-kda, or step for "
         "every pass step",
         0},
        {"pass", OPTION_PASS, "PASS", 0, "Only this pass: forward, backward or step", 0},
        {"shape", OPTION_SHAPE, "B,T,H,HV,K,V", 0, "Shape in place of the standard ones", 0},
        {"dtype", OPTION_DTYPE, "TYPE", 0, "Element type: f32, bf16, f16, or f64 on ref", 0},
        {"keep", OPTION_KEEP, "WHAT", 0,
         "What a forward pass keeps: none (no backward will follow), inputs, factors or states", 0},
        {"threads", OPTION_THREADS, "N", 0,
         "Threads (default: 1, and 2 in the rows of 1024 tokens and 32 heads); with --cp those of "
         "each rank",
         0},
        {"seconds", OPTION_SECONDS, "S", 0, "Seconds for each row (default 0.7)", 0},
        {"cp", OPTION_CP, "SPEC", 0,
         "Passes of gdn and kda over ranks with this protocol, such as p2p or grouped:2", 0},
        {"ranks", OPTION_RANKS, "N", 0, "Ranks for --cp, a thread of this process each", 0},
        {"plot", OPTION_PLOT, "DIR", 0,
         "Draw time against length and against threads, and shares of the roof, into SVG files of "
         "this folder (needs gnuplot)",
         0},
        {"json", OPTION_JSON, NULL, 0, "One JSON object a line", 0},
        {0},
    };
    static const struct argp argp = {
        options,
        parse,
        NULL,
        "Times operations beside what the machine can do, measured in the same run.\vShares are of "
        "the matrix product of the linked BLAS (GF/s) or, for conv, norm, gate and step, of the "
        "stream bandwidth (GB/s). Over ranks a call takes as long as its slowest rank, and "
        "efficiency is the time on one rank over that times the ranks.",
        NULL,
        NULL,
        NULL};
    static dr_plot_point points[2 * DR_BENCH_MAX_ROWS];
    settings s = {.pass = -1, .keep = -1, .seconds = 0.7};
    dr_tool_parse("bench", &argp, argc, argv, &s);
    int count = choose_rows(&s, points), code = DR_TOOL_OK;
    if (s.plot != NULL && !dr_plot_possible())
        dr_tool_usage("--plot: needs gnuplot, which is not there; install it with "
                      "\"apt-get install gnuplot-nox\"");
    if (s.plot != NULL)
        count += dr_plot_rows(s.threads, points + count, DR_BENCH_MAX_ROWS);
    code = bench_rows(&s, points, count);
    return code == DR_TOOL_OK && s.plot != NULL ? dr_plot_draw(s.plot, points, count) : code;
}
