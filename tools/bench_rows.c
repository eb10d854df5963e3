/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_rows.c - what `deltarule bench` measures: the operations with their nominal work, and the
 * standard rows; see bench.h. Work is what the formulas ask for, whatever a backend computes on
 * top, so that figures of different backends compare.
 */
#include "bench.h"

#include <stdlib.h>
#include <string.h>

const dr_tool_word dr_bench_passes[] = {{"forward", DR_BENCH_FORWARD},
                                        {"backward", DR_BENCH_BACKWARD},
                                        {"step", DR_BENCH_STEP},
                                        {NULL, 0}};
const dr_tool_word dr_bench_keeps[] = {{"none", DR_BENCH_KEEP_NONE},
                                       {"inputs", DR_KEEP_INPUTS},
                                       {"factors", DR_KEEP_FACTORS},
                                       {"states", DR_KEEP_STATES},
                                       {NULL, 0}};

/* ------------------------------------------------------------------------ */
/* Work                                                                     */
/* ------------------------------------------------------------------------ */

static double elements(const dr_bench_row *r) { return (double)r->B * (double)r->T; }
double dr_bench_token_heads(const dr_bench_row *r) { return elements(r) * (double)r->HV; }
static double rows_of(const dr_bench_row *r) { return dr_bench_token_heads(r) * (double)r->V; }
static double item(const dr_bench_row *r) { return (double)dr_dtype_size(r->dtype); }
static double state(const dr_bench_row *r) { return (double)r->K * (double)r->V; }
/* Channels of the convolution of a layer with these heads; its hidden width. */
int64_t dr_bench_channels(const dr_bench_row *r) { return 2 * r->H * r->K + r->HV * r->V; }
static int64_t hidden(const dr_bench_row *r) { return r->HV * r->V; }

static double delta_flops(const dr_bench_row *r)
{
    return (r->pass == DR_BENCH_BACKWARD ? 24 : 8) * state(r) * dr_bench_token_heads(r);
}

/* Decoding: every state is read and written, every input read. */
static double step_bytes(const dr_bench_row *r)
{
    double tokens = elements(r) * (2.0 * (double)(r->H * r->K) + 2.0 * (double)(r->HV * r->V));
    return 8 * state(r) * (double)(r->B * r->HV) + item(r) * tokens;
}

static double conv_flops(const dr_bench_row *r)
{
    return (r->pass == DR_BENCH_BACKWARD ? 24 : 8) * elements(r) *
           (double)dr_bench_channels(r); /* width 4 */
}

static double conv_bytes(const dr_bench_row *r)
{
    double states =
        r->pass == DR_BENCH_STEP ? 2.0 * 4 * 3 * (double)(r->B * dr_bench_channels(r)) : 0;
    return (r->pass == DR_BENCH_BACKWARD ? 3 : 2) * item(r) * elements(r) *
               (double)dr_bench_channels(r) +
           states;
}

static double norm_flops(const dr_bench_row *r)
{
    return (r->pass == DR_BENCH_BACKWARD ? 16 : 8) * rows_of(r);
}
static double norm_bytes(const dr_bench_row *r)
{
    return (r->pass == DR_BENCH_BACKWARD ? 5 : 3) * item(r) * rows_of(r);
}

static double gate_flops(const dr_bench_row *r)
{
    return (r->pass == DR_BENCH_BACKWARD ? 8 : 4) * dr_bench_token_heads(r) * (double)r->K;
}

static double gate_bytes(const dr_bench_row *r) /* g and dg are f32 */
{
    return (r->pass == DR_BENCH_BACKWARD ? 2 * item(r) + 4 : item(r) + 4) *
           dr_bench_token_heads(r) * (double)r->K;
}

static double layer_flops(const dr_bench_row *r, double decay_columns)
{
    double columns =
        (double)dr_bench_channels(r) + 2 * (double)hidden(r) + (double)r->HV + decay_columns;
    double products = 2 * elements(r) * (double)hidden(r) * columns;
    return (r->pass == DR_BENCH_BACKWARD ? 2 : 1) * products + delta_flops(r);
}

static double layer_gdn_flops(const dr_bench_row *r) { return layer_flops(r, (double)r->HV); }
static double layer_kda_flops(const dr_bench_row *r)
{
    return layer_flops(r, (double)(r->HV * r->K));
}

/* An operation: the case of each pass, work, and what it is limited by. */
static const struct operation {
    const char *name;
    dr_case_op op[DR_BENCH_PASSES]; /* of each pass; 0: there is none */
    dr_case c;                      /* what does not depend on the row */
    bool keeps;
    double (*flops)(const dr_bench_row *r);
    double (*bytes)(const dr_bench_row *r); /* NULL: limited by arithmetic (but for decoding) */
} operations[] = {
    {"gdn",
     {DR_CASE_DELTA, DR_CASE_DELTA, DR_CASE_STEP},
     {.variant = DR_GDN, .gate = DR_GATE_LOG, .beta = DR_BETA_VALUE, .decay = .1},
     true,
     delta_flops,
     NULL},
    {"kda",
     {DR_CASE_DELTA, DR_CASE_DELTA, DR_CASE_STEP},
     {.variant = DR_KDA, .gate = DR_GATE_LOG, .beta = DR_BETA_VALUE, .decay = .1},
     true,
     delta_flops,
     NULL},
    {"conv",
     {DR_CASE_CONV, DR_CASE_CONV, DR_CASE_CONV_STEP},
     {.width = 4, .activation = DR_ACT_SILU},
     false,
     conv_flops,
     conv_bytes},
    {"norm",
     {DR_CASE_NORM, DR_CASE_NORM, 0},
     {.activation = DR_ACT_SILU},
     false,
     norm_flops,
     norm_bytes},
    {"gate",
     {DR_CASE_GATE, DR_CASE_GATE, 0},
     {.variant = DR_KDA, .gate = DR_GATE_SOFTPLUS},
     false,
     gate_flops,
     gate_bytes},
    {"layer-gdn",
     {DR_CASE_LAYER, DR_CASE_LAYER, 0},
     {.variant = DR_GDN, .gate = DR_GATE_SOFTPLUS, .flags = DR_CASE_NO_STATE},
     true,
     layer_gdn_flops,
     NULL},
    {"layer-kda",
     {DR_CASE_LAYER, DR_CASE_LAYER, 0},
     {.variant = DR_KDA, .gate = DR_GATE_SOFTPLUS, .flags = DR_CASE_NO_STATE},
     true,
     layer_kda_flops,
     NULL},
};

static const struct operation *operation_of(const char *name)
{
    for (size_t i = 0; i < DR_TOOL_COUNT(operations); i++)
        if (strcmp(operations[i].name, name) == 0)
            return &operations[i];
    return NULL;
}

bool dr_bench_known(const char *op) { return operation_of(op) != NULL; }

bool dr_bench_keeps_something(const dr_bench_row *r)
{
    return operation_of(r->op)->keeps && r->pass != DR_BENCH_STEP;
}

double dr_bench_flops(const dr_bench_row *r)
{
    return operation_of(r->op)->flops(r) * (double)dr_bench_layers(r);
}

double dr_bench_bytes(const dr_bench_row *r)
{
    const struct operation *o = operation_of(r->op);
    const double bytes = o->bytes != NULL           ? o->bytes(r)
                         : r->pass == DR_BENCH_STEP ? step_bytes(r)
                                                    : 0;
    return bytes * (double)dr_bench_layers(r);
}

int64_t dr_bench_layers(const dr_bench_row *r) { return r->layers > 0 ? r->layers : 1; }

/* ------------------------------------------------------------------------ */
/* Rows as cases                                                            */
/* ------------------------------------------------------------------------ */

/* Documents of the lengths of a row, in an order that looks mixed and is always the same. */
static bool cut_documents(const dr_bench_row *r, dr_case *c, int64_t **offsets)
{
    const int64_t spread = r->longest - r->shortest + 1;
    int64_t n = 0, *o = malloc((size_t)(r->T / r->shortest + 2) * sizeof *o);
    if (o == NULL)
        return false;
    for (o[0] = 0; o[n] < r->T; n++) {
        const int64_t end = o[n] + r->shortest + n * 7919 % spread;
        o[n + 1] = end < r->T ? end : r->T;
    }
    c->offsets = *offsets = o;
    c->N = n;
    return true;
}

bool dr_bench_case(const dr_bench_row *r, dr_case *c, int64_t **offsets)
{
    const struct operation *o = operation_of(r->op);
    *offsets = NULL;
    *c = o->c;
    c->name = r->op;
    c->op = o->op[r->pass];
    c->B = r->B;
    c->T = r->T;
    c->H = (int32_t)r->H;
    const bool conv = c->op == DR_CASE_CONV || c->op == DR_CASE_CONV_STEP;
    c->HV = (int32_t)(conv ? dr_bench_channels(r) : r->HV);
    c->K = (int32_t)r->K;
    c->V = (int32_t)r->V;
    c->hidden = (int32_t)hidden(r);
    c->dtype = r->dtype;
    c->keep = r->keep == DR_BENCH_KEEP_NONE ? DR_KEEP_INPUTS : (dr_keep)r->keep;
    if (r->keep == DR_BENCH_KEEP_NONE && r->pass == DR_BENCH_FORWARD && o->keeps)
        c->flags |= DR_CASE_NO_SAVED;
    if (r->pass == DR_BENCH_STEP)
        c->flags |= DR_CASE_IN_PLACE;
    else if (!r->states)
        c->flags |= DR_CASE_NO_STATE;
    return r->shortest == 0 || cut_documents(r, c, offsets);
}

/* ------------------------------------------------------------------------ */
/* The standard rows                                                        */
/* ------------------------------------------------------------------------ */

#define FORWARD DR_BENCH_FORWARD
#define BACKWARD DR_BENCH_BACKWARD
#define STEP DR_BENCH_STEP
#define NONE DR_BENCH_KEEP_NONE
#define FACTORS DR_KEEP_FACTORS
#define STATES DR_KEEP_STATES
#define SHAPE(b, t, h, hv, k, v) .B = b, .T = t, .H = h, .HV = hv, .K = k, .V = v
#define USUAL SHAPE(1, 4096, 8, 8, 128, 128)
#define CHANNELS SHAPE(1, 4096, 16, 16, 128, 128)
#define LAYER SHAPE(1, 256, 8, 8, 128, 128)
static const dr_bench_row standard[] = {
    {"gdn", FORWARD, NONE, DR_F32, USUAL},
    {"gdn", FORWARD, FACTORS, DR_F32, USUAL},
    {"gdn", FORWARD, STATES, DR_F32, USUAL},
    {"gdn", BACKWARD, FACTORS, DR_F32, USUAL},
    {"gdn", BACKWARD, STATES, DR_F32, USUAL},
    {"kda", FORWARD, NONE, DR_F32, USUAL},
    {"kda", FORWARD, FACTORS, DR_F32, USUAL},
    {"kda", BACKWARD, FACTORS, DR_F32, USUAL},
    {"kda", BACKWARD, STATES, DR_F32, USUAL},
    /* element types */
    {"gdn", FORWARD, NONE, DR_BF16, USUAL},
    {"gdn", BACKWARD, FACTORS, DR_BF16, USUAL},
    {"kda", FORWARD, NONE, DR_BF16, USUAL},
    /* a chunk that is not full, documents, states that enter, grouped heads, other widths */
    {"gdn", FORWARD, NONE, DR_F32, SHAPE(1, 4111, 8, 8, 128, 128)},
    {"gdn", FORWARD, NONE, DR_F32, USUAL, .shortest = 100, .longest = 100},
    {"gdn", BACKWARD, FACTORS, DR_F32, USUAL, .shortest = 100, .longest = 100},
    {"gdn", FORWARD, NONE, DR_F32, USUAL, .shortest = 100, .longest = 500},
    {"gdn", BACKWARD, FACTORS, DR_F32, USUAL, .shortest = 100, .longest = 500},
    {"kda", FORWARD, NONE, DR_F32, USUAL, .shortest = 100, .longest = 500},
    {"gdn", FORWARD, NONE, DR_F32, USUAL, .states = true},
    {"gdn", FORWARD, NONE, DR_F32, SHAPE(1, 4096, 2, 8, 128, 128)},
    {"gdn", FORWARD, NONE, DR_F32, SHAPE(1, 4096, 8, 8, 64, 64)},
    {"gdn", FORWARD, NONE, DR_F32, SHAPE(1, 2048, 8, 8, 256, 256)},
    {"gdn", FORWARD, NONE, DR_F32, SHAPE(1, 4096, 8, 8, 96, 192)},
    /* threads, one long head, lengths in turn */
    {"gdn", FORWARD, NONE, DR_F32, SHAPE(1, 1024, 32, 32, 128, 128), .threads = 2},
    {"gdn", BACKWARD, FACTORS, DR_F32, SHAPE(1, 1024, 32, 32, 128, 128), .threads = 2},
    {"gdn", FORWARD, NONE, DR_F32, SHAPE(1, 32768, 1, 1, 128, 128)},
    {"gdn", FORWARD, NONE, DR_F32, SHAPE(1, 1000, 8, 8, 128, 128), .lengths = 100},
    /* decoding: the states of all layers are far larger than caches */
    {"gdn", STEP, NONE, DR_F32, SHAPE(1, 1, 32, 32, 128, 128), .layers = 64},
    {"kda", STEP, NONE, DR_F32, SHAPE(1, 1, 32, 32, 128, 128), .layers = 64},
    {"gdn", STEP, NONE, DR_F32, SHAPE(64, 1, 16, 32, 128, 128)},
    /* row operations: tensors larger than caches */
    {"conv", FORWARD, NONE, DR_F32, CHANNELS},
    {"conv", BACKWARD, NONE, DR_F32, CHANNELS},
    {"conv", STEP, NONE, DR_F32, SHAPE(64, 1, 16, 32, 128, 128)},
    {"norm", FORWARD, NONE, DR_F32, CHANNELS},
    {"norm", BACKWARD, NONE, DR_F32, CHANNELS},
    {"gate", FORWARD, NONE, DR_F32, CHANNELS},
    {"gate", BACKWARD, NONE, DR_F32, CHANNELS},
    {"layer-gdn", FORWARD, NONE, DR_F32, LAYER},
    {"layer-gdn", BACKWARD, FACTORS, DR_F32, LAYER},
    {"layer-kda", FORWARD, NONE, DR_F32, LAYER},
    {"layer-kda", BACKWARD, FACTORS, DR_F32, LAYER},
};

const dr_bench_row *dr_bench_standard(int index)
{
    return index >= 0 && (size_t)index < DR_TOOL_COUNT(standard) ? &standard[index] : NULL;
}
