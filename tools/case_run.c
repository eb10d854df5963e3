/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case_run.c - runs of cases, see cases.h: the table of operations, tensors declared, laid out
 * and filled, the call made, outputs read back. What an operation reads and writes is told once,
 * in its opener; the rest is the same for all of them.
 */
#include "case_run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const dr_case_row *const rows[DR_CASE_OPS_] = {
    [DR_CASE_DELTA] = &dr_case_delta,
    [DR_CASE_STEP] = &dr_case_step,
    [DR_CASE_STAGES] = &dr_case_stages,
    [DR_CASE_CP] = &dr_case_cp,
    [DR_CASE_CONV] = &dr_case_conv,
    [DR_CASE_CONV_STEP] = &dr_case_conv_step,
    [DR_CASE_GATE] = &dr_case_gate,
    [DR_CASE_BETA] = &dr_case_beta,
    [DR_CASE_L2NORM] = &dr_case_l2norm,
    [DR_CASE_NORM] = &dr_case_norm,
    [DR_CASE_MATMUL] = &dr_case_matmul,
    [DR_CASE_LAYER] = &dr_case_layer,
    [DR_CASE_LAYER_STEP] = &dr_case_layer_step,
};

/* ------------------------------------------------------------------------ */
/* Elements                                                                 */
/* ------------------------------------------------------------------------ */

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* Adds half of the last kept bit, ties to even, and drops the bits below it. */
static uint32_t keep_high(uint32_t u, int drop)
{
    return (u + (1u << (drop - 1)) - 1 + (u >> drop & 1)) >> drop;
}

static uint16_t to_bf16(float x) { return isnan(x) ? 0x7fc0 : (uint16_t)keep_high(bits_of(x), 16); }

static uint16_t to_f16(float x)
{
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    float a = fabsf(x);
    if (isnan(x))
        return 0x7e00;
    if (a >= 65520.0f)
        return sign | 0x7c00;
    if (a < 0x1p-14f) /* multiples of 2^-24 */
        return sign | (uint16_t)lrintf(a * 0x1p24f);
    return sign | (uint16_t)(keep_high(bits_of(a), 13) - (112u << 10));
}

static float from_f16(uint16_t h)
{
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float a = exponent == 0    ? (float)fraction * 0x1p-24f
              : exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                               : ldexpf((float)(1024 + fraction), exponent - 25);
    return h & 0x8000 ? -a : a;
}

static void store(void *at, dr_dtype dtype, double x)
{
    switch (dtype) {
    case DR_F32:
        *(float *)at = (float)x;
        break;
    case DR_F64:
        *(double *)at = x;
        break;
    case DR_BF16:
        *(uint16_t *)at = to_bf16((float)x);
        break;
    case DR_F16:
        *(uint16_t *)at = to_f16((float)x);
        break;
    }
}

static double load(const void *at, dr_dtype dtype)
{
    switch (dtype) {
    case DR_F32:
        return *(const float *)at;
    case DR_F64:
        return *(const double *)at;
    case DR_BF16:
        return float_of((uint32_t) * (const uint16_t *)at << 16);
    case DR_F16:
        return from_f16(*(const uint16_t *)at);
    }
    return NAN;
}

static double rounded(double x, dr_dtype dtype)
{
    double raw; /* room for any element */
    store(&raw, dtype, x);
    return load(&raw, dtype);
}

/* Offset in elements of the i-th element in row-major order. */
static int64_t offset_of(const dr_tensor *t, int64_t i)
{
    int64_t at = 0;
    for (int32_t axis = t->rank - 1; axis >= 0; axis--) {
        at += i % t->shape[axis] * t->stride[axis];
        i /= t->shape[axis];
    }
    return at;
}

static char *element(const dr_tensor *t, int64_t i)
{
    return (char *)t->data + offset_of(t, i) * (int64_t)dr_dtype_size(t->dtype);
}

double dr_case_element(const dr_tensor *view, int64_t i)
{
    return load(element(view, i), view->dtype);
}

void dr_case_set_element(const dr_tensor *view, int64_t i, double x)
{
    store(element(view, i), view->dtype, x);
}

/* ------------------------------------------------------------------------ */
/* Slots                                                                    */
/* ------------------------------------------------------------------------ */

/* Strides of a layout; *before and *total are the elements ahead of the first one and in all. */
static void lay_out(dr_tensor *t, dr_case_layout layout, int64_t *before, int64_t *total)
{
    int64_t step = layout == DR_CASE_FREE ? 2 : 1;
    *before = 0;
    *total = 1;
    for (int32_t i = 0; i < t->rank; i++) {
        int32_t axis = layout == DR_CASE_FREE ? i : t->rank - 1 - i;
        int64_t n = t->shape[axis] > 1 ? t->shape[axis] : 1;
        t->stride[axis] = step;
        *total += (n - 1) * step;
        if (layout == DR_CASE_FREE && axis == 1) {
            *before = (n - 1) * step;
            t->stride[axis] = -step;
        }
        step = step * n + (layout == DR_CASE_COMPACT ? 0 : 3);
    }
}

char *dr_case_place(dr_tensor *view, dr_case_layout layout, size_t *bytes)
{
    int64_t before, total;
    lay_out(view, layout, &before, &total);
    const size_t item = dr_dtype_size(view->dtype);
    *bytes = (size_t)total * item;
    char *memory = malloc(*bytes);
    if (memory == NULL)
        return NULL;
    memset(memory, 0xff, *bytes); /* NaN in every element type */
    view->data = memory + (size_t)before * item;
    return memory;
}

static void fill(dr_case_run *run, dr_case_slot *s)
{
    enum { BLOCK = 1024 };
    double block[BLOCK];
    const bool compact = s->bytes == (size_t)s->info.count * dr_dtype_size(s->view.dtype);
    for (int64_t first = 0; first < s->info.count; first += BLOCK) {
        int64_t n = s->info.count - first < BLOCK ? s->info.count - first : BLOCK;
        run->source(run->user, &s->info, first, n, block);
        const size_t item = dr_dtype_size(s->view.dtype);
        char *at = element(&s->view, first); /* of compact tensors the rest follows */
        for (int64_t i = 0; i < n; i++, at += item)
            store(compact ? at : element(&s->view, first + i), s->view.dtype,
                  rounded(block[i], s->info.dtype));
    }
}

void dr_case_declare(dr_case_run *run, dr_tensor *view, const char *name, int role, dr_dtype dtype,
                     dr_case_extents shape, dr_case_values values, double span)
{
    if (run->status != DR_OK)
        return;
    if (run->count == DR_CASE_MAX_TENSORS) {
        run->status = DR_ERR_MEMORY;
        return;
    }
    dr_case_slot *s = &run->slots[run->count];
    snprintf(s->info.name, sizeof s->info.name, "%s", name);
    s->info.output = (role & (DR_CASE_OUTPUT | DR_CASE_GRADIENT)) != 0;
    s->info.adjoint = (role & DR_CASE_GRADIENT) != 0;
    s->info.dtype = dtype;
    s->info.rank = shape.rank;
    s->info.count = 1;
    s->info.values = values;
    s->info.span = span;
    s->view.dtype = run->wide && !(role & DR_CASE_FIXED) ? DR_F64 : dtype;
    s->view.rank = shape.rank;
    for (int32_t i = 0; i < shape.rank; i++) {
        s->info.shape[i] = s->view.shape[i] = shape.n[i];
        s->info.count *= shape.n[i];
    }
    s->memory =
        dr_case_place(&s->view, role & DR_CASE_FIXED ? DR_CASE_COMPACT : run->c.layout, &s->bytes);
    if (s->memory == NULL) {
        run->status = DR_ERR_MEMORY;
        return;
    }
    run->count++;
    if (!s->info.output)
        fill(run, s);
    *view = s->view;
}

void dr_case_alias(dr_case_run *run, dr_tensor *view, const char *name, const char *input)
{
    int at = run->status == DR_OK ? dr_case_find(run, input) : -1;
    if (at < 0)
        return;
    dr_case_slot *s = &run->slots[run->count++];
    *s = run->slots[at];
    s->memory = NULL;
    s->info.output = true;
    snprintf(s->info.name, sizeof s->info.name, "%s", name);
    *view = s->view;
}

void dr_case_input(dr_case_run *run, dr_tensor *view, const char *name, dr_dtype dtype,
                   dr_case_extents e, dr_case_values values, double span)
{
    dr_case_declare(run, view, name, DR_CASE_INPUT, dtype, e, values, span);
}

void dr_case_output(dr_case_run *run, dr_tensor *view, const char *name, dr_dtype dtype,
                    dr_case_extents e)
{
    dr_case_declare(run, view, name, DR_CASE_OUTPUT, dtype, e, DR_VALUES_EVEN, 0);
}

void dr_case_gradient(dr_case_run *run, dr_tensor *view, const char *name, dr_dtype dtype,
                      dr_case_extents e, bool always)
{
    if (always || !(run->c.flags & DR_CASE_FEW))
        dr_case_declare(run, view, name, DR_CASE_GRADIENT, dtype, e, DR_VALUES_EVEN, 0);
}

void dr_case_fixed(dr_case_run *run, dr_tensor *view, const char *name, int role, dr_case_extents e)
{
    dr_case_declare(run, view, name, role | DR_CASE_FIXED, DR_F32, e, DR_VALUES_EVEN, 1);
}

void dr_case_fail(dr_case_run *run, dr_status status)
{
    if (run->status == DR_OK)
        run->status = status;
}

int64_t dr_case_sequences(const dr_case *c) { return c->offsets != NULL ? c->N : c->B; }

int64_t dr_case_pool(dr_case_run *run, const int32_t **index)
{
    int64_t N = dr_case_sequences(&run->c);
    if (!(run->c.flags & DR_CASE_POOL))
        return N;
    run->state_index = malloc((size_t)N * sizeof *run->state_index);
    if (run->state_index == NULL) {
        dr_case_fail(run, DR_ERR_MEMORY);
        return N;
    }
    for (int64_t n = 0; n < N; n++)
        run->state_index[n] = n == 1 ? -1 : (int32_t)(N + 1 - n);
    *index = run->state_index;
    return N + 2;
}

void dr_case_poison(const dr_buffers *b)
{
    memset(b->saved, 0xff, b->saved_bytes);
    memset(b->scratch, 0xff, b->scratch_bytes);
}

dr_buffers dr_case_buffers(const dr_case_run *run, dr_buffers b)
{
    if (run->c.flags & DR_CASE_NO_SAVED) {
        b.saved = NULL;
        b.saved_bytes = 0;
    }
    return b;
}

/* ------------------------------------------------------------------------ */
/* Runs                                                                     */
/* ------------------------------------------------------------------------ */

const char *dr_case_op_name(dr_case_op op)
{
    return op > 0 && op < DR_CASE_OPS_ ? rows[op]->name : NULL;
}

int dr_case_trips(const dr_case *c)
{
    const uint32_t forward_only = DR_CASE_IN_PLACE | DR_CASE_POOL | DR_CASE_NO_SAVED;
    return c->flags & forward_only ? 1 : rows[c->op]->trips;
}

dr_status dr_case_open(const dr_case *c, const dr_context *ctx, bool wide, dr_case_source *source,
                       void *user, dr_case_run **out)
{
    *out = NULL;
    dr_case_forget();
    dr_case_run *run = calloc(1, sizeof *run);
    if (run == NULL)
        return DR_ERR_MEMORY;
    run->c = *c;
    dr_case *d = &run->c;
    d->B = d->B ? d->B : 1;
    d->HV = d->HV ? d->HV : d->H;
    d->dilation = d->dilation ? d->dilation : 1;
    d->width = d->width ? d->width : 4;
    d->dtype = d->dtype ? d->dtype : DR_F32;
    d->gate_dtype = d->gate_dtype ? d->gate_dtype : DR_F32;
    d->state_dtype = d->state_dtype ? d->state_dtype : DR_F32;
    run->ctx = ctx;
    run->wide = wide;
    run->source = source;
    run->user = user;
    run->info = (dr_plan_info)DR_PLAN_INFO_INIT;
    run->buffers = (dr_buffers)DR_BUFFERS_INIT;
    dr_status status = rows[d->op]->open(run);
    if (status != DR_OK) {
        dr_case_close(run);
        return status;
    }
    *out = run;
    return DR_OK;
}

dr_status dr_case_call(dr_case_run *run, dr_direction dir)
{
    dr_case_forget();
    return rows[run->c.op]->call(run, dir);
}

void dr_case_close(dr_case_run *run)
{
    if (run == NULL)
        return;
    dr_case_world_close(run->world);
    dr_buffers_destroy(&run->buffers);
    dr_plan_destroy(run->plan);
    dr_layer_plan_destroy(run->layer_plan);
    dr_layer_destroy(run->layer);
    for (int i = 0; i < run->count; i++)
        free(run->slots[i].memory);
    free(run->state_index);
    free(run->mask);
    free(run);
}

int dr_case_tensors(const dr_case_run *run) { return run->count; }

const dr_case_tensor *dr_case_tensor_at(const dr_case_run *run, int index)
{
    return &run->slots[index].info;
}

int dr_case_find(const dr_case_run *run, const char *name)
{
    for (int i = 0; i < run->count; i++)
        if (strcmp(run->slots[i].info.name, name) == 0)
            return i;
    return -1;
}

void dr_case_read(const dr_case_run *run, int index, double *out)
{
    const dr_case_slot *s = &run->slots[index];
    for (int64_t i = 0; i < s->info.count; i++)
        out[i] = load(element(&s->view, i), s->view.dtype);
}

int32_t dr_case_chunk(const dr_case_run *run) { return run->info.chunk; }

size_t dr_case_workspace(const dr_case_run *run, dr_direction dir)
{
    bool saves = !(run->c.flags & DR_CASE_NO_SAVED);
    if (run->world != NULL)
        return dr_case_world_workspace(run->world);
    if (run->layer_plan != NULL)
        return run->buffers.scratch_bytes + (saves ? run->buffers.saved_bytes : 0);
    size_t scratch = dir == DR_FORWARD ? run->info.forward_scratch : run->info.backward_scratch;
    size_t staged = run->info.staged_scratch;
    return (saves ? run->info.saved_bytes : 0) + (run->c.op == DR_CASE_STAGES ? staged : scratch);
}

/* ------------------------------------------------------------------------ */
/* Damage                                                                   */
/* ------------------------------------------------------------------------ */

/* FNV-1a over the memory of an input, or over the gaps of an output. */
static uint64_t fingerprint(const dr_case_slot *s)
{
    char *copy = malloc(s->bytes);
    if (copy == NULL)
        return 0;
    memcpy(copy, s->memory, s->bytes);
    size_t item = dr_dtype_size(s->view.dtype);
    for (int64_t i = 0; s->info.output && i < s->info.count; i++)
        memset(copy + (element(&s->view, i) - s->memory), 0, item);
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < s->bytes; i++)
        hash = (hash ^ (unsigned char)copy[i]) * 0x100000001b3u;
    free(copy);
    return hash;
}

static bool is_shared(const dr_case_run *run, const dr_case_slot *s)
{
    for (int i = 0; i < run->count; i++)
        if (run->slots[i].memory == NULL && run->slots[i].view.data == s->view.data)
            return true;
    return false;
}

void dr_case_watch(dr_case_run *run)
{
    for (int i = 0; i < run->count; i++)
        if (!is_shared(run, &run->slots[i]))
            run->slots[i].guarded = fingerprint(&run->slots[i]);
}

const char *dr_case_damage(const dr_case_run *run)
{
    for (int i = 0; i < run->count; i++)
        if (!is_shared(run, &run->slots[i]) && run->slots[i].guarded != fingerprint(&run->slots[i]))
            return run->slots[i].info.name;
    return NULL;
}
