/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cli.c - the built command `deltarule`, from outside: exit codes, the sentence of every
 * kind of wrong usage, JSON that parses, files of test vectors whole, wrong, cut short and
 * damaged. The vectors are made here, by the recurrence with K = V = 1.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static char folder[] = "/tmp/deltarule-cli-XXXXXX";
static char vectors[64], scrap[64]; /* files in it */

/* ---- running ---------------------------------------------------------------------------- */

typedef struct outcome {
    int code; /* -1: ended by a signal */
    char *out, *err;
} outcome;

static char *slurp(const char *name)
{
    char path[96];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    long size = ftell(f);
    rewind(f);
    char *text = calloc((size_t)size + 1, 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)size, f), size);
    fclose(f);
    return text;
}

/* arguments go through the shell. */
static outcome run(const char *arguments)
{
    char command[1024];
    snprintf(command, sizeof command, "'%s/deltarule' %s >%s/out 2>%s/err", DR_TEST_BINARY_DIR,
             arguments, folder, folder);
    int status = system(command);
    outcome o = {WIFEXITED(status) ? WEXITSTATUS(status) : -1, slurp("out"), slurp("err")};
    if (o.code > 128) /* the shell's word for a signal */
        o.code = -1;
    return o;
}

static void done(outcome *o)
{
    free(o->out);
    free(o->err);
}

/* Wrong usage: exit 2, nothing on stdout, one sentence that starts with the name. */
static void expect_usage(const char *arguments, const char *sentence)
{
    outcome o = run(arguments);
    if (o.code != 2 || strncmp(o.err, "deltarule: ", 11) != 0 || strstr(o.err, sentence) == NULL ||
        o.out[0] != '\0')
        fail_msg("%s: expected exit 2 and \"%s\", got exit %d, \"%s\"", arguments, sentence, o.code,
                 o.err);
    done(&o);
}

static outcome expect_exit(const char *arguments, int code)
{
    outcome o = run(arguments);
    if (o.code != code)
        fail_msg("%s: expected exit %d, got %d: %s%s", arguments, code, o.code, o.out, o.err);
    return o;
}

/* ---- JSON ------------------------------------------------------------------------------- */

static const char *json_value(const char *s, int depth);

static const char *json_string_end(const char *s) /* s: after the quote */
{
    for (; *s != '"'; s++) {
        if ((unsigned char)*s < 32)
            return NULL;
        if (*s == '\\' && strchr("\"\\/bfnrtu", *++s) == NULL)
            return NULL;
    }
    return s + 1;
}

static const char *json_number(const char *s)
{
    char *end;
    if (*s != '-' && (*s < '0' || *s > '9'))
        return NULL;
    (void)strtod(s, &end);
    return end;
}

/* A list in brackets; with_names: of "name":value. */
static const char *json_list(const char *s, char close, bool with_names, int depth)
{
    if (*s == close)
        return s + 1;
    for (;; s++) {
        if (with_names) {
            s = *s == '"' ? json_string_end(s + 1) : NULL;
            if (s == NULL || *s != ':')
                return NULL;
            s++;
        }
        s = json_value(s, depth + 1);
        if (s == NULL || *s == close)
            return s != NULL ? s + 1 : NULL;
        if (*s != ',')
            return NULL;
    }
}

/* The compact form: no blanks between tokens. NULL: not a value. */
static const char *json_value(const char *s, int depth)
{
    static const char *const words[] = {"true", "false", "null"};
    if (depth > 8)
        return NULL;
    for (size_t i = 0; i < COUNT(words); i++)
        if (strncmp(s, words[i], strlen(words[i])) == 0)
            return s + strlen(words[i]);
    switch (*s) {
    case '{':
        return json_list(s + 1, '}', true, depth);
    case '[':
        return json_list(s + 1, ']', false, depth);
    case '"':
        return json_string_end(s + 1);
    default:
        return json_number(s);
    }
}

/* Every line is one object; returns how many. */
static int expect_json(const char *text)
{
    int lines = 0;
    for (const char *s = text; *s != '\0'; lines++) {
        const char *end = *s == '{' ? json_value(s, 0) : NULL;
        if (end == NULL || *end != '\n')
            fail_msg("line %d is not a JSON object: %.200s", lines + 1, s);
        s = end + 1;
    }
    return lines;
}

static void expect_all(const char *text, const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strstr(text, words[i]) == NULL)
            fail_msg("expected \"%s\" in: %.400s", words[i], text);
}

/* ---- files of vectors ------------------------------------------------------------------- */

enum { T = 40 };

static void put_record(FILE *f, const char *name, int rank, const int64_t *shape,
                       const double *values)
{
    uint32_t length = (uint32_t)strlen(name), r = (uint32_t)rank;
    size_t count = 1;
    for (int i = 0; i < rank; i++)
        count *= (size_t)shape[i];
    fwrite(&length, 4, 1, f);
    fwrite(name, 1, length, f);
    fwrite(&r, 4, 1, f);
    if (rank > 0)
        fwrite(shape, 8, (size_t)rank, f);
    fwrite(values, 8, count, f);
}

typedef struct scalars {
    double q[T], k[T], v[T], g[T], beta[T], d_o[T], o[T];
    double dq[T], dk[T], dv[T], dg[T], dbeta[T];
    double h0, dht, ht, dh0, scale;
} scalars;

/* The recurrence and its adjoint, all of them numbers. */
static void compute_from(scalars *x, double h0, double dht, double scale)
{
    double R[T], r[T], S[T + 1];
    S[0] = x->h0 = h0;
    x->scale = scale;
    for (int t = 0; t < T; t++) {
        x->q[t] = (float)cos(t);
        x->k[t] = (float)sin(1 + t * t);
        x->v[t] = (float)cos(3 * t + 1);
        x->g[t] = (float)(-0.3 - 0.2 * sin(t));
        x->beta[t] = (float)(0.5 + 0.4 * cos(5 * t));
        x->d_o[t] = (float)sin(2 * t + 1);
        R[t] = exp(x->g[t]) * S[t];
        r[t] = x->v[t] - R[t] * x->k[t];
        S[t + 1] = R[t] + x->k[t] * x->beta[t] * r[t];
        x->o[t] = scale * S[t + 1] * x->q[t];
    }
    x->ht = S[T];
    double dS = x->dht = dht;
    for (int t = T - 1; t >= 0; t--) {
        dS += scale * x->q[t] * x->d_o[t];
        double e = dS * x->k[t], dr = x->beta[t] * e, dR = dS - x->k[t] * dr;
        x->dq[t] = scale * S[t + 1] * x->d_o[t];
        x->dbeta[t] = e * r[t];
        x->dv[t] = dr;
        x->dk[t] = dS * x->beta[t] * r[t] - R[t] * dr;
        x->dg[t] = dR * R[t];
        dS = exp(x->g[t]) * dR;
    }
    x->dh0 = dS;
}

static void compute(scalars *x) { compute_from(x, 0.5, 0.25, 0.7); }

/* skip: a record to leave out, or NULL. */
static void write_vectors(const char *path, const scalars *x, const char *skip)
{
    static const double chunk = 64, offsets[2] = {0, T};
    static const int64_t shape[4] = {1, T, 1, 1}, state[4] = {1, 1, 1, 1}, two = 2;
    const struct {
        const char *name;
        int rank;
        const int64_t *shape;
        const double *values;
    } records[] = {
        {"q", 4, shape, x->q},         {"k", 4, shape, x->k},         {"v", 4, shape, x->v},
        {"g", 3, shape, x->g},         {"beta", 3, shape, x->beta},   {"h0", 4, state, &x->h0},
        {"do", 4, shape, x->d_o},      {"dht", 4, state, &x->dht},    {"o", 4, shape, x->o},
        {"ht", 4, state, &x->ht},      {"dq", 4, shape, x->dq},       {"dk", 4, shape, x->dk},
        {"dv", 4, shape, x->dv},       {"dg", 3, shape, x->dg},       {"dbeta", 3, shape, x->dbeta},
        {"dh0", 4, state, &x->dh0},    {"scale", 0, NULL, &x->scale}, {"chunk", 0, NULL, &chunk},
        {"offsets", 1, &two, offsets}, {"extra", 0, NULL, &x->scale}};
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fwrite("DRORACL1", 1, 8, f);
    for (size_t i = 0; i < COUNT(records); i++)
        if (skip == NULL || strcmp(skip, records[i].name) != 0)
            put_record(f, records[i].name, records[i].rank, records[i].shape, records[i].values);
    assert_int_equal(fclose(f), 0);
}

static void write_bytes(const unsigned char *bytes, size_t count)
{
    FILE *f = fopen(scrap, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, count, f), count);
    assert_int_equal(fclose(f), 0);
}

static size_t file_size(const char *path)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    fclose(f);
    return (size_t)size;
}

static outcome verify_scrap(const char *options)
{
    char arguments[192];
    snprintf(arguments, sizeof arguments, "verify %s %s", scrap, options);
    return run(arguments);
}

/* ---- tests ------------------------------------------------------------------------------ */

static void test_usage(void **state)
{
    (void)state;
    expect_usage("", "a subcommand is missing");
    expect_usage("tune", "\"tune\" is not a subcommand");
    expect_usage("--frobnicate", "unrecognized option '--frobnicate'");
    expect_usage("info all", "info takes no argument, got \"all\"");
    expect_usage("info --json --markdown", "exclude each other");
    expect_usage("check --threads 2x",
                 "--threads: must be a whole number from 1 to 4096, got \"2x\"");
    expect_usage("check --threads 0", "got \"0\"");
    expect_usage("check --threads ' 1'", "got \" 1\"");
    expect_usage("check --threads 0x10", "got \"0x10\"");
    expect_usage("check --seed -1", "--seed: must be a whole number");
    expect_usage("check --seed 99999999999999999999", "--seed");
    expect_usage("check --op softmax", "--op: must be");
    expect_usage("check --ranks 2", "--ranks: needs --cp");
    expect_usage("check --cp p2p --ranks 2,", "--ranks: must be a whole number from 1 to 64");
    expect_usage("check --cp p2p --ranks 65", "got \"65\"");
    expect_usage("check --cp ring --ranks 2", "--cp: protocol: must be one of p2p,");
    expect_usage("check --cp grouped --ranks 2", "grouped needs a width");
    expect_usage("check --cp p2p --op conv --ranks 2", "with --cp it must be gdn, kda or delta");
    expect_usage("check --backend tpu", "backend: must be");
    expect_usage("check --backend", "requires an argument");
    expect_usage("verify", "needs a file");
    expect_usage("verify a b", "one file, got \"b\" too");
    expect_usage("verify a --dtype f8", "--dtype: must be one of f32, bf16, f16, f64, got \"f8\"");
    expect_usage("verify a --tol 1e-5x", "--tol: must be a number");
    expect_usage("verify a --tol nan", "--tol: must be a number");
    expect_usage("verify a --chunk 0", "--chunk: must be a whole number from 1");
    expect_usage("verify a --ranks 2", "--ranks: needs --cp");
    expect_usage("verify a --cp p2p --ranks 0", "--ranks: must be a whole number from 1 to 64");
    expect_usage("verify a --volume 11", "unrecognized option");
    expect_usage("bench --op sort", "--op: must be one of");
    expect_usage("bench --shape 1,2,3", "--shape: must be 6 whole numbers");
    expect_usage("bench --shape 1,2,3,4,5,6,7", "--shape: must be 6 whole numbers");
    expect_usage("bench --shape 1,64,2,3,16,16 --op gdn", "HV must be a multiple of H");
    expect_usage("bench --op norm --pass step", "norm has no pass step");
    expect_usage("bench --op conv --keep states", "keeps nothing");
    expect_usage("bench --op gdn --pass backward --keep none", "needs inputs, factors or states");
    expect_usage("bench --op layer-gdn --dtype bf16", "layers take f32");
    expect_usage("bench --seconds 0", "--seconds: must be a number");
    expect_usage("bench --cp p2p", "--cp, --ranks: both or neither, got --cp alone");
    expect_usage("bench --ranks 2", "--cp, --ranks: both or neither, got --ranks alone");
    expect_usage("bench --cp p2p --ranks 2 --op conv", "ranks are for the forward and backward");
    expect_usage("bench extra", "bench takes no argument");
}

static void test_help(void **state)
{
    (void)state;
    static const char *const names[] = {"info", "check", "verify", "bench", "train", "generate"};
    outcome o = expect_exit("--help", 0);
    expect_all(o.out, names, COUNT(names));
    done(&o);
    for (size_t i = 0; i < COUNT(names); i++) {
        char arguments[64];
        snprintf(arguments, sizeof arguments, "%s --help", names[i]);
        o = expect_exit(arguments, 0);
        assert_non_null(strstr(o.out, "Usage: deltarule"));
        assert_string_equal(o.err, "");
        done(&o);
    }
    o = expect_exit("--version", 0);
    assert_int_equal(strncmp(o.out, "deltarule ", 10), 0);
    done(&o);
}

static void test_info(void **state)
{
    (void)state;
    static const char *const plain[] = {
        "deltarule ", "BLAS: ", "backend cpu: ", "backend ref: ", "gdn forward", "keep states"};
    static const char *const json[] = {"{\"version\":",
                                       "\"blas\":",
                                       "\"isa\":",
                                       "\"threads\":",
                                       "{\"operation\":\"kda backward\",\"backend\":\"ref\"",
                                       "{\"option\":\"packed documents\",\"backend\":\"cpu\""};
    outcome o = expect_exit("info", 0);
    expect_all(o.out, plain, COUNT(plain));
    done(&o);
    o = expect_exit("info --json", 0);
    assert_true(expect_json(o.out) > 50);
    expect_all(o.out, json, COUNT(json));
    done(&o);
    o = expect_exit("info --markdown", 0);
    assert_int_equal(o.out[0], '|');
    assert_non_null(strstr(o.out, "\n|---|---|"));
    done(&o);
}

static void test_check(void **state)
{
    (void)state;
    static const char *const fields[] = {"\"case\":\"norm-silu\"",
                                         "\"tensor\":\"dweight\"",
                                         "\"relative_l2\":",
                                         "\"max_error\":",
                                         "\"limit\":",
                                         "\"summary\":true",
                                         "\"refused\":0",
                                         "\"failed\":0"};
    outcome o = expect_exit("check --quick --op norm --seed 7 --threads 1 --json", 0);
    assert_true(expect_json(o.out) > 10);
    expect_all(o.out, fields, COUNT(fields));
    done(&o);
    o = expect_exit("check --quick --op step --backend cpu", 0);
    assert_non_null(strstr(o.out, "0 beyond limit or failed"));
    done(&o);
    o = expect_exit("check --quick --op beta --backend ref", 0);
    done(&o);
}

/* Ranks, the lines of partitions, and the places of JSON lines. */
static void test_check_cp(void **state)
{
    (void)state;
    static const char *const fields[] = {"\"case\":\"kda-empties\"",
                                         "\"op\":\"cp\"",
                                         "\"cp\":\"grouped:2\"",
                                         "\"ranks\":3",
                                         "\"partition\":\"contiguous\"",
                                         "\"partition\":\"uneven\"",
                                         "\"partition\":\"zig-zag\"",
                                         "\"tensor\":\"d_initial_state\"",
                                         "\"protocols\":1",
                                         "\"refused\":0",
                                         "\"failed\":0"};
    outcome o = expect_exit("check --quick --op kda --cp grouped:2 --ranks 3 --json", 0);
    assert_true(expect_json(o.out) > 100);
    expect_all(o.out, fields, COUNT(fields));
    done(&o);
    static const char *const lines[] = {"\np2p ", "\nallgather ", "\ngrouped:2 ", "\ndoubling ",
                                        "0 beyond limit or failed"};
    o = expect_exit("check --quick --op gdn --cp all --ranks 2,5 --seed 3", 0);
    expect_all(o.out, lines, COUNT(lines));
    done(&o);
    o = expect_exit("check --quick --op gdn --cp p2p --ranks 2 --backend ref", 0);
    done(&o);
}

static void test_bench(void **state)
{
    (void)state;
    static const char *const fields[] = {"\"op\":\"gdn\"",
                                         "\"pass\":\"backward\"",
                                         "\"backend\":\"cpu\"",
                                         "\"isa\":",
                                         "\"dtype\":\"f32\"",
                                         "\"B\":1",
                                         "\"T\":65",
                                         "\"H\":1",
                                         "\"HV\":2",
                                         "\"K\":16",
                                         "\"V\":24",
                                         "\"threads\":1",
                                         "\"ranks\":1",
                                         "\"cp\":\"none\"",
                                         "\"ms_median\":",
                                         "\"ms_min\":",
                                         "\"us_per_token_head\":",
                                         "\"gflops\":",
                                         "\"roof_gflops\":",
                                         "\"share_of_roof\":",
                                         "\"workspace_bytes\":"};
    outcome o = expect_exit("bench --op gdn --pass backward --shape 1,65,1,2,16,24 --threads 1 "
                            "--dtype f32 --keep factors --seconds 0.01 --json",
                            0);
    assert_int_equal(expect_json(o.out), 1);
    expect_all(o.out, fields, COUNT(fields));
    done(&o);
    o = expect_exit("bench --op step --shape 2,1,1,2,16,24 --threads 1 --seconds 0.01", 0);
    assert_non_null(strstr(o.out, "GB/s"));
    done(&o);
    expect_usage("bench --op gdn --shape 1,8,1,1,300,16 --seconds 0.01 --json", "key_dim");
}

/* Ranks of one thread each, the rows of a case as sequences of one stream. */
static void test_bench_cp(void **state)
{
    (void)state;
    static const char *const fields[] = {"\"ranks\":3",   "\"cp\":\"doubling\"",
                                         "\"threads\":1", "\"B\":2",
                                         "\"T\":50",      "\"efficiency\":"};
    outcome o = expect_exit("bench --cp doubling --ranks 3 --op kda --pass backward --dtype f32 "
                            "--keep states --shape 2,50,1,2,16,24 --seconds 0.01 --json",
                            0);
    assert_int_equal(expect_json(o.out), 1);
    expect_all(o.out, fields, COUNT(fields));
    done(&o);
    o = expect_exit("bench --cp p2p --ranks 2 --op gdn --keep states --shape 1,65,1,2,16,24 "
                    "--seconds 0.01",
                    0);
    assert_non_null(strstr(o.out, "2 ranks p2p, efficiency "));
    done(&o);
    o = run("bench --cp ring --ranks 2 --op gdn --shape 1,65,1,2,16,24 --seconds 0.01 --json");
    assert_int_equal(o.code, 2);
    assert_non_null(strstr(o.err, "protocol: must be one of"));
    done(&o);
}

/* Drawings where gnuplot is, and where it is not the sentence that tells how to get it. */
static void test_bench_plot(void **state)
{
    (void)state;
    static const char *const files[] = {"length.dat", "threads.dat", "share.dat", "plot.gp",
                                        "length.svg", "threads.svg", "share.svg"};
    char arguments[256], path[128];
    expect_usage("bench --plot '' --cp p2p --ranks 2", "--plot: draws one rank");
    if (system("command -v gnuplot >/dev/null 2>&1") != 0) {
        expect_usage("bench --plot anywhere", "apt-get install gnuplot-nox");
        return;
    }
    snprintf(arguments, sizeof arguments,
             "bench --plot %s/plots --op gdn --pass forward --shape 1,33,1,1,16,16 --seconds 0.001 "
             "--threads 1",
             folder);
    outcome o = expect_exit(arguments, 0);
    done(&o);
    for (size_t i = 0; i < COUNT(files); i++) {
        snprintf(path, sizeof path, "%s/plots/%s", folder, files[i]);
        if (file_size(path) < 20)
            fail_msg("%s is empty", path);
        unlink(path);
    }
    snprintf(path, sizeof path, "%s/plots", folder);
    assert_int_equal(rmdir(path), 0);
}

static void test_verify(void **state)
{
    (void)state;
    static const char *const outputs[] = {"\"tensor\":\"o\"",
                                          "\"tensor\":\"ht\"",
                                          "\"tensor\":\"dq\"",
                                          "\"tensor\":\"dk\"",
                                          "\"tensor\":\"dv\"",
                                          "\"tensor\":\"dg\"",
                                          "\"tensor\":\"dbeta\"",
                                          "\"tensor\":\"dh0\"",
                                          "\"tensor\":\"o (step)\"",
                                          "\"not_compared\":[\"extra\"]",
                                          "\"compared\":10,\"beyond\":0"};
    static const char *const ways[] = {"", "--backend ref --dtype f64 --chunk 7", "--dtype bf16",
                                       "--backend ref --dtype f16 --threads 1"};
    scalars x;
    compute(&x);
    write_vectors(vectors, &x, NULL);
    for (size_t i = 0; i < COUNT(ways); i++) {
        char arguments[160];
        snprintf(arguments, sizeof arguments, "verify %s --json %s", vectors, ways[i]);
        outcome o = expect_exit(arguments, 0);
        assert_int_equal(expect_json(o.out), 11);
        expect_all(o.out, outputs, COUNT(outputs));
        done(&o);
    }
}

/* The golden files of other groups, through the command. */
static void test_verify_golden(void **state)
{
    (void)state;
    static const char *const names[] = {"delta_gdn", "delta_kda_packed", "delta_kda_strong",
                                        "layer_gdn_packed", "layer_kda_pair"};
    for (size_t i = 0; i < COUNT(names); i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "verify '%s/golden/%s.bin' --json",
                 DR_TEST_SOURCE_DIR, names[i]);
        outcome o = expect_exit(arguments, 0);
        assert_true(expect_json(o.out) >= 10);
        assert_non_null(strstr(o.out, "\"ok\":true}\n"));
        done(&o);
    }
}

static void test_verify_finds_errors(void **state)
{
    (void)state;
    scalars x;
    compute(&x);
    double *const values[] = {&x.o[T - 1], &x.dq[0],    &x.dk[3], &x.dv[T - 1],
                              &x.dg[1],    &x.dbeta[5], &x.ht,    &x.dh0};
    for (size_t i = 0; i < COUNT(values); i++) {
        double right = *values[i];
        *values[i] += 1e-3;
        write_vectors(scrap, &x, NULL);
        outcome o = verify_scrap("");
        assert_int_equal(o.code, 1);
        assert_non_null(strstr(o.out, "BEYOND"));
        done(&o);
        *values[i] = right;
    }
    x.dv[2] += 1e-3; /* the reference itself must meet the file */
    write_vectors(scrap, &x, NULL);
    outcome o = verify_scrap("--dtype bf16");
    assert_int_equal(o.code, 1);
    done(&o);
    o = verify_scrap("--tol 0.1");
    assert_int_equal(o.code, 0);
    done(&o);
}

static void test_verify_refuses(void **state)
{
    (void)state;
    static const char *const needed[] = {"k", "beta", "do", "dht", "o", "dg", "scale", "offsets"};
    scalars x;
    compute(&x);
    for (size_t i = 0; i < COUNT(needed); i++) {
        char sentence[64];
        snprintf(sentence, sizeof sentence, "\"%s\"", needed[i]);
        write_vectors(scrap, &x, needed[i]);
        outcome o = verify_scrap("");
        if (o.code != 2 || strstr(o.err, sentence) == NULL)
            fail_msg("without %s: exit %d, %s", needed[i], o.code, o.err);
        done(&o);
    }
    write_vectors(scrap, &x, "g");
    outcome o = verify_scrap("");
    assert_int_equal(o.code, 2);
    assert_non_null(strstr(o.err, "name no kind"));
    done(&o);

    FILE *f = fopen(scrap, "ab"); /* a stream over ranks, but a number in place of cuts */
    assert_non_null(f);
    put_record(f, "cuts", 0, NULL, x.q);
    fclose(f);
    o = verify_scrap("");
    assert_int_equal(o.code, 2);
    assert_non_null(strstr(o.err, "record \"cuts\": expected [.], got []"));
    done(&o);

    char arguments[128];
    snprintf(arguments, sizeof arguments, "verify %s", folder);
    expect_usage(arguments, "not a regular file");
    snprintf(arguments, sizeof arguments, "verify %s/nothing", folder);
    expect_usage(arguments, "cannot be opened");
    snprintf(arguments, sizeof arguments, "verify %s --dtype f64", vectors);
    o = run(arguments); /* cpu has no f64; some output may come first */
    assert_int_equal(o.code, 2);
    assert_non_null(strstr(o.err, "f64"));
    done(&o);
}

/* Ranks: a stream that the file cuts, and any file of the delta rule in equal shares. */
static void test_verify_cp(void **state)
{
    (void)state;
    static const double cuts[] = {0, 10, 10, 25, T};
    static const int64_t five = 5;
    static const char *const protocols[] = {"p2p", "allgather", "grouped:2", "doubling"};
    static const char *const fields[] = {"\"kind\":\"cp-gdn\"", "\"tensor\":\"dbeta\"",
                                         "\"ranks\":4,\"cp\":", "\"compared\":6,\"beyond\":0"};
    scalars x;
    for (int wrong = 0; wrong < 2; wrong++) {
        compute_from(&x, 0, 0, 1);
        x.dk[12] += wrong * 1e-3;
        write_vectors(scrap, &x, NULL);
        FILE *f = fopen(scrap, "ab");
        assert_non_null(f);
        put_record(f, "cuts", 1, &five, cuts);
        fclose(f);
        for (size_t i = 0; i < COUNT(protocols); i++) {
            char options[64];
            snprintf(options, sizeof options, "--json --cp %s", protocols[i]);
            outcome o = verify_scrap(options);
            assert_int_equal(o.code, wrong);
            assert_int_equal(expect_json(o.out), wrong ? 8 : 7); /* its sensitivity as well */
            expect_all(o.out, fields, wrong ? 3 : COUNT(fields));
            done(&o);
        }
        outcome o = verify_scrap("");
        assert_int_equal(o.code, wrong);
        done(&o);
    }
    compute(&x);
    write_vectors(scrap, &x, NULL);
    for (int ranks = 1; ranks <= 7; ranks += 3) {
        char options[64];
        snprintf(options, sizeof options, "--cp doubling --ranks %d", ranks);
        outcome o = verify_scrap(options);
        assert_int_equal(o.code, 0);
        assert_non_null(strstr(o.out, "8 tensors compared, 0 beyond"));
        assert_non_null(strstr(o.out, "equal shares"));
        done(&o);
    }
    outcome o = verify_scrap("--cp p2p --ranks 3 --dtype bf16");
    assert_int_equal(o.code, 0);
    done(&o);
    o = verify_scrap("--cp p2p");
    assert_int_equal(o.code, 2);
    assert_non_null(strstr(o.err, "--ranks: must be given, since the file has no record"));
    done(&o);
    char arguments[256];
    snprintf(arguments, sizeof arguments,
             "verify '%s/golden/layer_gdn_packed.bin' --cp p2p --ranks 2", DR_TEST_SOURCE_DIR);
    expect_usage(arguments, "--cp: layer vectors are not for ranks");
}

/* Prefixes of a good file, and a good file with bytes changed: a sentence or a verdict, never
 * a signal; a prefix that is not the whole file is never accepted. */
static void test_verify_damage(void **state)
{
    (void)state;
    scalars x;
    compute(&x);
    write_vectors(vectors, &x, NULL);
    size_t size = file_size(vectors);
    unsigned char *bytes = malloc(size), *copy = malloc(size);
    assert_non_null(bytes);
    assert_non_null(copy);
    FILE *f = fopen(vectors, "rb");
    assert_non_null(f);
    assert_int_equal(fread(bytes, 1, size, f), size);
    fclose(f);
    for (size_t cut = 0; cut < size; cut += cut < 40 ? 3 : 151) {
        write_bytes(bytes, cut);
        outcome o = verify_scrap("");
        if (o.code != 2 || strstr(o.err, scrap) == NULL)
            fail_msg("first %zu bytes: exit %d, %s", cut, o.code, o.err);
        done(&o);
    }
    /* the first record's header, byte by byte, then places all over the file */
    for (size_t at = 0; at < size; at += at < 52 ? 1 : 373) {
        memcpy(copy, bytes, size);
        copy[at] ^= 0xff;
        write_bytes(copy, size);
        outcome o = verify_scrap("");
        if (o.code < 0 || o.code > 2)
            fail_msg("byte %zu changed: exit %d, %s", at, o.code, o.err);
        done(&o);
    }
    free(bytes);
    free(copy);
}

static int make_folder(void **state)
{
    (void)state;
    if (mkdtemp(folder) == NULL)
        return -1;
    snprintf(vectors, sizeof vectors, "%s/vectors.bin", folder);
    snprintf(scrap, sizeof scrap, "%s/scrap.bin", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    static const char *const names[] = {"out", "err", "vectors.bin", "scrap.bin"};
    for (size_t i = 0; i < COUNT(names); i++) {
        char path[96];
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_usage),          cmocka_unit_test(test_help),
        cmocka_unit_test(test_info),           cmocka_unit_test(test_check),
        cmocka_unit_test(test_bench_cp),       cmocka_unit_test(test_bench_plot),
        cmocka_unit_test(test_check_cp),       cmocka_unit_test(test_verify_cp),
        cmocka_unit_test(test_bench),          cmocka_unit_test(test_verify),
        cmocka_unit_test(test_verify_golden),  cmocka_unit_test(test_verify_finds_errors),
        cmocka_unit_test(test_verify_refuses), cmocka_unit_test(test_verify_damage),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
