/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_io.c - safetensors files: good ones, their exact bytes, every kind of damage, and
 * writers that fail half way. Headers are given as text; raw() makes a file of any.
 */
#include "test.h"

#include <deltarule/weights.h>

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

static char folder[64], path[96];

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/deltarule-io-XXXXXX");
    if (mkdtemp(folder) == NULL)
        return -1;
    snprintf(path, sizeof path, "%s/x.safetensors", folder);
    return 0;
}

/* How many entries the folder has; removes them on request. */
static int walk_folder(bool remove_them)
{
    int n = 0;
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        char name[400];
        if (e->d_name[0] == '.')
            continue;
        n++;
        snprintf(name, sizeof name, "%s/%s", folder, e->d_name);
        if (remove_them && remove(name) != 0)
            fail_msg("%s cannot be removed", name);
    }
    closedir(dir);
    return n;
}

static int remove_folder(void **state)
{
    (void)state;
    walk_folder(true);
    return rmdir(folder);
}

static void put_file(const char *name, const void *bytes, size_t n)
{
    FILE *f = fopen(name, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static unsigned char *get_file(const char *name, size_t *n)
{
    struct stat st;
    FILE *f = fopen(name, "rb");
    assert_non_null(f);
    assert_int_equal(fstat(fileno(f), &st), 0);
    *n = (size_t)st.st_size;
    unsigned char *bytes = malloc(*n + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *n, f), *n);
    fclose(f);
    return bytes;
}

/* A file of this header and so many data bytes 0, 1, 2, ... */
static void raw_bytes(const char *header, size_t n, size_t data)
{
    unsigned char *bytes = malloc(8 + n + data);
    assert_non_null(bytes);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(n >> 8 * i);
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < data; i++)
        bytes[8 + n + i] = (unsigned char)i;
    put_file(path, bytes, 8 + n + data);
    free(bytes);
}

static void raw(const char *header, size_t data) { raw_bytes(header, strlen(header), data); }

/* Reads everything that can be reached through the interface. */
static unsigned walk_weights(const dr_weights *w)
{
    unsigned sum = 0;
    for (int64_t i = 0; i < dr_weights_count(w); i++) {
        dr_tensor t;
        const char *name = dr_weights_name(w, i);
        assert_non_null(name);
        dr_status status = dr_weights_find(w, name, &t);
        if (status != DR_OK) {
            assert_int_equal(status, DR_ERR_SUPPORT);
            continue;
        }
        size_t size = dr_dtype_size(t.dtype);
        assert_true(t.rank >= 1 && t.rank <= DR_MAX_RANK && size > 0);
        assert_int_equal((uintptr_t)t.data % size, view_count(&t) > 0 ? 0 : (uintptr_t)t.data % size);
        for (size_t b = 0; b < (size_t)view_count(&t) * size; b++)
            sum += ((const unsigned char *)t.data)[b];
    }
    assert_null(dr_weights_name(w, dr_weights_count(w)));
    assert_null(dr_weights_name(w, -1));
    return sum;
}

/* Opens if it can; a refusal must explain itself. */
static bool survives(void)
{
    dr_weights *w = NULL;
    dr_status status = dr_weights_open(path, &w);
    if (status == DR_OK) {
        walk_weights(w);
        dr_weights_close(w);
        return true;
    }
    assert_null(w);
    assert_int_equal(status, DR_ERR_FORMAT);
    if (strstr(dr_last_error(), "byte") == NULL && strstr(dr_last_error(), " \"") == NULL)
        fail_msg("\"%s\" names neither a byte nor a tensor", dr_last_error());
    return false;
}

/* ---- whole files ------------------------------------------------------------------------ */

static const uint16_t halves[3] = {0x3f80, 0x4000, 0x7fc0};
static const float floats[8] = {1, -2, 3.5f, 1e-42f, 5, 6, 7, 8};
static const double doubles[2] = {1.0 / 3, -1e300};

/* Names that need escapes and more than ASCII, every element type, an empty tensor. */
static const dr_weights_note some_notes[] = {
    {"format", "pt"}, {"", "empty key"}, {"quotes \"and\" \\", "tab\there, line\nthere, \x01"}};

static int some_entries(dr_weights_entry *e)
{
    e[0] = (dr_weights_entry){"h", dr_tensor_make((void *)halves, DR_BF16, 1, 3, 0, 0, 0)};
    e[1] = (dr_weights_entry){"f", dr_tensor_make((void *)floats, DR_F32, 4, 1, 2, 2, 2)};
    e[2] = (dr_weights_entry){"\xce\xb2/\xf0\x9f\x8e\x88 \"q\"\n",
                              dr_tensor_make((void *)halves, DR_F16, 2, 1, 3, 0, 0)};
    e[3] = (dr_weights_entry){"", dr_tensor_make(NULL, DR_F32, 3, 4, 0, 2, 0)};
    e[4] = (dr_weights_entry){"d", dr_tensor_make((void *)doubles, DR_F64, 1, 2, 0, 0, 0)};
    e[5] = (dr_weights_entry){"one", dr_tensor_make((void *)(floats + 2), DR_F32, 1, 1, 0, 0, 0)};
    return 6;
}

static void write_some(const char *name)
{
    dr_weights_entry e[8];
    int n = some_entries(e);
    MUST(dr_weights_write(name, e, n, some_notes, DR_COUNT(some_notes)));
}

static void test_round_trip(void **state)
{
    (void)state;
    dr_weights_entry e[8], again[8];
    int n = some_entries(e);
    dr_weights *w;
    write_some(path);
    MUST(dr_weights_open(path, &w));
    assert_int_equal(dr_weights_count(w), n);
    for (int i = 0; i < n; i++) {
        dr_tensor t;
        MUST(dr_weights_find(w, e[i].name, &t));
        assert_int_equal(t.dtype, e[i].tensor.dtype);
        assert_int_equal(t.rank, e[i].tensor.rank);
        for (int32_t a = 0; a < t.rank; a++) {
            assert_int_equal(t.shape[a], e[i].tensor.shape[a]);
            assert_int_equal(t.stride[a], e[i].tensor.stride[a]);
        }
        size_t bytes = (size_t)view_count(&t) * dr_dtype_size(t.dtype);
        if (bytes > 0)
            assert_memory_equal(t.data, e[i].tensor.data, bytes);
    }
    for (size_t i = 0; i < DR_COUNT(some_notes); i++)
        assert_string_equal(dr_weights_metadata(w, some_notes[i].key), some_notes[i].value);
    assert_null(dr_weights_metadata(w, "absent"));
    assert_null(dr_weights_metadata(w, NULL));
    walk_weights(w);

    /* What was read, written again in the order of the file: the same bytes. */
    for (int i = 0; i < n; i++) {
        again[i].name = dr_weights_name(w, i);
        MUST(dr_weights_find(w, again[i].name, &again[i].tensor));
    }
    char second[128];
    snprintf(second, sizeof second, "%s/second", folder);
    MUST(dr_weights_write(second, again, n, some_notes, DR_COUNT(some_notes)));
    size_t a_bytes, b_bytes;
    unsigned char *a = get_file(path, &a_bytes), *b = get_file(second, &b_bytes);
    assert_int_equal(a_bytes, b_bytes);
    assert_memory_equal(a, b, a_bytes);
    assert_int_equal((8 + a[0] + 256 * a[1]) % 8, 0);
    /* In place: the file that is mapped may be replaced, its views stay. */
    MUST(dr_weights_write(path, again, n, NULL, 0));
    dr_tensor t;
    MUST(dr_weights_find(w, "d", &t));
    assert_memory_equal(t.data, doubles, sizeof doubles);
    dr_weights_close(w);
    free(a);
    free(b);
    assert_int_equal(walk_folder(false), 2);
}

static void test_exact_bytes(void **state)
{
    (void)state;
    const dr_weights_entry e[] = {
        {"b", dr_tensor_make((void *)halves, DR_BF16, 1, 1, 0, 0, 0)},
        {"a", dr_tensor_make((void *)floats, DR_F32, 2, 1, 2, 0, 0)},
    };
    const dr_weights_note notes[] = {{"k", "v"}};
    const char header[] = "{\"__metadata__\":{\"k\":\"v\"},"
                          "\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
                          "\"b\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[8,10]}}";
    size_t n, used = sizeof header - 1, padded = (used + 7) / 8 * 8;
    MUST(dr_weights_write(path, e, 2, notes, 1));
    unsigned char *bytes = get_file(path, &n);
    assert_int_equal(n, 8 + padded + 10);
    assert_int_equal(bytes[0], padded);
    assert_memory_equal(bytes + 8, header, used);
    for (size_t i = used; i < padded; i++)
        assert_int_equal(bytes[8 + i], ' ');
    assert_memory_equal(bytes + 8 + padded, floats, 8);
    assert_memory_equal(bytes + 16 + padded, halves, 2);
    free(bytes);

    dr_weights *w;
    MUST(dr_weights_write(path, NULL, 0, NULL, 0));
    MUST(dr_weights_open(path, &w));
    assert_int_equal(dr_weights_count(w), 0);
    assert_null(dr_weights_name(w, 0));
    dr_weights_close(w);
    dr_weights_close(NULL);
}

/* Types, ranks and alignments that other writers use. */
static void test_foreign(void **state)
{
    (void)state;
    dr_weights *w;
    dr_tensor t;
    raw("{ \"s\" : {\"shape\":[ ],\"dtype\":\"F32\",\n\"data_offsets\":[ 0 , 4 ]},"
        "\"i\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[4,12]},"
        "\"six\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[12,15]},"
        "\"deep\":{\"dtype\":\"F16\",\"shape\":[1,1,1,1,1],\"data_offsets\":[15,17]},"
        "\"odd\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[17,25]},"
        "\"\\u00e9\\ud83c\\udf88\\/\":{\"dtype\":\"BF16\",\"shape\":[0,9],\"data_offsets\":[25,25]}}\t \n",
        25);
    MUST(dr_weights_open(path, &w));
    assert_int_equal(dr_weights_count(w), 6);
    MUST(dr_weights_find(w, "s", &t));
    assert_int_equal(t.rank, 1);
    assert_int_equal(t.shape[0], 1);
    assert_int_equal(((unsigned char *)t.data)[3], 3);
    MUST(dr_weights_find(w, "odd", &t)); /* wherever it begins, the view is aligned */
    assert_int_equal((uintptr_t)t.data % 4, 0);
    for (unsigned char i = 0; i < 8; i++)
        assert_int_equal(((unsigned char *)t.data)[i], 17 + i);
    MUST(dr_weights_find(w, "\xc3\xa9\xf0\x9f\x8e\x88/", &t));
    assert_int_equal(t.shape[1], 9);
    REFUSED(dr_weights_find(w, "i", &t), DR_ERR_SUPPORT, "element type I64 has no view");
    REFUSED(dr_weights_find(w, "deep", &t), DR_ERR_SUPPORT, "rank 5");
    REFUSED(dr_weights_find(w, "none", &t), DR_ERR_ARG, "no tensor \"none\"");
    REFUSED(dr_weights_find(w, NULL, &t), DR_ERR_ARG, "name");
    walk_weights(w);
    dr_weights_close(w);
}

/* ---- damage ----------------------------------------------------------------------------- */

static void test_truncated(void **state)
{
    (void)state;
    size_t n;
    write_some(path);
    unsigned char *bytes = get_file(path, &n);
    for (size_t cut = 0; cut < n; cut++) {
        put_file(path, bytes, cut);
        if (survives())
            fail_msg("cut after %zu of %zu bytes, the file still opens", cut, n);
    }
    bytes = realloc(bytes, n + 1);
    assert_non_null(bytes);
    bytes[n] = 0;
    put_file(path, bytes, n + 1);
    assert_false(survives());
    free(bytes);
}

static void test_flipped(void **state)
{
    (void)state;
    static const unsigned char flips[] = {0x01, 0x20, 0x80};
    size_t n;
    write_some(path);
    unsigned char *bytes = get_file(path, &n);
    for (size_t i = 0; i < n; i++)
        for (size_t f = 0; f < DR_COUNT(flips); f++) {
            bytes[i] ^= flips[f];
            put_file(path, bytes, n);
            survives();
            bytes[i] ^= flips[f];
        }
    free(bytes);
}

#define TENSOR(name, dtype, shape, from, to) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" from "," to "]}"
#define GOOD TENSOR("g", "F32", "[2]", "0", "8")

static void test_hostile(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        const char *sentence;
    } cases[] = {
        {"", 0, "byte 8 of the file: the header must begin with '{'"},
        {"[]", 0, "the header must begin with '{'"},
        {" {}", 0, "the header must begin with '{'"},
        {"{", 0, "byte 9 of the file: expected a key"},
        {"{}x", 0, "byte 10 of the file: text after the end"},
        {"{}{}", 0, "text after the end"},
        {"{" GOOD ",}", 8, "expected a key"},
        {"{" GOOD " " GOOD "}", 8, "expected ',' or '}'"},
        {"{" GOOD "]", 8, "expected ',' or '}'"},
        {"{\"a\" 1}", 0, "expected ':'"},
        {"{\"a\":1}", 0, "expected '{'"},
        {"{\"a\":[[[[[[[[[[", 0, "expected '{'"},
        {"{\"a\":{}}", 0, "needs dtype, shape and data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", 0, "needs dtype, shape and data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 0, "given twice"},
        {"{\"a\":{\"color\":\"red\"}}", 0, "unknown field"},
        {"{\"a\":{\"dtype\":{\"dtype\":{}}}}", 0, "expected an element type"},
        {"{\"a\":{\"dtype\":\"Q4\"}}", 0, "unknown element type"},
        {"{\"a\":{\"dtype\":\"f32\"}}", 0, "unknown element type"},
        {"{" TENSOR("a", "F32", "[-1]", "0", "4") "}", 4, "expected a whole number"},
        {"{" TENSOR("a", "F32", "[1.0]", "0", "4") "}", 4, "expected a whole number"},
        {"{" TENSOR("a", "F32", "[1e2]", "0", "4") "}", 4, "expected a whole number"},
        {"{" TENSOR("a", "F32", "[01]", "0", "4") "}", 4, "leading zeros"},
        {"{" TENSOR("a", "F32", "[1,]", "0", "4") "}", 4, "expected a whole number"},
        {"{" TENSOR("a", "F32", "[1", "0", "4") "}", 4, "expected"},
        {"{" TENSOR("a", "F32", "1", "0", "4") "}", 4, "expected '['"},
        {"{" TENSOR("a", "F32", "[9223372036854775808]", "0", "4") "}", 4, "past 2^63"},
        {"{" TENSOR("a", "F32", "[99999999999999999999999]", "0", "4") "}", 4, "past 2^63"},
        {"{" TENSOR("a", "F32", "[4294967296,4294967296]", "0", "4") "}", 4, "more than 2^63"},
        {"{" TENSOR("a", "F32", "[0,4294967296,4294967296]", "0", "0") "}", 0, "more than 2^63"},
        {"{" TENSOR("a", "F32", "[4611686018427387904,2,2,0]", "0", "0") "}", 0, "more than 2^63"},
        {"{" TENSOR("a", "F32", "[4611686018427387904]", "0", "0") "}", 0, "do not fill the 0 bytes"},
        {"{" TENSOR("a", "F64", "[2305843009213693952]", "0", "0") "}", 0, "do not fill"},
        {"{" TENSOR("a", "F32", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]",
                    "0", "4") "}", 4, "more than 32 axes"},
        {"{" TENSOR("a", "F32", "[2]", "0", "4") "}", 4, "tensor \"a\": 2 elements of F32 do not fill the 4 bytes"},
        {"{" TENSOR("a", "F6_E2M3", "[3]", "0", "2") "}", 2, "do not fill"},
        {"{" TENSOR("a", "F32", "[2]", "0", "8") "}", 7, "must lie in order in the 7 bytes"},
        {"{" TENSOR("a", "F32", "[2]", "8", "0") "}", 8, "must lie in order"},
        {"{" TENSOR("a", "F32", "[2]", "0", "9223372036854775807") "}", 8, "must lie in order"},
        {"{" TENSOR("a", "F32", "[2]", "18446744073709551608", "0") "}", 8, "past 2^63"},
        {"{" TENSOR("a", "F32", "[1]", "0", "4") "," TENSOR("b", "F32", "[1]", "8", "12") "}", 12,
         "tensor \"b\": begins at byte 124 of the file, what is before it ends at byte 120: a gap"},
        {"{" TENSOR("a", "F32", "[2]", "0", "8") "," TENSOR("b", "F32", "[2]", "4", "12") "}", 12,
         "tensor \"b\": begins at byte 120 of the file, what is before it ends at byte 124: they overlap"},
        {"{" TENSOR("a", "F32", "[2]", "0", "8") "," TENSOR("b", "F32", "[2]", "0", "8") "}", 8,
         "they overlap"},
        {"{" TENSOR("a", "F32", "[2]", "0", "8") "," TENSOR("b", "F32", "[0]", "4", "4") "}", 8,
         "they overlap"},
        {"{" TENSOR("a", "F32", "[1]", "4", "8") "}", 8, "a gap"},
        {"{" GOOD "}", 9, "belongs to no tensor"},
        {"{}", 1, "byte 10 of the file: belongs to no tensor"},
        {"{" GOOD "," TENSOR("g", "F32", "[1]", "8", "12") "}", 12, "tensor \"g\": is given twice"},
        {"{" GOOD "," TENSOR("\\u0067", "F32", "[1]", "8", "12") "}", 12, "tensor \"g\": is given twice"},
        {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "note \"k\": is given twice"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "\"__metadata__\" is given twice"},
        {"{\"__metadata__\":null}", 0, "expected '{'"},
        {"{\"__metadata__\":{\"k\":1}}", 0, "must be text"},
        {"{\"__metadata__\":{\"k\":{\"k\":{}}}}", 0, "must be text"},
        {"{\"a", 0, "a string has no end"},
        {"{\"a\\", 0, "a string has no end"},
        {"{\"a\\\"", 0, "a string has no end"},
        {"{\"a\\q\":1}", 0, "unknown escape"},
        {"{\"a\\u12g4\":1}", 0, "hexadecimal"},
        {"{\"a\\u12", 0, "hexadecimal"},
        {"{\"a\\u0000\":1}", 0, "U+0000"},
        {"{\"a\\ud83c\":1}", 0, "surrogate"},
        {"{\"a\\ud83c\\n\":1}", 0, "surrogate"},
        {"{\"a\\ud83c\\ud83c\":1}", 0, "surrogate"},
        {"{\"a\\udf88\":1}", 0, "surrogate"},
        {"{\"a\nb\":1}", 0, "control character"},
        {"{\"a\x80\":1}", 0, "not UTF-8"},
        {"{\"a\xc3\":1}", 0, "not UTF-8"},
        {"{\"a\xc0\xaf\":1}", 0, "not UTF-8"},         /* overlong */
        {"{\"a\xe0\x80\xaf\":1}", 0, "not UTF-8"},
        {"{\"a\xed\xa0\x80\":1}", 0, "not UTF-8"},     /* a surrogate */
        {"{\"a\xf4\x90\x80\x80\":1}", 0, "not UTF-8"}, /* past U+10FFFF */
        {"{\"a\xf8\x88\x80\x80\x80\":1}", 0, "not UTF-8"},
        {"{\"a\xf0\x9f", 0, "not UTF-8"},
    };
    for (size_t i = 0; i < DR_COUNT(cases); i++) {
        dr_weights *w = NULL;
        raw(cases[i].header, cases[i].data);
        REFUSED(dr_weights_open(path, &w), DR_ERR_FORMAT, cases[i].sentence);
        assert_non_null(strstr(dr_last_error(), path));
    }
    raw_bytes("{\"a\0b\":1}", 9, 0);
    dr_weights *w;
    REFUSED(dr_weights_open(path, &w), DR_ERR_FORMAT, "control character");
}

/* Sizes of the prefix, and what must not grow with the header. */
static void test_limits(void **state)
{
    (void)state;
    static const uint64_t lengths[] = {3, 100, 1u << 31, (uint64_t)INT64_MAX, UINT64_MAX, UINT64_MAX - 7};
    dr_weights *w;
    for (size_t i = 0; i < DR_COUNT(lengths); i++) {
        unsigned char bytes[10] = {[8] = '{', [9] = '}'};
        for (int b = 0; b < 8; b++)
            bytes[b] = (unsigned char)(lengths[i] >> 8 * b);
        put_file(path, bytes, sizeof bytes);
        REFUSED(dr_weights_open(path, &w), DR_ERR_FORMAT, "a header of");
    }
    FILE *f = fopen(path, "wb"); /* a sparse file larger than any header may be */
    assert_non_null(f);
    assert_int_equal(fwrite("\x80\xd1\xf0\x08\0\0\0\0{", 1, 9, f), 9); /* 150 million */
    assert_int_equal(ftruncate(fileno(f), 200000000), 0);
    fclose(f);
    REFUSED(dr_weights_open(path, &w), DR_ERR_FORMAT, "at most 100000000");

    size_t n = 65537 * 16 + 64, at = 0;
    char *header = malloc(n);
    assert_non_null(header);
    at += (size_t)snprintf(header, n, "{\"__metadata__\":{");
    for (int i = 0; i < 65537; i++)
        at += (size_t)snprintf(header + at, n - at, "%s\"%d\":\"\"", i ? "," : "", i);
    snprintf(header + at, n - at, "}}");
    raw(header, 0);
    REFUSED(dr_weights_open(path, &w), DR_ERR_FORMAT, "more than 65536 notes");
    memset(header, 'x', 5000);
    memcpy(header, "{\"", 2);
    memcpy(header + 5000, "\":1}", 5);
    raw(header, 0);
    REFUSED(dr_weights_open(path, &w), DR_ERR_FORMAT, "longer than 4095 bytes");
    free(header);
    /* What a terminal would obey does not reach the sentence. */
    raw("{" TENSOR("\\u001b[31m\\u009b", "F32", "[2]", "0", "4") "}", 4);
    REFUSED(dr_weights_open(path, &w), DR_ERR_FORMAT, "tensor \"?[31m??\"");
}

static void test_not_files(void **state)
{
    (void)state;
    dr_weights *w;
    REFUSED(dr_weights_open(path, &w), DR_ERR_IO, "cannot be opened");
    REFUSED(dr_weights_open(folder, &w), DR_ERR_IO, "must be a regular file");
    REFUSED(dr_weights_open(NULL, &w), DR_ERR_ARG, "path");
    REFUSED(dr_weights_open(path, NULL), DR_ERR_ARG, "out");
    assert_int_equal(mkfifo(path, 0600), 0);
    REFUSED(dr_weights_open(path, &w), DR_ERR_IO, "must be a regular file");
}

/* ---- writing ---------------------------------------------------------------------------- */

static void test_write_refusals(void **state)
{
    (void)state;
    float x[4] = {0};
    dr_weights_entry good = {"a", dr_tensor_make(x, DR_F32, 1, 4, 0, 0, 0)}, e[2];
    dr_weights_note n[2] = {{"k", "v"}, {"k", "w"}};
#define WITH(change, code, sentence)                                               \
    do {                                                                           \
        e[0] = good;                                                               \
        change;                                                                    \
        REFUSED(dr_weights_write(path, e, 1, NULL, 0), code, sentence);            \
    } while (0)
    WITH(e[0].name = NULL, DR_ERR_ARG, "name of entry of 0: must be given");
    WITH(e[0].name = "\xff", DR_ERR_ARG, "must be UTF-8");
    WITH(e[0].name = "__metadata__", DR_ERR_ARG, "stands for the notes");
    WITH(e[0].tensor.dtype = 0, DR_ERR_SHAPE, "dtype must be");
    WITH(e[0].tensor.rank = 0, DR_ERR_SHAPE, "rank must be 1 to 4, got 0");
    WITH(e[0].tensor.rank = 5, DR_ERR_SHAPE, "rank must be 1 to 4, got 5");
    WITH(e[0].tensor.shape[0] = -1, DR_ERR_SHAPE, "shape[0] = -1");
    WITH(e[0].tensor.shape[0] = INT64_MAX / 2, DR_ERR_SHAPE, "too large");
    WITH(e[0].tensor.data = NULL, DR_ERR_ARG, "data must be given");
    WITH(e[0].tensor.stride[0] = 2, DR_ERR_SHAPE, "must be contiguous");
    WITH(e[0].tensor = dr_tensor_make(x, DR_F32, 2, 2, 2, 0, 0); e[0].tensor.stride[0] = 1,
         DR_ERR_SHAPE, "stride[0] is 1 instead of 2");
#undef WITH
    char *longer = malloc(5000);
    assert_non_null(longer);
    memset(longer, 'x', 4999);
    longer[4999] = '\0';
    e[0] = (dr_weights_entry){longer, good.tensor};
    REFUSED(dr_weights_write(path, e, 1, NULL, 0), DR_ERR_ARG, "shorter than 4096");
    free(longer);
    e[0] = e[1] = good;
    REFUSED(dr_weights_write(path, e, 2, NULL, 0), DR_ERR_ARG, "tensor \"a\": is given twice");
    REFUSED(dr_weights_write(path, e, 1, n, 2), DR_ERR_ARG, "note \"k\": is given twice");
    n[1] = (dr_weights_note){"x", NULL};
    REFUSED(dr_weights_write(path, e, 1, n, 2), DR_ERR_ARG, "value of note of 1: must be given");
    REFUSED(dr_weights_write(path, NULL, 1, NULL, 0), DR_ERR_ARG, "count");
    REFUSED(dr_weights_write(path, e, -1, NULL, 0), DR_ERR_ARG, "count");
    REFUSED(dr_weights_write(path, e, 1, NULL, 1), DR_ERR_ARG, "note_count");
    REFUSED(dr_weights_write(NULL, e, 1, NULL, 0), DR_ERR_ARG, "path");
    REFUSED(dr_weights_write("/nonexistent/x", e, 1, NULL, 0), DR_ERR_IO, "cannot be created");
    assert_int_equal(walk_folder(false), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    REFUSED(dr_weights_write(path, e, 1, NULL, 0), DR_ERR_IO, "not a regular file");
    assert_int_equal(walk_folder(false), 1);
    /* A rename would have put a file in its place. */
    struct stat at;
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    REFUSED(dr_weights_write(path, e, 1, NULL, 0), DR_ERR_IO, "not a regular file");
    assert_int_equal(stat(path, &at), 0);
    assert_true(S_ISFIFO(at.st_mode));
    assert_int_equal(walk_folder(false), 1);
    assert_int_equal(unlink(path), 0);
}

/* A device that is full half way: the old file stays, nothing else does. */
static void test_write_interrupted(void **state)
{
    (void)state;
    enum { FLOATS = 100000 };
    struct rlimit old, tight;
    size_t n;
    float *x = calloc(FLOATS, sizeof *x);
    assert_non_null(x);
    dr_weights_entry e = {"x", dr_tensor_make(x, DR_F32, 1, FLOATS, 0, 0, 0)};
    write_some(path);
    unsigned char *before = get_file(path, &n);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    for (rlim_t limit = 0; limit <= 400000; limit += 80000) {
        tight = old;
        tight.rlim_cur = limit;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
        dr_status status = dr_weights_write(path, &e, 1, NULL, 0);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        assert_int_equal(status, DR_ERR_IO);
        assert_non_null(strstr(dr_last_error(), "cannot be written"));
        size_t left;
        unsigned char *after = get_file(path, &left);
        assert_int_equal(left, n);
        assert_memory_equal(after, before, n);
        free(after);
        assert_int_equal(walk_folder(false), 1);
    }
    MUST(dr_weights_write(path, &e, 1, NULL, 0));
    assert_int_equal(walk_folder(false), 1);
    free(before);
    free(x);
}

int main(void)
{
#define TEST(fn) cmocka_unit_test_setup_teardown(fn, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        TEST(test_round_trip),    TEST(test_exact_bytes),    TEST(test_foreign),
        TEST(test_truncated),     TEST(test_flipped),        TEST(test_hostile),
        TEST(test_limits),        TEST(test_not_files),      TEST(test_write_refusals),
        TEST(test_write_interrupted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
