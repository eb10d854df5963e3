/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.h - the parts of `deltarule bench`: bench_rows.c knows operations, their nominal work and
 * the standard rows; bench_measure.c times a row beside the roof that limits it; bench_plot.c
 * draws; bench.c is the command.
 */
#ifndef DR_TOOL_BENCH_H
#define DR_TOOL_BENCH_H

#include "cases.h"
#include "roof.h"
#include "tool.h"

typedef enum dr_bench_pass {
    DR_BENCH_FORWARD = 0,
    DR_BENCH_BACKWARD,
    DR_BENCH_STEP,
    DR_BENCH_PASSES
} dr_bench_pass;

enum { DR_BENCH_KEEP_NONE = 100 }; /* beyond dr_keep: nothing is saved at all */
enum { DR_BENCH_MAX_ROWS = 128, DR_BENCH_MAX_RANKS = 64 };
extern const dr_tool_word dr_bench_passes[], dr_bench_keeps[];

/* What a row measures. Zero in a field after V: nothing of the kind. */
typedef struct dr_bench_row {
    const char *op;
    dr_bench_pass pass;
    int keep;
    dr_dtype dtype;
    int64_t B, T, H, HV, K, V;
    int64_t shortest, longest; /* documents of these lengths, packed */
    bool states;               /* states enter and leave */
    int64_t layers;            /* so many problems of their own in turn, together one call */
    int64_t lengths; /* T, T + 1, .. so many, a plan each, of which the first call counts */
    int32_t threads; /* 0: 1 */
    const char *cp;  /* over ranks, of so many threads each */
    int32_t ranks;
} dr_bench_row;

const dr_bench_row *dr_bench_standard(int index); /* NULL past the last */
bool dr_bench_known(const char *op);
bool dr_bench_keeps_something(const dr_bench_row *r);
int64_t dr_bench_channels(const dr_bench_row *r);   /* of the convolution of a layer like that */
int64_t dr_bench_layers(const dr_bench_row *r);     /* at least 1 */
double dr_bench_token_heads(const dr_bench_row *r); /* of one layer */
double dr_bench_flops(const dr_bench_row *r);       /* of a call */
double dr_bench_bytes(const dr_bench_row *r);       /* 0: limited by arithmetic */
/* The case of a row; *offsets is the caller's to free. false: no memory. */
bool dr_bench_case(const dr_bench_row *r, dr_case *c, int64_t **offsets);

typedef struct dr_bench_result {
    double median, fastest, spread; /* seconds; spread: of the middle half, over the median */
    double roof_gflops, roof_rate;  /* rate: GFLOP/s or GB/s as measured */
    double efficiency;              /* ranks: time of one rank / (ranks x time); else 0 */
    double first;                   /* lengths: the first calls over the second ones; else 0 */
    bool by_memory;
    size_t workspace;
} dr_bench_result;

double dr_bench_gflops(const dr_bench_row *r, const dr_bench_result *m);
double dr_bench_share(const dr_bench_row *r, const dr_bench_result *m); /* of the roof */
/* Microseconds for each token, value head and layer. */
double dr_bench_unit_time(const dr_bench_row *r, const dr_bench_result *m);
/* Measures for about so many seconds. The sentence of a failure is in dr_case_why. */
dr_status dr_bench_measure(const dr_bench_row *r, const dr_context *ctx, dr_roof *machine,
                           double seconds, dr_bench_result *out);

/* Draws, with gnuplot, into files of a folder. */
bool dr_plot_possible(void); /* false: gnuplot is not there */
enum { DR_PLOT_LENGTHS = 0, DR_PLOT_THREADS, DR_PLOT_CHOSEN };
typedef struct dr_plot_point {
    dr_bench_row row;
    dr_bench_result result;
    int where; /* which sweep it is of, or one of the rows that were asked for */
} dr_plot_point;
/* The rows of the sweeps over lengths and threads; how many. */
int dr_plot_rows(int32_t threads, dr_plot_point *out, int room);
int dr_plot_draw(const char *folder, const dr_plot_point *points, int count); /* an exit code */

#endif
