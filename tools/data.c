/* SPDX-License-Identifier: Apache-2.0 */
/*
 * data.c - see data.h. Names are sorted and the choice of held-out documents depends on names
 * alone, so that the same folder gives the same batches anywhere.
 */
#include "data.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEEPEST = 64 /* folders below the first; links are not followed */ };

typedef struct loader {
    const char *root, *glob;
    dr_lm_data *data;
    int64_t room_documents, room_bytes;
    int64_t n_bytes;
    int64_t seen; /* files whose names match */
} loader;

/* Grows an array that malloc gave to hold at least `wanted` elements. */
static dr_status grow(void **array, int64_t *room, int64_t wanted, size_t element)
{
    if (wanted <= *room)
        return DR_OK;
    int64_t larger = wanted > 2 * *room ? wanted : 2 * *room;
    void *moved = larger < INT64_MAX / 64 ? realloc(*array, (size_t)larger * element) : NULL;
    if (moved == NULL)
        return dr_lm_fail(DR_ERR_MEMORY, "data: no memory for %lld elements of %zu bytes",
                          (long long)larger, element);
    *array = moved;
    *room = larger;
    return DR_OK;
}

/* ------------------------------------------------------------------------ */
/* Finding and reading                                                      */
/* ------------------------------------------------------------------------ */

static char *joined(const char *folder, const char *name)
{
    size_t n = strlen(folder) + strlen(name) + 2;
    char *path = malloc(n);
    if (path != NULL)
        snprintf(path, n, "%s%s%s", folder, folder[0] != '\0' ? "/" : "", name);
    return path;
}

static dr_status add_document(loader *l, char *name)
{
    dr_lm_data *d = l->data;
    dr_status status = grow((void **)&d->documents, &l->room_documents, d->n_documents + 1,
                            sizeof *d->documents);
    if (status != DR_OK) {
        free(name);
        return status;
    }
    d->documents[d->n_documents++] = (dr_lm_document){.name = name};
    return DR_OK;
}

/* Names below folder, which is relative to the root. A folder that cannot be read has no
 * names. */
static dr_status find_names(loader *l, const char *folder, int depth)
{
    dr_status status = DR_OK;
    char *path = joined(l->root, folder);
    DIR *dir = path != NULL ? opendir(path) : NULL;
    for (struct dirent *e; status == DR_OK && dir != NULL && (e = readdir(dir)) != NULL;) {
        struct stat st;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 ||
            fstatat(dirfd(dir), e->d_name, &st, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        bool wanted = l->glob == NULL || fnmatch(l->glob, e->d_name, 0) == 0;
        if (!S_ISDIR(st.st_mode) && !(S_ISREG(st.st_mode) && wanted))
            continue;
        char *name = joined(folder, e->d_name);
        if (name == NULL) {
            status = dr_lm_fail(DR_ERR_MEMORY, "data: no memory for a name");
        } else if (S_ISREG(st.st_mode)) {
            status = add_document(l, name);
        } else {
            if (depth < DEEPEST)
                status = find_names(l, name, depth + 1);
            free(name);
        }
    }
    if (dir != NULL)
        closedir(dir);
    free(path);
    return status;
}

/* Appends the file's bytes. A file that cannot be read, or holds a NUL byte or nothing, is no
 * text: *length is 0 then. */
static dr_status read_text(loader *l, const char *path, int64_t *length)
{
    dr_lm_data *d = l->data;
    struct stat st;
    *length = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return DR_OK;
    dr_status status = DR_OK;
    int64_t n = 0;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) {
        status = grow((void **)&d->bytes, &l->room_bytes, l->n_bytes + st.st_size + 1, 1);
        while (status == DR_OK && n < st.st_size) {
            ssize_t got = read(fd, d->bytes + l->n_bytes + n, (size_t)(st.st_size - n));
            if (got < 0 && errno == EINTR)
                continue;
            if (got <= 0)
                break;
            n += got;
        }
    }
    close(fd);
    if (status == DR_OK && n > 0 && memchr(d->bytes + l->n_bytes, '\0', (size_t)n) == NULL)
        *length = n;
    return status;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const dr_lm_document *)a)->name, ((const dr_lm_document *)b)->name);
}

/* Keeps the documents that are text. */
static dr_status read_documents(loader *l)
{
    dr_lm_data *d = l->data;
    int64_t kept = 0;
    if (d->n_documents > 0)
        qsort(d->documents, (size_t)d->n_documents, sizeof *d->documents, by_name);
    l->seen = d->n_documents;
    for (int64_t i = 0; i < l->seen; i++) {
        dr_lm_document *doc = &d->documents[i];
        char *path = joined(l->root, doc->name);
        if (path == NULL)
            return dr_lm_fail(DR_ERR_MEMORY, "data: no memory for a path");
        /* The root may be a file: then its one document has no name of its own. */
        dr_status status = read_text(l, doc->name[0] != '\0' ? path : l->root, &doc->length);
        free(path);
        LM_TRY(status);
        if (doc->length == 0) {
            free(doc->name);
            doc->name = NULL;
            d->skipped++;
            continue;
        }
        doc->begin = l->n_bytes;
        doc->hash = dr_lm_hash_text(0, doc->name);
        d->digest = dr_lm_hash_text(d->digest, doc->name);
        d->digest = dr_lm_hash(d->digest, d->bytes + doc->begin, (size_t)doc->length);
        l->n_bytes += doc->length;
        dr_lm_document moved = *doc;
        doc->name = NULL;
        d->documents[kept++] = moved;
    }
    d->n_documents = kept;
    return DR_OK;
}

/* ------------------------------------------------------------------------ */
/* What is held out                                                         */
/* ------------------------------------------------------------------------ */

/* The next document in the order of hashes, names deciding between equal ones. */
static dr_lm_document *smallest_left(dr_lm_data *d)
{
    dr_lm_document *best = NULL;
    for (int64_t i = 0; i < d->n_documents; i++) {
        dr_lm_document *doc = &d->documents[i];
        if (!doc->held_out && (best == NULL || doc->hash < best->hash))
            best = doc;
    }
    return best;
}

/* A document alone is cut in two. */
static dr_status split_document(loader *l)
{
    dr_lm_data *d = l->data;
    int64_t length = d->documents[0].length, end = length / 10;
    char *name = strdup(d->documents[0].name);
    if (name == NULL)
        return dr_lm_fail(DR_ERR_MEMORY, "data: no memory for a name");
    if (length < 2) {
        free(name);
        return dr_lm_fail(DR_ERR_ARG, "data: one document of %lld byte is too little to learn from",
                          (long long)length);
    }
    end = end > 1 ? end : 1;
    LM_TRY(add_document(l, name));
    d->documents[0].length -= end;
    d->documents[1].begin = d->documents[0].length;
    d->documents[1].length = end;
    d->documents[1].hash = 0;
    d->documents[0].hash = 1;
    return DR_OK;
}

static dr_status hold_out(loader *l, int64_t most)
{
    dr_lm_data *d = l->data;
    int64_t limit = l->n_bytes / 20 < most ? l->n_bytes / 20 : most;
    if (d->n_documents == 1) {
        LM_TRY(split_document(l));
        limit = l->n_bytes / 10 < most ? l->n_bytes / 10 : most;
    }
    limit = limit > 1 ? limit : 1;
    while (d->held_out_bytes < limit && d->n_held_out < d->n_documents - 1) {
        dr_lm_document *doc = smallest_left(d);
        int64_t left = limit - d->held_out_bytes;
        doc->held_out = true;
        doc->length = doc->length < left ? doc->length : left;
        d->held_out_bytes += doc->length;
        d->n_held_out++;
    }
    for (int64_t i = 0; i < d->n_documents; i++)
        d->train_bytes += d->documents[i].held_out ? 0 : d->documents[i].length;
    return DR_OK;
}

static dr_status load(loader *l, int64_t held_out_most)
{
    struct stat st;
    if (stat(l->root, &st) != 0)
        return dr_lm_fail(DR_ERR_ARG, "%s: cannot be read: %s", l->root, strerror(errno));
    if (S_ISDIR(st.st_mode)) {
        LM_TRY(find_names(l, "", 0));
    } else {
        char *name = strdup("");
        if (name == NULL)
            return dr_lm_fail(DR_ERR_MEMORY, "data: no memory for a name");
        LM_TRY(add_document(l, name));
    }
    LM_TRY(read_documents(l));
    if (l->data->n_documents == 0)
        return dr_lm_fail(DR_ERR_ARG, "%s: no readable text: of %lld files%s%s none holds any (empty "
                          "files and files with NUL bytes are not text)", l->root,
                          (long long)l->seen, l->glob != NULL ? " that match " : "",
                          l->glob != NULL ? l->glob : "");
    return hold_out(l, held_out_most);
}

dr_status dr_lm_data_load(const char *path, const char *glob, int64_t held_out_most,
                          dr_lm_data *out)
{
    loader l = {.root = path, .glob = glob, .data = out};
    *out = (dr_lm_data){0};
    dr_status status = load(&l, held_out_most);
    if (status != DR_OK)
        dr_lm_data_free(out);
    return status;
}

void dr_lm_data_free(dr_lm_data *data)
{
    for (int64_t i = 0; i < data->n_documents; i++)
        free(data->documents[i].name);
    free(data->documents);
    free(data->bytes);
    *data = (dr_lm_data){0};
}

/* ------------------------------------------------------------------------ */
/* Batches                                                                  */
/* ------------------------------------------------------------------------ */

static int64_t count_pieces(const dr_lm_data *data, bool training, int64_t context,
                            dr_lm_piece *pieces)
{
    int64_t n = 0;
    for (int64_t i = 0; i < data->n_documents; i++) {
        const dr_lm_document *doc = &data->documents[i];
        for (int64_t at = 0; doc->held_out != training && at < doc->length; at += context, n++) {
            int64_t left = doc->length - at;
            if (pieces != NULL)
                pieces[n] = (dr_lm_piece){doc->begin + at,
                                          (int32_t)(left < context ? left : context), at == 0};
        }
    }
    return n;
}

/* A permutation that depends on seed and epoch alone. */
static void shuffle(dr_lm_feed *f)
{
    dr_lm_random r = {f->seed ^ 0x5851f42d4c957f2du * (uint64_t)(f->cursor.epoch + 1)};
    for (int64_t i = 0; i < f->n_pieces; i++)
        f->order[i] = i;
    for (int64_t i = f->n_pieces - 1; f->training && i > 0; i--) {
        int64_t j = (int64_t)(dr_lm_bits(&r) % (uint64_t)(i + 1)), kept = f->order[i];
        f->order[i] = f->order[j];
        f->order[j] = kept;
    }
}

dr_status dr_lm_feed_create(const dr_lm_data *data, bool training, int64_t context, uint64_t seed,
                            dr_lm_feed *out)
{
    dr_lm_feed f = {.data = data, .training = training, .seed = seed};
    f.n_pieces = count_pieces(data, training, context, NULL);
    f.pieces = dr_lm_alloc(f.n_pieces, sizeof *f.pieces, "data");
    f.order = dr_lm_alloc(f.n_pieces, sizeof *f.order, "data");
    if (f.pieces == NULL || f.order == NULL) {
        dr_lm_feed_free(&f);
        return DR_ERR_MEMORY;
    }
    count_pieces(data, training, context, f.pieces);
    shuffle(&f);
    *out = f;
    return DR_OK;
}

void dr_lm_feed_free(dr_lm_feed *feed)
{
    free(feed->pieces);
    free(feed->order);
    *feed = (dr_lm_feed){0};
}

dr_status dr_lm_feed_seek(dr_lm_feed *feed, dr_lm_cursor c)
{
    if (c.epoch < 0 || c.piece < 0 || c.piece >= feed->n_pieces || c.at < 0)
        return dr_lm_fail(DR_ERR_FORMAT, "position: epoch %lld, piece %lld, byte %lld is not a place "
                          "in data of %lld pieces", (long long)c.epoch, (long long)c.piece,
                          (long long)c.at, (long long)feed->n_pieces);
    feed->cursor = c;
    shuffle(feed);
    int32_t length = feed->pieces[feed->order[c.piece]].length;
    if (c.at >= length)
        return dr_lm_fail(DR_ERR_FORMAT, "position: byte %lld of a piece of %d bytes",
                          (long long)c.at, length);
    return DR_OK;
}

dr_status dr_lm_batch_create(int64_t room, dr_lm_batch *out)
{
    dr_lm_batch b = {.room = room};
    b.offsets = dr_lm_alloc(room + 1, sizeof *b.offsets, "batch");
    b.input = dr_lm_alloc(room, sizeof *b.input, "batch");
    b.target = dr_lm_alloc(room, sizeof *b.target, "batch");
    if (b.offsets == NULL || b.input == NULL || b.target == NULL) {
        dr_lm_batch_free(&b);
        return DR_ERR_MEMORY;
    }
    *out = b;
    return DR_OK;
}

void dr_lm_batch_free(dr_lm_batch *batch)
{
    free(batch->offsets);
    free(batch->input);
    free(batch->target);
    *batch = (dr_lm_batch){0};
}

static void next_piece(dr_lm_feed *f)
{
    f->cursor.at = 0;
    if (++f->cursor.piece == f->n_pieces && f->training) {
        f->cursor.piece = 0;
        f->cursor.epoch++;
        shuffle(f);
    }
}

void dr_lm_feed_next(dr_lm_feed *f, dr_lm_batch *b)
{
    b->tokens = b->sequences = 0;
    while (b->tokens < b->room && f->cursor.piece < f->n_pieces) {
        const dr_lm_piece *p = &f->pieces[f->order[f->cursor.piece]];
        int64_t at = f->cursor.at, left = p->length - at, room = b->room - b->tokens;
        int64_t n = left < room ? left : room;
        const unsigned char *bytes = f->data->bytes + p->begin + at;
        for (int64_t i = 0; i < n; i++) {
            b->input[b->tokens + i] = i + at == 0 && p->starts ? DR_LM_START : bytes[i - 1];
            b->target[b->tokens + i] = bytes[i];
        }
        b->offsets[b->sequences++] = b->tokens;
        b->tokens += n;
        f->cursor.at += n;
        if (n == left)
            next_piece(f);
    }
    b->offsets[b->sequences] = b->tokens;
}
