/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_cp.c - `deltarule check --cp`: the cases of the delta rule over ranks, each a thread of
 * this process, against one rank: the reference in fp64 on the same rounded inputs. Protocols x
 * numbers of ranks x partitions, one line each; what is beyond its limit gets a line of its own.
 *
 * Left out are cases that are not of a stream that ranks can share: pools of states, and streams
 * without a token. Tokens behind the last document, which context parallelism does not take, are
 * cut off; the states entering chunks are not asked for, since ranks cut chunks differently.
 */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const partitions[DR_CASE_CUTS] = {"contiguous", "uneven", "zig-zag"};

void dr_check_read_ranks(const char *text, dr_check_settings *s)
{
    char one[32];
    s->worlds = 0;
    for (const char *at = text; at != NULL;) {
        const size_t length = strcspn(at, ",");
        snprintf(one, sizeof one, "%.*s", (int)(length < sizeof one ? length : sizeof one - 1), at);
        if (s->worlds == DR_CHECK_MAX_WORLDS)
            dr_tool_usage("--ranks: at most %d numbers, got \"%s\"", DR_CHECK_MAX_WORLDS, text);
        s->ranks[s->worlds++] = (int32_t)dr_tool_int("--ranks", one, 1, DR_CHECK_MAX_RANKS);
        at = at[length] == ',' ? at + length + 1 : NULL;
    }
}

/* ------------------------------------------------------------------------ */
/* Protocols                                                                */
/* ------------------------------------------------------------------------ */

enum { MAX_SPECS = 32, SPEC = 64 };

typedef struct specs {
    char text[MAX_SPECS][SPEC];
    int count;
} specs;

/* Whether a world takes the protocol at all: asked with a small stream whose heads divide. */
static dr_status probe(const dr_context *ctx, const char *spec, int32_t ranks)
{
    uint64_t seed = 1;
    dr_case c = {.name = "probe",
                 .op = DR_CASE_CP,
                 .flags = DR_CASE_NO_STATE,
                 .variant = DR_GDN,
                 .gate = DR_GATE_NONE,
                 .beta = DR_BETA_VALUE,
                 .T = 4 * (int64_t)ranks,
                 .H = ranks,
                 .K = 4,
                 .V = 4,
                 .cp = spec,
                 .ranks = ranks};
    dr_case_run *run;
    dr_status status = dr_case_open(&c, ctx, false, dr_case_seeded, &seed, &run);
    if (status == DR_OK)
        dr_case_close(run);
    return status;
}

static dr_status probe_all(const dr_check_settings *s, const dr_context *ctx, const char *spec)
{
    dr_status status = DR_OK;
    for (int i = 0; i < s->worlds; i++) {
        status = probe(ctx, spec, s->ranks[i]);
        if (status == DR_OK)
            return DR_OK;
    }
    return status;
}

/* "all": every protocol, alone, with a width and with a second one, where that means something. */
static dr_status choose_specs(const dr_check_settings *s, const dr_context *ctx, specs *out)
{
    static const char *const forms[] = {"", ":2", ":2+p2p", ":2+doubling"};
    out->count = 0;
    if (strcmp(s->cp, "all") != 0) {
        snprintf(out->text[out->count++], SPEC, "%s", s->cp);
        return probe_all(s, ctx, s->cp);
    }
    for (int32_t i = 0; i < dr_cp_protocol_count(); i++)
        for (size_t form = 0; form < DR_TOOL_COUNT(forms) && out->count < MAX_SPECS; form++) {
            char *text = out->text[out->count];
            snprintf(text, SPEC, "%s%s", dr_cp_protocol_name(i), forms[form]);
            out->count += probe_all(s, ctx, text) == DR_OK;
        }
    return DR_OK;
}

/* ------------------------------------------------------------------------ */
/* Cases                                                                    */
/* ------------------------------------------------------------------------ */

typedef struct subject {
    dr_case c;
    dr_case_run *want; /* on one rank, in fp64 */
} subject;

static bool of_stream(const dr_check_settings *s, const dr_case *c)
{
    const int64_t tokens = c->offsets != NULL ? c->offsets[c->N] : c->T;
    return c->op == DR_CASE_DELTA && !(c->flags & DR_CASE_POOL) && tokens > 0 &&
           dr_check_matches(s->op, c) && !(s->quick && c->flags & DR_CASE_FULL);
}

static void close_subjects(subject *subjects, int count)
{
    for (int i = 0; i < count; i++)
        dr_case_close(subjects[i].want);
    free(subjects);
}

/* The cases, with the results of one rank. */
static dr_status open_subjects(const dr_check_settings *s, const dr_context *ref, subject **out,
                               int *count)
{
    int most = 0;
    dr_status status = DR_OK;
    while (dr_case_at(most) != NULL)
        most++;
    *count = 0;
    *out = calloc((size_t)most, sizeof **out);
    if (*out == NULL)
        return DR_ERR_MEMORY;
    for (int i = 0; i < most && status == DR_OK; i++) {
        uint64_t seed = (uint64_t)s->seed;
        subject *one = &(*out)[*count];
        if (!of_stream(s, dr_case_at(i)))
            continue;
        one->c = *dr_case_at(i);
        one->c.flags &= ~(uint32_t)DR_CASE_CHUNK_STATES;
        one->c.T = one->c.offsets != NULL ? one->c.offsets[one->c.N] : one->c.T;
        status = dr_check_run(&one->c, ref, true, &seed, &one->want);
        *count += status == DR_OK;
    }
    return status;
}

static void check_subject(const dr_check_settings *s, const subject *one, const dr_check_place *at,
                          dr_case_cut cut, dr_check_tally *total)
{
    uint64_t seed = (uint64_t)s->seed;
    dr_case c = one->c;
    c.op = DR_CASE_CP;
    c.cp = at->cp;
    c.ranks = at->ranks;
    c.cut = cut;
    dr_check_place place = *at;
    place.c = &c;
    dr_case_run *got = NULL;
    dr_status status = dr_check_run(&c, at->ctx, false, &seed, &got);
    total->cases++;
    if (status == DR_OK) {
        dr_check_compare(s, &place, got, one->want, total);
    } else if (status == DR_ERR_SUPPORT || status == DR_ERR_SHAPE || status == DR_ERR_ARG) {
        if (total->refused++ == 0)
            snprintf(total->refusal, sizeof total->refusal, "%s: %s", c.name, dr_case_why());
        if (s->json)
            dr_check_word(s, &place, "refused", dr_case_why());
    } else {
        dr_check_word(s, &place, "failed", dr_case_why());
        total->failed++;
    }
    dr_case_close(got);
}

/* ------------------------------------------------------------------------ */
/* The sweep                                                                */
/* ------------------------------------------------------------------------ */

static void report_line(const dr_check_settings *s, const dr_check_place *at,
                        const dr_check_tally *t)
{
    if (s->json)
        return;
    printf("%-20s %5d %-10s %5d %7d %9.2e %9.2e %-28s %4.0f%% %s\n", at->cp, at->ranks,
           at->partition, t->cases - t->refused, t->tensors, t->relative, t->limit,
           t->tensor[0] != '\0' ? t->tensor : "-", 100 * t->worst,
           t->failed > 0     ? "BEYOND"
           : t->tensors == 0 ? "nothing compared"
                             : "ok");
    if (t->refused > 0)
        printf("  %d refused, the first %s\n", t->refused, t->refusal);
    fflush(stdout);
}

static void add_tally(dr_check_tally *all, const dr_check_tally *t)
{
    all->cases += t->cases;
    all->tensors += t->tensors;
    all->failed += t->failed;
    all->refused += t->refused;
    if (!(t->worst <= all->worst)) {
        all->worst = t->worst;
        snprintf(all->where, sizeof all->where, "%s", t->where);
    }
}

static void report_end(const dr_check_settings *s, const dr_context *ctx, const specs *protocols,
                       const dr_check_tally *t)
{
    if (s->json)
        dr_tool_json(json_pack("{sb ss ss si si si si si si so ss sb}", "summary", 1, "backend",
                               dr_context_backend(ctx), "isa", dr_context_isa(ctx), "threads",
                               dr_context_threads(ctx), "protocols", protocols->count, "cases",
                               t->cases, "tensors", t->tensors, "failed", t->failed, "refused",
                               t->refused, "worst_share_of_limit", dr_tool_number(t->worst),
                               "worst", t->where, "ok", t->failed == 0));
    else
        printf("%s (%s), %d thread%s a rank: %d runs, %d tensors, %d beyond limit or failed, %d "
               "refused; worst %.0f%% of its limit, %s\n",
               dr_context_backend(ctx), dr_context_isa(ctx), dr_context_threads(ctx),
               dr_context_threads(ctx) == 1 ? "" : "s", t->cases, t->tensors, t->failed, t->refused,
               100 * t->worst, t->where[0] ? t->where : "nothing compared");
}

static int sweep(const dr_check_settings *s, const dr_context *ctx, const dr_context *ref)
{
    specs protocols;
    subject *subjects = NULL;
    int count = 0;
    dr_status status = choose_specs(s, ctx, &protocols);
    if (status != DR_OK) {
        char sentence[600];
        snprintf(sentence, sizeof sentence, "--cp: %s", dr_case_why());
        return dr_tool_failure(status, sentence);
    }
    status = open_subjects(s, ref, &subjects, &count);
    if (status != DR_OK || count == 0) {
        dr_tool_error("%s", status != DR_OK ? dr_case_why()
                                            : "--op: with --cp it must be gdn, kda or delta");
        close_subjects(subjects, count);
        return status != DR_OK ? DR_TOOL_FAILED : DR_TOOL_USAGE;
    }
    dr_check_tally all = {0};
    if (!s->json)
        printf("%-20s %5s %-10s %5s %7s %9s %9s %-28s %5s\n", "cp", "ranks", "partition", "cases",
               "tensors", "f32 error", "limit", "of", "worst");
    for (int p = 0; p < protocols.count; p++)
        for (int w = 0; w < s->worlds; w++)
            for (int cut = 0; cut < DR_CASE_CUTS; cut++) {
                const dr_check_place at = {.ctx = ctx,
                                           .cp = protocols.text[p],
                                           .partition = partitions[cut],
                                           .ranks = s->ranks[w]};
                dr_check_tally t = {0};
                for (int i = 0; i < count; i++)
                    check_subject(s, &subjects[i], &at, (dr_case_cut)cut, &t);
                report_line(s, &at, &t);
                add_tally(&all, &t);
            }
    report_end(s, ctx, &protocols, &all);
    close_subjects(subjects, count);
    return all.failed == 0 ? DR_TOOL_OK : DR_TOOL_FAILED;
}

int dr_check_cp(const dr_check_settings *s, const char *backend, const dr_context *ref)
{
    static const int32_t usual[] = {1, 2, 3, 5, 8};
    dr_check_settings with = *s;
    int code = DR_TOOL_OK;
    if (with.worlds == 0) {
        memcpy(with.ranks, usual, sizeof usual);
        with.worlds = (int)DR_TOOL_COUNT(usual);
    }
    dr_context *ctx = dr_tool_context(backend, s->threads > 0 ? s->threads : 1, &code);
    if (ctx == NULL)
        return code;
    code = sweep(&with, ctx, ref);
    dr_context_destroy(ctx);
    return code;
}
