/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer_gdn.c - the Gated DeltaNet block of Qwen3-Next and Qwen3.5 as a table: one
 * projection and one convolution for q|k|v, one decay per value head through softplus, an
 * output norm gated by silu(z). Names as in the Qwen3.5 checkpoints.
 */
#include "layer/params.h"

static dr_status complete(dr_layer_config *config)
{
    if (config->gate == 0)
        config->gate = DR_GATE_SOFTPLUS;
    if (config->gate != DR_GATE_SOFTPLUS)
        return dr_fail(DR_ERR_ARG, "gate: a GDN layer takes DR_GATE_SOFTPLUS (4) or 0, got %d",
                       (int)config->gate);
    if (config->gate_rank != 0)
        return dr_fail(DR_ERR_ARG, "gate_rank: must be 0 in a GDN layer, got %d",
                       config->gate_rank);
    return DR_OK;
}

static const dr_layer_row rows[] = {
    {"in_proj_qkv.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_QKV, DR_WHEN_ALWAYS},
    {"in_proj_z.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_GATE, DR_WHEN_ALWAYS},
    {"in_proj_b.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_BETA, DR_WHEN_ALWAYS},
    {"in_proj_a.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_DECAY, DR_WHEN_ALWAYS},
    {"conv1d.weight", DR_USE_CONV, DR_PART_QKV, DR_PART_QKV, DR_WHEN_ALWAYS},
    {"conv1d.bias", DR_USE_CONV_BIAS, DR_PART_QKV, DR_PART_QKV, DR_WHEN_CONV_BIAS},
    {"A_log", DR_USE_A_LOG, DR_PART_DECAY, DR_PART_DECAY, DR_WHEN_ALWAYS},
    {"dt_bias", DR_USE_DT_BIAS, DR_PART_DECAY, DR_PART_DECAY, DR_WHEN_ALWAYS},
    {"norm.weight", DR_USE_NORM, DR_PART_NORMED, DR_PART_NORMED, DR_WHEN_ALWAYS},
    {"out_proj.weight", DR_USE_LINEAR, DR_PART_NORMED, DR_PART_Y, DR_WHEN_ALWAYS},
};

const dr_layer_type dr_layer_gdn = {
    .kind = DR_LAYER_GDN,
    .variant = DR_GDN,
    .gate_activation = DR_ACT_SILU,
    .norm_eps = 1e-6,
    .complete = complete,
    .rows = rows,
    .n_rows = DR_COUNT(rows),
};
