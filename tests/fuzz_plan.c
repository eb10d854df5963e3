/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_plan.c - libFuzzer target: any bytes as a problem. What dr_problem_complete lets
 * through must be cut exactly as the token-by-token count of plan_check.h says; what it
 * refuses must come with a sentence. Built by the option DR_FUZZ, or alone:
 *
 *   clang -g -fsanitize=fuzzer,address,undefined -D_POSIX_C_SOURCE=200809L -Iinclude -Isrc \
 *       -Itests tests/fuzz_plan.c src/plan/plan.c src/base/status.c -lm -lpthread -o fuzz_plan
 */
#include "plan_check.h"

#include <math.h>
#include <stdlib.h>

typedef struct input {
    const uint8_t *data;
    size_t left;
} input;

static uint64_t take(input *in, size_t bytes)
{
    uint64_t x = 0;
    for (size_t i = 0; i < bytes && in->left > 0; i++, in->left--)
        x |= (uint64_t)*in->data++ << 8 * i;
    return x;
}

/* Mostly small, sometimes anything. */
static int64_t number(input *in, int64_t small)
{
    uint64_t kind = take(in, 1);
    return kind < 240 ? (int64_t)(take(in, 2) % (uint64_t)small) : (int64_t)take(in, 8);
}

static double real(input *in)
{
    static const double some[] = {0, 1, 2, -1, -5, 1e-6, 0.5, INFINITY, -INFINITY, NAN};
    return some[take(in, 1) % DR_COUNT(some)];
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    enum { MOST = 200, TOKENS = 5000 };
    input in = {data, size};
    int64_t offsets[MOST + 1];
    dr_problem p = DR_PROBLEM_INIT, out;
    p.variant = (dr_variant)(take(&in, 1) % 4);
    p.batch = number(&in, 5);
    p.tokens = number(&in, TOKENS);
    p.heads = (int32_t)number(&in, 9);
    p.value_heads = p.heads * (int32_t)(take(&in, 1) % 4) + (int32_t)(take(&in, 1) % 2);
    p.key_dim = (int32_t)number(&in, 300);
    p.value_dim = (int32_t)number(&in, 300);
    p.gate = (dr_gate)(take(&in, 1) % 7);
    p.lower_bound = real(&in);
    p.beta = (dr_beta)(take(&in, 1) % 4);
    p.beta_scale = real(&in);
    p.l2norm_eps = real(&in);
    p.scale = real(&in);
    p.head_map = (dr_head_map)(take(&in, 1) % 3);
    p.chunk = (int32_t)number(&in, 130);
    p.keep = (dr_keep)(take(&in, 1) % 4);
    if (take(&in, 1) % 2) {
        p.sequences = (int64_t)(take(&in, 1) % (MOST + 1));
        for (int64_t i = 0, at = 0; i <= p.sequences; i++) {
            offsets[i] = at;
            at = take(&in, 1) < 250 ? at + number(&in, 90) : (int64_t)take(&in, 8);
        }
        p.offsets = offsets;
    }
    if (dr_problem_complete(&p, &out) != DR_OK) {
        if (strchr(dr_last_error(), ':') == NULL)
            abort();
        return 0;
    }
    if (out.value_heads % out.heads != 0 || out.scale == 0 || (out.l2norm && out.l2norm_eps <= 0) ||
        (out.beta_scale != 1 && out.beta_scale != 2))
        abort();
    if (out.batch > 1000 || out.tokens > 100000) /* legal; too long to walk */
        return 0;
    if (out.chunk == 0)
        out.chunk = 64;
    dr_plan plan = {0};
    if (dr_plan_cut(&plan, &out) != DR_OK || plan_disagrees(&plan, &out) != NULL)
        abort();
    for (int32_t j = 0; j < out.value_heads && j < 100; j++)
        if (dr_key_head(&out, j) < 0 || dr_key_head(&out, j) >= out.heads)
            abort();
    dr_plan_clear(&plan);
    return 0;
}
