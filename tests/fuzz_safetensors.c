/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_safetensors.c - libFuzzer target: any bytes as a safetensors file. What opens must be
 * readable to its last byte and, where it has views of all its tensors, must survive being
 * written and read again; what is refused must come with a sentence. Built by the option
 * DR_FUZZ, or alone; with DR_FUZZ_MAIN it reads the files named on its command line instead:
 *
 *   clang -g -fsanitize=fuzzer,address,undefined -D_GNU_SOURCE -Iinclude -Isrc \
 *       tests/fuzz_safetensors.c src/io/safetensors*.c src/base/status.c -lpthread \
 *       -o fuzz_safetensors
 *   gcc -g -fsanitize=address,undefined -DDR_FUZZ_MAIN -D_GNU_SOURCE -Iinclude -Isrc \
 *       tests/fuzz_safetensors.c src/io/safetensors*.c src/base/status.c -lpthread \
 *       -o read_safetensors
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* memfd_create */
#endif
#include "base/base.h"

#include <deltarule/weights.h>

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool truth)
{
    if (!truth)
        abort();
}

static size_t view_bytes(const dr_tensor *t)
{
    size_t bytes = dr_dtype_size(t->dtype);
    for (int32_t i = 0; i < t->rank; i++)
        bytes *= (size_t)t->shape[i];
    return bytes;
}

static volatile unsigned char last_read;

/* Every tensor to its last byte; false if one has no view. */
static bool read_all(const dr_weights *w, dr_weights_entry *entries)
{
    bool all = true;
    for (int64_t i = 0; i < dr_weights_count(w); i++) {
        entries[i].name = dr_weights_name(w, i);
        must(entries[i].name != NULL);
        dr_tensor *t = &entries[i].tensor;
        dr_status status = dr_weights_find(w, entries[i].name, t);
        must(status == DR_OK || status == DR_ERR_SUPPORT);
        all = all && status == DR_OK;
        for (size_t b = 0; status == DR_OK && b < view_bytes(t); b++)
            last_read = ((unsigned char *)t->data)[b];
    }
    return all;
}

static void write_and_compare(const dr_weights_entry *entries, int64_t n)
{
    char path[64];
    snprintf(path, sizeof path, "/dev/shm/fuzz_safetensors.%ld", (long)getpid());
    dr_weights *w;
    must(dr_weights_write(path, entries, n, NULL, 0) == DR_OK);
    must(dr_weights_open(path, &w) == DR_OK && dr_weights_count(w) == n);
    for (int64_t i = 0; i < n; i++) {
        dr_tensor t;
        must(dr_weights_find(w, entries[i].name, &t) == DR_OK);
        must(view_bytes(&t) == view_bytes(&entries[i].tensor));
        must(view_bytes(&t) == 0 || memcmp(t.data, entries[i].tensor.data, view_bytes(&t)) == 0);
    }
    dr_weights_close(w);
    unlink(path);
}

static void try_file(const char *path)
{
    dr_weights *w = NULL;
    if (dr_weights_open(path, &w) != DR_OK) {
        must(w == NULL && strlen(dr_last_error()) > 10);
        return;
    }
    int64_t n = dr_weights_count(w);
    dr_weights_entry *entries = calloc((size_t)n + 1, sizeof *entries);
    must(entries != NULL);
    dr_weights_metadata(w, "format");
    if (read_all(w, entries))
        write_and_compare(entries, n);
    free(entries);
    dr_weights_close(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[64];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    must(fd >= 0);
    must(write(fd, data, size) == (ssize_t)size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    try_file(path);
    close(fd);
    return 0;
}

#ifdef DR_FUZZ_MAIN
int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        try_file(argv[i]);
        printf("%s: %s\n", argv[i], dr_last_error()[0] != '\0' ? dr_last_error() : "well");
    }
    return 0;
}
#endif
