/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors.c - reads safetensors files: maps the file, reads the header with a JSON
 * reader that knows this one shape of header and nothing else, and hands out views in place.
 *
 * Nothing in a file is trusted. The reader descends a fixed number of levels, so depth
 * cannot grow; every string is copied into one block as long as the header, so text cannot
 * grow; every count has a limit; and the tensors must tile the data exactly, each with
 * the bytes of its shape. A file that shrinks while it is mapped is the one thing that
 * cannot be caught here: the system answers a read past the new end with SIGBUS.
 *
 * Views need an address that suits their element type. Files whose header was not padded
 * break that; their tensors are copied once, when the file is opened.
 */
#include "io/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct item {
    const char *name;
    const dr_safetensors_type *type;
    int32_t rank;
    int64_t shape[DR_MAX_RANK]; /* of rank up to DR_MAX_RANK */
    int64_t count;              /* elements */
    int64_t begin, end;         /* bytes of the data */
    void *copy;                 /* where the mapped address does not suit the type */
} item;

typedef struct note {
    const char *key, *value;
} note;

struct dr_weights {
    const unsigned char *map;
    size_t map_bytes;
    int64_t data_at, data_bytes;
    char *text; /* all names, keys and values */
    item *items;
    int64_t n_items, room_items;
    note *notes; /* sorted by key */
    int64_t n_notes, room_notes;
    const item **sorted; /* by name */
};

static const dr_safetensors_type types[] = {
    {"F64", 64, DR_F64},    {"F32", 32, DR_F32},    {"BF16", 16, DR_BF16}, {"F16", 16, DR_F16},
    {"BOOL", 8, 0},         {"U8", 8, 0},           {"I8", 8, 0},          {"U16", 16, 0},
    {"I16", 16, 0},         {"U32", 32, 0},         {"I32", 32, 0},        {"U64", 64, 0},
    {"I64", 64, 0},         {"C64", 64, 0},         {"F8_E4M3", 8, 0},     {"F8_E5M2", 8, 0},
    {"F8_E8M0", 8, 0},      {"F8_E4M3FNUZ", 8, 0},  {"F8_E5M2FNUZ", 8, 0}, {"F6_E2M3", 6, 0},
    {"F6_E3M2", 6, 0},      {"F4", 4, 0},
};

const dr_safetensors_type *dr_safetensors_type_named(const char *name)
{
    for (size_t i = 0; i < DR_COUNT(types); i++)
        if (strcmp(types[i].name, name) == 0)
            return &types[i];
    return NULL;
}

const dr_safetensors_type *dr_safetensors_type_of(dr_dtype dtype)
{
    for (size_t i = 0; i < DR_COUNT(types) && dtype != 0; i++)
        if (types[i].dtype == dtype)
            return &types[i];
    return NULL;
}

dr_shown dr_show(const char *name)
{
    dr_shown s;
    size_t n = strlen(name), half = (sizeof s.text - 4) / 2, at = 0;
    for (size_t i = 0; i < n; i++) {
        if (n >= sizeof s.text && i == half) {
            memcpy(s.text + at, "...", 3);
            at += 3;
            i = n - half;
        }
        s.text[at++] = name[i] >= 0x20 && name[i] < 0x7f ? name[i] : '?';
    }
    s.text[at] = '\0';
    return s;
}

int32_t dr_utf8_length(const unsigned char *text, size_t left)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (left == 0)
        return 0;
    unsigned char c = text[0];
    int32_t n = c < 0x80 ? 1 : c >= 0xf0 && c < 0xf8 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 0;
    if (n <= 1)
        return n;
    if (c >= 0xf8 || (size_t)n > left)
        return 0;
    uint32_t code = c & (0x7fu >> n);
    for (int32_t i = 1; i < n; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | (text[i] & 0x3fu);
    }
    bool surrogate = code >= 0xd800 && code < 0xe000;
    return code < least[n] || surrogate || code > 0x10ffff ? 0 : n;
}

/* ------------------------------------------------------------------------ */
/* JSON                                                                     */
/* ------------------------------------------------------------------------ */

typedef struct reader {
    dr_weights *w;
    dr_shown path;
    const unsigned char *at, *end; /* what is left of the header */
    char *text;                    /* free part of w->text */
} reader;

static dr_status malformed(const reader *r, const unsigned char *at, const char *what)
{
    return dr_fail(DR_ERR_FORMAT, "%s: byte %lld of the file: %s", r->path.text,
                   (long long)(at - r->w->map), what);
}

static void skip_blanks(reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t'))
        r->at++;
}

/* The next character if it is c, after blanks. */
static bool take(reader *r, char c)
{
    skip_blanks(r);
    if (r->at == r->end || *r->at != (unsigned char)c)
        return false;
    r->at++;
    return true;
}

static dr_status read_hex4(reader *r, uint32_t *out)
{
    const unsigned char *start = r->at;
    uint32_t code = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        if (r->at == r->end)
            return malformed(r, start, "\\u needs four hexadecimal digits");
        unsigned char c = *r->at, low = c | 0x20;
        bool digit = c >= '0' && c <= '9', letter = low >= 'a' && low <= 'f';
        if (!digit && !letter)
            return malformed(r, r->at, "\\u needs four hexadecimal digits");
        code = code << 4 | (uint32_t)(digit ? c - '0' : low - 'a' + 10);
    }
    *out = code;
    return DR_OK;
}

static void put_utf8(reader *r, uint32_t code)
{
    static const uint32_t first[] = {0, 0, 0xc0, 0xe0, 0xf0};
    int n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--, code >>= 6)
        r->text[i] = (char)(0x80 | (code & 0x3f));
    r->text[0] = (char)(first[n] | code);
    r->text += n;
}

/* What follows a backslash. */
static dr_status read_escape(reader *r)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const unsigned char *start = r->at - 1;
    if (r->at == r->end)
        return malformed(r, start, "a string has no end");
    unsigned char c = *r->at++;
    const char *found = c != '\0' ? strchr(from, c) : NULL;
    if (found != NULL) {
        *r->text++ = to[found - from];
        return DR_OK;
    }
    if (c != 'u')
        return malformed(r, start, "an unknown escape in a string");
    uint32_t code, low;
    DR_TRY(read_hex4(r, &code));
    if (code >= 0xd800 && code < 0xdc00) {
        if (r->end - r->at < 2 || r->at[0] != '\\' || r->at[1] != 'u')
            return malformed(r, start, "half a surrogate pair");
        r->at += 2;
        DR_TRY(read_hex4(r, &low));
        if (low < 0xdc00 || low >= 0xe000)
            return malformed(r, start, "half a surrogate pair");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code < 0xe000) {
        return malformed(r, start, "half a surrogate pair");
    }
    if (code == 0)
        return malformed(r, start, "the character U+0000 in a string");
    put_utf8(r, code);
    return DR_OK;
}

/* Unescaped text is never longer than its source, quotes included: w->text is enough. */
static dr_status read_string(reader *r, const char *what, const char **out)
{
    if (!take(r, '"'))
        return malformed(r, r->at, what);
    const unsigned char *start = r->at - 1;
    *out = r->text;
    for (;;) {
        if (r->at == r->end)
            return malformed(r, start, "a string has no end");
        if (*r->at == '"')
            break;
        if (*r->at == '\\') {
            r->at++;
            DR_TRY(read_escape(r));
            continue;
        }
        if (*r->at < 0x20)
            return malformed(r, r->at, "a control character in a string");
        int32_t n = dr_utf8_length(r->at, (size_t)(r->end - r->at));
        if (n == 0)
            return malformed(r, r->at, "a string that is not UTF-8");
        memcpy(r->text, r->at, (size_t)n);
        r->text += n;
        r->at += n;
    }
    r->at++;
    *r->text++ = '\0';
    return DR_OK;
}

static dr_status read_key(reader *r, const char **out)
{
    const unsigned char *start = r->at;
    DR_TRY(read_string(r, "expected a key in quotes", out));
    if (r->text - *out > DR_SAFETENSORS_NAME_MAX)
        return malformed(r, start, "a name longer than 4095 bytes");
    if (!take(r, ':'))
        return malformed(r, r->at, "expected ':' after a key");
    return DR_OK;
}

/* A whole number from 0 to 2^63 - 1. */
static dr_status read_count(reader *r, int64_t *out)
{
    skip_blanks(r);
    const unsigned char *start = r->at;
    int64_t x = 0;
    for (; r->at < r->end && *r->at >= '0' && *r->at <= '9'; r->at++)
        if (!dr_mul(x, 10, &x) || !dr_add(x, *r->at - '0', &x))
            return malformed(r, start, "a number past 2^63 - 1");
    if (r->at == start)
        return malformed(r, start, "expected a whole number");
    if (*start == '0' && r->at - start > 1)
        return malformed(r, start, "a number with leading zeros");
    if (r->at < r->end && (*r->at == '.' || *r->at == 'e' || *r->at == 'E'))
        return malformed(r, start, "expected a whole number");
    *out = x;
    return DR_OK;
}

/* Between the members of an object or array: whether another follows. */
static dr_status read_more(reader *r, char close, bool *more)
{
    *more = take(r, ',');
    if (*more || take(r, close))
        return DR_OK;
    return malformed(r, r->at, close == '}' ? "expected ',' or '}'" : "expected ',' or ']'");
}

/* ------------------------------------------------------------------------ */
/* The header                                                               */
/* ------------------------------------------------------------------------ */

/* Makes room for one element more. */
static dr_status grow(void **array, int64_t *room, int64_t used, size_t element)
{
    if (used < *room)
        return DR_OK;
    int64_t wanted = dr_max(16, 2 * *room);
    void *larger = dr_alloc((size_t)wanted * element);
    if (larger == NULL)
        return dr_fail(DR_ERR_MEMORY, "dr_weights_open: no memory for %lld header entries",
                       (long long)wanted);
    if (used > 0)
        memcpy(larger, *array, (size_t)used * element);
    dr_free(*array);
    *array = larger;
    *room = wanted;
    return DR_OK;
}

static dr_status read_dtype(reader *r, item *t)
{
    const unsigned char *start = r->at;
    const char *name;
    DR_TRY(read_string(r, "expected an element type in quotes", &name));
    t->type = dr_safetensors_type_named(name);
    return t->type != NULL ? DR_OK : malformed(r, start, "an unknown element type");
}

static dr_status read_shape(reader *r, item *t)
{
    const unsigned char *start = r->at;
    int64_t extent = 1; /* the strides of an empty tensor must fit as well */
    t->count = 1;
    if (!take(r, '['))
        return malformed(r, r->at, "expected '[' before a shape");
    for (bool more = !take(r, ']'); more;) {
        int64_t n;
        if (t->rank == DR_SAFETENSORS_RANK_MAX)
            return malformed(r, start, "a shape with more than 32 axes");
        DR_TRY(read_count(r, &n));
        if (!dr_mul(extent, dr_max(n, 1), &extent))
            return malformed(r, start, "a shape with more than 2^63 - 1 elements");
        t->count *= n;
        if (t->rank < DR_MAX_RANK)
            t->shape[t->rank] = n;
        t->rank++;
        DR_TRY(read_more(r, ']', &more));
    }
    return DR_OK;
}

static dr_status read_offsets(reader *r, item *t)
{
    if (!take(r, '['))
        return malformed(r, r->at, "expected '[' before data_offsets");
    DR_TRY(read_count(r, &t->begin));
    if (!take(r, ','))
        return malformed(r, r->at, "expected ',' between data_offsets");
    DR_TRY(read_count(r, &t->end));
    if (!take(r, ']'))
        return malformed(r, r->at, "expected ']' after data_offsets");
    return DR_OK;
}

static const struct {
    const char *name;
    dr_status (*read)(reader *r, item *t);
} fields[] = {{"dtype", read_dtype}, {"shape", read_shape}, {"data_offsets", read_offsets}};

static dr_status read_field(reader *r, item *t, uint32_t *seen)
{
    const unsigned char *start = r->at;
    const char *key;
    DR_TRY(read_key(r, &key));
    for (size_t i = 0; i < DR_COUNT(fields); i++) {
        if (strcmp(fields[i].name, key) != 0)
            continue;
        if (*seen & 1u << i)
            return malformed(r, start, "a field of a tensor is given twice");
        *seen |= 1u << i;
        return fields[i].read(r, t);
    }
    return malformed(r, start, "an unknown field of a tensor");
}

/* The tensor's bytes against its shape and the file. */
static dr_status check_bytes(const reader *r, const item *t)
{
    dr_shown name = dr_show(t->name);
    int64_t bits;
    if (t->begin > t->end || t->end > r->w->data_bytes)
        return dr_fail(DR_ERR_FORMAT,
                       "%s: tensor \"%s\": data_offsets [%lld, %lld] must lie in order in the %lld "
                       "bytes after the header", r->path.text, name.text, (long long)t->begin,
                       (long long)t->end, (long long)r->w->data_bytes);
    if (!dr_mul(t->count, t->type->bits, &bits) || bits % 8 != 0 || bits / 8 != t->end - t->begin)
        return dr_fail(DR_ERR_FORMAT,
                       "%s: tensor \"%s\": %lld elements of %s do not fill the %lld bytes from byte "
                       "%lld of the file", r->path.text, name.text, (long long)t->count,
                       t->type->name, (long long)(t->end - t->begin),
                       (long long)(r->w->data_at + t->begin));
    return DR_OK;
}

static dr_status read_tensor(reader *r, const unsigned char *start, const char *name)
{
    dr_weights *w = r->w;
    if (w->n_items == DR_SAFETENSORS_TENSORS_MAX)
        return malformed(r, start, "more than 1048576 tensors");
    DR_TRY(grow((void **)&w->items, &w->room_items, w->n_items, sizeof *w->items));
    item *t = &w->items[w->n_items];
    uint32_t seen = 0;
    *t = (item){.name = name};
    if (!take(r, '{'))
        return malformed(r, r->at, "expected '{' before the fields of a tensor");
    for (bool more = !take(r, '}'); more;) {
        DR_TRY(read_field(r, t, &seen));
        DR_TRY(read_more(r, '}', &more));
    }
    if (seen != (1u << DR_COUNT(fields)) - 1)
        return malformed(r, start, "a tensor needs dtype, shape and data_offsets");
    DR_TRY(check_bytes(r, t));
    w->n_items++;
    return DR_OK;
}

static dr_status read_notes(reader *r)
{
    dr_weights *w = r->w;
    if (!take(r, '{'))
        return malformed(r, r->at, "expected '{' after \"__metadata__\"");
    for (bool more = !take(r, '}'); more;) {
        note n;
        if (w->n_notes == DR_SAFETENSORS_NOTES_MAX)
            return malformed(r, r->at, "more than 65536 notes in \"__metadata__\"");
        DR_TRY(grow((void **)&w->notes, &w->room_notes, w->n_notes, sizeof *w->notes));
        DR_TRY(read_key(r, &n.key));
        DR_TRY(read_string(r, "a note of \"__metadata__\" must be text in quotes", &n.value));
        w->notes[w->n_notes++] = n;
        DR_TRY(read_more(r, '}', &more));
    }
    return DR_OK;
}

static dr_status read_header(reader *r)
{
    bool notes = false;
    if (r->at == r->end || *r->at != '{')
        return malformed(r, r->at, "the header must begin with '{'");
    r->at++;
    for (bool more = !take(r, '}'); more;) {
        skip_blanks(r);
        const unsigned char *start = r->at;
        const char *name;
        DR_TRY(read_key(r, &name));
        if (strcmp(name, DR_SAFETENSORS_NOTES) != 0) {
            DR_TRY(read_tensor(r, start, name));
        } else {
            if (notes)
                return malformed(r, start, "\"__metadata__\" is given twice");
            notes = true;
            DR_TRY(read_notes(r));
        }
        DR_TRY(read_more(r, '}', &more));
    }
    skip_blanks(r);
    return r->at == r->end ? DR_OK : malformed(r, r->at, "text after the end of the header");
}

/* ------------------------------------------------------------------------ */
/* The tensors together                                                     */
/* ------------------------------------------------------------------------ */

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const item *const *)a)->name, (*(const item *const *)b)->name);
}

static int by_key(const void *a, const void *b)
{
    return strcmp(((const note *)a)->key, ((const note *)b)->key);
}

/* Empty tensors stand in front of the one that begins where they do. */
static int by_range(const void *a, const void *b)
{
    const item *s = *(const item *const *)a, *t = *(const item *const *)b;
    if (s->begin != t->begin)
        return s->begin < t->begin ? -1 : 1;
    return (s->end > t->end) - (s->end < t->end);
}

static dr_status check_ranges(const reader *r)
{
    const dr_weights *w = r->w;
    int64_t at = 0;
    qsort(w->sorted, (size_t)w->n_items, sizeof *w->sorted, by_range);
    for (int64_t i = 0; i < w->n_items; i++) {
        const item *t = w->sorted[i];
        if (t->begin != at) {
            dr_shown name = dr_show(t->name);
            return dr_fail(DR_ERR_FORMAT, "%s: tensor \"%s\": begins at byte %lld of the file, what is "
                           "before it ends at byte %lld: %s", r->path.text, name.text,
                           (long long)(w->data_at + t->begin), (long long)(w->data_at + at),
                           t->begin < at ? "they overlap" : "a gap");
        }
        at = t->end;
    }
    if (at != w->data_bytes)
        return dr_fail(DR_ERR_FORMAT, "%s: byte %lld of the file: belongs to no tensor, nor do the "
                       "%lld bytes after it", r->path.text, (long long)(w->data_at + at),
                       (long long)(w->data_bytes - at - 1));
    return DR_OK;
}

static dr_status check_names(const reader *r)
{
    dr_weights *w = r->w;
    qsort(w->sorted, (size_t)w->n_items, sizeof *w->sorted, by_name);
    for (int64_t i = 1; i < w->n_items; i++)
        if (strcmp(w->sorted[i - 1]->name, w->sorted[i]->name) == 0)
            return dr_fail(DR_ERR_FORMAT, "%s: tensor \"%s\": is given twice", r->path.text,
                           dr_show(w->sorted[i]->name).text);
    if (w->n_notes > 0)
        qsort(w->notes, (size_t)w->n_notes, sizeof *w->notes, by_key);
    for (int64_t i = 1; i < w->n_notes; i++)
        if (strcmp(w->notes[i - 1].key, w->notes[i].key) == 0)
            return dr_fail(DR_ERR_FORMAT, "%s: note \"%s\": is given twice", r->path.text,
                           dr_show(w->notes[i].key).text);
    return DR_OK;
}

static const unsigned char *mapped(const dr_weights *w, const item *t)
{
    return w->map + w->data_at + t->begin;
}

static dr_status copy_misaligned(const reader *r)
{
    dr_weights *w = r->w;
    for (int64_t i = 0; i < w->n_items; i++) {
        item *t = &w->items[i];
        size_t size = dr_dtype_size(t->type->dtype);
        if (size == 0 || t->begin == t->end || (uintptr_t)mapped(w, t) % size == 0)
            continue;
        t->copy = dr_alloc((size_t)(t->end - t->begin));
        if (t->copy == NULL)
            return dr_fail(DR_ERR_MEMORY, "%s: tensor \"%s\": no memory for an aligned copy",
                           r->path.text, dr_show(t->name).text);
        memcpy(t->copy, mapped(w, t), (size_t)(t->end - t->begin));
    }
    return DR_OK;
}

/* ------------------------------------------------------------------------ */
/* Files                                                                    */
/* ------------------------------------------------------------------------ */

static dr_status map_file(const char *path, const dr_shown *shown, dr_weights *w)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not block */
    if (fd < 0)
        return dr_fail(DR_ERR_IO, "%s: cannot be opened: %s", shown->text, strerror(errno));
    dr_status status = DR_OK;
    void *map = MAP_FAILED;
    if (fstat(fd, &st) != 0)
        status = dr_fail(DR_ERR_IO, "%s: cannot be examined: %s", shown->text, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        status = dr_fail(DR_ERR_IO, "%s: must be a regular file", shown->text);
    else if (st.st_size < DR_SAFETENSORS_PREFIX)
        status = dr_fail(DR_ERR_FORMAT, "%s: byte %lld of the file: ends inside the length of the "
                         "header", shown->text, (long long)st.st_size);
    else if ((map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        status = dr_fail(DR_ERR_IO, "%s: cannot be mapped: %s", shown->text, strerror(errno));
    close(fd);
    DR_TRY(status);
    w->map = map;
    w->map_bytes = (size_t)st.st_size;
    return DR_OK;
}

static dr_status read_weights(const char *path, dr_weights *w)
{
    reader r = {.w = w, .path = dr_show(path)};
    uint64_t n = 0;
    DR_TRY(map_file(path, &r.path, w));
    for (int i = 0; i < DR_SAFETENSORS_PREFIX; i++)
        n |= (uint64_t)w->map[i] << 8 * i;
    if (n > w->map_bytes - DR_SAFETENSORS_PREFIX)
        return dr_fail(DR_ERR_FORMAT, "%s: byte 0 of the file: a header of %llu bytes in a file of %zu",
                       r.path.text, (unsigned long long)n, w->map_bytes);
    if (n > DR_SAFETENSORS_HEADER_MAX)
        return dr_fail(DR_ERR_FORMAT, "%s: byte 0 of the file: a header of %llu bytes, at most %d are "
                       "allowed", r.path.text, (unsigned long long)n, DR_SAFETENSORS_HEADER_MAX);
    w->data_at = DR_SAFETENSORS_PREFIX + (int64_t)n;
    w->data_bytes = (int64_t)w->map_bytes - w->data_at;
    w->text = dr_alloc((size_t)n);
    if (w->text == NULL)
        return dr_fail(DR_ERR_MEMORY, "%s: no memory for the names of the header", r.path.text);
    r.text = w->text;
    r.at = w->map + DR_SAFETENSORS_PREFIX;
    r.end = w->map + w->data_at;
    DR_TRY(read_header(&r));
    w->sorted = dr_alloc((size_t)w->n_items * sizeof *w->sorted);
    if (w->sorted == NULL)
        return dr_fail(DR_ERR_MEMORY, "%s: no memory for the index of the tensors", r.path.text);
    for (int64_t i = 0; i < w->n_items; i++)
        w->sorted[i] = &w->items[i];
    DR_TRY(check_ranges(&r));
    DR_TRY(check_names(&r));
    return copy_misaligned(&r);
}

dr_status dr_weights_open(const char *path, dr_weights **out)
{
    if (path == NULL || out == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must be given", path == NULL ? "path" : "out");
    dr_weights *w = dr_alloc(sizeof *w);
    if (w == NULL)
        return dr_fail(DR_ERR_MEMORY, "dr_weights_open: no memory");
    dr_status status = read_weights(path, w);
    if (status != DR_OK) {
        dr_weights_close(w);
        return status;
    }
    *out = w;
    return DR_OK;
}

void dr_weights_close(dr_weights *weights)
{
    if (weights == NULL)
        return;
    for (int64_t i = 0; i < weights->n_items; i++)
        dr_free(weights->items[i].copy);
    if (weights->map != NULL)
        munmap((void *)weights->map, weights->map_bytes);
    dr_free(weights->sorted);
    dr_free(weights->notes);
    dr_free(weights->items);
    dr_free(weights->text);
    dr_free(weights);
}

int64_t dr_weights_count(const dr_weights *weights) { return weights != NULL ? weights->n_items : 0; }

const char *dr_weights_name(const dr_weights *weights, int64_t index)
{
    bool there = weights != NULL && index >= 0 && index < weights->n_items;
    return there ? weights->items[index].name : NULL;
}

const char *dr_weights_metadata(const dr_weights *weights, const char *key)
{
    const note wanted = {key, NULL};
    if (weights == NULL || key == NULL || weights->n_notes == 0)
        return NULL;
    const note *found =
        bsearch(&wanted, weights->notes, (size_t)weights->n_notes, sizeof *weights->notes, by_key);
    return found != NULL ? found->value : NULL;
}

dr_status dr_weights_find(const dr_weights *weights, const char *name, dr_tensor *out)
{
    if (weights == NULL || name == NULL || out == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must be given",
                       weights == NULL ? "weights" : name == NULL ? "name" : "out");
    const item wanted = {.name = name}, *key = &wanted;
    const item *const *found = bsearch(&key, weights->sorted, (size_t)weights->n_items,
                                       sizeof *weights->sorted, by_name);
    if (found == NULL)
        return dr_fail(DR_ERR_ARG, "name: no tensor \"%s\" in the file", dr_show(name).text);
    const item *t = *found;
    if (t->type->dtype == 0)
        return dr_fail(DR_ERR_SUPPORT, "tensor \"%s\": element type %s has no view",
                       dr_show(name).text, t->type->name);
    if (t->rank > DR_MAX_RANK)
        return dr_fail(DR_ERR_SUPPORT, "tensor \"%s\": rank %d has no view, the largest is %d",
                       dr_show(name).text, t->rank, DR_MAX_RANK);
    void *data = t->copy != NULL ? t->copy : (void *)mapped(weights, t);
    if (t->rank == 0)
        *out = dr_tensor_make(data, t->type->dtype, 1, 1, 0, 0, 0);
    else
        *out = dr_tensor_make(data, t->type->dtype, t->rank, t->shape[0], t->shape[1], t->shape[2],
                              t->shape[3]);
    return DR_OK;
}
