/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors_write.c - writes safetensors files. Tensors stand in the order of the call,
 * wide element types first, and the header is padded to a multiple of 8: then every tensor
 * begins at an address that suits its type, and the same tensors and notes in the same
 * order give the same bytes.
 *
 * NOTE [Whole or not at all]: the bytes go to a new file in the folder of path, which is
 * flushed to the device, renamed to path, and the rename flushed too. A crash at any point
 * leaves path as it was or as it shall be; a failure removes the new file.
 */
#include "io/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct request {
    dr_shown path;
    const dr_weights_entry *entries;
    int64_t n_entries;
    const dr_weights_note *notes;
    int64_t n_notes;
    const dr_weights_entry **order; /* as written; before that, sorted by name */
    const dr_weights_note **keys;   /* sorted */
    char *header;
    int64_t header_bytes;           /* prefix and padding included */
} request;

/* ------------------------------------------------------------------------ */
/* Checks                                                                   */
/* ------------------------------------------------------------------------ */

static dr_status check_text(const char *what, int64_t index, const char *text, size_t most)
{
    if (text == NULL)
        return dr_fail(DR_ERR_ARG, "%s of %lld: must be given", what, (long long)index);
    size_t n = strlen(text);
    if (n >= most)
        return dr_fail(DR_ERR_ARG, "%s of %lld: must be shorter than %zu bytes, got %zu", what,
                       (long long)index, most, n);
    for (size_t at = 0; at < n;) {
        int32_t length = dr_utf8_length((const unsigned char *)text + at, n - at);
        if (length == 0)
            return dr_fail(DR_ERR_ARG, "%s of %lld: must be UTF-8, byte %zu of \"%s\" is not", what,
                           (long long)index, at, dr_show(text).text);
        at += (size_t)length;
    }
    return DR_OK;
}

static int64_t tensor_bytes(const dr_tensor *t)
{
    int64_t n = (int64_t)dr_dtype_size(t->dtype);
    for (int32_t i = 0; i < t->rank; i++)
        n *= t->shape[i];
    return n;
}

static dr_status check_entry(int64_t index, const dr_weights_entry *e)
{
    const dr_tensor *t = &e->tensor;
    DR_TRY(check_text("name of entry", index, e->name, DR_SAFETENSORS_NAME_MAX));
    dr_shown name = dr_show(e->name);
    if (strcmp(e->name, DR_SAFETENSORS_NOTES) == 0)
        return dr_fail(DR_ERR_ARG, "tensor \"%s\": the name stands for the notes", name.text);
    if (dr_safetensors_type_of(t->dtype) == NULL)
        return dr_fail(DR_ERR_SHAPE, "tensor \"%s\": dtype must be f32, f64, bf16 or f16, got %d",
                       name.text, (int)t->dtype);
    if (t->rank < 1 || t->rank > DR_MAX_RANK)
        return dr_fail(DR_ERR_SHAPE, "tensor \"%s\": rank must be 1 to %d, got %d", name.text,
                       DR_MAX_RANK, t->rank);
    int64_t extent = (int64_t)dr_dtype_size(t->dtype), stride = 1;
    for (int32_t i = 0; i < t->rank; i++)
        if (t->shape[i] < 0 || !dr_mul(extent, dr_max(t->shape[i], 1), &extent))
            return dr_fail(DR_ERR_SHAPE, "tensor \"%s\": shape[%d] = %lld is negative or too large",
                           name.text, i, (long long)t->shape[i]);
    if (tensor_bytes(t) == 0)
        return DR_OK;
    if (t->data == NULL)
        return dr_fail(DR_ERR_ARG, "tensor \"%s\": data must be given", name.text);
    for (int32_t i = t->rank - 1; i >= 0; i--) {
        if (t->shape[i] != 1 && t->stride[i] != stride)
            return dr_fail(DR_ERR_SHAPE, "tensor \"%s\": must be contiguous, stride[%d] is %lld "
                           "instead of %lld", name.text, i, (long long)t->stride[i],
                           (long long)stride);
        stride *= t->shape[i];
    }
    return DR_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const dr_weights_entry *const *)a)->name,
                  (*(const dr_weights_entry *const *)b)->name);
}

static int by_key(const void *a, const void *b)
{
    return strcmp((*(const dr_weights_note *const *)a)->key,
                  (*(const dr_weights_note *const *)b)->key);
}

static dr_status check_entries(request *r)
{
    for (int64_t i = 0; i < r->n_entries; i++) {
        DR_TRY(check_entry(i, &r->entries[i]));
        r->order[i] = &r->entries[i];
    }
    if (r->n_entries > 0)
        qsort(r->order, (size_t)r->n_entries, sizeof *r->order, by_name);
    for (int64_t i = 1; i < r->n_entries; i++)
        if (by_name(&r->order[i - 1], &r->order[i]) == 0)
            return dr_fail(DR_ERR_ARG, "tensor \"%s\": is given twice",
                           dr_show(r->order[i]->name).text);
    return DR_OK;
}

static dr_status check_notes(request *r)
{
    for (int64_t i = 0; i < r->n_notes; i++) {
        DR_TRY(check_text("key of note", i, r->notes[i].key, DR_SAFETENSORS_NAME_MAX));
        DR_TRY(check_text("value of note", i, r->notes[i].value, DR_SAFETENSORS_HEADER_MAX));
        r->keys[i] = &r->notes[i];
    }
    if (r->n_notes > 0)
        qsort(r->keys, (size_t)r->n_notes, sizeof *r->keys, by_key);
    for (int64_t i = 1; i < r->n_notes; i++)
        if (by_key(&r->keys[i - 1], &r->keys[i]) == 0)
            return dr_fail(DR_ERR_ARG, "note \"%s\": is given twice", dr_show(r->keys[i]->key).text);
    return DR_OK;
}

/* ------------------------------------------------------------------------ */
/* The header                                                               */
/* ------------------------------------------------------------------------ */

/* Measures with base NULL, writes otherwise. */
typedef struct sink {
    char *base;
    int64_t used;
} sink;

static void put(sink *s, const char *text, size_t n)
{
    if (s->base != NULL)
        memcpy(s->base + s->used, text, n);
    s->used += (int64_t)n;
}

static void put_text(sink *s, const char *text) { put(s, text, strlen(text)); }

static void put_count(sink *s, const char *before, int64_t x)
{
    char digits[32];
    snprintf(digits, sizeof digits, "%lld", (long long)x);
    put_text(s, before);
    put_text(s, digits);
}

static void put_quoted(sink *s, const char *text)
{
    put_text(s, "\"");
    for (const char *c = text; *c != '\0'; c++) {
        unsigned char byte = (unsigned char)*c;
        char escaped[8];
        if (byte == '"' || byte == '\\')
            put_text(s, "\\");
        if (byte < 0x20) {
            snprintf(escaped, sizeof escaped, "\\u%04x", byte);
            put_text(s, escaped);
        } else {
            put(s, c, 1);
        }
    }
    put_text(s, "\"");
}

static void put_notes(sink *s, const request *r)
{
    put_text(s, "\"" DR_SAFETENSORS_NOTES "\":{");
    for (int64_t i = 0; i < r->n_notes; i++) {
        put_text(s, i > 0 ? "," : "");
        put_quoted(s, r->notes[i].key);
        put_text(s, ":");
        put_quoted(s, r->notes[i].value);
    }
    put_text(s, "}");
}

static void put_tensor(sink *s, const dr_weights_entry *e, int64_t begin)
{
    put_quoted(s, e->name);
    put_text(s, ":{\"dtype\":\"");
    put_text(s, dr_safetensors_type_of(e->tensor.dtype)->name);
    put_text(s, "\",\"shape\":[");
    for (int32_t i = 0; i < e->tensor.rank; i++)
        put_count(s, i > 0 ? "," : "", e->tensor.shape[i]);
    put_count(s, "],\"data_offsets\":[", begin);
    put_count(s, ",", begin + tensor_bytes(&e->tensor));
    put_text(s, "]}");
}

static void put_header(sink *s, const request *r)
{
    int64_t begin = 0;
    s->used = DR_SAFETENSORS_PREFIX;
    put_text(s, "{");
    if (r->n_notes > 0)
        put_notes(s, r);
    for (int64_t i = 0; i < r->n_entries; i++) {
        put_text(s, i > 0 || r->n_notes > 0 ? "," : "");
        put_tensor(s, r->order[i], begin);
        begin += tensor_bytes(&r->order[i]->tensor);
    }
    put_text(s, "}");
    put(s, "        ", (size_t)(dr_round_up(s->used, 8) - s->used));
}

/* Wide types first, otherwise the order of the call. */
static void arrange(request *r)
{
    int64_t at = 0;
    for (size_t size = 8; size > 0; size /= 2)
        for (int64_t i = 0; i < r->n_entries; i++)
            if (dr_dtype_size(r->entries[i].tensor.dtype) == size)
                r->order[at++] = &r->entries[i];
}

static dr_status make_header(request *r)
{
    int64_t data = 0;
    arrange(r);
    for (int64_t i = 0; i < r->n_entries; i++)
        if (!dr_add(data, tensor_bytes(&r->entries[i].tensor), &data))
            return dr_fail(DR_ERR_SHAPE, "entries: must be less than 2^63 bytes together");
    sink s = {NULL, 0};
    put_header(&s, r);
    if (s.used - DR_SAFETENSORS_PREFIX > DR_SAFETENSORS_HEADER_MAX)
        return dr_fail(DR_ERR_ARG, "entries and notes: need a header of %lld bytes, at most %d are "
                       "allowed", (long long)(s.used - DR_SAFETENSORS_PREFIX),
                       DR_SAFETENSORS_HEADER_MAX);
    s.base = r->header = dr_alloc((size_t)s.used);
    if (s.base == NULL)
        return dr_fail(DR_ERR_MEMORY, "dr_weights_write: no memory for a header of %lld bytes",
                       (long long)s.used);
    put_header(&s, r);
    r->header_bytes = s.used;
    for (int i = 0; i < DR_SAFETENSORS_PREFIX; i++)
        r->header[i] = (char)((uint64_t)(s.used - DR_SAFETENSORS_PREFIX) >> 8 * i);
    return DR_OK;
}

/* ------------------------------------------------------------------------ */
/* The file                                                                 */
/* ------------------------------------------------------------------------ */

static dr_status io_failure(const request *r, const char *what)
{
    return dr_fail(DR_ERR_IO, "%s: %s: %s", r->path.text, what, strerror(errno));
}

static dr_status write_all(const request *r, int fd, const void *data, int64_t bytes)
{
    const char *at = data;
    while (bytes > 0) {
        ssize_t n = write(fd, at, (size_t)dr_min(bytes, 1 << 30));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return io_failure(r, "cannot be written");
        at += n;
        bytes -= n;
    }
    return DR_OK;
}

static dr_status write_content(const request *r, int fd)
{
    DR_TRY(write_all(r, fd, r->header, r->header_bytes));
    for (int64_t i = 0; i < r->n_entries; i++)
        DR_TRY(write_all(r, fd, r->order[i]->tensor.data, tensor_bytes(&r->order[i]->tensor)));
    return fsync(fd) == 0 ? DR_OK : io_failure(r, "cannot be flushed");
}

/* A rename is lost in a crash until its folder has reached the device. */
static dr_status flush_folder(const request *r, char *path)
{
    char *slash = strrchr(path, '/');
    const char *folder = slash == NULL ? "." : slash == path ? "/" : path;
    if (slash != NULL)
        *slash = '\0';
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return io_failure(r, "its folder cannot be opened");
    /* Some file systems have no flush for folders and say so. */
    bool flushed = fsync(fd) == 0 || errno == EINVAL;
    dr_status status = flushed ? DR_OK : io_failure(r, "its folder cannot be flushed");
    close(fd);
    return status;
}

static dr_status open_new(const request *r, const char *path, char *name, size_t size, int *fd)
{
    for (int attempt = 0; attempt < 100; attempt++) {
        snprintf(name, size, "%s.%ld-%d.tmp", path, (long)getpid(), attempt);
        *fd = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (*fd >= 0)
            return DR_OK;
        if (errno != EEXIST)
            break;
    }
    return io_failure(r, "a new file beside it cannot be created");
}

/* A rename would put the file in the place of a device or a pipe: what stands there must be a file. */
static dr_status check_place(const request *r, const char *path, mode_t *mode)
{
    struct stat at;
    *mode = (mode_t)-1;
    if (stat(path, &at) != 0)
        return DR_OK;
    if (!S_ISREG(at.st_mode))
        return dr_fail(DR_ERR_IO, "%s: exists and is not a regular file, it is left as it is",
                       r->path.text);
    *mode = at.st_mode & 0777;
    return DR_OK;
}

static dr_status write_file(const request *r, const char *path)
{
    mode_t mode; /* of the file that is replaced, which the new one takes over */
    DR_TRY(check_place(r, path, &mode));
    size_t size = strlen(path) + 64;
    char *name = dr_alloc(size);
    int fd;
    if (name == NULL)
        return dr_fail(DR_ERR_MEMORY, "dr_weights_write: no memory for a path");
    dr_status status = open_new(r, path, name, size, &fd);
    if (status != DR_OK)
        goto done;
    status = mode == (mode_t)-1 || fchmod(fd, mode) == 0
                 ? write_content(r, fd)
                 : io_failure(r, "a new file beside it cannot take its permissions");
    if (close(fd) != 0 && status == DR_OK)
        status = io_failure(r, "cannot be closed");
    if (status == DR_OK && rename(name, path) != 0)
        status = io_failure(r, "cannot be replaced");
    if (status != DR_OK)
        unlink(name);
    else
        status = flush_folder(r, name);
done:
    dr_free(name);
    return status;
}

static dr_status write_request(request *r, const char *path)
{
    r->order = dr_alloc((size_t)r->n_entries * sizeof *r->order);
    r->keys = dr_alloc((size_t)r->n_notes * sizeof *r->keys);
    if (r->order == NULL || r->keys == NULL)
        return dr_fail(DR_ERR_MEMORY, "dr_weights_write: no memory for %lld entries",
                       (long long)r->n_entries);
    DR_TRY(check_entries(r));
    DR_TRY(check_notes(r));
    DR_TRY(make_header(r));
    return write_file(r, path);
}

dr_status dr_weights_write(const char *path, const dr_weights_entry *entries, int64_t count,
                           const dr_weights_note *notes, int64_t note_count)
{
    if (path == NULL || path[0] == '\0')
        return dr_fail(DR_ERR_ARG, "path: must be given");
    if (count < 0 || count > DR_SAFETENSORS_TENSORS_MAX || (entries == NULL && count > 0))
        return dr_fail(DR_ERR_ARG, "count: must be 0 to %d with entries, got %lld%s",
                       DR_SAFETENSORS_TENSORS_MAX, (long long)count,
                       entries == NULL ? " and no entries" : "");
    if (note_count < 0 || note_count > DR_SAFETENSORS_NOTES_MAX || (notes == NULL && note_count > 0))
        return dr_fail(DR_ERR_ARG, "note_count: must be 0 to %d with notes, got %lld%s",
                       DR_SAFETENSORS_NOTES_MAX, (long long)note_count,
                       notes == NULL ? " and no notes" : "");
    request r = {.path = dr_show(path), .entries = entries, .n_entries = count, .notes = notes,
                 .n_notes = note_count};
    dr_status status = write_request(&r, path);
    dr_free(r.header);
    dr_free(r.keys);
    dr_free(r.order);
    return status;
}
