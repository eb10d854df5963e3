/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_measure.c - times one row. The roof is measured in the same run, between the same calls:
 * clocks of machines swing, shares do not. Over ranks the time of a call is that of the slowest
 * rank, and calls on one rank take turns with those on all.
 */
#include "bench.h"

#include <stdlib.h>
#include <unistd.h>

enum { MAX_SAMPLES = 8192, SLICES = 3, MAX_LAYERS = 256 };

typedef struct subject {
    dr_case_run *runs[MAX_LAYERS];
    int64_t count;
    dr_direction dir;
    bool over_ranks;
} subject;

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(double *values, int count, double q)
{
    qsort(values, (size_t)count, sizeof *values, by_value);
    return values[(int)(q * (count - 1) + .5)];
}

double dr_bench_gflops(const dr_bench_row *r, const dr_bench_result *m)
{
    return 1e-9 * dr_bench_flops(r) / m->median;
}

double dr_bench_share(const dr_bench_row *r, const dr_bench_result *m)
{
    return dr_bench_gflops(r, m) / m->roof_gflops;
}

double dr_bench_unit_time(const dr_bench_row *r, const dr_bench_result *m)
{
    return 1e6 * m->median / (dr_bench_token_heads(r) * (double)dr_bench_layers(r));
}

static void close_subject(subject *s)
{
    for (int64_t i = 0; i < s->count; i++)
        dr_case_close(s->runs[i]);
}

/* Opens the runs of a row and makes the first call of each, which nobody times. */
static dr_status open_subject(const dr_bench_row *r, const dr_context *ctx, int32_t ranks,
                              subject *s)
{
    dr_case c;
    int64_t *offsets;
    uint64_t seed = 1;
    *s = (subject){.dir = r->pass == DR_BENCH_BACKWARD ? DR_ADJOINT : DR_FORWARD,
                   .over_ranks = ranks > 1 || r->cp != NULL};
    dr_status status = dr_bench_case(r, &c, &offsets) ? DR_OK : DR_ERR_MEMORY;
    if (s->over_ranks) {
        c.op = DR_CASE_CP;
        c.cp = r->cp;
        c.ranks = ranks;
        c.flags |= DR_CASE_APART;
    }
    for (int64_t i = 0; i < dr_bench_layers(r) && i < MAX_LAYERS && status == DR_OK; i++) {
        status = dr_case_open(&c, ctx, false, dr_case_seeded, &seed, &s->runs[i]);
        if (status != DR_OK)
            break;
        s->count = i + 1;
        status = dr_case_call(s->runs[i], DR_FORWARD);
        if (status == DR_OK && s->dir == DR_ADJOINT)
            status = dr_case_call(s->runs[i], s->dir);
    }
    free(offsets);
    return status;
}

static dr_status sample(subject *s, double *seconds)
{
    const double start = dr_tool_now();
    dr_status status = DR_OK;
    for (int64_t i = 0; i < s->count && status == DR_OK; i++)
        status = dr_case_call(s->runs[i], s->dir);
    *seconds = s->over_ranks ? dr_case_seconds(s->runs[0]) : dr_tool_now() - start;
    return status;
}

static double roof_of(const dr_roof *machine, bool by_memory)
{
    return by_memory ? dr_roof_stream(machine) : dr_roof_product(machine);
}

static void conclude(const dr_bench_row *r, double *times, int calls, double *roofs,
                     dr_bench_result *out)
{
    out->fastest = quantile(times, calls, 0);
    out->median = quantile(times, calls, .5);
    out->spread = (quantile(times, calls, .75) - quantile(times, calls, .25)) / out->median;
    out->roof_rate = quantile(roofs, SLICES + 1, .5);
    out->roof_gflops =
        out->by_memory ? out->roof_rate * dr_bench_flops(r) / dr_bench_bytes(r) : out->roof_rate;
}

/* Calls until the time is over, in slices with a sample of the roof around each. */
static dr_status time_calls(const dr_bench_row *r, subject *s, subject *alone,
                            const dr_roof *machine, double seconds, dr_bench_result *out)
{
    static double times[MAX_SAMPLES], others[MAX_SAMPLES];
    double roofs[SLICES + 1];
    dr_status status = DR_OK;
    int calls = 0;
    for (int slice = 0; slice <= SLICES; slice++) {
        roofs[slice] = roof_of(machine, out->by_memory);
        const double end = dr_tool_now() + seconds / SLICES;
        bool more = slice < SLICES;
        while (status == DR_OK && more && calls < MAX_SAMPLES) {
            status = sample(s, &times[calls]);
            if (status == DR_OK && alone != NULL)
                status = sample(alone, &others[calls]);
            calls++;
            more = dr_tool_now() < end;
        }
    }
    if (status != DR_OK)
        return status;
    conclude(r, times, calls, roofs, out);
    if (alone != NULL)
        out->efficiency = quantile(others, calls, .5) / (r->ranks * out->median);
    out->workspace = dr_case_workspace(s->runs[0], s->dir) * (size_t)s->count;
    return DR_OK;
}

/* Lengths in turn: what a new length costs beside the same one again. Every time is brought to
 * that of the first length. */
static dr_status time_lengths(const dr_bench_row *r, const dr_context *ctx, const dr_roof *machine,
                              dr_bench_result *out)
{
    static double firsts[MAX_SAMPLES], times[MAX_SAMPLES];
    double roofs[SLICES + 1] = {0};
    const int64_t step = r->lengths > SLICES ? (r->lengths - 1) / SLICES : 1;
    dr_status status = DR_OK;
    int calls = 0;
    for (int64_t i = 0; i < r->lengths && i < MAX_SAMPLES && status == DR_OK; i++) {
        dr_bench_row one = *r;
        one.T = r->T + i;
        const double to_first = (double)r->T / (double)one.T;
        dr_case c;
        int64_t *offsets;
        uint64_t seed = 1;
        dr_case_run *run = NULL;
        if (i % step == 0 && i / step <= SLICES)
            roofs[i / step] = roof_of(machine, out->by_memory);
        status = dr_bench_case(&one, &c, &offsets) ? DR_OK : DR_ERR_MEMORY;
        if (status == DR_OK)
            status = dr_case_open(&c, ctx, false, dr_case_seeded, &seed, &run);
        for (int turn = 0; turn < 2 && status == DR_OK; turn++) {
            const double start = dr_tool_now();
            status = dr_case_call(run, r->pass == DR_BENCH_BACKWARD ? DR_ADJOINT : DR_FORWARD);
            (turn == 0 ? firsts : times)[i] = (dr_tool_now() - start) * to_first;
        }
        if (status == DR_OK)
            out->workspace = dr_case_workspace(run, DR_FORWARD);
        dr_case_close(run);
        free(offsets);
        calls++;
    }
    if (status != DR_OK)
        return status;
    conclude(r, firsts, calls, roofs, out);
    out->first = out->median / quantile(times, calls, .5);
    return DR_OK;
}

dr_status dr_bench_measure(const dr_bench_row *r, const dr_context *ctx, dr_roof *machine,
                           double seconds, dr_bench_result *out)
{
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const int32_t busy = dr_context_threads(ctx) * (r->ranks > 0 ? r->ranks : 1);
    machine->threads = r->ranks > 0 && busy > cores ? (int)cores : busy;
    *out = (dr_bench_result){.by_memory = dr_bench_bytes(r) > 0};
    if (r->lengths > 0)
        return time_lengths(r, ctx, machine, out);
    subject s, alone;
    const int32_t ranks = r->ranks > 0 ? r->ranks : 1;
    dr_bench_row single = *r;
    single.cp = NULL;
    dr_status status = open_subject(r, ctx, ranks, &s);
    if (status == DR_OK && r->cp != NULL) {
        status = open_subject(&single, ctx, 1, &alone);
        if (status == DR_OK)
            status = time_calls(r, &s, &alone, machine, seconds, out);
        close_subject(&alone);
    } else if (status == DR_OK) {
        status = time_calls(r, &s, NULL, machine, seconds, out);
    }
    close_subject(&s);
    return status;
}
