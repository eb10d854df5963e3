/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.h - a parallel loop over independent tasks, on OpenMP or on the pool that
 * the host program brought.
 *
 * NOTE [Lanes]: a loop runs on at most `threads` lanes; a lane takes the next task
 * when it has finished one. Scratch memory belongs to lanes, results to tasks: what a
 * task computes must not depend on the lane or on the order, so the same bits come out
 * at any thread count. Inside another parallel region the loop runs on one lane.
 */
#ifndef DR_POOL_H
#define DR_POOL_H

#include "base/base.h"

typedef struct dr_pool {
    int32_t threads;
    dr_parallel_fn *parallel; /* NULL: OpenMP */
    void *user;
} dr_pool;

typedef void dr_lane_fn(void *arg, int64_t task, int32_t lane);

/* Fills in the thread count: options, OMP_NUM_THREADS, cores of this process. */
dr_status dr_pool_init(dr_pool *pool, const dr_context_options *options);

/* How many lanes dr_pool_run uses for so many tasks: min(threads, tasks). */
int32_t dr_pool_lanes(const dr_pool *pool, int64_t tasks);

void dr_pool_run(const dr_pool *pool, int64_t tasks, dr_lane_fn *body, void *arg);

#endif
