/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vectors.c - see vectors.h. The reader knows how many bytes are left and never asks for
 * memory that the file could not fill.
 */
#include "vectors.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static const char magic[8] = "DRORACL1";

enum { MAX_NAME = 64, MAX_RECORDS = 100000 };

typedef struct reader {
    FILE *file;
    const char *path;
    int64_t at, size; /* bytes read, bytes in the file */
    char *why;
    size_t why_size;
} reader;

static bool refuse(reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool refuse(reader *r, const char *format, ...)
{
    int used = snprintf(r->why, r->why_size, "%s: ", r->path);
    if (used < 0 || (size_t)used >= r->why_size)
        used = 0;
    va_list args;
    va_start(args, format);
    vsnprintf(r->why + used, r->why_size - (size_t)used, format, args);
    va_end(args);
    return false;
}

static bool take(reader *r, void *out, int64_t bytes, const char *what)
{
    if (bytes > r->size - r->at)
        return refuse(r, "byte %lld: %s needs %lld bytes, the file has %lld left", (long long)r->at,
                      what, (long long)bytes, (long long)(r->size - r->at));
    if (bytes > 0 && fread(out, 1, (size_t)bytes, r->file) != (size_t)bytes)
        return refuse(r, "byte %lld: could not be read", (long long)r->at);
    r->at += bytes;
    return true;
}

static uint64_t little_endian(const unsigned char *bytes, int count)
{
    uint64_t x = 0;
    for (int i = count; i-- > 0;)
        x = x << 8 | bytes[i];
    return x;
}

static bool take_number(reader *r, int bytes, const char *what, uint64_t *out)
{
    unsigned char raw[8];
    if (!take(r, raw, bytes, what))
        return false;
    *out = little_endian(raw, bytes);
    return true;
}

static bool take_name(reader *r, dr_record *record)
{
    int64_t start = r->at;
    uint64_t length;
    if (!take_number(r, 4, "the length of a record's name", &length))
        return false;
    if (length < 1 || length > MAX_NAME)
        return refuse(r, "byte %lld: the length of a record's name must be 1 to %d, got %llu",
                      (long long)start, MAX_NAME, (unsigned long long)length);
    record->name = calloc((size_t)length + 1, 1);
    if (record->name == NULL)
        return refuse(r, "no memory for a name");
    start = r->at;
    if (!take(r, record->name, (int64_t)length, "a record's name"))
        return false;
    for (uint64_t i = 0; i < length; i++)
        if (record->name[i] < 33 || record->name[i] > 126)
            return refuse(r, "byte %lld: a record's name must be printable ASCII, got byte 0x%02x",
                          (long long)(start + (int64_t)i), (unsigned char)record->name[i]);
    return true;
}

static bool take_shape(reader *r, dr_record *record)
{
    int64_t start = r->at;
    uint64_t rank;
    if (!take_number(r, 4, "a record's rank", &rank))
        return false;
    if (rank > DR_VECTORS_MAX_RANK)
        return refuse(r, "byte %lld: the rank of record \"%s\" must be 0 to %d, got %llu",
                      (long long)start, record->name, DR_VECTORS_MAX_RANK,
                      (unsigned long long)rank);
    record->rank = (int32_t)rank;
    record->count = 1;
    bool fits = true;
    for (int32_t i = 0; i < record->rank; i++) {
        uint64_t n;
        start = r->at;
        if (!take_number(r, 8, "an extent", &n))
            return false;
        record->shape[i] = (int64_t)n;
        if (record->shape[i] < 0)
            return refuse(r, "byte %lld: extent %d of record \"%s\" must not be negative, got %lld",
                          (long long)start, i, record->name, (long long)record->shape[i]);
        fits = fits && !__builtin_mul_overflow(record->count, record->shape[i], &record->count);
    }
    if (!fits || record->count > (r->size - r->at) / 8)
        return refuse(r,
                      "byte %lld: record \"%s\" claims more values than the %lld bytes left hold",
                      (long long)r->at, record->name, (long long)(r->size - r->at));
    return true;
}

static bool take_values(reader *r, dr_record *record)
{
    record->values = malloc((size_t)(record->count > 0 ? record->count : 1) * sizeof(double));
    if (record->values == NULL)
        return refuse(r, "no memory for the %lld values of record \"%s\"", (long long)record->count,
                      record->name);
    if (!take(r, record->values, record->count * 8, "the values of a record"))
        return false;
    for (int64_t i = 0; i < record->count; i++) {
        uint64_t bits = little_endian((const unsigned char *)&record->values[i], 8);
        memcpy(&record->values[i], &bits, 8);
        if (!isfinite(record->values[i]))
            return refuse(r, "record \"%s\": value %lld is not finite", record->name, (long long)i);
    }
    return true;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool check_distinct(reader *r, const dr_vectors *v)
{
    char **names = malloc((size_t)(v->count > 0 ? v->count : 1) * sizeof *names);
    if (names == NULL)
        return refuse(r, "no memory for %lld names", (long long)v->count);
    for (int64_t i = 0; i < v->count; i++)
        names[i] = v->records[i].name;
    qsort(names, (size_t)v->count, sizeof *names, by_name);
    bool distinct = true;
    for (int64_t i = 1; distinct && i < v->count; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            distinct = refuse(r, "record \"%s\" is there twice", names[i]);
    free(names);
    return distinct;
}

static bool read_records(reader *r, dr_vectors *out)
{
    char start[sizeof magic];
    if (!take(r, start, sizeof magic, "the magic word"))
        return false;
    if (memcmp(start, magic, sizeof magic) != 0)
        return refuse(r, "byte 0: not a file of test vectors (it must start with DRORACL1)");
    int64_t room = 0;
    while (r->at < r->size) {
        if (out->count == MAX_RECORDS)
            return refuse(r, "byte %lld: more than %d records", (long long)r->at, MAX_RECORDS);
        if (out->count == room) {
            room = room > 0 ? 2 * room : 32;
            dr_record *more = realloc(out->records, (size_t)room * sizeof *more);
            if (more == NULL)
                return refuse(r, "no memory for %lld records", (long long)room);
            out->records = more;
        }
        dr_record *record = &out->records[out->count++];
        memset(record, 0, sizeof *record);
        if (!take_name(r, record) || !take_shape(r, record) || !take_values(r, record))
            return false;
    }
    return check_distinct(r, out);
}

bool dr_vectors_read(const char *path, dr_vectors *out, char *why, size_t why_size)
{
    *out = (dr_vectors){0};
    reader r = {.path = path, .why = why, .why_size = why_size};
    struct stat info;
    if (stat(path, &info) != 0)
        return refuse(&r, "cannot be opened: %s", strerror(errno));
    if (!S_ISREG(info.st_mode)) /* opening a pipe would wait for its other end */
        return refuse(&r, "not a regular file");
    r.size = info.st_size;
    r.file = fopen(path, "rb");
    if (r.file == NULL)
        return refuse(&r, "cannot be opened: %s", strerror(errno));
    bool good = read_records(&r, out);
    fclose(r.file);
    if (!good)
        dr_vectors_free(out);
    return good;
}

void dr_vectors_free(dr_vectors *vectors)
{
    for (int64_t i = 0; i < vectors->count; i++) {
        free(vectors->records[i].name);
        free(vectors->records[i].values);
    }
    free(vectors->records);
    *vectors = (dr_vectors){0};
}

dr_record *dr_vectors_find(const dr_vectors *vectors, const char *name)
{
    for (int64_t i = 0; i < vectors->count; i++)
        if (strcmp(vectors->records[i].name, name) == 0)
            return &vectors->records[i];
    return NULL;
}
