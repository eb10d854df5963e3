/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lm_ranks.c - see lm_ranks.h. The threads live for one step: they share the weights, which nobody
 * writes meanwhile, and what they leave is read when all have ended.
 */
#include "lm_ranks.h"

#include <deltarule/comm.h>
#include <deltarule/cp.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static dr_status create(const dr_lm_model *model, int64_t tokens, const char *protocol, dr_lm_ranks *r)
{
    dr_fragment shares[DR_LM_MAX_RANKS];
    dr_comm *comms[DR_LM_MAX_RANKS];
    LM_LIBRARY(dr_partition_contiguous(tokens, r->n, shares));
    r->rank = dr_lm_alloc(r->n, sizeof *r->rank, "ranks");
    if (r->rank == NULL)
        return DR_ERR_MEMORY;
    LM_LIBRARY(dr_comm_threads_create(r->n, comms));
    for (int32_t i = 0; i < r->n; i++)
        r->rank[i].comm = comms[i];
    for (int32_t i = 0; i < r->n; i++) {
        dr_lm_rank *one = &r->rank[i];
        const int64_t room = shares[i].end - shares[i].begin;
        one->begin = shares[i].begin;
        LM_TRY(dr_lm_run_create(model, room, true, &one->run));
        LM_TRY(dr_lm_run_share(&one->run, one->comm, protocol, tokens));
        LM_TRY(dr_lm_batch_create(room, &one->part));
        one->part.tokens = room;
        one->gradients = dr_lm_alloc(model->size, sizeof *one->gradients, "gradients");
        if (one->gradients == NULL)
            return DR_ERR_MEMORY;
    }
    return DR_OK;
}

dr_status dr_lm_ranks_create(const dr_lm_model *model, int64_t tokens, int32_t n, const char *protocol,
                             dr_lm_ranks *out)
{
    *out = (dr_lm_ranks){.n = n};
    if (n < 1 || n > DR_LM_MAX_RANKS || n > tokens)
        return dr_lm_fail(DR_ERR_ARG, "--ranks: must be 1 to %d and at most the %lld tokens of a batch, got %d",
                          DR_LM_MAX_RANKS, (long long)tokens, n);
    dr_status status = create(model, tokens, protocol, out);
    if (status != DR_OK)
        dr_lm_ranks_free(out);
    return status;
}

void dr_lm_ranks_free(dr_lm_ranks *r)
{
    for (int32_t i = 0; r->rank != NULL && i < r->n; i++) {
        dr_lm_run_free(&r->rank[i].run);
        dr_lm_batch_free(&r->rank[i].part);
        free(r->rank[i].gradients);
        dr_comm_close(r->rank[i].comm);
    }
    free(r->rank);
    *r = (dr_lm_ranks){0};
}

static dr_status work(dr_lm_rank *one)
{
    const size_t bytes = (size_t)one->part.tokens * sizeof *one->part.input;
    memcpy(one->part.input, one->whole->input + one->begin, bytes);
    memcpy(one->part.target, one->whole->target + one->begin, bytes);
    one->run.whole = one->whole;
    LM_TRY(dr_lm_run_forward(&one->run, &one->part, NULL));
    one->loss = dr_lm_run_loss(&one->run, &one->part);
    LM_TRY(dr_lm_run_backward(&one->run, &one->part, one->gradients));
    LM_LIBRARY(dr_comm_sum(one->comm, one->gradients, one->run.model->size));
    return DR_OK;
}

static void *rank_main(void *at)
{
    dr_lm_rank *one = at;
    one->status = work(one);
    if (one->status == DR_OK)
        return NULL;
    snprintf(one->sentence, sizeof one->sentence, "%s", dr_lm_error());
    dr_comm_abort(one->comm, one->sentence);
    return NULL;
}

dr_status dr_lm_ranks_step(dr_lm_ranks *r, const dr_lm_batch *batch, double *loss,
                           const float **gradients)
{
    pthread_t threads[DR_LM_MAX_RANKS];
    int32_t started = 0;
    for (; started < r->n; started++) {
        r->rank[started].whole = batch;
        if (pthread_create(&threads[started], NULL, rank_main, &r->rank[started]) != 0)
            break;
    }
    if (started < r->n)
        dr_comm_abort(r->rank[started].comm, "no thread for a rank");
    for (int32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    if (started < r->n)
        return dr_lm_fail(DR_ERR_MEMORY, "--ranks: no thread for rank %d", started);
    const dr_lm_rank *first = NULL; /* whoever failed for a reason of its own says it best */
    *loss = 0;
    for (int32_t i = 0; i < r->n; i++) {
        const dr_lm_rank *one = &r->rank[i];
        if (one->status != DR_OK && (first == NULL || first->status == DR_ERR_COMM))
            first = one;
        *loss += one->loss;
    }
    *gradients = r->rank[0].gradients;
    return first != NULL ? dr_lm_fail(first->status, "%s", first->sentence) : DR_OK;
}
