/* SPDX-License-Identifier: Apache-2.0 */
/*
 * info.c - `deltarule info`: the version, the backends and what they support. Nothing here
 * knows what a backend can do: options are put to dr_supports, operations and element types
 * to a tiny call.
 */
#include "cases.h"
#include "tool.h"

#include <cblas.h>
#include <stdio.h>
#include <string.h>

typedef struct settings {
    bool json, markdown;
} settings;

enum { OPTION_JSON = 1000, OPTION_MARKDOWN, MAX_BACKENDS = 8 };

typedef struct backends {
    dr_context *ctx[MAX_BACKENDS];
    const char *name[MAX_BACKENDS];
    int count;
} backends;

static error_t parse(int key, char *text, struct argp_state *state)
{
    settings *s = state->input;
    switch (key) {
    case OPTION_JSON:
        s->json = true;
        return 0;
    case OPTION_MARKDOWN:
        s->markdown = true;
        return 0;
    case ARGP_KEY_ARG:
        dr_tool_usage("info takes no argument, got \"%s\"", text);
    case ARGP_KEY_END:
        if (s->json && s->markdown)
            dr_tool_usage("--json and --markdown exclude each other");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ------------------------------------------------------------------------ */
/* What is asked                                                            */
/* ------------------------------------------------------------------------ */

#define TINY .T = 2, .H = 1, .K = 2, .V = 2
#define RULE(v) .variant = v, .gate = DR_GATE_LOG, .beta = DR_BETA_VALUE, .decay = .1
#define BLOCK(v) .variant = v, .gate = DR_GATE_SOFTPLUS, .hidden = 4

/* Operations by element type. */
static const struct operation {
    const char *name;
    dr_direction dir;
    bool f32_only; /* the operation has no other type to ask for */
    dr_case c;
} operations[] = {
    {"gdn forward", DR_FORWARD, false, {.op = DR_CASE_DELTA, RULE(DR_GDN), TINY}},
    {"gdn backward", DR_ADJOINT, false, {.op = DR_CASE_DELTA, RULE(DR_GDN), TINY}},
    {"gdn step", DR_FORWARD, false, {.op = DR_CASE_STEP, RULE(DR_GDN), TINY}},
    {"gdn stages forward", DR_FORWARD, false, {.op = DR_CASE_STAGES, RULE(DR_GDN), TINY}},
    {"gdn stages backward", DR_ADJOINT, false, {.op = DR_CASE_STAGES, RULE(DR_GDN), TINY}},
    {"kda forward", DR_FORWARD, false, {.op = DR_CASE_DELTA, RULE(DR_KDA), TINY}},
    {"kda backward", DR_ADJOINT, false, {.op = DR_CASE_DELTA, RULE(DR_KDA), TINY}},
    {"kda step", DR_FORWARD, false, {.op = DR_CASE_STEP, RULE(DR_KDA), TINY}},
    {"kda stages forward", DR_FORWARD, false, {.op = DR_CASE_STAGES, RULE(DR_KDA), TINY}},
    {"kda stages backward", DR_ADJOINT, false, {.op = DR_CASE_STAGES, RULE(DR_KDA), TINY}},
    {"conv forward", DR_FORWARD, false, {.op = DR_CASE_CONV, TINY}},
    {"conv backward", DR_ADJOINT, false, {.op = DR_CASE_CONV, TINY}},
    {"conv step", DR_FORWARD, false, {.op = DR_CASE_CONV_STEP, TINY}},
    {"gate forward", DR_FORWARD, false, {.op = DR_CASE_GATE, BLOCK(DR_KDA), TINY}},
    {"gate backward", DR_ADJOINT, false, {.op = DR_CASE_GATE, BLOCK(DR_KDA), TINY}},
    {"beta forward", DR_FORWARD, false, {.op = DR_CASE_BETA, TINY}},
    {"beta backward", DR_ADJOINT, false, {.op = DR_CASE_BETA, TINY}},
    {"l2norm forward", DR_FORWARD, false, {.op = DR_CASE_L2NORM, TINY}},
    {"l2norm backward", DR_ADJOINT, false, {.op = DR_CASE_L2NORM, TINY}},
    {"gated norm forward",
     DR_FORWARD,
     false,
     {.op = DR_CASE_NORM, TINY, .activation = DR_ACT_SILU}},
    {"gated norm backward",
     DR_ADJOINT,
     false,
     {.op = DR_CASE_NORM, TINY, .activation = DR_ACT_SILU}},
    {"matrix product", DR_FORWARD, false, {.op = DR_CASE_MATMUL, TINY}},
    {"gdn layer forward", DR_FORWARD, true, {.op = DR_CASE_LAYER, BLOCK(DR_GDN), TINY}},
    {"gdn layer backward", DR_ADJOINT, true, {.op = DR_CASE_LAYER, BLOCK(DR_GDN), TINY}},
    {"gdn layer step", DR_FORWARD, true, {.op = DR_CASE_LAYER_STEP, BLOCK(DR_GDN), TINY}},
    {"kda layer forward", DR_FORWARD, true, {.op = DR_CASE_LAYER, BLOCK(DR_KDA), TINY}},
    {"kda layer backward", DR_ADJOINT, true, {.op = DR_CASE_LAYER, BLOCK(DR_KDA), TINY}},
    {"kda layer step", DR_FORWARD, true, {.op = DR_CASE_LAYER_STEP, BLOCK(DR_KDA), TINY}},
};

static const int64_t two_documents[] = {0, 0, 64};

/* Options of the delta rule by variant. */
static const struct choice {
    const char *name;
    dr_problem p; /* what differs from the plainest problem */
} choices[] = {
    {"no gate", {.gate = DR_GATE_NONE}},
    {"gate: log decay", {.gate = DR_GATE_LOG}},
    {"gate: decay factor", {.gate = DR_GATE_FACTOR}},
    {"gate: softplus", {.gate = DR_GATE_SOFTPLUS}},
    {"gate: lower bound", {.gate = DR_GATE_LOWER_BOUND, .lower_bound = -5}},
    {"beta: value", {.beta = DR_BETA_VALUE}},
    {"beta: logit", {.beta = DR_BETA_LOGIT}},
    {"beta: doubled logit", {.beta = DR_BETA_LOGIT, .beta_scale = 2}},
    {"l2norm of q and k", {.l2norm = 1}},
    {"grouped value heads", {.value_heads = 4}},
    {"tiled value heads", {.value_heads = 4, .head_map = DR_HEADS_TILED}},
    {"packed documents", {.offsets = two_documents, .sequences = 2}},
    {"states [V,K]", {.state_v_first = 1}},
    {"keep inputs", {.keep = DR_KEEP_INPUTS}},
    {"keep factors", {.keep = DR_KEEP_FACTORS}},
    {"keep states", {.keep = DR_KEEP_STATES}},
    {"K = V = 64", {.key_dim = 64, .value_dim = 64}},
    {"K = V = 128", {.key_dim = 128, .value_dim = 128}},
    {"K = V = 256", {.key_dim = 256, .value_dim = 256}},
    {"K = 24, V = 40", {.key_dim = 24, .value_dim = 40}},
    {"chunk 16", {.chunk = 16}},
    {"chunk 32", {.chunk = 32}},
    {"chunk 64", {.chunk = 64}},
    {"chunk 50", {.chunk = 50}},
};

static bool runs(const struct operation *o, dr_dtype dtype, const dr_context *ctx)
{
    uint64_t seed = 1;
    dr_case c = o->c;
    dr_case_run *run;
    c.dtype = c.gate_dtype = c.state_dtype = dtype;
    if (dr_case_open(&c, ctx, false, dr_case_seeded, &seed, &run) != DR_OK)
        return false;
    bool good = dr_case_call(run, DR_FORWARD) == DR_OK;
    if (o->dir == DR_ADJOINT)
        good = good && dr_case_call(run, DR_ADJOINT) == DR_OK;
    dr_case_close(run);
    return good;
}

static bool takes(const struct choice *o, dr_variant variant, const dr_context *ctx)
{
    dr_problem p = o->p;
    p.size = (uint32_t)sizeof p;
    p.variant = variant;
    p.batch = 1;
    p.tokens = 64;
    p.heads = 2;
    p.key_dim = p.key_dim ? p.key_dim : 32;
    p.value_dim = p.value_dim ? p.value_dim : 32;
    p.gate = p.gate ? p.gate : DR_GATE_LOG;
    p.beta = p.beta ? p.beta : DR_BETA_VALUE;
    return dr_supports(ctx, &p) == DR_OK;
}

/* ------------------------------------------------------------------------ */
/* Tables                                                                   */
/* ------------------------------------------------------------------------ */

/* Words of a cell, in text and as JSON. */
typedef struct cell {
    char text[64];
    json_t *words;
} cell;

static void add_word(cell *c, const char *word)
{
    size_t used = strlen(c->text);
    snprintf(c->text + used, sizeof c->text - used, "%s%s", used ? " " : "", word);
    json_array_append_new(c->words, json_string(word));
}

static cell ask_operation(int row, const dr_context *ctx)
{
    cell c = {"", json_array()};
    const struct operation *o = &operations[row];
    for (const dr_tool_word *w = dr_tool_dtypes; w->word != NULL; w++)
        if ((!o->f32_only || w->value == DR_F32) && runs(o, (dr_dtype)w->value, ctx))
            add_word(&c, w->word);
    return c;
}

static cell ask_choice(int row, const dr_context *ctx)
{
    cell c = {"", json_array()};
    if (takes(&choices[row], DR_GDN, ctx))
        add_word(&c, "gdn");
    if (takes(&choices[row], DR_KDA, ctx))
        add_word(&c, "kda");
    return c;
}

static const char *operation_name(int row) { return operations[row].name; }
static const char *choice_name(int row) { return choices[row].name; }

static const struct matrix {
    const char *key;   /* JSON: the row */
    const char *words; /* JSON: the cell */
    const char *title;
    int rows;
    const char *(*name)(int row);
    cell (*ask)(int row, const dr_context *ctx);
} matrices[] = {
    {"operation", "dtypes", "operation, by element type", (int)DR_TOOL_COUNT(operations),
     operation_name, ask_operation},
    {"option", "variants", "option of the delta rule, by variant", (int)DR_TOOL_COUNT(choices),
     choice_name, ask_choice},
};

static void print_heading(const settings *s, const struct matrix *m, const backends *all)
{
    if (s->json)
        return;
    printf(s->markdown ? "| %s |" : "%-38s", m->title);
    for (int i = 0; i < all->count; i++)
        printf(s->markdown ? " %s |" : " %-18s", all->name[i]);
    printf("\n");
    for (int i = 0; s->markdown && i <= all->count; i++)
        printf(i < all->count ? "|---" : "|---|\n");
}

static void print_matrix(const settings *s, const struct matrix *m, const backends *all)
{
    print_heading(s, m, all);
    for (int row = 0; row < m->rows; row++) {
        if (!s->json)
            printf(s->markdown ? "| %s |" : "  %-36s", m->name(row));
        for (int i = 0; i < all->count; i++) {
            cell c = m->ask(row, all->ctx[i]);
            if (s->json) {
                dr_tool_json(json_pack("{ss ss so}", m->key, m->name(row), "backend", all->name[i],
                                       m->words, c.words));
                continue;
            }
            printf(s->markdown ? " %s |" : " %-18s", c.text[0] ? c.text : "-");
            json_decref(c.words);
        }
        if (!s->json)
            printf("\n");
    }
    if (!s->json)
        printf("\n");
}

/* ------------------------------------------------------------------------ */
/* The command                                                              */
/* ------------------------------------------------------------------------ */

static const char *blas_name(void)
{
#ifdef DR_HAVE_OPENBLAS
    return openblas_get_config();
#else
    return "CBLAS; this library does not tell its name";
#endif
}

static void print_head(const settings *s, const backends *all)
{
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", dr_version() / 10000, dr_version() / 100 % 100,
             dr_version() % 100);
    if (s->json)
        dr_tool_json(json_pack("{ss so}", "version", version, "blas", dr_tool_text(blas_name())));
    else
        printf("deltarule %s\nBLAS: %s\n", version, blas_name());
    for (int i = 0; i < all->count; i++) {
        const dr_context *ctx = all->ctx[i];
        if (s->json)
            dr_tool_json(json_pack("{ss ss ss si}", "backend", all->name[i], "isa",
                                   dr_context_isa(ctx), "reason", dr_context_isa_reason(ctx),
                                   "threads", dr_context_threads(ctx)));
        else
            printf("backend %s: %s (%s), %d threads\n", all->name[i], dr_context_isa(ctx),
                   dr_context_isa_reason(ctx), dr_context_threads(ctx));
    }
    if (!s->json)
        printf("\n");
}

int dr_tool_info(int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"json", OPTION_JSON, NULL, 0, "One JSON object a line", 0},
        {"markdown", OPTION_MARKDOWN, NULL, 0, "Only the tables of support, as Markdown", 0},
        {0},
    };
    static const struct argp argp = {
        options,
        parse,
        NULL,
        "Shows the version, the backends with their instruction sets and threads, and what they "
        "support.\vThe environment variable DR_CPU names the instruction set to use.",
        NULL,
        NULL,
        NULL};
    settings s = {0};
    dr_tool_parse("info", &argp, argc, argv, &s);
    backends all = {0};
    int code = DR_TOOL_OK;
    while (all.count < MAX_BACKENDS && dr_backend_name(all.count) != NULL && code == DR_TOOL_OK) {
        all.name[all.count] = dr_backend_name(all.count);
        all.ctx[all.count] = dr_tool_context(all.name[all.count], 0, &code);
        all.count += code == DR_TOOL_OK;
    }
    if (code == DR_TOOL_OK) {
        if (!s.markdown)
            print_head(&s, &all);
        for (size_t i = 0; i < DR_TOOL_COUNT(matrices); i++)
            print_matrix(&s, &matrices[i], &all);
    }
    for (int i = 0; i < all.count; i++)
        dr_context_destroy(all.ctx[i]);
    return code;
}
