/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tool.h - what the subcommands of `deltarule` share: the command line (argp), numbers read
 * strictly, errors as one sentence, time, JSON lines. Subcommands see only the public headers
 * of the library.
 *
 * Exit codes are the same everywhere: what was asked for is true or done, it is not, the
 * question could not be understood.
 */
#ifndef DR_TOOL_H
#define DR_TOOL_H

#include <deltarule/deltarule.h>

#include <argp.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DR_TOOL_COUNT(array) (sizeof(array) / sizeof(array)[0])
#define DR_TOOL_FORMAT(fmt, args) __attribute__((format(printf, fmt, args)))

enum dr_tool_exit { DR_TOOL_OK = 0, DR_TOOL_FAILED = 1, DR_TOOL_USAGE = 2 };

/* The subcommands: argv[0] is the name of the program. They return an exit code. */
int dr_tool_info(int argc, char **argv);
int dr_tool_check(int argc, char **argv);
int dr_tool_verify(int argc, char **argv);
int dr_tool_bench(int argc, char **argv);
int dr_tool_train(int argc, char **argv);
int dr_tool_generate(int argc, char **argv);

/* Runs argp for a subcommand: "deltarule NAME" in usage texts, "deltarule: sentence" in
 * errors. Wrong usage ends the process with DR_TOOL_USAGE, --help with DR_TOOL_OK. */
void dr_tool_parse(const char *name, const struct argp *argp, int argc, char **argv, void *input);

/* Prints "deltarule: sentence" on stderr. */
void dr_tool_error(const char *format, ...) DR_TOOL_FORMAT(1, 2);
/* The same, then ends the process with DR_TOOL_USAGE: for parsers. */
void dr_tool_usage(const char *format, ...) DR_TOOL_FORMAT(1, 2) __attribute__((noreturn));
/* Prints the library's sentence of a failure; the exit code that fits: what the caller asked
 * for (arguments, shapes, files) is usage, anything else a failure. */
int dr_tool_status(dr_status status);
int dr_tool_failure(dr_status status, const char *sentence); /* the same, the sentence given */

/* Numbers, the whole text and nothing else; otherwise wrong usage, in a sentence that names
 * the option, the rule and the value. */
int64_t dr_tool_int(const char *option, const char *text, int64_t low, int64_t high);
double dr_tool_real(const char *option, const char *text, double low, double high);
/* count integers separated by commas; fewer or more are wrong usage. */
void dr_tool_ints(const char *option, const char *text, int64_t low, int64_t high, int count,
                  int64_t *out);

/* One of a few words. Tables end with a NULL word. */
typedef struct dr_tool_word {
    const char *word;
    int value;
} dr_tool_word;
int dr_tool_choice(const char *option, const char *text, const dr_tool_word *words);
const char *dr_tool_word_of(const dr_tool_word *words, int value); /* NULL if none has it */

extern const dr_tool_word dr_tool_dtypes[]; /* f32 bf16 f16 f64 */
extern const dr_tool_word dr_tool_keeps[];  /* inputs factors states */

/* A context by name with a thread count (0: the library's choice); backend NULL is the
 * build's first. On failure the sentence is printed and *code set. */
dr_context *dr_tool_context(const char *backend, int32_t threads, int *code);

double dr_tool_now(void); /* seconds, monotonic */

/* JSON: the object on one line of stdout, then released. */
void dr_tool_json(json_t *object);
json_t *dr_tool_number(double x);       /* null where JSON has no such number */
json_t *dr_tool_text(const char *text); /* bytes that are not UTF-8 become '?' */
/* Flushes stdout: DR_TOOL_FAILED with a sentence if output was lost, else code. */
int dr_tool_finish(int code);

#endif
