/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layer_kda.c - the Kimi Delta Attention block as a table: separate projections and
 * convolutions for q, k and v, one decay per value head and key channel through softplus or
 * the lower bound, an output norm gated by a sigmoid. The forget and the output gate are
 * one matrix each, or a pair through gate_rank channels. Names as in the Kimi checkpoints.
 */
#include "layer/params.h"

static dr_status complete(dr_layer_config *config)
{
    if (config->gate != DR_GATE_SOFTPLUS && config->gate != DR_GATE_LOWER_BOUND)
        return dr_fail(DR_ERR_ARG, "gate: a KDA layer takes DR_GATE_SOFTPLUS (4) or "
                       "DR_GATE_LOWER_BOUND (5; there is no default), got %d", (int)config->gate);
    if (config->gate_rank < 0)
        return dr_fail(DR_ERR_ARG, "gate_rank: must be 0 (full rank) or more, got %d",
                       config->gate_rank);
    return DR_OK;
}

static const dr_layer_row rows[] = {
    {"q_proj.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_Q, DR_WHEN_ALWAYS},
    {"k_proj.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_K, DR_WHEN_ALWAYS},
    {"v_proj.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_V, DR_WHEN_ALWAYS},
    {"q_conv1d.weight", DR_USE_CONV, DR_PART_Q, DR_PART_Q, DR_WHEN_ALWAYS},
    {"q_conv1d.bias", DR_USE_CONV_BIAS, DR_PART_Q, DR_PART_Q, DR_WHEN_CONV_BIAS},
    {"k_conv1d.weight", DR_USE_CONV, DR_PART_K, DR_PART_K, DR_WHEN_ALWAYS},
    {"k_conv1d.bias", DR_USE_CONV_BIAS, DR_PART_K, DR_PART_K, DR_WHEN_CONV_BIAS},
    {"v_conv1d.weight", DR_USE_CONV, DR_PART_V, DR_PART_V, DR_WHEN_ALWAYS},
    {"v_conv1d.bias", DR_USE_CONV_BIAS, DR_PART_V, DR_PART_V, DR_WHEN_CONV_BIAS},
    {"f_proj.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_DECAY, DR_WHEN_FULL},
    {"f_a_proj.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_DECAY_IN, DR_WHEN_PAIR},
    {"f_b_proj.weight", DR_USE_LINEAR, DR_PART_DECAY_IN, DR_PART_DECAY, DR_WHEN_PAIR},
    {"b_proj.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_BETA, DR_WHEN_ALWAYS},
    {"g_proj.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_GATE, DR_WHEN_FULL},
    {"g_a_proj.weight", DR_USE_LINEAR, DR_PART_X, DR_PART_GATE_IN, DR_WHEN_PAIR},
    {"g_b_proj.weight", DR_USE_LINEAR, DR_PART_GATE_IN, DR_PART_GATE, DR_WHEN_PAIR},
    {"A_log", DR_USE_A_LOG, DR_PART_DECAY, DR_PART_DECAY, DR_WHEN_ALWAYS},
    {"dt_bias", DR_USE_DT_BIAS, DR_PART_DECAY, DR_PART_DECAY, DR_WHEN_ALWAYS},
    {"o_norm.weight", DR_USE_NORM, DR_PART_NORMED, DR_PART_NORMED, DR_WHEN_ALWAYS},
    {"o_proj.weight", DR_USE_LINEAR, DR_PART_NORMED, DR_PART_Y, DR_WHEN_ALWAYS},
};

const dr_layer_type dr_layer_kda = {
    .kind = DR_LAYER_KDA,
    .variant = DR_KDA,
    .gate_activation = DR_ACT_SIGMOID,
    .norm_eps = 1e-5,
    .complete = complete,
    .rows = rows,
    .n_rows = DR_COUNT(rows),
};
