/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lm_ranks.h - a training step over many ranks, which are threads of this process: every rank runs the
 * model on a contiguous share of the batch, its layers exchange by a protocol (cp.h), and the gradients
 * are summed. Weights, optimiser and checkpoints are those of one rank.
 */
#ifndef DR_LM_RANKS_H
#define DR_LM_RANKS_H

#include "model.h"

enum { DR_LM_MAX_RANKS = 64 };

typedef struct dr_lm_rank {
    struct dr_comm *comm;
    const dr_lm_batch *whole;
    dr_lm_batch part;
    dr_lm_run run;
    float *gradients;
    int64_t begin; /* of part in whole */
    double loss;
    dr_status status;
    char sentence[1024];
} dr_lm_rank;

typedef struct dr_lm_ranks {
    int32_t n;
    dr_lm_rank *rank;
} dr_lm_ranks;

/* Batches hold exactly `tokens`, at least one for each rank. */
dr_status dr_lm_ranks_create(const dr_lm_model *model, int64_t tokens, int32_t n, const char *protocol,
                             dr_lm_ranks *out);
void dr_lm_ranks_free(dr_lm_ranks *ranks);
/* Mean loss per byte, and the gradients of the loss as a block like the weights, until the next step. */
dr_status dr_lm_ranks_step(dr_lm_ranks *ranks, const dr_lm_batch *batch, double *loss,
                           const float **gradients);

#endif
