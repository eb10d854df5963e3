/* SPDX-License-Identifier: Apache-2.0 */
/*
 * train.c - `deltarule train`: a language model over bytes learns from the text files of a
 * folder, by AdamW with clipping, warm-up and a cosine, and is measured on documents that
 * were held out, next to what gzip and xz need for them. Checkpoints make a run that was cut
 * short go on as if it had not been.
 */
#include "checkpoint.h"
#include "lm_ops.h"
#include "lm_ranks.h"
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
    const char *data, *glob, *arch, *out, *resume, *cp;
    int64_t layers, hidden, heads, head_dim, inner, context, batch_tokens, steps, held_out, threads;
    int64_t ranks;
    int64_t seed;
    double seconds, rate, save;
    bool json;
} options;

enum { UNSET = -1 /* an option that was not given */, KEY_FIRST = 0x100 };

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
} option_row;

static const option_row rows[] = {
#define OPTION(name, value, type, field, low, high, help) \
    {name, value, type, offsetof(options, field), low, high, help}
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
    OPTION("ranks", "N", 'i', ranks, 1, DR_LM_MAX_RANKS,
           "Context parallelism: cut every batch over so many ranks, threads of this process (1)"),
    OPTION("cp", "SPEC", 't', cp, 0, 0,
           "Protocol between the ranks of --ranks: p2p, relay, allgather, grouped:G, doubling, ulysses (p2p)"),
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
                   .save = DEFAULT_SAVE, .ranks = UNSET};
    dr_tool_parse("train", &argp, argc, argv, o);
    if (o->data == NULL)
        dr_tool_usage("--data: must be given, a folder of text files or one file");
    if (o->cp != NULL && o->ranks == UNSET)
        dr_tool_usage("--cp: needs --ranks, between which the protocol runs");
    if (o->resume != NULL && o->out == NULL)
        dr_tool_usage("--resume: needs --out, the folder of the checkpoint");
}

/* ------------------------------------------------------------------------ */
/* Setting up                                                               */
/* ------------------------------------------------------------------------ */

typedef struct trainer {
    options o;
    dr_context *ctx;
    dr_lm_config config;
    dr_lm_training plan;
    dr_lm_data data;
    dr_lm_feed feed;
    dr_lm_batch batch;
    dr_lm_model model;
    dr_lm_run run;
    dr_lm_ranks ranks;  /* with --ranks, in place of run and gradients */
    float *gradients, *m, *v;
    bool keep;          /* the checkpoint that is there is a good one */
    double saved_at;    /* elapsed, at the last checkpoint */
    int64_t first_step; /* of this process */
    double first_elapsed;
    /* since the last line of progress */
    double line_elapsed, line_loss;
    int64_t line_steps;
} trainer;

static void trainer_free(trainer *t)
{
    free(t->gradients);
    free(t->m);
    free(t->v);
    dr_lm_run_free(&t->run);
    dr_lm_ranks_free(&t->ranks);
    dr_lm_model_free(&t->model);
    dr_lm_batch_free(&t->batch);
    dr_lm_feed_free(&t->feed);
    dr_lm_data_free(&t->data);
    dr_context_destroy(t->ctx);
}

/* Fills config and plan from the options, from defaults, and on --resume from the checkpoint,
 * against which options may only repeat what it says; how long and how fast to learn may
 * change. */
static dr_status settle(trainer *t, const dr_lm_checkpoint *from)
{
    options *o = &t->o;
    dr_lm_config *c = &t->config;
    dr_lm_training *p = &t->plan;
    const int64_t hidden = o->hidden != UNSET ? o->hidden : DEFAULT_HIDDEN;
    if (from != NULL) {
        *c = from->config;
        *p = from->training;
    }
    const struct {
        const char *name;
        int64_t *option, kept, otherwise;
    } fixed[] = {
        {"layers", &o->layers, c->layers, DEFAULT_LAYERS},
        {"hidden", &o->hidden, c->hidden, DEFAULT_HIDDEN},
        {"heads", &o->heads, c->heads, DEFAULT_HEADS},
        {"head-dim", &o->head_dim, c->head_dim, DEFAULT_HEAD_DIM},
        {"inner", &o->inner, c->inner, (hidden * 8 / 3 + 31) / 32 * 32},
        {"context", &o->context, p->context, DEFAULT_CONTEXT},
        {"batch-tokens", &o->batch_tokens, p->batch_tokens, DEFAULT_BATCH},
        {"seed", &o->seed, (int64_t)p->seed, 1},
        {"held-out", &o->held_out, p->held_out_most, DEFAULT_HELD_OUT},
    };
    for (size_t i = 0; i < LM_COUNT(fixed); i++) {
        if (*fixed[i].option == UNSET)
            *fixed[i].option = from != NULL ? fixed[i].kept : fixed[i].otherwise;
        else if (from != NULL && *fixed[i].option != fixed[i].kept)
            return dr_lm_fail(DR_ERR_ARG, "--%s: the checkpoint was made with %lld, got %lld",
                              fixed[i].name, (long long)fixed[i].kept,
                              (long long)*fixed[i].option);
    }
    *c = (dr_lm_config){.layers = (int32_t)o->layers, .hidden = (int32_t)o->hidden,
                        .heads = (int32_t)o->heads, .head_dim = (int32_t)o->head_dim,
                        .inner = (int32_t)o->inner};
    if (o->arch != NULL || from == NULL)
        LM_TRY(dr_lm_config_arch(o->arch != NULL ? o->arch : DEFAULT_ARCH, c));
    else
        memcpy(c->kind, from->config.kind, sizeof c->kind);
    if (from != NULL && memcmp(c->kind, from->config.kind, sizeof c->kind) != 0)
        return dr_lm_fail(DR_ERR_ARG, "--arch: the checkpoint was made with other layers than \"%s\"",
                          o->arch);
    p->context = o->context;
    p->batch_tokens = o->batch_tokens;
    p->seed = (uint64_t)o->seed;
    p->held_out_most = o->held_out;
    if (o->steps != UNSET || o->seconds != UNSET || from == NULL) {
        p->steps = o->steps != UNSET ? o->steps : 0;
        p->seconds = o->seconds != UNSET ? o->seconds : o->steps != UNSET ? 0 : DEFAULT_SECONDS;
    }
    p->rate = o->rate != UNSET ? o->rate : from != NULL ? p->rate : DEFAULT_RATE;
    return DR_OK;
}

/* Before anything long begins: whether checkpoints can be written. */
static dr_status prepare_folder(const char *folder)
{
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        return dr_lm_fail(DR_ERR_IO, "--out: %s: cannot be made: %s", folder, strerror(errno));
    struct stat st;
    if (stat(folder, &st) != 0 || !S_ISDIR(st.st_mode) || access(folder, W_OK | X_OK) != 0)
        return dr_lm_fail(DR_ERR_IO, "--out: %s: must be a folder that can be written to", folder);
    return DR_OK;
}

static dr_status create_blocks(trainer *t)
{
    const int64_t n = t->model.size;
    if (t->o.ranks == UNSET)
        t->gradients = dr_lm_alloc(n, sizeof *t->gradients, "gradients");
    t->m = dr_lm_alloc(n, sizeof *t->m, "optimiser");
    t->v = dr_lm_alloc(n, sizeof *t->v, "optimiser");
    return (t->gradients != NULL || t->o.ranks != UNSET) && t->m != NULL && t->v != NULL ? DR_OK : DR_ERR_MEMORY;
}

/* Says how the other checkpoint can be used, if it can. */
static dr_status open_checkpoint(const char *folder, bool previous, dr_lm_checkpoint *out)
{
    char path[4096], other[4096];
    LM_TRY(dr_lm_checkpoint_path(folder, previous ? DR_LM_PREVIOUS : DR_LM_CURRENT, path,
                                 sizeof path));
    LM_TRY(dr_lm_checkpoint_path(folder, DR_LM_PREVIOUS, other, sizeof other));
    dr_status status = dr_lm_checkpoint_open(path, out);
    if (status == DR_OK || previous)
        return status;
    char sentence[512];
    snprintf(sentence, sizeof sentence, "%s", dr_lm_error());
    dr_lm_checkpoint backup;
    if (dr_lm_checkpoint_open(other, &backup) != DR_OK)
        return dr_lm_fail(status, "%s", sentence);
    long long step = (long long)backup.training.step;
    dr_lm_checkpoint_close(&backup);
    return dr_lm_fail(status, "%s; the one before it is whole: --resume=previous goes on from its step "
                      "%lld", sentence, step);
}

static dr_status set_up_data(trainer *t, const dr_lm_checkpoint *from)
{
    LM_TRY(dr_lm_data_load(t->o.data, t->o.glob, t->plan.held_out_most, &t->data));
    if (from != NULL && from->training.data_digest != t->data.digest)
        return dr_lm_fail(DR_ERR_ARG, "--data: %s does not hold the files that the checkpoint was made "
                          "with", t->o.data);
    t->plan.data_digest = t->data.digest;
    LM_TRY(dr_lm_feed_create(&t->data, true, t->plan.context, t->plan.seed, &t->feed));
    if (from != NULL)
        LM_TRY(dr_lm_feed_seek(&t->feed, t->plan.cursor));
    return dr_lm_batch_create(t->plan.batch_tokens, &t->batch);
}

static dr_status set_up(trainer *t, const dr_lm_checkpoint *from)
{
    dr_context_options how = DR_CONTEXT_OPTIONS_INIT;
    how.threads = (int32_t)t->o.threads;
    LM_TRY(settle(t, from));
    if (t->o.out != NULL)
        LM_TRY(prepare_folder(t->o.out));
    LM_LIBRARY(dr_context_create(dr_backend_name(0), &how, &t->ctx));
    LM_TRY(set_up_data(t, from));
    LM_TRY(dr_lm_model_create(t->ctx, &t->config, &t->model));
    LM_TRY(create_blocks(t));
    if (from != NULL)
        LM_TRY(dr_lm_checkpoint_read(from, &t->model, t->m, t->v));
    else
        dr_lm_model_init(&t->model, t->plan.seed);
    if (t->o.ranks != UNSET)
        LM_TRY(dr_lm_ranks_create(&t->model, t->plan.batch_tokens, (int32_t)t->o.ranks,
                                  t->o.cp != NULL ? t->o.cp : "p2p", &t->ranks));
    else
        LM_TRY(dr_lm_run_create(&t->model, t->plan.batch_tokens, true, &t->run));
    t->keep = from == NULL || strcmp(t->o.resume, "current") == 0;
    t->first_step = t->plan.step;
    t->first_elapsed = t->saved_at = t->line_elapsed = t->plan.elapsed;
    return DR_OK;
}

/* ------------------------------------------------------------------------ */
/* Learning                                                                 */
/* ------------------------------------------------------------------------ */

static volatile sig_atomic_t interrupted;

static void interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

/* The first signal asks for an end at the next step; the second finds the system's own way
 * of ending a program. */
static void listen_to_signals(void)
{
    struct sigaction action = {.sa_handler = interrupt, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* Part of the plan that is done, by steps or by time. */
static double progress(const dr_lm_training *p)
{
    double by_steps = p->steps > 0 ? (double)p->step / (double)p->steps : 0;
    double by_time = p->seconds > 0 ? p->elapsed / p->seconds : 0;
    return fmin(fmax(by_steps, by_time), 1);
}

static double rate_now(const dr_lm_training *p)
{
    double warm = fmin((double)(p->step + 1) / WARM_UP, 1);
    double cosine = 0.5 + 0.5 * cos(3.141592653589793 * progress(p));
    return p->rate * warm * (LEAST_RATE + (1 - LEAST_RATE) * cosine);
}

static double seconds_left(const trainer *t)
{
    const dr_lm_training *p = &t->plan;
    double by_time = p->seconds > 0 ? p->seconds - p->elapsed : INFINITY;
    double each = (p->elapsed - t->first_elapsed) / (double)(p->step - t->first_step);
    double by_steps = p->steps > 0 ? (double)(p->steps - p->step) * each : INFINITY;
    return fmax(fmin(by_time, by_steps), 0);
}

static void update(trainer *t, const float *gradients)
{
    const dr_lm_model *m = &t->model;
    double norm = sqrt(dr_lm_square_sum(m->threads, m->size, gradients));
    dr_lm_adamw how = {.rate = rate_now(&t->plan), .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8,
                       .gradient_scale = norm > CLIP ? CLIP / norm : 1, .step = t->plan.step + 1};
    for (int32_t i = 0; i < m->n_params; i++) {
        const dr_lm_param *p = &m->params[i];
        how.decay = p->decays ? 0.1 : 0;
        dr_lm_adamw_step(m->threads, p->count, &how, gradients + p->at, m->weights + p->at,
                         t->m + p->at, t->v + p->at);
    }
}

static dr_status one_step(trainer *t, double *loss)
{
    const float *gradients = t->gradients;
    dr_lm_feed_next(&t->feed, &t->batch);
    if (t->o.ranks != UNSET) {
        LM_TRY(dr_lm_ranks_step(&t->ranks, &t->batch, loss, &gradients));
    } else {
        LM_TRY(dr_lm_run_forward(&t->run, &t->batch, NULL));
        *loss = dr_lm_run_loss(&t->run, &t->batch);
    }
    if (!isfinite(*loss))
        return dr_lm_fail(DR_ERR_DEVICE, "step %lld: the loss is %g; a smaller --lr may help",
                          (long long)t->plan.step + 1, *loss);
    if (t->o.ranks == UNSET)
        LM_TRY(dr_lm_run_backward(&t->run, &t->batch, t->gradients));
    update(t, gradients);
    t->plan.step++;
    t->plan.cursor = t->feed.cursor;
    return DR_OK;
}

static dr_status save(trainer *t)
{
    if (t->o.out == NULL)
        return DR_OK;
    LM_TRY(dr_lm_checkpoint_save(t->o.out, &t->model, t->m, t->v, &t->plan, t->keep));
    t->keep = true;
    t->saved_at = t->plan.elapsed;
    return DR_OK;
}

static const double nats_per_bit = 0.6931471805599453;

static void print_progress(trainer *t, double loss)
{
    const dr_lm_training *p = &t->plan;
    double span = p->elapsed - t->line_elapsed, left = seconds_left(t);
    t->line_steps++;
    t->line_loss += loss;
    double every = t->o.json ? 0 : fmin(fmax((span + left) / 30, 1), 10);
    if (span < every && progress(p) < 1 && !interrupted)
        return;
    loss = t->line_loss / (double)t->line_steps;
    double speed = (double)(t->line_steps * p->batch_tokens) / span;
    if (t->o.json) {
        dr_tool_json(json_pack("{s:I, s:o, s:o, s:o, s:o, s:o}", "step", (json_int_t)p->step, "loss",
                               dr_tool_number(loss), "bits_per_byte",
                               dr_tool_number(loss / nats_per_bit), "tokens_per_second",
                               dr_tool_number(speed), "seconds", dr_tool_number(p->elapsed),
                               "seconds_left", dr_tool_number(left)));
    } else {
        printf("step %6lld  loss %.4f  %.3f bits/byte  %6.0f tokens/s  %lld:%02lld left\n",
               (long long)p->step, loss, loss / nats_per_bit, speed, (long long)(left / 60),
               (long long)left % 60);
    }
    fflush(stdout);
    t->line_elapsed = p->elapsed;
    t->line_loss = 0;
    t->line_steps = 0;
}

static dr_status learn(trainer *t)
{
    dr_lm_training *p = &t->plan;
    const double start = dr_tool_now() - p->elapsed;
    while (progress(p) < 1 && !interrupted) {
        double loss;
        LM_TRY(one_step(t, &loss));
        p->elapsed = dr_tool_now() - start;
        print_progress(t, loss);
        if (p->elapsed - t->saved_at >= t->o.save && t->o.save > 0)
            LM_TRY(save(t));
    }
    return save(t);
}

/* ------------------------------------------------------------------------ */
/* Measuring                                                                */
/* ------------------------------------------------------------------------ */

/* Bits per byte of the documents that were held out; NAN if interrupted. */
static dr_status measure(trainer *t, double *bits)
{
    dr_lm_feed feed = {0};
    double nats = 0;
    dr_lm_run_free(&t->run);
    dr_status status = dr_lm_run_create(&t->model, t->plan.batch_tokens, false, &t->run);
    if (status == DR_OK)
        status = dr_lm_feed_create(&t->data, false, t->plan.context, 0, &feed);
    while (status == DR_OK && !interrupted) {
        dr_lm_feed_next(&feed, &t->batch);
        if (t->batch.tokens == 0)
            break;
        status = dr_lm_run_forward(&t->run, &t->batch, NULL);
        if (status == DR_OK)
            nats += dr_lm_run_loss(&t->run, &t->batch) * (double)t->batch.tokens;
    }
    *bits = interrupted ? NAN : nats / nats_per_bit / (double)t->data.held_out_bytes;
    dr_lm_feed_free(&feed);
    return status;
}

static FILE *held_out_file(const dr_lm_data *data)
{
    FILE *f = tmpfile();
    for (int64_t i = 0; f != NULL && i < data->n_documents; i++) {
        const dr_lm_document *doc = &data->documents[i];
        if (doc->held_out)
            fwrite(data->bytes + doc->begin, 1, (size_t)doc->length, f);
    }
    if (f != NULL && (fflush(f) != 0 || ferror(f))) {
        fclose(f);
        return NULL;
    }
    return f;
}

/* Bytes that a program makes of the file on its standard input; -1 if it cannot be run. */
static int64_t compressed_bytes(const char *program, FILE *in)
{
    char *const argv[] = {(char *)program, (char *)"-9", (char *)"-c", NULL};
    posix_spawn_file_actions_t actions;
    int ends[2], status = -1;
    int64_t bytes = 0;
    pid_t child;
    char buffer[4096];
    rewind(in);
    if (pipe(ends) != 0)
        return -1;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fileno(in), 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    posix_spawn_file_actions_addclose(&actions, ends[0]);
    posix_spawn_file_actions_addclose(&actions, ends[1]);
    int failure = posix_spawnp(&child, program, &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    for (ssize_t n = 1; failure == 0 && n != 0;) {
        n = read(ends[0], buffer, sizeof buffer);
        if (n < 0 && errno != EINTR)
            break;
        bytes += n > 0 ? n : 0;
    }
    close(ends[0]);
    while (failure == 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    bool well = failure == 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    return well ? bytes : -1;
}

static void print_measures(trainer *t, double bits)
{
    static const char *const programs[] = {"gzip", "xz"};
    const dr_lm_data *d = &t->data;
    FILE *f = held_out_file(d);
    json_t *object = json_pack("{s:I, s:o}", "held_out_bytes", (json_int_t)d->held_out_bytes,
                               "bits_per_byte", dr_tool_number(bits));
    if (!t->o.json)
        printf("held out: %lld bytes of %lld documents, in bits per byte\n  %-8s %.3f\n",
               (long long)d->held_out_bytes, (long long)d->n_held_out, "model", bits);
    for (size_t i = 0; i < LM_COUNT(programs); i++) {
        int64_t bytes = f != NULL ? compressed_bytes(programs[i], f) : -1;
        double each = bytes >= 0 ? 8 * (double)bytes / (double)d->held_out_bytes : NAN;
        json_object_set_new(object, programs[i], dr_tool_number(each));
        if (!t->o.json && bytes >= 0)
            printf("  %-2s -9%*s %.3f\n", programs[i], 5 - (int)strlen(programs[i]), "", each);
        else if (!t->o.json)
            printf("  %s could not be run\n", programs[i]);
    }
    if (t->o.json)
        dr_tool_json(object);
    else
        json_decref(object);
    if (f != NULL)
        fclose(f);
}

/* ------------------------------------------------------------------------ */
/* The command                                                              */
/* ------------------------------------------------------------------------ */

static void print_start(const trainer *t)
{
    const dr_lm_data *d = &t->data;
    char arch[DR_LM_MAX_LAYERS * 4 + 1];
    if (t->o.json)
        return;
    dr_lm_config_arch_text(&t->config, arch, sizeof arch);
    printf("data:  %lld documents, %.1f MB to learn from; %lld held out, %.2f MB",
           (long long)(d->n_documents - d->n_held_out), 1e-6 * (double)d->train_bytes,
           (long long)d->n_held_out, 1e-6 * (double)d->held_out_bytes);
    if (d->skipped > 0)
        printf("; %lld files without text left out", (long long)d->skipped);
    printf("\nmodel: %s, hidden %d, %d heads of %d, %.2f million parameters\n", arch,
           t->config.hidden, t->config.heads, t->config.head_dim, 1e-6 * (double)t->model.n_weights);
    printf("run:   %s (%s), %d threads, batches of %lld bytes in sequences up to %lld\n",
           dr_context_backend(t->ctx), dr_context_isa(t->ctx), (int)dr_context_threads(t->ctx),
           (long long)t->plan.batch_tokens, (long long)t->plan.context);
    if (t->plan.step > 0)
        printf("going on after step %lld\n", (long long)t->plan.step);
    fflush(stdout);
}

static void print_interrupted(const trainer *t)
{
    if (t->o.out != NULL)
        dr_tool_error("interrupted after step %lld, which %s holds; --resume goes on from there",
                      (long long)t->plan.step, t->o.out);
    else
        dr_tool_error("interrupted after step %lld; nothing was saved, there is no --out",
                      (long long)t->plan.step);
}

static dr_status train(trainer *t)
{
    dr_lm_checkpoint from = {0};
    if (t->o.resume != NULL)
        LM_TRY(open_checkpoint(t->o.out, strcmp(t->o.resume, "previous") == 0, &from));
    dr_status status = set_up(t, t->o.resume != NULL ? &from : NULL);
    dr_lm_checkpoint_close(&from);
    LM_TRY(status);
    print_start(t);
    listen_to_signals();
    LM_TRY(learn(t));
    double bits = NAN;
    if (!interrupted)
        LM_TRY(measure(t, &bits));
    if (interrupted)
        print_interrupted(t);
    else
        print_measures(t, bits);
    return DR_OK;
}

int dr_tool_train(int argc, char **argv)
{
    trainer t = {0};
    read_options(argc, argv, &t.o);
    dr_status status = train(&t);
    trainer_free(&t);
    if (status == DR_OK)
        return DR_TOOL_OK;
    dr_tool_error("%s", dr_lm_error());
    return dr_lm_asked(status) ? DR_TOOL_USAGE : DR_TOOL_FAILED;
}
