/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cases.c - the table of cases, values from a seed, and the error budget; see cases.h. Every
 * row is there for one reason, which its name tells: lengths around chunk edges, odd widths,
 * every form of every option, every element type, strides, extreme decays.
 */
#include "cases.h"

#include <float.h>
#include <math.h>
#include <stddef.h>

/* ------------------------------------------------------------------------ */
/* The table                                                                */
/* ------------------------------------------------------------------------ */

static const int64_t documents[] = {0, 5, 6, 40, 70};
static const int64_t holes[] = {0, 0, 3, 3, 67, 131, 131, 140}; /* empty ones, and a tail */
static const int64_t singles[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
static const int64_t nothing[] = {0, 0, 0};

#define PACKED(o) .offsets = (o), .N = (int64_t)(sizeof(o) / sizeof(o)[0]) - 1
#define DIMS(b, t, h, hv, k, v) .B = b, .T = t, .H = h, .HV = hv, .K = k, .V = v
#define GDN(kind) .op = DR_CASE_##kind, .variant = DR_GDN
#define KDA(kind) .op = DR_CASE_##kind, .variant = DR_KDA
#define LOG(d) .gate = DR_GATE_LOG, .decay = d
#define SOFTPLUS .gate = DR_GATE_SOFTPLUS
#define BOUND(l) .gate = DR_GATE_LOWER_BOUND, .lower_bound = l
#define VALUE .beta = DR_BETA_VALUE
#define LOGIT(s) .beta = DR_BETA_LOGIT, .beta_scale = s
#define FLAGS(f) .flags = f
#define ALL_TYPES(t) .dtype = t, .gate_dtype = t, .state_dtype = t
#define FULL DR_CASE_FULL

/* clang-format off */
static const dr_case table[] = {
    /* lengths around the edges of chunks */
    {.name = "gdn-t1", GDN(DELTA), DIMS(1, 1, 2, 2, 16, 16), LOG(.3), VALUE},
    {.name = "gdn-t2", GDN(DELTA), DIMS(1, 2, 1, 1, 1, 1), LOG(.3), VALUE},
    {.name = "gdn-t15", GDN(DELTA), DIMS(1, 15, 1, 2, 16, 8), LOG(.3), VALUE},
    {.name = "gdn-t16", GDN(DELTA), DIMS(1, 16, 1, 1, 8, 16), LOG(.3), VALUE},
    {.name = "gdn-t17", GDN(DELTA), DIMS(1, 17, 1, 1, 8, 8), LOG(.3), VALUE},
    {.name = "gdn-t31", GDN(DELTA), DIMS(1, 31, 1, 2, 16, 16), LOG(.3), VALUE},
    {.name = "gdn-t32", GDN(DELTA), DIMS(1, 32, 2, 2, 16, 16), LOG(.3), VALUE},
    {.name = "gdn-t33", GDN(DELTA), DIMS(2, 33, 1, 2, 32, 16), LOG(.3), VALUE},
    {.name = "gdn-t63", GDN(DELTA), DIMS(1, 63, 1, 1, 32, 32), LOG(.1), VALUE},
    {.name = "gdn-t64", GDN(DELTA), DIMS(1, 64, 1, 2, 32, 32), LOG(.1), VALUE},
    {.name = "gdn-t65", GDN(DELTA), DIMS(3, 65, 1, 3, 16, 32), LOG(.1), VALUE},
    {.name = "gdn-t129", GDN(DELTA), DIMS(1, 129, 2, 2, 64, 64), LOG(.05), VALUE},
    {.name = "gdn-t0", GDN(DELTA), DIMS(1, 0, 1, 2, 8, 8), LOG(.3), VALUE},
    {.name = "kda-t1", KDA(DELTA), DIMS(1, 1, 2, 2, 16, 16), LOG(.3), VALUE},
    {.name = "kda-t2", KDA(DELTA), DIMS(1, 2, 1, 1, 1, 1), LOG(.3), VALUE},
    {.name = "kda-t16", KDA(DELTA), DIMS(1, 16, 1, 2, 16, 8), LOG(.3), VALUE},
    {.name = "kda-t17", KDA(DELTA), DIMS(2, 17, 1, 1, 8, 16), LOG(.3), VALUE},
    {.name = "kda-t32", KDA(DELTA), DIMS(1, 32, 1, 1, 32, 32), LOG(.3), VALUE},
    {.name = "kda-t33", KDA(DELTA), DIMS(1, 33, 2, 2, 16, 16), LOG(.3), VALUE},
    {.name = "kda-t64", KDA(DELTA), DIMS(2, 64, 1, 2, 32, 16), LOG(.1), VALUE},
    {.name = "kda-t65", KDA(DELTA), DIMS(1, 65, 1, 3, 16, 32), LOG(.1), VALUE},
    {.name = "kda-t129", KDA(DELTA), DIMS(1, 129, 2, 2, 64, 64), LOG(.05), VALUE},
    {.name = "kda-t0", KDA(DELTA), DIMS(1, 0, 1, 2, 8, 8), LOG(.3), VALUE},

    /* widths: odd, unequal, common, largest */
    {.name = "gdn-k5-v3", GDN(DELTA), DIMS(1, 40, 1, 2, 5, 3), LOG(.2), VALUE},
    {.name = "gdn-k24-v40", GDN(DELTA), DIMS(1, 70, 1, 2, 24, 40), LOG(.2), VALUE},
    {.name = "gdn-k17-v33", GDN(DELTA), DIMS(1, 50, 1, 1, 17, 33), LOG(.2), VALUE},
    {.name = "gdn-k127-v65", GDN(DELTA), DIMS(1, 66, 1, 1, 127, 65), LOG(.1), VALUE},
    {.name = "gdn-128", GDN(DELTA), DIMS(1, 100, 1, 2, 128, 128), LOG(.1), VALUE},
    {.name = "gdn-256", GDN(DELTA), DIMS(1, 70, 1, 1, 256, 256), LOG(.1), VALUE, FLAGS(FULL)},
    {.name = "kda-k5-v3", KDA(DELTA), DIMS(1, 40, 1, 2, 5, 3), LOG(.2), VALUE},
    {.name = "kda-k24-v40", KDA(DELTA), DIMS(1, 70, 1, 2, 24, 40), LOG(.2), VALUE},
    {.name = "kda-k17-v33", KDA(DELTA), DIMS(1, 50, 1, 1, 17, 33), LOG(.2), VALUE},
    {.name = "kda-k127-v65", KDA(DELTA), DIMS(1, 66, 1, 1, 127, 65), LOG(.1), VALUE},
    {.name = "kda-128", KDA(DELTA), DIMS(1, 100, 1, 2, 128, 128), LOG(.1), VALUE},
    {.name = "kda-256", KDA(DELTA), DIMS(1, 70, 1, 1, 256, 256), LOG(.1), VALUE, FLAGS(FULL)},
    {.name = "gdn-long", GDN(DELTA), DIMS(1, 1500, 1, 2, 32, 32), LOG(.01), VALUE, FLAGS(FULL)},
    {.name = "kda-long", KDA(DELTA), DIMS(1, 1500, 1, 2, 32, 32), LOG(.01), VALUE, FLAGS(FULL)},

    /* value heads */
    {.name = "gdn-grouped", GDN(DELTA), DIMS(2, 50, 2, 6, 16, 16), LOG(.2), VALUE},
    {.name = "gdn-tiled", GDN(DELTA), DIMS(1, 50, 2, 6, 16, 16), LOG(.2), VALUE,
     .head_map = DR_HEADS_TILED},
    {.name = "kda-grouped", KDA(DELTA), DIMS(2, 50, 2, 6, 16, 16), LOG(.2), VALUE},
    {.name = "kda-tiled", KDA(DELTA), DIMS(1, 50, 2, 4, 16, 16), LOG(.2), VALUE,
     .head_map = DR_HEADS_TILED},
    {.name = "gdn-many-heads", GDN(DELTA), DIMS(1, 40, 16, 32, 16, 16), LOG(.2), VALUE},

    /* packed documents */
    {.name = "gdn-packed", GDN(DELTA), DIMS(1, 70, 1, 2, 24, 40), LOG(.2), VALUE,
     PACKED(documents)},
    {.name = "gdn-empties", GDN(DELTA), DIMS(1, 150, 1, 2, 16, 16), LOG(.2), VALUE, PACKED(holes)},
    {.name = "gdn-singles", GDN(DELTA), DIMS(1, 9, 1, 2, 16, 16), LOG(.2), VALUE, PACKED(singles)},
    {.name = "gdn-none", GDN(DELTA), DIMS(1, 7, 1, 2, 8, 8), LOG(.2), VALUE, PACKED(nothing)},
    {.name = "kda-packed", KDA(DELTA), DIMS(1, 70, 1, 2, 24, 40), LOG(.2), VALUE,
     PACKED(documents)},
    {.name = "kda-empties", KDA(DELTA), DIMS(1, 150, 1, 2, 16, 16), LOG(.2), VALUE, PACKED(holes)},
    {.name = "kda-singles", KDA(DELTA), DIMS(1, 9, 1, 2, 16, 16), LOG(.2), VALUE, PACKED(singles)},

    /* gates */
    {.name = "gdn-no-gate", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), .gate = DR_GATE_NONE, VALUE},
    {.name = "gdn-factor", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), .gate = DR_GATE_FACTOR,
     .decay = .2, VALUE},
    {.name = "gdn-softplus", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), SOFTPLUS, VALUE},
    {.name = "gdn-softplus-bare", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), SOFTPLUS, VALUE,
     FLAGS(DR_CASE_NO_BIAS)},
    {.name = "gdn-bound", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), BOUND(-5), VALUE},
    {.name = "kda-no-gate", KDA(DELTA), DIMS(1, 70, 1, 2, 16, 16), .gate = DR_GATE_NONE, VALUE},
    {.name = "kda-factor", KDA(DELTA), DIMS(1, 70, 1, 2, 16, 16), .gate = DR_GATE_FACTOR,
     .decay = .2, VALUE},
    {.name = "kda-softplus", KDA(DELTA), DIMS(1, 70, 1, 2, 16, 16), SOFTPLUS, VALUE},
    {.name = "kda-bound", KDA(DELTA), DIMS(1, 70, 1, 2, 16, 16), BOUND(-5), VALUE},
    {.name = "kda-bound-bare", KDA(DELTA), DIMS(1, 70, 1, 2, 16, 16), BOUND(-2), VALUE,
     FLAGS(DR_CASE_NO_A_LOG | DR_CASE_NO_BIAS)},
    {.name = "kda-bound-packed", KDA(DELTA), DIMS(1, 150, 2, 2, 16, 24), BOUND(-5), LOGIT(1),
     .l2norm = 1, PACKED(holes)},
    {.name = "gdn-decay-5", GDN(DELTA), DIMS(1, 130, 1, 2, 16, 16), LOG(5), VALUE},
    {.name = "gdn-decay-30", GDN(DELTA), DIMS(1, 130, 1, 2, 16, 16), LOG(30), VALUE},
    {.name = "gdn-decay-1000", GDN(DELTA), DIMS(1, 130, 1, 2, 16, 16), LOG(1000), VALUE},
    {.name = "gdn-decay-switch", GDN(DELTA), DIMS(1, 130, 1, 2, 16, 16), LOG(1000), VALUE,
     FLAGS(DR_CASE_ALTERNATE)},
    {.name = "gdn-decay-weak", GDN(DELTA), DIMS(1, 300, 1, 2, 16, 16), LOG(1e-4), VALUE},
    {.name = "kda-decay-5", KDA(DELTA), DIMS(1, 130, 1, 2, 16, 16), LOG(5), VALUE},
    {.name = "kda-decay-30", KDA(DELTA), DIMS(1, 130, 1, 2, 16, 16), LOG(30), VALUE},
    {.name = "kda-decay-1000", KDA(DELTA), DIMS(1, 130, 1, 2, 16, 16), LOG(1000), VALUE},
    {.name = "kda-decay-switch", KDA(DELTA), DIMS(1, 130, 1, 2, 16, 16), LOG(1000), VALUE,
     FLAGS(DR_CASE_ALTERNATE)},
    {.name = "kda-decay-weak", KDA(DELTA), DIMS(1, 300, 1, 2, 16, 16), LOG(1e-4), VALUE},

    /* beta, norm, scale, layouts of states, what is kept */
    {.name = "gdn-logit", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), LOG(.2), LOGIT(1)},
    {.name = "gdn-logit-2", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), LOG(.2), LOGIT(2), .l2norm = 1},
    {.name = "gdn-l2norm", GDN(DELTA), DIMS(1, 70, 2, 4, 24, 16), SOFTPLUS, LOGIT(1), .l2norm = 1},
    {.name = "gdn-l2norm-k1", GDN(DELTA), DIMS(1, 40, 2, 2, 1, 16), LOG(.2), VALUE, .l2norm = 1},
    {.name = "gdn-l2norm-eps", GDN(DELTA), DIMS(1, 40, 2, 2, 16, 16), LOG(.2), VALUE, .l2norm = 1,
     .eps = .1},
    {.name = "gdn-scale", GDN(DELTA), DIMS(1, 40, 1, 2, 16, 16), LOG(.2), VALUE, .scale = 1.7},
    {.name = "gdn-v-first", GDN(DELTA), DIMS(2, 70, 1, 2, 24, 16), LOG(.2), VALUE,
     .state_v_first = 1, FLAGS(DR_CASE_CHUNK_STATES)},
    {.name = "gdn-chunk-states", GDN(DELTA), DIMS(1, 150, 1, 2, 24, 16), LOG(.2), VALUE,
     PACKED(holes), FLAGS(DR_CASE_CHUNK_STATES)},
    {.name = "gdn-keep-inputs", GDN(DELTA), DIMS(1, 150, 1, 2, 24, 16), LOG(.2), VALUE,
     PACKED(holes), .keep = DR_KEEP_INPUTS},
    {.name = "gdn-keep-states", GDN(DELTA), DIMS(1, 150, 1, 2, 24, 16), LOG(.2), VALUE,
     PACKED(holes), .keep = DR_KEEP_STATES},
    {.name = "gdn-no-state", GDN(DELTA), DIMS(2, 70, 1, 2, 16, 16), LOG(.2), VALUE,
     FLAGS(DR_CASE_NO_STATE)},
    {.name = "gdn-fresh", GDN(DELTA), DIMS(2, 70, 1, 2, 16, 16), LOG(.2), VALUE,
     FLAGS(DR_CASE_FRESH)},
    {.name = "gdn-few", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), SOFTPLUS, VALUE, FLAGS(DR_CASE_FEW)},
    {.name = "gdn-in-place", GDN(DELTA), DIMS(2, 70, 1, 2, 16, 16), LOG(.2), VALUE,
     FLAGS(DR_CASE_IN_PLACE)},
    {.name = "gdn-pool", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), LOG(.2), VALUE, PACKED(documents),
     FLAGS(DR_CASE_POOL)},
    {.name = "gdn-no-saved", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), LOG(.2), VALUE,
     FLAGS(DR_CASE_NO_SAVED)},
    {.name = "kda-logit-2", KDA(DELTA), DIMS(1, 70, 1, 2, 16, 16), LOG(.2), LOGIT(2), .l2norm = 1},
    {.name = "kda-l2norm", KDA(DELTA), DIMS(1, 70, 2, 4, 24, 16), BOUND(-5), LOGIT(1), .l2norm = 1},
    {.name = "kda-v-first", KDA(DELTA), DIMS(2, 70, 1, 2, 24, 16), LOG(.2), VALUE,
     .state_v_first = 1, FLAGS(DR_CASE_CHUNK_STATES)},
    {.name = "kda-keep-inputs", KDA(DELTA), DIMS(1, 150, 1, 2, 24, 16), LOG(.2), VALUE,
     PACKED(holes), .keep = DR_KEEP_INPUTS},
    {.name = "kda-keep-states", KDA(DELTA), DIMS(1, 150, 1, 2, 24, 16), LOG(.2), VALUE,
     PACKED(holes), .keep = DR_KEEP_STATES},
    {.name = "kda-no-state", KDA(DELTA), DIMS(2, 70, 1, 2, 16, 16), LOG(.2), VALUE,
     FLAGS(DR_CASE_NO_STATE)},
    {.name = "kda-few", KDA(DELTA), DIMS(1, 70, 1, 2, 16, 16), SOFTPLUS, VALUE, FLAGS(DR_CASE_FEW)},
    {.name = "kda-pool", KDA(DELTA), DIMS(1, 70, 1, 2, 16, 16), LOG(.2), VALUE, PACKED(documents),
     FLAGS(DR_CASE_POOL)},

    /* element types and strides */
    {.name = "gdn-bf16", GDN(DELTA), DIMS(1, 100, 1, 2, 32, 32), LOG(.2), VALUE, .dtype = DR_BF16},
    {.name = "gdn-f16", GDN(DELTA), DIMS(1, 100, 1, 2, 32, 32), LOG(.2), VALUE, .dtype = DR_F16},
    {.name = "gdn-all-bf16", GDN(DELTA), DIMS(1, 70, 1, 2, 16, 16), SOFTPLUS, LOGIT(1), .l2norm = 1,
     ALL_TYPES(DR_BF16)},
    {.name = "gdn-all-f16", GDN(DELTA), DIMS(1, 70, 1, 2, 17, 9), LOG(.2), VALUE,
     ALL_TYPES(DR_F16)},
    {.name = "gdn-slices", GDN(DELTA), DIMS(2, 70, 2, 4, 24, 16), LOG(.2), VALUE,
     .layout = DR_CASE_PADDED},
    {.name = "gdn-strides", GDN(DELTA), DIMS(2, 70, 2, 4, 24, 17), SOFTPLUS, LOGIT(1),
     .layout = DR_CASE_FREE, FLAGS(DR_CASE_CHUNK_STATES)},
    {.name = "gdn-strides-bf16", GDN(DELTA), DIMS(2, 40, 2, 4, 24, 17), LOG(.2), VALUE,
     .layout = DR_CASE_FREE, ALL_TYPES(DR_BF16)},
    {.name = "kda-bf16", KDA(DELTA), DIMS(1, 100, 1, 2, 32, 32), BOUND(-5), LOGIT(1), .l2norm = 1,
     .dtype = DR_BF16},
    {.name = "kda-f16", KDA(DELTA), DIMS(1, 100, 1, 2, 32, 32), LOG(.2), VALUE, .dtype = DR_F16},
    {.name = "kda-all-bf16", KDA(DELTA), DIMS(1, 70, 1, 2, 16, 16), SOFTPLUS, LOGIT(1), .l2norm = 1,
     ALL_TYPES(DR_BF16)},
    {.name = "kda-slices", KDA(DELTA), DIMS(2, 70, 2, 4, 24, 16), LOG(.2), VALUE,
     .layout = DR_CASE_PADDED},
    {.name = "kda-strides", KDA(DELTA), DIMS(2, 70, 2, 4, 24, 17), SOFTPLUS, LOGIT(1),
     .layout = DR_CASE_FREE, FLAGS(DR_CASE_CHUNK_STATES)},
    {.name = "kda-strides-f16", KDA(DELTA), DIMS(1, 40, 2, 4, 24, 17), LOG(.2), VALUE,
     .layout = DR_CASE_FREE, ALL_TYPES(DR_F16)},

    /* decoding */
    {.name = "gdn-step", GDN(STEP), DIMS(3, 1, 2, 4, 24, 40), SOFTPLUS, LOGIT(1), .l2norm = 1},
    {.name = "gdn-step-128", GDN(STEP), DIMS(2, 1, 2, 4, 128, 128), LOG(.2), VALUE,
     FLAGS(DR_CASE_IN_PLACE)},
    {.name = "gdn-step-few", GDN(STEP), DIMS(1, 9, 1, 2, 16, 17), LOG(.2), VALUE},
    {.name = "gdn-step-pool", GDN(STEP), DIMS(1, 9, 1, 2, 16, 16), LOG(.2), VALUE, PACKED(singles),
     FLAGS(DR_CASE_POOL)},
    {.name = "gdn-step-v-first", GDN(STEP), DIMS(2, 3, 1, 2, 24, 16), LOG(.2), VALUE,
     .state_v_first = 1},
    {.name = "gdn-step-bf16", GDN(STEP), DIMS(2, 2, 1, 2, 32, 32), LOG(.2), VALUE,
     ALL_TYPES(DR_BF16)},
    {.name = "gdn-step-strides", GDN(STEP), DIMS(2, 3, 2, 4, 24, 17), LOG(.2), VALUE,
     .layout = DR_CASE_FREE},
    {.name = "kda-step", KDA(STEP), DIMS(3, 1, 2, 4, 24, 40), BOUND(-5), LOGIT(1), .l2norm = 1},
    {.name = "kda-step-128", KDA(STEP), DIMS(2, 1, 2, 4, 128, 128), LOG(.2), VALUE,
     FLAGS(DR_CASE_IN_PLACE)},
    {.name = "kda-step-empties", KDA(STEP), DIMS(1, 150, 1, 2, 16, 16), LOG(.2), VALUE,
     PACKED(holes)},
    {.name = "kda-step-pool", KDA(STEP), DIMS(1, 9, 1, 2, 16, 16), LOG(.2), VALUE, PACKED(singles),
     FLAGS(DR_CASE_POOL)},
    {.name = "kda-step-f16", KDA(STEP), DIMS(2, 2, 1, 2, 32, 32), LOG(.2), VALUE,
     ALL_TYPES(DR_F16)},

    /* stages and maps */
    {.name = "gdn-stages", GDN(STAGES), DIMS(2, 70, 1, 2, 24, 40), LOG(.1), VALUE},
    {.name = "gdn-stages-packed", GDN(STAGES), DIMS(1, 150, 1, 2, 16, 16), LOG(.1), VALUE,
     PACKED(holes), FLAGS(DR_CASE_ENTRY)},
    {.name = "gdn-stages-keep", GDN(STAGES), DIMS(1, 70, 2, 4, 16, 16), SOFTPLUS, LOGIT(1),
     .l2norm = 1, FLAGS(DR_CASE_ENTRY), .keep = DR_KEEP_STATES},
    {.name = "gdn-stages-inputs", GDN(STAGES), DIMS(1, 70, 2, 4, 16, 16), LOG(.1), VALUE,
     .keep = DR_KEEP_INPUTS},
    {.name = "gdn-stages-128", GDN(STAGES), DIMS(1, 130, 1, 2, 128, 128), LOG(.02), VALUE},
    {.name = "gdn-stages-decay", GDN(STAGES), DIMS(1, 70, 1, 2, 16, 16), LOG(1000), VALUE,
     FLAGS(DR_CASE_ALTERNATE)},
    {.name = "gdn-stages-bf16", GDN(STAGES), DIMS(1, 70, 1, 2, 32, 32), LOG(.1), VALUE,
     .dtype = DR_BF16, FLAGS(DR_CASE_ENTRY)},
    {.name = "kda-stages", KDA(STAGES), DIMS(2, 70, 1, 2, 24, 40), LOG(.1), VALUE},
    {.name = "kda-stages-packed", KDA(STAGES), DIMS(1, 150, 1, 2, 16, 16), LOG(.1), VALUE,
     PACKED(holes), FLAGS(DR_CASE_ENTRY)},
    {.name = "kda-stages-inputs", KDA(STAGES), DIMS(1, 70, 2, 4, 16, 17), BOUND(-5), LOGIT(1),
     .l2norm = 1, .keep = DR_KEEP_INPUTS},
    {.name = "kda-stages-128", KDA(STAGES), DIMS(1, 130, 1, 2, 128, 128), LOG(.02), VALUE},

    /* causal convolution */
    {.name = "conv-w4", .op = DR_CASE_CONV, .B = 2, .T = 50, .HV = 24, .width = 4,
     .activation = DR_ACT_SILU},
    {.name = "conv-w1", .op = DR_CASE_CONV, .T = 9, .HV = 5, .width = 1,
     FLAGS(DR_CASE_NO_STATE)},
    {.name = "conv-w2-linear", .op = DR_CASE_CONV, .T = 20, .HV = 17, .width = 2},
    {.name = "conv-w3-dilated", .op = DR_CASE_CONV, .T = 30, .HV = 16, .width = 3, .dilation = 3,
     .activation = DR_ACT_SILU},
    {.name = "conv-w7", .op = DR_CASE_CONV, .T = 40, .HV = 9, .width = 7,
     .activation = DR_ACT_SILU, FLAGS(DR_CASE_NO_BIAS)},
    {.name = "conv-short", .op = DR_CASE_CONV, .B = 3, .T = 2, .HV = 16, .width = 4,
     .activation = DR_ACT_SILU},
    {.name = "conv-packed", .op = DR_CASE_CONV, .T = 150, .HV = 33, .width = 4,
     .activation = DR_ACT_SILU, PACKED(holes)},
    {.name = "conv-singles", .op = DR_CASE_CONV, .T = 9, .HV = 8, .width = 4,
     .activation = DR_ACT_SILU, PACKED(singles)},
    {.name = "conv-state-plus", .op = DR_CASE_CONV, .B = 2, .T = 5, .HV = 16, .width = 4,
     .activation = DR_ACT_SILU, FLAGS(DR_CASE_STATE_PLUS)},
    {.name = "conv-few", .op = DR_CASE_CONV, .T = 20, .HV = 16, .width = 4,
     .activation = DR_ACT_SILU, FLAGS(DR_CASE_FEW)},
    {.name = "conv-pool", .op = DR_CASE_CONV, .T = 70, .HV = 16, .width = 4,
     .activation = DR_ACT_SILU, PACKED(documents), FLAGS(DR_CASE_POOL)},
    {.name = "conv-bf16", .op = DR_CASE_CONV, .T = 50, .HV = 24, .width = 4,
     .activation = DR_ACT_SILU, ALL_TYPES(DR_BF16)},
    {.name = "conv-f16", .op = DR_CASE_CONV, .T = 50, .HV = 24, .width = 4,
     .activation = DR_ACT_SILU, .dtype = DR_F16},
    {.name = "conv-slices", .op = DR_CASE_CONV, .B = 2, .T = 30, .HV = 24, .width = 4,
     .activation = DR_ACT_SILU, .layout = DR_CASE_PADDED},
    {.name = "conv-channel-major", .op = DR_CASE_CONV, .B = 2, .T = 30, .HV = 24, .width = 4,
     .activation = DR_ACT_SILU, .layout = DR_CASE_FREE},
    {.name = "conv-step", .op = DR_CASE_CONV_STEP, .B = 3, .T = 1, .HV = 40, .width = 4,
     .activation = DR_ACT_SILU},
    {.name = "conv-step-plus", .op = DR_CASE_CONV_STEP, .B = 2, .T = 3, .HV = 17, .width = 4,
     .activation = DR_ACT_SILU, FLAGS(DR_CASE_STATE_PLUS | DR_CASE_IN_PLACE)},
    {.name = "conv-step-pool", .op = DR_CASE_CONV_STEP, .T = 9, .HV = 16, .width = 4,
     .activation = DR_ACT_SILU, PACKED(singles), FLAGS(DR_CASE_POOL)},
    {.name = "conv-step-bf16", .op = DR_CASE_CONV_STEP, .B = 2, .T = 2, .HV = 16, .width = 4,
     .activation = DR_ACT_SILU, ALL_TYPES(DR_BF16)},

    /* gates, beta, norms */
    {.name = "gate-gdn-softplus", GDN(GATE), DIMS(2, 33, 3, 3, 1, 1), SOFTPLUS},
    {.name = "gate-gdn-bound", GDN(GATE), DIMS(2, 33, 3, 3, 1, 1), BOUND(-5)},
    {.name = "gate-gdn-bare", GDN(GATE), DIMS(1, 1, 3, 3, 1, 1), SOFTPLUS, FLAGS(DR_CASE_NO_BIAS)},
    {.name = "gate-kda-softplus", KDA(GATE), DIMS(2, 17, 2, 3, 24, 1), SOFTPLUS},
    {.name = "gate-kda-bound", KDA(GATE), DIMS(1, 65, 2, 2, 17, 1), BOUND(-5)},
    {.name = "gate-kda-bare", KDA(GATE), DIMS(1, 20, 2, 2, 16, 1), BOUND(-3),
     FLAGS(DR_CASE_NO_A_LOG | DR_CASE_NO_BIAS)},
    {.name = "gate-few", KDA(GATE), DIMS(1, 20, 2, 2, 16, 1), SOFTPLUS, FLAGS(DR_CASE_FEW)},
    {.name = "gate-bf16", KDA(GATE), DIMS(1, 40, 2, 2, 16, 1), SOFTPLUS, .dtype = DR_BF16},
    {.name = "gate-all-f16", GDN(GATE), DIMS(1, 40, 2, 2, 16, 1), BOUND(-5), ALL_TYPES(DR_F16)},
    {.name = "gate-strides", KDA(GATE), DIMS(2, 20, 2, 3, 17, 1), SOFTPLUS, .layout = DR_CASE_FREE},
    {.name = "beta", .op = DR_CASE_BETA, DIMS(2, 33, 1, 3, 1, 1)},
    {.name = "beta-2", .op = DR_CASE_BETA, DIMS(1, 40, 1, 2, 1, 1), .beta_scale = 2},
    {.name = "beta-bf16", .op = DR_CASE_BETA, DIMS(1, 40, 1, 2, 1, 1), ALL_TYPES(DR_BF16)},
    {.name = "beta-strides", .op = DR_CASE_BETA, DIMS(2, 20, 1, 3, 1, 1), .layout = DR_CASE_FREE},
    {.name = "l2norm", .op = DR_CASE_L2NORM, DIMS(2, 20, 3, 3, 24, 1)},
    {.name = "l2norm-k1", .op = DR_CASE_L2NORM, DIMS(1, 5, 1, 1, 1, 1)},
    {.name = "l2norm-k257", .op = DR_CASE_L2NORM, DIMS(1, 5, 2, 2, 257, 1), .eps = 1e-3},
    {.name = "l2norm-bf16", .op = DR_CASE_L2NORM, DIMS(1, 20, 2, 2, 32, 1), .dtype = DR_BF16},
    {.name = "l2norm-f16", .op = DR_CASE_L2NORM, DIMS(1, 20, 2, 2, 32, 1), .dtype = DR_F16,
     .eps = 1e-2},
    {.name = "l2norm-strides", .op = DR_CASE_L2NORM, DIMS(2, 9, 2, 2, 19, 1),
     .layout = DR_CASE_FREE},
    {.name = "norm-silu", .op = DR_CASE_NORM, DIMS(2, 20, 1, 3, 1, 40), .activation = DR_ACT_SILU},
    {.name = "norm-sigmoid", .op = DR_CASE_NORM, DIMS(1, 33, 1, 2, 1, 17),
     .activation = DR_ACT_SIGMOID, .eps = 1e-5},
    {.name = "norm-few", .op = DR_CASE_NORM, DIMS(1, 20, 1, 2, 1, 16), .activation = DR_ACT_SILU,
     FLAGS(DR_CASE_FEW)},
    {.name = "norm-bf16", .op = DR_CASE_NORM, DIMS(1, 20, 1, 2, 1, 64), .activation = DR_ACT_SILU,
     .dtype = DR_BF16},
    {.name = "norm-all-f16", .op = DR_CASE_NORM, DIMS(1, 20, 1, 2, 1, 64),
     .activation = DR_ACT_SIGMOID, .eps = 1e-2, ALL_TYPES(DR_F16)},
    {.name = "norm-strides", .op = DR_CASE_NORM, DIMS(2, 9, 1, 2, 1, 19),
     .activation = DR_ACT_SILU, .layout = DR_CASE_FREE},

    /* matrix product and layers */
    {.name = "matmul", .op = DR_CASE_MATMUL, .T = 33, .K = 50, .V = 17},
    {.name = "matmul-alpha", .op = DR_CASE_MATMUL, .T = 1, .K = 64, .V = 64, .scale = -.5},
    {.name = "matmul-turned", .op = DR_CASE_MATMUL, .T = 20, .K = 31, .V = 40,
     FLAGS(DR_CASE_TRANSPOSED)},
    {.name = "matmul-slices", .op = DR_CASE_MATMUL, .T = 20, .K = 31, .V = 40,
     .layout = DR_CASE_PADDED},
    {.name = "layer-gdn", GDN(LAYER), DIMS(2, 40, 2, 4, 16, 16), .hidden = 32, SOFTPLUS,
     FLAGS(DR_CASE_NO_STATE)},
    {.name = "layer-gdn-packed", GDN(LAYER), DIMS(1, 150, 1, 2, 16, 24), .hidden = 24, SOFTPLUS,
     PACKED(holes)},
    {.name = "layer-gdn-mask", GDN(LAYER), DIMS(2, 40, 1, 2, 16, 16), .hidden = 24, SOFTPLUS,
     FLAGS(DR_CASE_NO_STATE | DR_CASE_MASK)},
    {.name = "layer-kda", KDA(LAYER), DIMS(2, 40, 2, 2, 16, 16), .hidden = 32, BOUND(-5),
     FLAGS(DR_CASE_NO_STATE | DR_CASE_NO_BIAS)},
    {.name = "layer-kda-low-rank", KDA(LAYER), DIMS(1, 70, 2, 2, 16, 16), .hidden = 32, SOFTPLUS,
     .gate_rank = 8, PACKED(documents), FLAGS(DR_CASE_NO_BIAS)},
    {.name = "layer-gdn-step", GDN(LAYER_STEP), DIMS(3, 1, 2, 4, 16, 16), .hidden = 32, SOFTPLUS},
    {.name = "layer-kda-step", KDA(LAYER_STEP), DIMS(2, 2, 2, 2, 16, 16), .hidden = 32, BOUND(-5),
     FLAGS(DR_CASE_NO_BIAS)},
};
/* clang-format on */

const dr_case *dr_case_at(int index)
{
    return index >= 0 && (size_t)index < sizeof table / sizeof table[0] ? &table[index] : NULL;
}

/* ------------------------------------------------------------------------ */
/* Values from a seed                                                       */
/* ------------------------------------------------------------------------ */

/* A finaliser of 64 bits: neighbours in, unrelated numbers out. */
static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static double seeded_value(const dr_case_tensor *t, int64_t i, uint64_t bits)
{
    double u = ((double)(bits >> 11) + .5) * 0x1p-53; /* in (0, 1) */
    unsigned edge = bits & 31;
    switch (t->values) {
    case DR_VALUES_EVEN:
        return t->span * (2 * u - 1);
    case DR_VALUES_ROWS:
        return i < t->shape[t->rank - 1] ? 0 : t->span * (2 * u - 1);
    case DR_VALUES_DECAY:
        return t->span * log(u);
    case DR_VALUES_ALTERNATE:
        return bits & 1 ? -t->span : 0;
    case DR_VALUES_FACTOR:
        return edge == 0 ? 0 : edge == 1 ? 1 : exp(t->span * log(u));
    case DR_VALUES_BETA:
        return t->span * (edge == 0 ? 0 : edge == 1 ? 1 : u);
    case DR_VALUES_POSITIVE:
        return t->span * (.5 + u);
    }
    return NAN;
}

void dr_case_seeded(void *user, const dr_case_tensor *t, int64_t first, int64_t count, double *out)
{
    uint64_t key = *(const uint64_t *)user;
    for (const char *c = t->name; *c != '\0'; c++)
        key = mixed(key + 0x9e3779b97f4a7c15u + (unsigned char)*c);
    for (int64_t i = 0; i < count; i++)
        out[i] =
            seeded_value(t, first + i, mixed(key + 0x9e3779b97f4a7c15u * (uint64_t)(first + i)));
}

/* ------------------------------------------------------------------------ */
/* Errors                                                                   */
/* ------------------------------------------------------------------------ */

static const struct rounding {
    double unit;     /* largest relative error of storing a number */
    double smallest; /* below it the error is absolute */
    bool narrow;     /* rounding comes on top of the arithmetic, which is wider */
} roundings[] = {
    [DR_F32] = {0x1p-24, FLT_MIN, false},
    [DR_F64] = {0x1p-53, DBL_MIN, false},
    [DR_BF16] = {0x1p-8, FLT_MIN, true},
    [DR_F16] = {0x1p-11, 0x1p-24, true}, /* its subnormals are in use: their distance */
};

dr_case_error dr_case_compare(const double *got, const double *want, int64_t count, dr_dtype stored,
                              double arithmetic, double doubt)
{
    double difference = 0, norm = 0, unit = 0;
    dr_case_error e = {0};
    for (int64_t i = 0; i < count; i++)
        unit = fmax(unit, fmax(fabs(got[i]), fabs(want[i])));
    unit = unit > 0 && isfinite(unit) ? unit : 1; /* squares must not overflow: inf <= inf would pass */
    for (int64_t i = 0; i < count; i++) {
        double d = got[i] - want[i];
        difference += d / unit * (d / unit);
        norm += want[i] / unit * (want[i] / unit);
        if (!(fabs(d) <= e.largest) && !isnan(e.largest))
            e.largest = fabs(d);
    }
    difference = unit * sqrt(difference);
    norm = unit * sqrt(norm);
    const struct rounding *r = &roundings[stored];
    double absolute = sqrt((double)count) * r->smallest + doubt;
    double budget = r->narrow ? arithmetic + r->unit : fmax(arithmetic, r->unit);
    e.relative = difference == 0 ? 0 : difference / norm;
    e.limit = norm > 0 ? budget + absolute / norm : budget;
    e.ok = isfinite(difference) && difference <= budget * norm + absolute;
    return e;
}
