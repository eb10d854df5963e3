/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint.c - see checkpoint.h. Notes are a table that is read in both directions.
 */
#include "checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Both structs as the notes see them. */
typedef struct contents {
    dr_lm_config config;
    dr_lm_training training;
} contents;

typedef enum field_type { FIELD_INT32, FIELD_INT64, FIELD_HASH, FIELD_REAL } field_type;

static const struct field {
    const char *key;
    field_type type;
    size_t at;
    double low, high; /* not of a FIELD_HASH */
} fields[] = {
#define CONFIG(name, low, high) {#name, FIELD_INT32, offsetof(contents, config.name), low, high}
#define TRAINING(name, type, low, high) {#name, type, offsetof(contents, training.name), low, high}
    CONFIG(layers, 1, DR_LM_MAX_LAYERS),
    CONFIG(hidden, 1, 1 << 16),
    CONFIG(heads, 1, 1 << 10),
    CONFIG(head_dim, 1, 256),
    CONFIG(inner, 1, 1 << 18),
    TRAINING(context, FIELD_INT64, 1, 1 << 24),
    TRAINING(batch_tokens, FIELD_INT64, 1, 1 << 24),
    TRAINING(steps, FIELD_INT64, 0, 1e15),
    TRAINING(seconds, FIELD_REAL, 0, 1e9),
    TRAINING(rate, FIELD_REAL, 0, 1e3),
    TRAINING(seed, FIELD_HASH, 0, 0),
    TRAINING(data_digest, FIELD_HASH, 0, 0),
    TRAINING(held_out_most, FIELD_INT64, 1, 1e15),
    TRAINING(step, FIELD_INT64, 0, 1e15),
    TRAINING(elapsed, FIELD_REAL, 0, 1e12),
    TRAINING(cursor.epoch, FIELD_INT64, 0, 1e15),
    TRAINING(cursor.piece, FIELD_INT64, 0, 1e15),
    TRAINING(cursor.at, FIELD_INT64, 0, 1e15),
#undef CONFIG
#undef TRAINING
};

enum { FIELDS = LM_COUNT(fields), NOTES = FIELDS + 3, VALUE = 32, ARCH = DR_LM_MAX_LAYERS * 4 + 1 };

static void print_field(const struct field *f, const contents *c, char *text)
{
    const char *at = (const char *)c + f->at;
    switch (f->type) {
    case FIELD_INT32: snprintf(text, VALUE, "%" PRId32, *(const int32_t *)at); break;
    case FIELD_INT64: snprintf(text, VALUE, "%" PRId64, *(const int64_t *)at); break;
    case FIELD_HASH: snprintf(text, VALUE, "%016" PRIx64, *(const uint64_t *)at); break;
    case FIELD_REAL: snprintf(text, VALUE, "%.17g", *(const double *)at); break;
    }
}

/* What print_field would print, and nothing else. */
static bool parse_field(const struct field *f, const char *text, contents *c)
{
    char *at = (char *)c + f->at, again[VALUE];
    errno = 0;
    switch (f->type) {
    case FIELD_INT32: *(int32_t *)at = (int32_t)strtoll(text, NULL, 10); break;
    case FIELD_INT64: *(int64_t *)at = strtoll(text, NULL, 10); break;
    case FIELD_HASH: *(uint64_t *)at = strtoull(text, NULL, 16); break;
    case FIELD_REAL: *(double *)at = strtod(text, NULL); break;
    }
    double x = f->type == FIELD_INT32   ? *(int32_t *)at
               : f->type == FIELD_INT64 ? (double)*(int64_t *)at
               : f->type == FIELD_REAL  ? *(double *)at
                                        : 0;
    print_field(f, c, again);
    return errno == 0 && strcmp(text, again) == 0 && x >= f->low && x <= f->high;
}

static uint64_t hash_tensor(uint64_t hash, const char *name, const dr_tensor *t)
{
    int64_t count = 1;
    hash = dr_lm_hash_text(hash, name);
    hash = dr_lm_hash(hash, t->shape, (size_t)t->rank * sizeof *t->shape);
    for (int32_t i = 0; i < t->rank; i++)
        count *= t->shape[i];
    return dr_lm_hash(hash, t->data, (size_t)count * dr_dtype_size(t->dtype));
}

static uint64_t hash_note(uint64_t hash, const char *key, const char *value)
{
    return dr_lm_hash_text(dr_lm_hash_text(hash, key), value);
}

dr_status dr_lm_checkpoint_path(const char *path, const char *name, char *out, size_t size)
{
    struct stat st;
    bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    int n = snprintf(out, size, "%s%s%s", path, folder ? "/" : "", folder ? name : "");
    if (n < 0 || (size_t)n >= size)
        return dr_lm_fail(DR_ERR_ARG, "%.80s...: the path is too long", path);
    return DR_OK;
}

/* ------------------------------------------------------------------------ */
/* Reading                                                                  */
/* ------------------------------------------------------------------------ */

static dr_status note_of(const dr_weights *w, const char *path, const char *key, const char **out)
{
    *out = dr_weights_metadata(w, key);
    if (*out == NULL)
        return dr_lm_fail(DR_ERR_FORMAT, "%s: not a checkpoint of deltarule train, the note \"%s\" is "
                          "missing", path, key);
    return DR_OK;
}

static dr_status read_checkpoint(const char *path, dr_lm_checkpoint *c)
{
    const dr_weights *w = c->weights;
    contents all = {0};
    uint64_t hash = 0;
    const char *text, *sum;
    char again[VALUE];
    LM_TRY(note_of(w, path, "checksum", &sum));
    LM_TRY(note_of(w, path, "arch", &text));
    hash = hash_note(hash, "arch", text);
    for (size_t i = 0; i < FIELDS; i++) {
        const char *value;
        LM_TRY(note_of(w, path, fields[i].key, &value));
        hash = hash_note(hash, fields[i].key, value);
        if (!parse_field(&fields[i], value, &all))
            return dr_lm_fail(DR_ERR_FORMAT, "%s: damaged, the note \"%s\" is \"%.40s\"", path,
                              fields[i].key, value);
    }
    for (int64_t i = 0; i < dr_weights_count(w); i++) {
        dr_tensor t;
        LM_LIBRARY(dr_weights_find(w, dr_weights_name(w, i), &t));
        hash = hash_tensor(hash, dr_weights_name(w, i), &t);
    }
    snprintf(again, sizeof again, "%016" PRIx64, hash);
    if (strcmp(again, sum) != 0)
        return dr_lm_fail(DR_ERR_FORMAT, "%s: damaged, its contents do not match its checksum", path);
    LM_TRY(dr_lm_config_arch(text, &all.config));
    c->config = all.config;
    c->training = all.training;
    return DR_OK;
}

dr_status dr_lm_checkpoint_open(const char *path, dr_lm_checkpoint *out)
{
    *out = (dr_lm_checkpoint){0};
    LM_LIBRARY(dr_weights_open(path, &out->weights));
    dr_status status = read_checkpoint(path, out);
    if (status != DR_OK)
        dr_lm_checkpoint_close(out);
    return status;
}

void dr_lm_checkpoint_close(dr_lm_checkpoint *checkpoint)
{
    dr_weights_close(checkpoint->weights);
    checkpoint->weights = NULL;
}

static const char *const prefixes[] = {"", "adamw.m.", "adamw.v."}; /* weights, m, v */

static dr_status read_block(const dr_weights *w, const dr_lm_model *model, const char *prefix,
                            float *block)
{
    for (int32_t i = 0; i < model->n_params; i++) {
        const dr_lm_param *p = &model->params[i];
        char name[DR_LM_MAX_NAME + 16];
        dr_tensor t;
        snprintf(name, sizeof name, "%s%s", prefix, p->name);
        LM_LIBRARY(dr_weights_find(w, name, &t));
        if (t.dtype != DR_F32 || t.rank != p->rank ||
            memcmp(t.shape, p->shape, (size_t)t.rank * sizeof *t.shape) != 0)
            return dr_lm_fail(DR_ERR_FORMAT, "tensor \"%s\": its shape does not fit the notes of the "
                              "checkpoint", name);
        memcpy(block + p->at, t.data, (size_t)p->count * sizeof *block);
    }
    return DR_OK;
}

dr_status dr_lm_checkpoint_read(const dr_lm_checkpoint *checkpoint, const dr_lm_model *model,
                                float *m, float *v)
{
    float *const blocks[] = {model->weights, m, v};
    for (size_t b = 0; b < LM_COUNT(blocks); b++)
        if (blocks[b] != NULL)
            LM_TRY(read_block(checkpoint->weights, model, prefixes[b], blocks[b]));
    return DR_OK;
}

/* ------------------------------------------------------------------------ */
/* Writing                                                                  */
/* ------------------------------------------------------------------------ */

typedef struct writer {
    char (*names)[DR_LM_MAX_NAME + 16];
    dr_weights_entry *entries;
    int64_t n_entries;
    char values[FIELDS][VALUE], arch[ARCH], checksum[VALUE];
    dr_weights_note notes[NOTES];
} writer;

static dr_status list_entries(writer *w, const dr_lm_model *model, const float *const *blocks)
{
    const int64_t n = (int64_t)model->n_params * (int64_t)LM_COUNT(prefixes);
    w->entries = dr_lm_alloc(n, sizeof *w->entries, "checkpoint");
    w->names = dr_lm_alloc(n, sizeof *w->names, "checkpoint");
    if (w->entries == NULL || w->names == NULL)
        return DR_ERR_MEMORY;
    for (size_t b = 0; b < LM_COUNT(prefixes); b++)
        for (int32_t i = 0; i < model->n_params; i++) {
            const dr_lm_param *p = &model->params[i];
            char *name = w->names[w->n_entries];
            snprintf(name, sizeof *w->names, "%s%s", prefixes[b], p->name);
            dr_weights_entry *e = &w->entries[w->n_entries++];
            e->name = name;
            e->tensor = dr_tensor_make((float *)blocks[b] + p->at, DR_F32, p->rank, p->shape[0],
                                       p->shape[1], p->shape[2], p->shape[3]);
        }
    return DR_OK;
}

static void list_notes(writer *w, const contents *c)
{
    uint64_t hash = 0;
    int n = 0;
    dr_lm_config_arch_text(&c->config, w->arch, sizeof w->arch);
    hash = hash_note(hash, "arch", w->arch);
    w->notes[n++] = (dr_weights_note){"format", "pt"}; /* what loaders of other programs expect */
    w->notes[n++] = (dr_weights_note){"arch", w->arch};
    for (size_t i = 0; i < FIELDS; i++) {
        print_field(&fields[i], c, w->values[i]);
        hash = hash_note(hash, fields[i].key, w->values[i]);
        w->notes[n++] = (dr_weights_note){fields[i].key, w->values[i]};
    }
    for (int64_t i = 0; i < w->n_entries; i++)
        hash = hash_tensor(hash, w->entries[i].name, &w->entries[i].tensor);
    snprintf(w->checksum, sizeof w->checksum, "%016" PRIx64, hash);
    w->notes[n++] = (dr_weights_note){"checksum", w->checksum};
}

static dr_status replace(const char *from, const char *to)
{
    if (rename(from, to) != 0)
        return dr_lm_fail(DR_ERR_IO, "%s: cannot be renamed to %s: %s", from, to, strerror(errno));
    return DR_OK;
}

static dr_status flush_folder(const char *folder)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool flushed = fd >= 0 && (fsync(fd) == 0 || errno == EINVAL);
    int error = errno;
    if (fd >= 0)
        close(fd);
    return flushed ? DR_OK : dr_lm_fail(DR_ERR_IO, "%s: cannot be flushed: %s", folder,
                                        strerror(error));
}

/* The new file is complete on the device before either of the old ones is touched. */
static dr_status put_in_place(const writer *w, const char *folder, bool keep)
{
    char fresh[4096], current[4096], previous[4096];
    LM_TRY(dr_lm_checkpoint_path(folder, "new.safetensors", fresh, sizeof fresh));
    LM_TRY(dr_lm_checkpoint_path(folder, DR_LM_CURRENT, current, sizeof current));
    LM_TRY(dr_lm_checkpoint_path(folder, DR_LM_PREVIOUS, previous, sizeof previous));
    LM_LIBRARY(dr_weights_write(fresh, w->entries, w->n_entries, w->notes, NOTES));
    if (keep && access(current, F_OK) == 0)
        LM_TRY(replace(current, previous));
    LM_TRY(replace(fresh, current));
    return flush_folder(folder);
}

dr_status dr_lm_checkpoint_save(const char *folder, const dr_lm_model *model, const float *m,
                                const float *v, const dr_lm_training *training, bool keep)
{
    const float *const blocks[] = {model->weights, m, v};
    const contents c = {model->config, *training};
    writer *w = dr_lm_alloc(1, sizeof *w, "checkpoint");
    if (w == NULL)
        return DR_ERR_MEMORY;
    dr_status status = list_entries(w, model, blocks);
    if (status == DR_OK) {
        list_notes(w, &c);
        status = put_in_place(w, folder, keep);
    }
    free(w->entries);
    free(w->names);
    free(w);
    return status;
}
