/* SPDX-License-Identifier: Apache-2.0 */
/*
 * main.c - the command `deltarule`: a table of subcommands and the option parsing that
 * comes before one.
 */
#include "tool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct subcommand {
    const char *name;
    const char *help;
    int (*run)(int argc, char **argv);
} subcommand;

static const subcommand subcommands[] = {
    {"info", "show the version, the backends and what they support", dr_tool_info},
    {"check", "compare every backend with the reference on this machine", dr_tool_check},
    {"verify", "compare a backend with a file of test vectors", dr_tool_verify},
    {"bench", "measure speed against the matrix product and the memory", dr_tool_bench},
    {"train", "train a small language model on text files", dr_tool_train},
    {"generate", "continue a text with a trained model", dr_tool_generate},
};

typedef struct request {
    const subcommand *chosen;
    int first; /* index of the subcommand's name in argv */
} request;

static char *list_subcommands(int key, const char *text, void *input)
{
    (void)input;
    if (key != ARGP_KEY_HELP_EXTRA)
        return (char *)text;
    char *list = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&list, &bytes);
    if (out == NULL)
        return NULL;
    fputs("Subcommands:\n", out);
    for (size_t i = 0; i < DR_TOOL_COUNT(subcommands); i++)
        fprintf(out, "  %-10s %s\n", subcommands[i].name, subcommands[i].help);
    fputs("\nEach has its own --help. Exit status: 0 well, 1 mismatch or failure, 2 wrong usage.",
          out);
    fclose(out);
    return list; /* argp frees it */
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    request *r = state->input;
    switch (key) {
    case 'V':
        printf("deltarule %d.%d.%d\n", dr_version() / 10000, dr_version() / 100 % 100,
               dr_version() % 100);
        exit(dr_tool_finish(DR_TOOL_OK));
    case ARGP_KEY_ARG:
        for (size_t i = 0; i < DR_TOOL_COUNT(subcommands); i++)
            if (strcmp(subcommands[i].name, text) == 0)
                r->chosen = &subcommands[i];
        if (r->chosen == NULL)
            dr_tool_usage("\"%s\" is not a subcommand; deltarule --help lists them", text);
        r->first = state->next - 1;
        state->next = state->argc;
        return 0;
    case ARGP_KEY_NO_ARGS:
        dr_tool_usage("a subcommand is missing; deltarule --help lists them");
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int main(int argc, char **argv)
{
    static char name[] = "deltarule";
    static const struct argp_option options[] = {
        {"version", 'V', NULL, 0, "Print the version of the library", 0},
        {0},
    };
    static const struct argp argp = {
        options,
        parse,
        "SUBCOMMAND [OPTION...]",
        "Delta-rule linear attention: check, measure and use the library.\v",
        NULL,
        list_subcommands,
        NULL};
    request r = {0};
    if (argc > 0)
        argv[0] = name;
    argp_err_exit_status = DR_TOOL_USAGE;
    if (argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, &r) != 0 || r.chosen == NULL)
        dr_tool_usage("the command line could not be read");
    argv[r.first] = name;
    return dr_tool_finish(r.chosen->run(argc - r.first, argv + r.first));
}
