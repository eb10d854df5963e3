/* SPDX-License-Identifier: Apache-2.0 */
/*
 * train.c - `deltarule train`: a language model over bytes learns from the text files of a
 * folder, by AdamW with clipping, warm-up and a cosine, and is measured on documents that
 * were held out, next to what gzip and xz need for them. Checkpoints make a run that was cut
 * short go on as if it had not been.
 */
#include "checkpoint.h"
#include "lm_ops.h"
#include "tool.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* Defaults, chosen by what 60 seconds on two cores make of C headers. */
#define DEFAULT_ARCH "gdn"
enum {
    DEFAULT_LAYERS = 4,
    DEFAULT_HIDDEN = 256,
    DEFAULT_HEADS = 4,
    DEFAULT_HEAD_DIM = 64,
    DEFAULT_CONTEXT = 512,
    DEFAULT_BATCH = 4096,
    DEFAULT_SECONDS = 60,
    DEFAULT_SAVE = 60,
    DEFAULT_HELD_OUT = 1 << 19,
    WARM_UP = 10 /* steps */
};
#define DEFAULT_RATE 3e-3
#define LEAST_RATE 0.02 /* of the highest, at the end */
#define CLIP 1.0        /* largest norm of a gradient */

typedef struct options {
    const char *data, *glob, *arch, *out, *resume;
    int64_t layers, hidden, heads, head_dim, inner, context, batch_tokens, steps, held_out, threads;
    int64_t seed;
    double seconds, rate, save;
    bool json;
} options;

/* Of an option that was not given. */
enum { UNSET = -1 };

enum { KEY_FIRST = 0x100 };

/* ------------------------------------------------------------------------ */
/* The command line                                                         */
/* ------------------------------------------------------------------------ */

/* One row for each option, so that none can be listed and not read. */
typedef struct option_row {
    const char *name, *value;
    char type; /* i: whole number, r: number, t: text, f: flag */
    size_t at;
    double low, high;
    const char *help;
    bool fixed; /* part of a checkpoint: on --resume it may only be repeated */
} option_row;

static const option_row rows[] = {
#define OPTION(name, value, type, field, low, high, help) \
    {name, value, type, offsetof(options, field), low, high, help, false}
    OPTION("data", "PATH", 't', data, 0, 0, "Folder of text files, or one file; required"),
    OPTION("glob", "PATTERN", 't', glob, 0, 0, "Only files whose names match, for example '*.h'"),
    OPTION("arch", "KINDS", 't', arch, 0, 0,
           "gdn, kda, or a pattern such as gdn,gdn,gdn,kda repeated over the layers (gdn)"),
    OPTION("layers", "N", 'i', layers, 1, DR_LM_MAX_LAYERS, "Blocks of the model"),
    OPTION("hidden", "N", 'i', hidden, 1, 1 << 14, "Width of the model"),
    OPTION("heads", "N", 'i', heads, 1, 1 << 8, "Heads of each layer"),
    OPTION("head-dim", "N", 'i', head_dim, 1, 256, "Width of a head"),
    OPTION("inner", "N", 'i', inner, 1, 1 << 16, "Inner width of the SwiGLU (8/3 of hidden)"),
    OPTION("context", "N", 'i', context, 1, 1 << 20, "Longest sequence; longer documents are cut"),
    OPTION("batch-tokens", "N", 'i', batch_tokens, 1, 1 << 20, "Bytes per step"),
    OPTION("steps", "N", 'i', steps, 1, 1e15, "Stop after so many steps"),
    OPTION("seconds", "S", 'r', seconds, 0.01, 1e9,
           "Stop after so much time (60, if --steps is not given)"),
    OPTION("lr", "X", 'r', rate, 1e-9, 100, "Highest learning rate"),
    OPTION("seed", "N", 'i', seed, 0, 1e15, "Of the first weights and the order of the data (1)"),
    OPTION("threads", "N", 'i', threads, 0, 4096, "Threads; 0: the library's choice (0)"),
    OPTION("held-out", "BYTES", 'i', held_out, 1, 1e12,
           "Hold out at most so much, and at most a twentieth, of the data"),
    OPTION("out", "DIR", 't', out, 0, 0, "Folder for checkpoints; made if it is missing"),
    OPTION("save", "S", 'r', save, 0, 1e9, "Seconds between checkpoints (60)"),
    OPTION("json", NULL, 'f', json, 0, 0, "One JSON object per step instead of text"),
#undef OPTION
};

static error_t parse_option(int key, char *text, struct argp_state *state)
{
    options *o = state->input;
    if (key == 'r') {
        o->resume = text != NULL ? text : "current";
        if (strcmp(o->resume, "current") != 0 && strcmp(o->resume, "previous") != 0)
            dr_tool_usage("--resume: must be current or previous, got \"%s\"", text);
        return 0;
    }
    if (key == ARGP_KEY_ARG)
        dr_tool_usage("\"%s\" is not an option; deltarule train --help lists them", text);
    if (key < KEY_FIRST || key >= KEY_FIRST + (int)LM_COUNT(rows))
        return ARGP_ERR_UNKNOWN;
    const option_row *row = &rows[key - KEY_FIRST];
    char name[32], *at = (char *)o + row->at;
    snprintf(name, sizeof name, "--%s", row->name);
    switch (row->type) {
    case 'i': *(int64_t *)at = dr_tool_int(name, text, (int64_t)row->low, (int64_t)row->high); break;
    case 'r': *(double *)at = dr_tool_real(name, text, row->low, row->high); break;
    case 't':
        if (text[0] == '\0')
            dr_tool_usage("%s: must not be empty", name);
        *(const char **)at = text;
        break;
    default: *(bool *)at = true; break;
    }
    return 0;
}

static void read_options(int argc, char **argv, options *o)
{
    struct argp_option table[LM_COUNT(rows) + 2] = {0};
    for (size_t i = 0; i < LM_COUNT(rows); i++)
        table[i] = (struct argp_option){rows[i].name, KEY_FIRST + (int)i, rows[i].value, 0,
                                        rows[i].help, 0};
    table[LM_COUNT(rows)] =
        (struct argp_option){"resume", 'r', "WHICH", OPTION_ARG_OPTIONAL,
                             "Go on from the checkpoint in --out: current, or previous", 0};
    const struct argp argp = {table, parse_option, "",
                              "Train a small language model on the bytes of text files.", NULL,
                              NULL, NULL};
    *o = (options){.layers = UNSET, .hidden = UNSET, .heads = UNSET, .head_dim = UNSET,
                   .inner = UNSET, .context = UNSET, .batch_tokens = UNSET, .steps = UNSET,
                   .held_out = UNSET, .seed = UNSET, .seconds = UNSET, .rate = UNSET,
                   .save = DEFAULT_SAVE};
    dr_tool_parse("train", &argp, argc, argv, o);
    if (o->data == NULL)
        dr_tool_usage("--data: must be given, a folder of text files or one file");
    if (o->resume != NULL && o->out == NULL)
        dr_tool_usage("--resume: needs --out, the folder of the checkpoint");
}
