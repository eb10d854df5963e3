/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_plot.c - `deltarule bench --plot`: the rows of two sweeps, over lengths and over threads,
 * and three drawings by gnuplot. The folder keeps the numbers (.dat) and the script beside the
 * drawings (.svg), so that they can be drawn again in another way.
 */
#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct curve {
    const char *op;
    dr_bench_pass pass;
    int keep;
} curves[] = {
    {"gdn", DR_BENCH_FORWARD, DR_BENCH_KEEP_NONE},
    {"gdn", DR_BENCH_BACKWARD, DR_KEEP_FACTORS},
    {"kda", DR_BENCH_FORWARD, DR_BENCH_KEEP_NONE},
    {"kda", DR_BENCH_BACKWARD, DR_KEEP_FACTORS},
};
enum { CURVES = sizeof curves / sizeof curves[0], MAX_LENGTH = 8192, SHORTEST = 32 };

static dr_plot_point point(const struct curve *c, int64_t T, int64_t H, int32_t threads, int where)
{
    const dr_bench_row row = {.op = c->op,
                              .pass = c->pass,
                              .keep = c->keep,
                              .dtype = DR_F32,
                              .B = 1,
                              .T = T,
                              .H = H,
                              .HV = H,
                              .K = 128,
                              .V = 128,
                              .threads = threads};
    return (dr_plot_point){.row = row, .where = where};
}

/* Lengths in steps of 4, on the threads that were asked for; threads doubled up to the cores, or
 * up to those that were asked for. */
int dr_plot_rows(int32_t threads, dr_plot_point *out, int room)
{
    const int32_t most = threads > 0 ? threads : (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    int count = 0;
    for (int i = 0; i < CURVES; i++) {
        for (int64_t T = SHORTEST; T <= MAX_LENGTH && count < room; T *= 4)
            out[count++] = point(&curves[i], T, 8, threads > 0 ? threads : 1, DR_PLOT_LENGTHS);
        for (int32_t n = 1; count < room; n = 2 * n < most ? 2 * n : most) {
            out[count++] = point(&curves[i], 1024, 32, n, DR_PLOT_THREADS);
            if (n == most)
                break;
        }
    }
    return count;
}

/* ------------------------------------------------------------------------ */
/* gnuplot                                                                  */
/* ------------------------------------------------------------------------ */

/* Its exit status; 127: it is not there. */
static int gnuplot(const char *folder, const char *argument, bool quiet)
{
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        const int nowhere = open("/dev/null", O_WRONLY);
        if (quiet && nowhere >= 0) {
            dup2(nowhere, 1);
            dup2(nowhere, 2);
        }
        if (folder == NULL || chdir(folder) == 0)
            execlp("gnuplot", "gnuplot", argument, (char *)NULL);
        _exit(127);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child)
        return 127;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

bool dr_plot_possible(void) { return gnuplot(NULL, "--version", true) == 0; }

static FILE *create(const char *folder, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    if (f == NULL)
        dr_tool_error("--plot: %s: %s", path, strerror(errno));
    return f;
}

static bool close_written(FILE *f, const char *folder)
{
    const bool bad = ferror(f) != 0;
    if (fclose(f) == 0 && !bad)
        return true;
    dr_tool_error("--plot: %s: could not be written", folder);
    return false;
}

/* One block of points for each curve, two empty lines between blocks. */
static bool write_curves(const char *folder, const char *name, const dr_plot_point *points,
                         int count, int where)
{
    FILE *f = create(folder, name);
    if (f == NULL)
        return false;
    for (int i = 0; i < CURVES; i++) {
        fprintf(f, "# %s %s: x, us per token-head, share of the roof\n", curves[i].op,
                dr_tool_word_of(dr_bench_passes, curves[i].pass));
        for (int j = 0; j < count; j++) {
            const dr_bench_row *r = &points[j].row;
            if (points[j].where == where && strcmp(r->op, curves[i].op) == 0 &&
                r->pass == curves[i].pass)
                fprintf(f, "%lld %.6g %.6g\n",
                        where == DR_PLOT_LENGTHS ? (long long)r->T : (long long)r->threads,
                        dr_bench_unit_time(r, &points[j].result),
                        dr_bench_share(r, &points[j].result));
        }
        fprintf(f, "\n\n");
    }
    return close_written(f, folder);
}

static bool write_shares(const char *folder, const dr_plot_point *points, int count)
{
    FILE *f = create(folder, "share.dat");
    if (f == NULL)
        return false;
    for (int j = 0; j < count; j++) {
        const dr_bench_row *r = &points[j].row;
        if (points[j].where == DR_PLOT_CHOSEN)
            fprintf(f, "\"%s %s %s%s%s %lld,%lld,%lld,%lld,%lld,%lld%s%s%s\" %.6g\n", r->op,
                    dr_tool_word_of(dr_bench_passes, r->pass), dr_dtype_name(r->dtype),
                    dr_bench_keeps_something(r) ? " " : "",
                    dr_bench_keeps_something(r) ? dr_tool_word_of(dr_bench_keeps, r->keep) : "",
                    (long long)r->B, (long long)r->T, (long long)r->H, (long long)r->HV,
                    (long long)r->K, (long long)r->V, r->shortest > 0 ? " documents" : "",
                    r->states ? " states" : "", r->layers > 0 ? " layers" : "",
                    100 * dr_bench_share(r, &points[j].result));
    }
    return close_written(f, folder);
}

static bool write_script(const char *folder)
{
    static const char *const drawings[][3] = {
        {"length", "tokens", "set logscale x 2\nset xrange [*:*]"},
        {"threads", "threads", "unset logscale\nset xrange [0:*]"}};
    FILE *f = create(folder, "plot.gp");
    if (f == NULL)
        return false;
    fprintf(f, "set terminal svg size 800,500 background rgb 'white'\nset grid\n"
               "set key outside bottom horizontal\n");
    for (size_t d = 0; d < DR_TOOL_COUNT(drawings); d++) {
        fprintf(f,
                "set output '%s.svg'\n%s\nset yrange [0:*]\nset xlabel '%s'\n"
                "set ylabel 'us per token and value head'\nplot",
                drawings[d][0], drawings[d][2], drawings[d][1]);
        for (int i = 0; i < CURVES; i++)
            fprintf(f, "%s '%s.dat' index %d using 1:2 with linespoints title '%s %s'",
                    i > 0 ? "," : "", drawings[d][0], i, curves[i].op,
                    dr_tool_word_of(dr_bench_passes, curves[i].pass));
        fputc('\n', f);
    }
    fprintf(f, "set terminal svg size 1100,700 background rgb 'white'\nset output 'share.svg'\n"
               "set xrange [*:*]\nunset xlabel\nset ylabel 'percent of the roof'\n"
               "set style fill solid 0.6\nset boxwidth 0.7\nset xtics rotate by -60 font ',9'\n"
               "set bmargin 14\nset rmargin 10\n"
               "plot 'share.dat' using 0:2:xtic(1) with boxes notitle\n");
    return close_written(f, folder);
}

int dr_plot_draw(const char *folder, const dr_plot_point *points, int count)
{
    if (mkdir(folder, 0777) != 0 && errno != EEXIST) {
        dr_tool_error("--plot: %s: %s", folder, strerror(errno));
        return DR_TOOL_USAGE;
    }
    if (!write_curves(folder, "length.dat", points, count, DR_PLOT_LENGTHS) ||
        !write_curves(folder, "threads.dat", points, count, DR_PLOT_THREADS) ||
        !write_shares(folder, points, count) || !write_script(folder))
        return DR_TOOL_FAILED;
    if (gnuplot(folder, "plot.gp", false) == 0)
        return DR_TOOL_OK;
    dr_tool_error("--plot: gnuplot could not draw %s/plot.gp", folder);
    return DR_TOOL_FAILED;
}
