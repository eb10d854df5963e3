/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tool.c - see tool.h.
 */
#include "tool.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

const dr_tool_word dr_tool_dtypes[] = {
    {"f32", DR_F32}, {"bf16", DR_BF16}, {"f16", DR_F16}, {"f64", DR_F64}, {NULL, 0}};
const dr_tool_word dr_tool_keeps[] = {{"inputs", DR_KEEP_INPUTS},
                                      {"factors", DR_KEEP_FACTORS},
                                      {"states", DR_KEEP_STATES},
                                      {NULL, 0}};

static void print_sentence(const char *format, va_list args) DR_TOOL_FORMAT(1, 0);

static void print_sentence(const char *format, va_list args)
{
    fflush(stdout);
    fputs("deltarule: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

void dr_tool_error(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_sentence(format, args);
    va_end(args);
}

void dr_tool_usage(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print_sentence(format, args);
    va_end(args);
    exit(DR_TOOL_USAGE);
}

int dr_tool_status(dr_status status) { return dr_tool_failure(status, dr_last_error()); }

int dr_tool_failure(dr_status status, const char *sentence)
{
    if (status == DR_OK)
        return DR_TOOL_OK;
    dr_tool_error("%s", sentence);
    bool asked = status == DR_ERR_ARG || status == DR_ERR_SHAPE || status == DR_ERR_SUPPORT ||
                 status == DR_ERR_IO || status == DR_ERR_FORMAT;
    return asked ? DR_TOOL_USAGE : DR_TOOL_FAILED;
}

/* ------------------------------------------------------------------------ */
/* The command line                                                         */
/* ------------------------------------------------------------------------ */

/* argp takes the name for usage texts from its hidden option and getopt its own from argv[0],
 * so the first can say "deltarule NAME" and the second stay "deltarule". */
void dr_tool_parse(const char *name, const struct argp *argp, int argc, char **argv, void *input)
{
    static char option[64]; /* argp keeps it as the name of the program */
    char **longer = malloc((size_t)(argc + 2) * sizeof *longer);
    if (longer == NULL) {
        dr_tool_error("no memory for the command line");
        exit(DR_TOOL_FAILED);
    }
    snprintf(option, sizeof option, "--program-name=deltarule %s", name);
    longer[0] = argv[0];
    longer[1] = option;
    for (int i = 1; i <= argc; i++) /* the NULL at the end too */
        longer[i + 1] = argv[i];
    argp_err_exit_status = DR_TOOL_USAGE;
    if (argp_parse(argp, argc + 1, longer, 0, NULL, input) != 0)
        dr_tool_usage("the command line of %s could not be read", name);
    free(longer);
}

/* strtoll and strtod take leading blanks, signs, hexadecimal and names; options do not. */
static bool starts_plainly(const char *text, const char *first)
{
    text += text[0] == '-';
    return text[0] != '\0' && strchr(first, text[0]) != NULL && strpbrk(text, "xX") == NULL;
}

int64_t dr_tool_int(const char *option, const char *text, int64_t low, int64_t high)
{
    char *end;
    errno = 0;
    long long x = strtoll(text, &end, 10);
    if (!starts_plainly(text, "0123456789") || *end != '\0' || errno != 0 || x < low || x > high)
        dr_tool_usage("%s: must be a whole number from %lld to %lld, got \"%s\"", option,
                      (long long)low, (long long)high, text);
    return x;
}

double dr_tool_real(const char *option, const char *text, double low, double high)
{
    char *end;
    double x = strtod(text, &end);
    if (!starts_plainly(text, ".0123456789") || *end != '\0' || !(x >= low && x <= high))
        dr_tool_usage("%s: must be a number from %g to %g, got \"%s\"", option, low, high, text);
    return x;
}

void dr_tool_ints(const char *option, const char *text, int64_t low, int64_t high, int count,
                  int64_t *out)
{
    const char *at = text;
    bool good = true;
    for (int i = 0; good && i < count; i++) {
        char *end;
        errno = 0;
        long long x = strtoll(at, &end, 10);
        good = starts_plainly(at, "0123456789") && errno == 0 && x >= low && x <= high &&
               *end == (i + 1 < count ? ',' : '\0');
        out[i] = x;
        at = good ? end + 1 : at;
    }
    if (!good)
        dr_tool_usage(
            "%s: must be %d whole numbers from %lld to %lld separated by commas, got \"%s\"",
            option, count, (long long)low, (long long)high, text);
}

int dr_tool_choice(const char *option, const char *text, const dr_tool_word *words)
{
    char all[256] = "";
    for (const dr_tool_word *w = words; w->word != NULL; w++) {
        if (strcmp(w->word, text) == 0)
            return w->value;
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s", used ? ", " : "", w->word);
    }
    dr_tool_usage("%s: must be one of %s, got \"%s\"", option, all, text);
}

const char *dr_tool_word_of(const dr_tool_word *words, int value)
{
    for (const dr_tool_word *w = words; w->word != NULL; w++)
        if (w->value == value)
            return w->word;
    return NULL;
}

dr_context *dr_tool_context(const char *backend, int32_t threads, int *code)
{
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    dr_context *ctx = NULL;
    dr_status status =
        dr_context_create(backend != NULL ? backend : dr_backend_name(0), &options, &ctx);
    if (status != DR_OK)
        *code = dr_tool_status(status);
    return ctx;
}

/* ------------------------------------------------------------------------ */
/* Time and output                                                          */
/* ------------------------------------------------------------------------ */

double dr_tool_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void dr_tool_json(json_t *object)
{
    if (object == NULL || json_dumpf(object, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9)) != 0) {
        dr_tool_error("an object could not be written as JSON");
        exit(DR_TOOL_FAILED);
    }
    putchar('\n');
    json_decref(object);
}

json_t *dr_tool_text(const char *text)
{
    json_t *valid = json_string(text);
    if (valid != NULL)
        return valid;
    char *ascii = strdup(text);
    for (char *c = ascii; c != NULL && *c != '\0'; c++)
        *c = *c & 0x80 ? '?' : *c;
    valid = json_string(ascii);
    free(ascii);
    return valid;
}

json_t *dr_tool_number(double x) { return isfinite(x) ? json_real(x) : json_null(); }

int dr_tool_finish(int code)
{
    if (fflush(stdout) != 0 || ferror(stdout)) {
        dr_tool_error("standard output: %s", strerror(errno));
        return DR_TOOL_FAILED;
    }
    return code;
}
