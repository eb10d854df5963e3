/* SPDX-License-Identifier: Apache-2.0 */
/*
 * generate.c - `deltarule generate`: continues a text with a model that `deltarule train`
 * made. The prompt is read in one pass, chunk by chunk; then each byte costs one recurrent
 * step, however long the text has become.
 */
#include "checkpoint.h"
#include "tool.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct options {
    const char *model, *prompt;
    int64_t tokens, seed, threads;
    double temperature, top_p;
} options;

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    options *o = state->input;
    (void)state;
    switch (key) {
    case 'm': o->model = text; return 0;
    case 'p': o->prompt = text; return 0;
    case 'n': o->tokens = dr_tool_int("--tokens", text, 0, 1 << 30); return 0;
    case 't': o->temperature = dr_tool_real("--temperature", text, 0, 100); return 0;
    case 'q': o->top_p = dr_tool_real("--top-p", text, 1e-6, 1); return 0;
    case 's': o->seed = dr_tool_int("--seed", text, 0, 1000000000000000); return 0;
    case 'j': o->threads = dr_tool_int("--threads", text, 0, 4096); return 0;
    case ARGP_KEY_ARG:
        dr_tool_usage("\"%s\" is not an option; deltarule generate --help lists them", text);
    default: return ARGP_ERR_UNKNOWN;
    }
}

static void read_options(int argc, char **argv, options *o)
{
    static const struct argp_option table[] = {
        {"model", 'm', "DIR", 0, "Folder, or file, that deltarule train wrote; required", 0},
        {"prompt", 'p', "TEXT", 0, "What the text begins with", 0},
        {"tokens", 'n', "N", 0, "Bytes to add (200)", 0},
        {"temperature", 't', "X", 0, "0: always the likeliest byte (0.8)", 0},
        {"top-p", 'q', "X", 0, "Draw from the likeliest bytes that make up this share (0.95)", 0},
        {"seed", 's', "N", 0, "Of the draws (1)", 0},
        {"threads", 'j', "N", 0, "Threads; 0: the library's choice (0)", 0},
        {0},
    };
    static const struct argp argp = {table, parse_option, "",
                                     "Continue a text with a trained model.", NULL, NULL, NULL};
    *o = (options){.prompt = "", .tokens = 200, .temperature = 0.8, .top_p = 0.95, .seed = 1};
    dr_tool_parse("generate", &argp, argc, argv, o);
    if (o->model == NULL)
        dr_tool_usage("--model: must be given, a folder or file that deltarule train wrote");
}

typedef struct generator {
    options o;
    dr_context *ctx;
    dr_lm_model model;
    dr_lm_run run;
    dr_lm_batch batch;
    dr_lm_states states;
    dr_lm_random random;
} generator;

static void generator_free(generator *g)
{
    dr_lm_states_free(&g->states);
    dr_lm_batch_free(&g->batch);
    dr_lm_run_free(&g->run);
    dr_lm_model_free(&g->model);
    dr_context_destroy(g->ctx);
}

static dr_status load_model(generator *g)
{
    char path[4096];
    dr_lm_checkpoint c;
    dr_context_options how = DR_CONTEXT_OPTIONS_INIT;
    how.threads = (int32_t)g->o.threads;
    LM_TRY(dr_lm_checkpoint_path(g->o.model, DR_LM_CURRENT, path, sizeof path));
    LM_LIBRARY(dr_context_create(dr_backend_name(0), &how, &g->ctx));
    LM_TRY(dr_lm_checkpoint_open(path, &c));
    dr_status status = dr_lm_model_create(g->ctx, &c.config, &g->model);
    if (status == DR_OK)
        status = dr_lm_checkpoint_read(&c, &g->model, NULL, NULL);
    dr_lm_checkpoint_close(&c);
    return status;
}

/* Feeds symbols of the one sequence; run.logits then belong to them. */
static dr_status feed(generator *g, const unsigned char *bytes, int64_t n, bool start)
{
    dr_lm_batch *b = &g->batch;
    b->tokens = 0;
    if (start)
        b->input[b->tokens++] = DR_LM_START;
    for (int64_t i = 0; i < n; i++)
        b->input[b->tokens++] = bytes[i];
    b->sequences = 1;
    b->offsets[0] = 0;
    b->offsets[1] = b->tokens;
    return dr_lm_run_forward(&g->run, b, &g->states);
}

typedef struct candidate {
    double p;
    int byte;
} candidate;

static int likelier_first(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    return x->p != y->p ? (x->p < y->p) - (x->p > y->p) : x->byte - y->byte;
}

/* Draws from the smallest set of likeliest bytes whose share is at least top_p; -1 where the
 * logits are not numbers. */
static int draw(generator *g, const float *logits)
{
    candidate c[DR_LM_BYTES];
    double most = -INFINITY, all = 0, kept = 0;
    int n = 0;
    for (int i = 0; i < DR_LM_BYTES; i++)
        most = fmax(most, (double)logits[i]);
    for (int i = 0; i < DR_LM_BYTES; i++) {
        double above = (double)logits[i] - most;
        c[i].p = g->o.temperature > 0 ? exp(above / g->o.temperature) : above == 0;
        c[i].byte = i;
        all += c[i].p;
    }
    if (!isfinite(all))
        return -1;
    qsort(c, DR_LM_BYTES, sizeof *c, likelier_first);
    while (n < DR_LM_BYTES && kept < g->o.top_p * all)
        kept += c[n++].p;
    double at = dr_lm_uniform(&g->random, 0, kept);
    for (int i = 0; i < n - 1; i++) {
        if (at < c[i].p)
            return c[i].byte;
        at -= c[i].p;
    }
    return c[n - 1].byte;
}

static dr_status generate(generator *g)
{
    const int64_t n = (int64_t)strlen(g->o.prompt);
    LM_TRY(load_model(g));
    LM_TRY(dr_lm_run_create(&g->model, n + 1, false, &g->run));
    LM_TRY(dr_lm_batch_create(n + 1, &g->batch));
    LM_TRY(dr_lm_states_create(&g->model, &g->states));
    g->random.state = (uint64_t)g->o.seed;
    fputs(g->o.prompt, stdout);
    LM_TRY(feed(g, (const unsigned char *)g->o.prompt, n, true));
    for (int64_t i = 0; i < g->o.tokens; i++) {
        int drawn = draw(g, g->run.logits + (g->batch.tokens - 1) * DR_LM_BYTES);
        if (drawn < 0)
            return dr_lm_fail(DR_ERR_FORMAT, "%s: the model predicts no numbers", g->o.model);
        unsigned char byte = (unsigned char)drawn;
        if (putchar(byte) == EOF || fflush(stdout) != 0)
            return dr_lm_fail(DR_ERR_DEVICE, "standard output: %s", strerror(errno));
        LM_TRY(feed(g, &byte, 1, false));
    }
    putchar('\n');
    return DR_OK;
}

int dr_tool_generate(int argc, char **argv)
{
    generator g = {0};
    read_options(argc, argv, &g.o);
    dr_status status = generate(&g);
    generator_free(&g);
    if (status == DR_OK)
        return DR_TOOL_OK;
    dr_tool_error("%s", dr_lm_error());
    return dr_lm_asked(status) ? DR_TOOL_USAGE : DR_TOOL_FAILED;
}
