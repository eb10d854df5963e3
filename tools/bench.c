/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.c - `deltarule bench`: times operations and sets each beside the limit of the machine,
 * measured in the same run and between the same calls: the matrix product of the linked BLAS
 * (2048^3, f32, as many threads) where arithmetic rules, the stream bandwidth (a = b + c s)
 * where memory does. Useful work is nominal: what the formulas ask for, whatever a backend
 * computes on top, so that figures of different backends compare.
 */
#include "cases.h"
#include "roof.h"
#include "tool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------ */
/* Work                                                                     */
/* ------------------------------------------------------------------------ */

typedef enum trip { FORWARD = 0, BACKWARD, STEP, TRIPS } trip;

static const dr_tool_word passes[] = {
    {"forward", FORWARD}, {"backward", BACKWARD}, {"step", STEP}, {NULL, 0}};

enum { KEEP_NONE = 100 }; /* beyond dr_keep: nothing is saved at all */
static const dr_tool_word keeps[] = {{"none", KEEP_NONE},
                                     {"inputs", DR_KEEP_INPUTS},
                                     {"factors", DR_KEEP_FACTORS},
                                     {"states", DR_KEEP_STATES},
                                     {NULL, 0}};

/* What a row measures; the fields are those of the table that is printed. */
typedef struct row {
    const char *op;
    trip pass;
    int keep;
    dr_dtype dtype;
    int64_t B, T, H, HV, K, V;
} row;

static double elements(const row *r) { return (double)r->B * (double)r->T; }
static double token_heads(const row *r) { return elements(r) * (double)r->HV; }
static double rows_of(const row *r) { return token_heads(r) * (double)r->V; }
static double item(const row *r) { return (double)dr_dtype_size(r->dtype); }
static double state(const row *r) { return (double)r->K * (double)r->V; }
/* Channels of the convolution of a layer with these heads; its hidden width. */
static int64_t channels(const row *r) { return 2 * r->H * r->K + r->HV * r->V; }
static int64_t hidden(const row *r) { return r->HV * r->V; }

static double delta_flops(const row *r)
{
    return (r->pass == BACKWARD ? 24 : 8) * state(r) * token_heads(r);
}

/* Decoding: every state is read and written, every input read. */
static double step_bytes(const row *r)
{
    double tokens = elements(r) * (2.0 * (double)(r->H * r->K) + 2.0 * (double)(r->HV * r->V));
    return 8 * state(r) * (double)(r->B * r->HV) + item(r) * tokens;
}

static double conv_flops(const row *r)
{
    return (r->pass == BACKWARD ? 24 : 8) * elements(r) * (double)channels(r); /* width 4 */
}

static double conv_bytes(const row *r)
{
    double states = r->pass == STEP ? 2.0 * 4 * 3 * (double)(r->B * channels(r)) : 0;
    return (r->pass == BACKWARD ? 3 : 2) * item(r) * elements(r) * (double)channels(r) + states;
}

static double norm_flops(const row *r) { return (r->pass == BACKWARD ? 16 : 8) * rows_of(r); }
static double norm_bytes(const row *r)
{
    return (r->pass == BACKWARD ? 5 : 3) * item(r) * rows_of(r);
}

static double gate_flops(const row *r)
{
    return (r->pass == BACKWARD ? 8 : 4) * token_heads(r) * (double)r->K;
}

static double gate_bytes(const row *r) /* g and dg are f32 */
{
    return (r->pass == BACKWARD ? 2 * item(r) + 4 : item(r) + 4) * token_heads(r) * (double)r->K;
}

static double layer_flops(const row *r, double decay_columns)
{
    double columns = (double)channels(r) + 2 * (double)hidden(r) + (double)r->HV + decay_columns;
    double products = 2 * elements(r) * (double)hidden(r) * columns;
    return (r->pass == BACKWARD ? 2 : 1) * products + delta_flops(r);
}

static double layer_gdn_flops(const row *r) { return layer_flops(r, (double)r->HV); }
static double layer_kda_flops(const row *r) { return layer_flops(r, (double)(r->HV * r->K)); }

/* An operation: the case of each pass, work, and what it is limited by. */
static const struct operation {
    const char *name;
    dr_case_op op[TRIPS]; /* of each pass; 0: there is none */
    dr_case c;            /* what does not depend on the row */
    bool keeps;
    double (*flops)(const row *r);
    double (*bytes)(const row *r); /* NULL: limited by arithmetic (but for a delta rule's step) */
} operations[] = {
    {"gdn",
     {DR_CASE_DELTA, DR_CASE_DELTA, DR_CASE_STEP},
     {.variant = DR_GDN, .gate = DR_GATE_LOG, .beta = DR_BETA_VALUE, .decay = .1},
     true,
     delta_flops,
     NULL},
    {"kda",
     {DR_CASE_DELTA, DR_CASE_DELTA, DR_CASE_STEP},
     {.variant = DR_KDA, .gate = DR_GATE_LOG, .beta = DR_BETA_VALUE, .decay = .1},
     true,
     delta_flops,
     NULL},
    {"conv",
     {DR_CASE_CONV, DR_CASE_CONV, DR_CASE_CONV_STEP},
     {.width = 4, .activation = DR_ACT_SILU},
     false,
     conv_flops,
     conv_bytes},
    {"norm",
     {DR_CASE_NORM, DR_CASE_NORM, 0},
     {.activation = DR_ACT_SILU},
     false,
     norm_flops,
     norm_bytes},
    {"gate",
     {DR_CASE_GATE, DR_CASE_GATE, 0},
     {.variant = DR_KDA, .gate = DR_GATE_SOFTPLUS},
     false,
     gate_flops,
     gate_bytes},
    {"layer-gdn",
     {DR_CASE_LAYER, DR_CASE_LAYER, 0},
     {.variant = DR_GDN, .gate = DR_GATE_SOFTPLUS, .flags = DR_CASE_NO_STATE},
     true,
     layer_gdn_flops,
     NULL},
    {"layer-kda",
     {DR_CASE_LAYER, DR_CASE_LAYER, 0},
     {.variant = DR_KDA, .gate = DR_GATE_SOFTPLUS, .flags = DR_CASE_NO_STATE},
     true,
     layer_kda_flops,
     NULL},
};

static const struct operation *operation_of(const char *name)
{
    for (size_t i = 0; i < DR_TOOL_COUNT(operations); i++)
        if (strcmp(operations[i].name, name) == 0)
            return &operations[i];
    return NULL;
}

/* The standard rows: shapes that fill two cores for a fraction of a second, and whose
 * row operations and decoding states are larger than caches. */
#define MODEL 1, 1024, 16, 16, 128, 128
#define TOKENS 1, 4096, 16, 16, 128, 128
#define DECODE 64, 1, 16, 32, 128, 128
static const row standard[] = {
    {"gdn", FORWARD, KEEP_NONE, DR_F32, MODEL},
    {"gdn", FORWARD, DR_KEEP_FACTORS, DR_F32, MODEL},
    {"gdn", BACKWARD, DR_KEEP_FACTORS, DR_F32, MODEL},
    {"gdn", FORWARD, KEEP_NONE, DR_BF16, MODEL},
    {"gdn", STEP, KEEP_NONE, DR_F32, DECODE},
    {"kda", FORWARD, KEEP_NONE, DR_F32, MODEL},
    {"kda", FORWARD, DR_KEEP_FACTORS, DR_F32, MODEL},
    {"kda", BACKWARD, DR_KEEP_FACTORS, DR_F32, MODEL},
    {"kda", FORWARD, KEEP_NONE, DR_BF16, MODEL},
    {"kda", STEP, KEEP_NONE, DR_F32, DECODE},
    {"conv", FORWARD, KEEP_NONE, DR_F32, TOKENS},
    {"conv", BACKWARD, KEEP_NONE, DR_F32, TOKENS},
    {"conv", STEP, KEEP_NONE, DR_F32, DECODE},
    {"norm", FORWARD, KEEP_NONE, DR_F32, TOKENS},
    {"norm", BACKWARD, KEEP_NONE, DR_F32, TOKENS},
    {"gate", FORWARD, KEEP_NONE, DR_F32, TOKENS},
    {"gate", BACKWARD, KEEP_NONE, DR_F32, TOKENS},
    {"layer-gdn", FORWARD, KEEP_NONE, DR_F32, 1, 256, 8, 8, 128, 128},
    {"layer-gdn", BACKWARD, DR_KEEP_FACTORS, DR_F32, 1, 256, 8, 8, 128, 128},
    {"layer-kda", FORWARD, KEEP_NONE, DR_F32, 1, 256, 8, 8, 128, 128},
    {"layer-kda", BACKWARD, DR_KEEP_FACTORS, DR_F32, 1, 256, 8, 8, 128, 128},
};
enum { STANDARD_ROWS = (int)DR_TOOL_COUNT(standard) };

/* ------------------------------------------------------------------------ */
/* Measuring                                                                */
/* ------------------------------------------------------------------------ */

enum { MAX_SAMPLES = 8192, SLICES = 3 };

typedef struct result {
    double median, fastest, spread; /* seconds; spread: of the middle half, over the median */
    double roof_gflops, roof_rate;  /* rate: GFLOP/s or GB/s as measured */
    bool by_memory;
    size_t workspace;
    int calls;
} result;

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(const double *sorted, int count, double q)
{
    return sorted[(int)(q * (count - 1) + .5)];
}

static double bytes_of(const row *r)
{
    const struct operation *o = operation_of(r->op);
    return o->bytes != NULL ? o->bytes(r) : r->pass == STEP ? step_bytes(r) : 0;
}

static dr_case case_of(const row *r)
{
    const struct operation *o = operation_of(r->op);
    dr_case c = o->c;
    c.name = r->op;
    c.op = o->op[r->pass];
    c.B = r->B;
    c.T = r->T;
    c.H = (int32_t)r->H;
    c.HV =
        c.op == DR_CASE_CONV || c.op == DR_CASE_CONV_STEP ? (int32_t)channels(r) : (int32_t)r->HV;
    c.K = (int32_t)r->K;
    c.V = (int32_t)r->V;
    c.hidden = (int32_t)hidden(r);
    c.dtype = r->dtype;
    c.keep = r->keep == KEEP_NONE ? DR_KEEP_INPUTS : (dr_keep)r->keep;
    if (r->keep == KEEP_NONE && r->pass == FORWARD && o->keeps)
        c.flags |= DR_CASE_NO_SAVED;
    if (r->pass == STEP)
        c.flags |= DR_CASE_IN_PLACE;
    return c;
}

/* Calls until the time is over, in slices with a sample of the roof around each. */
static dr_status measure(const row *r, dr_case_run *run, const dr_roof *machine, double seconds,
                         result *out)
{
    static double times[MAX_SAMPLES];
    double roofs[SLICES + 1];
    const dr_direction dir = r->pass == BACKWARD ? DR_ADJOINT : DR_FORWARD;
    const double bytes = bytes_of(r), flops = operation_of(r->op)->flops(r);
    dr_status status = dr_case_call(run, DR_FORWARD);
    if (status == DR_OK && dir == DR_ADJOINT)
        status = dr_case_call(run, dir);
    int calls = 0;
    out->by_memory = bytes > 0;
    for (int slice = 0; slice <= SLICES; slice++) {
        roofs[slice] = out->by_memory ? dr_roof_stream(machine) : dr_roof_product(machine);
        double end = dr_tool_now() + seconds / SLICES, start = dr_tool_now();
        bool more = slice < SLICES;
        while (status == DR_OK && more && calls < MAX_SAMPLES) {
            status = dr_case_call(run, dir);
            double now = dr_tool_now();
            times[calls++] = now - start;
            start = now;
            more = now < end;
        }
    }
    if (status != DR_OK)
        return status;
    qsort(times, (size_t)calls, sizeof times[0], by_value);
    qsort(roofs, SLICES + 1, sizeof roofs[0], by_value);
    out->calls = calls;
    out->fastest = times[0];
    out->median = quantile(times, calls, .5);
    out->spread = (quantile(times, calls, .75) - quantile(times, calls, .25)) / out->median;
    out->roof_rate = (roofs[SLICES / 2] + roofs[SLICES / 2 + 1]) / 2;
    out->roof_gflops = out->by_memory ? out->roof_rate * flops / bytes : out->roof_rate;
    out->workspace = dr_case_workspace(run, dir);
    return DR_OK;
}

static void report(const row *r, const dr_context *ctx, const result *m, bool json)
{
    const double gflops = 1e-9 * operation_of(r->op)->flops(r) / m->median;
    const double share = gflops / m->roof_gflops;
    const char *pass = dr_tool_word_of(passes, r->pass);
    if (json) {
        dr_tool_json(json_pack(
            "{ss ss ss ss ss sI sI sI sI sI sI si si ss so so so so so so sI}", "op", r->op, "pass",
            pass, "backend", dr_context_backend(ctx), "isa", dr_context_isa(ctx), "dtype",
            dr_dtype_name(r->dtype), "B", (json_int_t)r->B, "T", (json_int_t)r->T, "H",
            (json_int_t)r->H, "HV", (json_int_t)r->HV, "K", (json_int_t)r->K, "V", (json_int_t)r->V,
            "threads", dr_context_threads(ctx), "ranks", 1, "cp", "none", "ms_median",
            dr_tool_number(1e3 * m->median), "ms_min", dr_tool_number(1e3 * m->fastest),
            "us_per_token_head", dr_tool_number(1e6 * m->median / token_heads(r)), "gflops",
            dr_tool_number(gflops), "roof_gflops", dr_tool_number(m->roof_gflops), "share_of_roof",
            dr_tool_number(share), "workspace_bytes", (json_int_t)m->workspace));
        fflush(stdout);
        return;
    }
    char shape[64], limit[32];
    const char *keep =
        operation_of(r->op)->keeps && r->pass != STEP ? dr_tool_word_of(keeps, r->keep) : "";
    snprintf(shape, sizeof shape, "%lld,%lld,%lld,%lld,%lld,%lld", (long long)r->B, (long long)r->T,
             (long long)r->H, (long long)r->HV, (long long)r->K, (long long)r->V);
    snprintf(limit, sizeof limit, m->by_memory ? "%.1f GB/s" : "%.0f GF/s", m->roof_rate);
    printf("%-9s %-8s %-7s %-4s %-22s %9.3f %9.3f %4.0f%% %8.4f %8.2f %4.0f%% of %-10s %8.1f\n",
           r->op, pass, keep, dr_dtype_name(r->dtype), shape, 1e3 * m->median, 1e3 * m->fastest,
           100 * m->spread, 1e6 * m->median / token_heads(r), gflops, 100 * share, limit,
           (double)m->workspace / (1 << 20));
    fflush(stdout);
}

/* ------------------------------------------------------------------------ */
/* The command                                                              */
/* ------------------------------------------------------------------------ */

typedef struct settings {
    const char *op, *backend;
    int pass, keep; /* -1: not given */
    dr_dtype dtype;
    int64_t shape[6]; /* B = 0: not given */
    int32_t threads;
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
        if (operation_of(text) == NULL && strcmp(text, "step") != 0)
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
        s->keep = dr_tool_choice("--keep", text, keeps);
        return 0;
    case OPTION_PASS:
        s->pass = dr_tool_choice("--pass", text, passes);
        return 0;
    case OPTION_THREADS:
        s->threads = (int32_t)dr_tool_int("--threads", text, 1, 4096);
        return 0;
    case OPTION_SECONDS:
        s->seconds = dr_tool_real("--seconds", text, 0.001, 3600);
        return 0;
    case OPTION_JSON:
        s->json = true;
        return 0;
    case ARGP_KEY_ARG:
        dr_tool_usage("bench takes no argument, got \"%s\"", text);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static bool wanted(const settings *s, const row *r)
{
    bool op = s->op == NULL || strcmp(s->op, r->op) == 0 ||
              (strcmp(s->op, "step") == 0 && r->pass == STEP);
    return op && (s->pass < 0 || s->pass == (int)r->pass);
}

/* Puts the options into a row; wrong usage where the row has no such option. */
static void override(const settings *s, row *r)
{
    const struct operation *o = operation_of(r->op);
    if (s->keep >= 0) {
        if (!o->keeps || r->pass == STEP)
            dr_tool_usage("--keep: %s %s keeps nothing; choose others with --op and --pass", r->op,
                          dr_tool_word_of(passes, r->pass));
        if (s->keep == KEEP_NONE && r->pass == BACKWARD)
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
        int64_t *fields[] = {&r->B, &r->T, &r->H, &r->HV, &r->K, &r->V};
        for (size_t i = 0; i < DR_TOOL_COUNT(fields); i++)
            *fields[i] = s->shape[i];
        if (channels(r) > INT32_MAX || r->HV % r->H != 0)
            dr_tool_usage("--shape: HV must be a multiple of H and 2 H K + HV V below 2^31");
    }
}

static bool same_row(const row *a, const row *b)
{
    return strcmp(a->op, b->op) == 0 && a->pass == b->pass && a->keep == b->keep &&
           a->dtype == b->dtype && a->B == b->B && a->T == b->T && a->H == b->H && a->HV == b->HV &&
           a->K == b->K && a->V == b->V;
}

/* The standard rows that are wanted, with the options put in, each once. */
static int choose_rows(const settings *s, row *out)
{
    int count = 0;
    for (int i = 0; i < STANDARD_ROWS; i++) {
        if (!wanted(s, &standard[i]))
            continue;
        out[count] = standard[i];
        override(s, &out[count]);
        bool known = false;
        for (int j = 0; j < count; j++)
            known = known || same_row(&out[j], &out[count]);
        count += !known;
    }
    if (count == 0)
        dr_tool_usage("%s has no pass %s", s->op != NULL ? s->op : "no operation",
                      dr_tool_word_of(passes, s->pass));
    return count;
}

static int bench_rows(const settings *s, const row *rows, int count, const dr_context *ctx)
{
    dr_roof machine;
    int code = DR_TOOL_OK;
    if (!dr_roof_open(&machine, dr_context_threads(ctx))) {
        dr_tool_error("no memory to measure the machine");
        code = DR_TOOL_FAILED;
    }
    for (int i = 0; i < count && code == DR_TOOL_OK; i++) {
        uint64_t seed = 1;
        dr_case c = case_of(&rows[i]);
        dr_case_run *run = NULL;
        result m = {0};
        dr_status status = dr_case_open(&c, ctx, false, dr_case_seeded, &seed, &run);
        if (status == DR_OK)
            status = measure(&rows[i], run, &machine, s->seconds, &m);
        if (status == DR_OK)
            report(&rows[i], ctx, &m, s->json);
        else
            code = dr_tool_status(status);
        dr_case_close(run);
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
        {"threads", OPTION_THREADS, "N", 0, "Threads (default: OMP_NUM_THREADS, else the cores)",
         0},
        {"seconds", OPTION_SECONDS, "S", 0, "Seconds for each row (default 2)", 0},
        {"json", OPTION_JSON, NULL, 0, "One JSON object a line", 0},
        {0},
    };
    static const struct argp argp = {
        options,
        parse,
        NULL,
        "Times operations beside what the machine can do, measured in the same run.\vShares are of "
        "the matrix product of the linked BLAS (GF/s) or, for conv, norm, gate and step, of the "
        "stream bandwidth (GB/s).",
        NULL,
        NULL,
        NULL};
    settings s = {.pass = -1, .keep = -1, .seconds = 2};
    dr_tool_parse("bench", &argp, argc, argv, &s);
    row rows[STANDARD_ROWS];
    int count = choose_rows(&s, rows), code = DR_TOOL_OK;
    dr_context *ctx = dr_tool_context(s.backend, s.threads, &code);
    if (ctx == NULL)
        return code;
    if (!s.json)
        printf("%s (%s), %d threads, warm; spread is of the middle half of the calls\n"
               "%-9s %-8s %-7s %-4s %-22s %9s %9s %5s %8s %8s %-19s %8s\n",
               dr_context_backend(ctx), dr_context_isa(ctx), dr_context_threads(ctx), "op", "pass",
               "keep", "type", "B,T,H,HV,K,V", "ms med.", "ms min", "sprd", "us/tk-hd", "GFLOP/s",
               "share of roof", "MiB work");
    code = bench_rows(&s, rows, count, ctx);
    dr_context_destroy(ctx);
    return code;
}
