/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.c - see pool.h. Lanes share one atomic counter of tasks: whoever is free takes
 * the next, so uneven tasks balance without a schedule.
 */
#include "base/pool.h"

#include <omp.h>
#include <stdatomic.h>

typedef struct run {
    dr_lane_fn *body;
    void *arg;
    int64_t tasks;
    _Atomic int64_t next;
} run;

static void lane_loop(void *arg, int64_t lane)
{
    run *r = arg;
    for (;;) {
        int64_t task = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed);
        if (task >= r->tasks)
            return;
        r->body(r->arg, task, (int32_t)lane);
    }
}

dr_status dr_pool_init(dr_pool *pool, const dr_context_options *options)
{
    *pool = (dr_pool){0};
    if (options != NULL) {
        if (options->size != sizeof *options)
            return dr_fail(DR_ERR_ARG, "options.size: must be %zu (DR_CONTEXT_OPTIONS_INIT), got %u",
                           sizeof *options, options->size);
        if (options->threads < 0 || options->threads > 4096)
            return dr_fail(DR_ERR_ARG, "options.threads: must be 0 to 4096, got %d",
                           options->threads);
        pool->threads = options->threads;
        pool->parallel = options->parallel;
        pool->user = options->parallel_user;
    }
    if (pool->threads == 0)
        pool->threads = omp_get_max_threads() < 4096 ? omp_get_max_threads() : 4096;
    return DR_OK;
}

int32_t dr_pool_lanes(const dr_pool *pool, int64_t tasks)
{
    return (int32_t)dr_max(1, dr_min(pool->threads, tasks));
}

void dr_pool_run(const dr_pool *pool, int64_t tasks, dr_lane_fn *body, void *arg)
{
    run r = {.body = body, .arg = arg, .tasks = tasks};
    atomic_init(&r.next, 0);
    int32_t lanes = dr_pool_lanes(pool, tasks);
    if (lanes == 1 || (pool->parallel == NULL && omp_in_parallel())) {
        lane_loop(&r, 0);
        return;
    }
    if (pool->parallel != NULL) {
        pool->parallel(pool->user, lanes, lane_loop, &r);
        return;
    }
#pragma omp parallel for num_threads(lanes) schedule(static, 1)
    for (int32_t lane = 0; lane < lanes; lane++)
        lane_loop(&r, lane);
}
