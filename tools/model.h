/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.h - a small language model over bytes: embedding, blocks of
 *
 *     x += layer(norm(x))        layer: Gated DeltaNet or Kimi Delta Attention (layer.h)
 *     x += down(silu(gate(n)) * up(n)),  n = norm(x)
 *
 * a last norm and a linear head. Parameters lie in one block of memory, with names as
 * published checkpoints have them; gradients and the optimiser's moments mirror the block.
 *
 * Letters: T tokens, D hidden width, F inner width of the SwiGLU.
 */
#ifndef DR_LM_MODEL_H
#define DR_LM_MODEL_H

#include "data.h"

#include <deltarule/layer.h>

enum { DR_LM_MAX_LAYERS = 64, DR_LM_MAX_NAME = 96 };

typedef struct dr_lm_config {
    int32_t layers, hidden, heads, head_dim;
    int32_t inner;
    dr_layer_kind kind[DR_LM_MAX_LAYERS];
} dr_lm_config;

/* "gdn", "kda", or such words separated by commas: a pattern that is repeated over the
 * layers. ERR_ARG for anything else, or a pattern longer than the layers. */
dr_status dr_lm_config_arch(const char *arch, dr_lm_config *config);
/* The kinds of all layers in the same form; size bytes at text. */
void dr_lm_config_arch_text(const dr_lm_config *config, char *text, size_t size);

typedef struct dr_lm_param {
    char name[DR_LM_MAX_NAME];
    int32_t rank;
    int64_t shape[DR_MAX_RANK];
    int64_t at, count; /* place in the block, elements */
    dr_init init;
    double scale;      /* of the first values: of LINEAR's range, else a standard deviation */
    bool decays;       /* under weight decay */
} dr_lm_param;

typedef struct dr_lm_block { /* indices of parameters; the layer's are consecutive */
    int32_t norm, layer, mlp_norm, gate_up, down;
} dr_lm_block;

typedef struct dr_lm_model {
    const dr_context *ctx;
    int threads;
    dr_lm_config config;
    dr_layer *layers[3]; /* by kind; NULL where no block has it */
    dr_lm_param *params;
    int32_t n_params;
    int64_t size;        /* of the block */
    int64_t n_weights;   /* of those, parameters */
    float *weights;
    dr_tensor *views;    /* of the weights, by parameter */
    int32_t embed, norm, head;
    dr_lm_block blocks[DR_LM_MAX_LAYERS];
} dr_lm_model;
dr_status dr_lm_model_create(const dr_context *ctx, const dr_lm_config *config, dr_lm_model *out);
void dr_lm_model_free(dr_lm_model *model);
void dr_lm_model_init(dr_lm_model *model, uint64_t seed);
/* Views of a block like the weights, one for each parameter. */
void dr_lm_model_views(const dr_lm_model *model, float *block, dr_tensor *views);

/* What one sequence carries from call to call. */
typedef struct dr_lm_states {
    float *memory;
    dr_tensor conv[DR_LM_MAX_LAYERS], state[DR_LM_MAX_LAYERS];
} dr_lm_states;
dr_status dr_lm_states_create(const dr_lm_model *model, dr_lm_states *out); /* of an empty past */
void dr_lm_states_free(dr_lm_states *states);

/* What a block keeps for its gradient. */
typedef struct dr_lm_values {
    float *x, *rstd, *normed;             /* in front of the layer */
    float *mlp_x, *mlp_rstd, *mlp_normed; /* in front of the SwiGLU */
    float *gate_up, *inner;
    void *saved;                          /* of the layer */
} dr_lm_values;

/* Memory for passes over up to `room` tokens. */
typedef struct dr_lm_run {
    const dr_lm_model *model;
    int64_t room;
    bool training;
    float *memory;
    dr_lm_values values[DR_LM_MAX_LAYERS + 1]; /* the last: the final norm's x, rstd, normed */
    float *y, *logits;                         /* [T,D], [T,256] */
    float *dx, *dnormed, *partial;             /* training only */
    double *rows;
    int64_t *order;
    dr_tensor *gradient_views;
    /* Layer plans of the arrangement `offsets`, made anew when a batch has another one. */
    dr_layer_plan *plans[3];
    int64_t *offsets;
    int64_t sequences;
    size_t saved_bytes, scratch_bytes;
    void *scratch;
    /* Of a run on one rank's share (lm_ranks.h): the batch of all ranks, of which a pass gets a part. */
    struct dr_comm *comm;
    const char *protocol;
    const dr_lm_batch *whole;
} dr_lm_run;
dr_status dr_lm_run_create(const dr_lm_model *model, int64_t room, bool training, dr_lm_run *out);
/* From now on passes are collective over comm; batches of all ranks have up to `tokens`. */
dr_status dr_lm_run_share(dr_lm_run *run, struct dr_comm *comm, const char *protocol, int64_t tokens);
void dr_lm_run_free(dr_lm_run *run);

/* Fills run->logits. states: NULL, or of the one sequence of the batch, which they follow. */
dr_status dr_lm_run_forward(dr_lm_run *run, const dr_lm_batch *batch, dr_lm_states *states);
/* Mean loss per byte, in nats, or a share's part in the mean of all ranks; in a training run the logits become their gradient. */
double dr_lm_run_loss(dr_lm_run *run, const dr_lm_batch *batch);
/* Gradients of the loss, a block like the weights; overwritten. Uses the values up. */
dr_status dr_lm_run_backward(dr_lm_run *run, const dr_lm_batch *batch, float *gradients);

#endif
