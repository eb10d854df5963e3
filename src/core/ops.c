/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ops.c - the row operations: every argument checked and brought to the form of backend.h,
 * then the backend. The two directions of an operation share one checker, since backward
 * reads the same inputs and adds gradients.
 */
#include "core/core.h"

#include <float.h>
#include <math.h>

#define CHECK_STRUCT(args, init)                                                              \
    do {                                                                                      \
        if (ctx == NULL)                                                                      \
            return dr_fail(DR_ERR_ARG, "ctx: must not be NULL");                              \
        if ((args) == NULL)                                                                   \
            return dr_fail(DR_ERR_ARG, "args: must not be NULL");                             \
        if ((args)->size != sizeof *(args))                                                   \
            return dr_fail(DR_ERR_ARG, "args.size: must be %zu (" init "), got %u", sizeof *(args), \
                           (args)->size);                                                     \
    } while (0)

/* Tensors that a direction does not check must not reach the backend: each checker starts from the
 * caller's options alone. */
static const dr_tensor none = DR_TENSOR_NONE;

/* A tensor of the very shape of x. */
static dr_status same_shape(const dr_context *ctx, const dr_tensor *x, const dr_tensor *t,
                            const char *name, bool required, bool output, dr_tensor *out)
{
    dr_expect want = {name, "the shape of x", x->rank, {0}, false, required, output};
    for (int32_t i = 0; i < x->rank; i++)
        want.shape[i] = x->shape[i];
    return dr_tensor_check(ctx, t, &want, out);
}

/* x itself, which sets the shape: rank between low and high. */
static dr_status shape_setter(const dr_context *ctx, const dr_tensor *x, int32_t low, int32_t high,
                              dr_tensor *out)
{
    if (x->rank < low || x->rank > high)
        return dr_fail(DR_ERR_SHAPE, "x: rank must be %d to %d, got %d", low, high, x->rank);
    int64_t count = 1;
    for (int32_t i = 0; i < x->rank; i++)
        if (x->shape[i] < 0 || !dr_mul(count, dr_max(x->shape[i], 1), &count) ||
            count > INT64_MAX / 64)
            return dr_fail(DR_ERR_SHAPE, "x: shape[%d] must be 0 or more and the product must fit "
                           "64 bits, got %lld", i, (long long)x->shape[i]);
    if (x->data == NULL && !dr_tensor_empty(x))
        return dr_fail(DR_ERR_ARG, "x: must be given");
    DR_TRY(same_shape(ctx, x, x, "x", true, false, out));
    if (out->data == NULL) { /* an empty tensor may come without memory */
        *out = *x;
        if (dr_dtype_size(out->dtype) == 0)
            out->dtype = DR_F32;
    }
    return DR_OK;
}

static dr_status check_eps(double *eps)
{
    if (*eps == 0)
        *eps = 1e-6;
    if (!(*eps >= FLT_MIN && *eps <= FLT_MAX))
        return dr_fail(DR_ERR_ARG, "eps: must be %g to %g, got %g", FLT_MIN, FLT_MAX, *eps);
    return DR_OK;
}

/* ---- convolution ------------------------------------------------------------------- */

static dr_status conv_state(const dr_context *ctx, const dr_tensor *t, const char *name, int64_t N,
                            int64_t D, int64_t halo, bool output, dr_tensor *out)
{
    bool wide = t->data != NULL && t->rank == 3 && t->shape[2] == halo + 1;
    const dr_expect want = {name, wide ? "[N,D,halo+1]" : "[N,D,halo]", 3,
                            {N, D, halo + (wide ? 1 : 0), 0}, false, false, output};
    return dr_tensor_check(ctx, t, &want, out);
}

static dr_status conv_shape(const dr_context *ctx, const dr_conv_args *args, dr_conv_args *a)
{
    dr_tensor x = args->x;
    if (x.rank == 2) { /* [T,D]: the batch axis left out */
        x = (dr_tensor){x.data, x.dtype, 3, {1, x.shape[0], x.shape[1], 0},
                        {0, x.stride[0], x.stride[1], 0}};
    }
    if (x.rank != 3)
        return dr_fail(DR_ERR_SHAPE, "x: rank must be 3, or 2 where the only batch row is left out, got %d", x.rank);
    return shape_setter(ctx, &x, 3, 3, &a->x);
}

static dr_status conv_check(const dr_context *ctx, const dr_conv_args *args, int dir, bool step,
                            dr_conv_args *a)
{
    CHECK_STRUCT(args, "DR_CONV_ARGS_INIT");
    *a = *args;
    a->x = a->weight = a->bias = a->initial_state = a->y = a->final_state = a->dy = none;
    a->d_final_state = a->dx = a->dweight = a->dbias = a->d_initial_state = none;
    if (a->activation != DR_ACT_NONE && a->activation != DR_ACT_SILU)
        return dr_fail(DR_ERR_ARG, "activation: must be DR_ACT_NONE (0) or DR_ACT_SILU (1), got %d",
                       (int)a->activation);
    if (a->dilation == 0)
        a->dilation = 1;
    if (a->dilation < 1)
        return dr_fail(DR_ERR_ARG, "dilation: must be 1 or more, got %d", a->dilation);
    DR_TRY(conv_shape(ctx, args, a));
    int64_t B = a->x.shape[0], T = a->x.shape[1], D = a->x.shape[2];
    int64_t W = args->weight.rank == 2 ? args->weight.shape[1]
                                       : args->weight.rank == 3 ? args->weight.shape[2] : 0;
    if (W < 1 || W > INT32_MAX)
        return dr_fail(DR_ERR_SHAPE, "weight: expected [D,W] or [D,1,W] with W of 1 or more, got rank %d, "
                       "width %lld", args->weight.rank, (long long)W);
    const dr_expect weight3 = {"weight", "[D,1,W]", 3, {D, 1, W, 0}, false, true, false};
    const dr_expect weight2 = {"weight", "[D,W]", 2, {D, W, 0, 0}, false, true, false};
    bool deep = args->weight.rank == 3;
    DR_TRY(dr_tensor_check(ctx, &args->weight, deep ? &weight3 : &weight2, &a->weight));
    const dr_expect bias = {"bias", "[D]", 1, {D, 0, 0, 0}, false, false, false};
    DR_TRY(dr_tensor_check(ctx, &args->bias, &bias, &a->bias));
    DR_TRY(dr_offsets_check("offsets", a->offsets, a->sequences, B, T));
    int64_t N = a->offsets ? a->sequences : B, halo = (W - 1) * a->dilation, slots = N;
    const dr_tensor *pool = args->final_state.data ? &args->final_state : &args->initial_state;
    if (a->state_index != NULL) {
        if (dir < 0)
            return dr_fail(DR_ERR_ARG, "state_index: must be NULL for the backward pass");
        if (pool->data == NULL)
            return dr_fail(DR_ERR_ARG, "state_index: needs initial_state or final_state");
        slots = pool->rank == 3 ? pool->shape[0] : 0;
    }
    DR_TRY(conv_state(ctx, &args->initial_state, "initial_state", slots, D, halo, false,
                      &a->initial_state));
    DR_TRY(conv_state(ctx, &args->final_state, "final_state", slots, D, halo, true, &a->final_state));
    for (int64_t i = 0; a->state_index != NULL && i < N; i++) {
        if (a->state_index[i] < -1 || a->state_index[i] >= slots)
            return dr_fail(DR_ERR_ARG, "state_index[%lld]: must be -1 or a slot below %lld, got %d",
                           (long long)i, (long long)slots, a->state_index[i]);
        for (int64_t j = 0; j < i; j++)
            if (a->state_index[i] == a->state_index[j] && a->state_index[i] >= 0)
                return dr_fail(DR_ERR_ARG, "state_index: slots of one call must differ, got slot %d twice",
                               a->state_index[i]);
    }
    const dr_expect token = {dir > 0 ? "y" : "dy", "[B,T,D]", 3, {B, T, D, 0}, B == 1, false, dir > 0};
    if (dir > 0) {
        DR_TRY(dr_tensor_check(ctx, &args->y, &token, &a->y));
        if (a->y.data == NULL && a->final_state.data == NULL && !dr_tensor_empty(&a->x))
            return dr_fail(DR_ERR_ARG, "y: must be given, or else final_state");
        if (step && (a->initial_state.data == NULL || a->final_state.data == NULL) && halo > 0)
            return dr_fail(DR_ERR_ARG, "%s: must be given to dr_conv_step",
                           a->initial_state.data == NULL ? "initial_state" : "final_state");
        return DR_OK;
    }
    const dr_expect dx = {"dx", "[B,T,D]", 3, {B, T, D, 0}, B == 1, false, true};
    const dr_expect dbias = {"dbias", "[D]", 1, {D, 0, 0, 0}, false, false, true};
    dr_expect dweight = args->dweight.rank == 3 ? weight3 : weight2;
    dweight.name = "dweight";
    dweight.required = false;
    dweight.output = true;
    DR_TRY(dr_tensor_check(ctx, &args->dy, &token, &a->dy));
    DR_TRY(conv_state(ctx, &args->d_final_state, "d_final_state", N, D, halo, false,
                      &a->d_final_state));
    DR_TRY(dr_tensor_check(ctx, &args->dx, &dx, &a->dx));
    DR_TRY(dr_tensor_check(ctx, &args->dweight, &dweight, &a->dweight));
    DR_TRY(dr_tensor_check(ctx, &args->dbias, &dbias, &a->dbias));
    if (a->bias.data == NULL)
        DR_TRY(dr_tensor_absent(&a->dbias, "dbias", "when bias is"));
    return conv_state(ctx, &args->d_initial_state, "d_initial_state", N, D, halo, true,
                      &a->d_initial_state);
}

/* [D,1,W] to [D,W]: the form that backends see. */
static void drop_middle(dr_tensor *t)
{
    if (t->data == NULL || t->rank != 3)
        return;
    t->shape[1] = t->shape[2];
    t->stride[1] = t->stride[2];
    t->rank = 2;
}

static dr_status conv_run(const dr_context *ctx, const dr_conv_args *args, int dir, bool step)
{
    dr_conv_args a;
    DR_TRY(conv_check(ctx, args, dir, step, &a));
    drop_middle(&a.weight);
    drop_middle(&a.dweight);
    DR_TRY(ctx->backend->conv(ctx->dev, dir, &a));
    int64_t tail = a.offsets ? a.offsets[a.sequences] : a.x.shape[1];
    dr_tensor_zero_tail(dir > 0 ? &a.y : &a.dx, tail);
    return DR_OK;
}

dr_status dr_conv(const dr_context *ctx, const dr_conv_args *args)
{
    return conv_run(ctx, args, +1, false);
}

dr_status dr_conv_backward(const dr_context *ctx, const dr_conv_args *args)
{
    return conv_run(ctx, args, -1, false);
}

dr_status dr_conv_step(const dr_context *ctx, const dr_conv_args *args)
{
    return conv_run(ctx, args, +1, true);
}

/* ---- gate -------------------------------------------------------------------------- */

static dr_status gate_run(const dr_context *ctx, const dr_gate_args *args, int dir)
{
    CHECK_STRUCT(args, "DR_GATE_ARGS_INIT");
    dr_gate_args a = *args;
    a.x = a.a_log = a.dt_bias = a.g = a.dg = a.dx = a.da_log = a.ddt_bias = none;
    if (a.gate != DR_GATE_SOFTPLUS && a.gate != DR_GATE_LOWER_BOUND)
        return dr_fail(DR_ERR_ARG, "gate: must be DR_GATE_SOFTPLUS (4) or DR_GATE_LOWER_BOUND (5; there "
                       "is no default), got %d", (int)a.gate);
    bool bounded = a.gate == DR_GATE_LOWER_BOUND;
    if (bounded ? !(a.lower_bound < 0) || !isfinite(a.lower_bound) : a.lower_bound != 0)
        return dr_fail(DR_ERR_ARG, "lower_bound: must be %s, got %g",
                       bounded ? "finite and below 0" : "0 unless gate is DR_GATE_LOWER_BOUND",
                       a.lower_bound);
    DR_TRY(shape_setter(ctx, &args->x, 3, 4, &a.x));
    int64_t HV = a.x.shape[2], K = a.x.rank == 4 ? a.x.shape[3] : 1;
    const dr_expect a_log = {"a_log", "[HV]", 1, {HV, 0, 0, 0}, false, !bounded, false};
    DR_TRY(dr_vector_check(ctx, &args->a_log, &a_log, &a.a_log));
    DR_TRY(dr_bias_check(ctx, &args->dt_bias, "dt_bias", false, HV, K, &a.dt_bias));
    if (dir > 0) {
        DR_TRY(same_shape(ctx, &a.x, &args->g, "g", true, true, &a.g));
    } else {
        const dr_expect da_log = {"da_log", "[HV]", 1, {HV, 0, 0, 0}, false, false, true};
        DR_TRY(same_shape(ctx, &a.x, &args->dg, "dg", true, false, &a.dg));
        DR_TRY(same_shape(ctx, &a.x, &args->dx, "dx", false, true, &a.dx));
        DR_TRY(dr_vector_check(ctx, &args->da_log, &da_log, &a.da_log));
        DR_TRY(dr_bias_check(ctx, &args->ddt_bias, "ddt_bias", true, HV, K, &a.ddt_bias));
        if (a.a_log.data == NULL)
            DR_TRY(dr_tensor_absent(&a.da_log, "da_log", "when a_log is"));
        if (a.dt_bias.data == NULL)
            DR_TRY(dr_tensor_absent(&a.ddt_bias, "ddt_bias", "when dt_bias is"));
    }
    if (a.x.rank == 3) {
        dr_tensor *all[] = {&a.x, &a.g, &a.dg, &a.dx};
        for (size_t i = 0; i < DR_COUNT(all); i++)
            dr_tensor_widen(all[i]);
        if (a.x.rank == 3) { /* empty x without memory */
            a.x.rank = 4;
            a.x.shape[3] = 1;
        }
    }
    return ctx->backend->gate(ctx->dev, dir, &a);
}

dr_status dr_gate_activate(const dr_context *ctx, const dr_gate_args *args)
{
    return gate_run(ctx, args, +1);
}

dr_status dr_gate_backward(const dr_context *ctx, const dr_gate_args *args)
{
    return gate_run(ctx, args, -1);
}

/* ---- beta, l2norm, gated norm ------------------------------------------------------ */

static dr_status beta_run(const dr_context *ctx, const dr_beta_args *args, int dir)
{
    CHECK_STRUCT(args, "DR_BETA_ARGS_INIT");
    dr_beta_args a = *args;
    a.x = a.beta = a.dbeta = a.dx = none;
    if (a.scale == 0)
        a.scale = 1;
    if (a.scale != 1 && a.scale != 2)
        return dr_fail(DR_ERR_ARG, "scale: must be 1 or 2, got %g", a.scale);
    DR_TRY(shape_setter(ctx, &args->x, 1, DR_MAX_RANK, &a.x));
    if (dir > 0) {
        DR_TRY(same_shape(ctx, &a.x, &args->beta, "beta", true, true, &a.beta));
    } else {
        DR_TRY(same_shape(ctx, &a.x, &args->dbeta, "dbeta", true, false, &a.dbeta));
        DR_TRY(same_shape(ctx, &a.x, &args->dx, "dx", true, true, &a.dx));
    }
    if (dr_tensor_empty(&a.x))
        return DR_OK;
    dr_tensor *all[] = {&a.x, &a.beta, &a.dbeta, &a.dx};
    for (size_t i = 0; i < DR_COUNT(all); i++)
        dr_tensor_lead(all[i]);
    return ctx->backend->beta(ctx->dev, dir, &a);
}

dr_status dr_beta_sigmoid(const dr_context *ctx, const dr_beta_args *args)
{
    return beta_run(ctx, args, +1);
}

dr_status dr_beta_backward(const dr_context *ctx, const dr_beta_args *args)
{
    return beta_run(ctx, args, -1);
}

static dr_status l2norm_run(const dr_context *ctx, const dr_l2norm_args *args, int dir)
{
    CHECK_STRUCT(args, "DR_L2NORM_ARGS_INIT");
    dr_l2norm_args a = *args;
    a.x = a.y = a.dy = a.dx = none;
    DR_TRY(check_eps(&a.eps));
    DR_TRY(shape_setter(ctx, &args->x, 1, DR_MAX_RANK, &a.x));
    if (dir > 0) {
        DR_TRY(same_shape(ctx, &a.x, &args->y, "y", true, true, &a.y));
    } else {
        DR_TRY(same_shape(ctx, &a.x, &args->dy, "dy", true, false, &a.dy));
        DR_TRY(same_shape(ctx, &a.x, &args->dx, "dx", true, true, &a.dx));
    }
    if (dr_tensor_empty(&a.x))
        return DR_OK;
    dr_tensor *all[] = {&a.x, &a.y, &a.dy, &a.dx};
    for (size_t i = 0; i < DR_COUNT(all); i++)
        dr_tensor_lead(all[i]);
    return ctx->backend->l2norm(ctx->dev, dir, &a);
}

dr_status dr_l2norm(const dr_context *ctx, const dr_l2norm_args *args)
{
    return l2norm_run(ctx, args, +1);
}

dr_status dr_l2norm_backward(const dr_context *ctx, const dr_l2norm_args *args)
{
    return l2norm_run(ctx, args, -1);
}

static dr_status norm_run(const dr_context *ctx, const dr_norm_args *args, int dir)
{
    CHECK_STRUCT(args, "DR_NORM_ARGS_INIT");
    dr_norm_args a = *args;
    a.x = a.gate = a.weight = a.y = a.dy = a.dx = a.dgate = a.dweight = none;
    if (a.activation != DR_ACT_SILU && a.activation != DR_ACT_SIGMOID)
        return dr_fail(DR_ERR_ARG, "activation: must be DR_ACT_SILU (1) or DR_ACT_SIGMOID (2; there is no "
                       "default), got %d", (int)a.activation);
    DR_TRY(check_eps(&a.eps));
    DR_TRY(shape_setter(ctx, &args->x, 1, DR_MAX_RANK, &a.x));
    int64_t V = a.x.shape[a.x.rank - 1];
    const dr_expect weight = {"weight", "[V]", 1, {V, 0, 0, 0}, false, true, false};
    DR_TRY(same_shape(ctx, &a.x, &args->gate, "gate", true, false, &a.gate));
    DR_TRY(dr_tensor_check(ctx, &args->weight, &weight, &a.weight));
    if (dir > 0) {
        DR_TRY(same_shape(ctx, &a.x, &args->y, "y", true, true, &a.y));
    } else {
        const dr_expect dweight = {"dweight", "[V]", 1, {V, 0, 0, 0}, false, false, true};
        DR_TRY(same_shape(ctx, &a.x, &args->dy, "dy", true, false, &a.dy));
        DR_TRY(same_shape(ctx, &a.x, &args->dx, "dx", false, true, &a.dx));
        DR_TRY(same_shape(ctx, &a.x, &args->dgate, "dgate", false, true, &a.dgate));
        DR_TRY(dr_tensor_check(ctx, &args->dweight, &dweight, &a.dweight));
    }
    dr_tensor *all[] = {&a.x, &a.gate, &a.y, &a.dy, &a.dx, &a.dgate};
    for (size_t i = 0; i < DR_COUNT(all); i++)
        dr_tensor_lead(all[i]);
    if (a.x.rank < DR_MAX_RANK) { /* empty x without memory */
        dr_tensor x = a.x;
        x.data = &x;
        dr_tensor_lead(&x);
        x.data = NULL;
        a.x = x;
    }
    return ctx->backend->norm(ctx->dev, dir, &a);
}

dr_status dr_gated_norm(const dr_context *ctx, const dr_norm_args *args)
{
    return norm_run(ctx, args, +1);
}

dr_status dr_gated_norm_backward(const dr_context *ctx, const dr_norm_args *args)
{
    return norm_run(ctx, args, -1);
}

/* ---- matmul ------------------------------------------------------------------------ */

dr_status dr_matmul(const dr_context *ctx, const dr_matmul_args *args)
{
    CHECK_STRUCT(args, "DR_MATMUL_ARGS_INIT");
    dr_matmul_args a = *args;
    if (a.alpha == 0)
        a.alpha = 1;
    if (!isfinite(a.alpha))
        return dr_fail(DR_ERR_ARG, "alpha: must be finite, got %g", a.alpha);
    if (args->a.rank != 2 || args->b.rank != 2)
        return dr_fail(DR_ERR_SHAPE, "a, b: rank must be 2, got %d, %d", args->a.rank, args->b.rank);
    int64_t m = args->a.shape[0], k = args->a.shape[1], n = args->b.shape[1];
    if (m < 0 || k < 0 || n < 0 || m > INT32_MAX || k > INT32_MAX || n > INT32_MAX)
        return dr_fail(DR_ERR_SHAPE, "a, b: extents must be 0 to %d, got m = %lld, k = %lld, n = %lld",
                       INT32_MAX, (long long)m, (long long)k, (long long)n);
    const dr_expect want_a = {"a", "[m,k]", 2, {m, k, 0, 0}, false, true, false};
    const dr_expect want_b = {"b", "[k,n]", 2, {k, n, 0, 0}, false, true, false};
    const dr_expect want_out = {"out", "[m,n]", 2, {m, n, 0, 0}, false, true, true};
    DR_TRY(dr_tensor_check(ctx, &args->a, &want_a, &a.a));
    DR_TRY(dr_tensor_check(ctx, &args->b, &want_b, &a.b));
    DR_TRY(dr_tensor_check(ctx, &args->out, &want_out, &a.out));
    if (m == 0 || n == 0)
        return DR_OK;
    if (k == 0) { /* absent operands: their shapes still count */
        a.a.shape[0] = m;
        a.b.shape[1] = n;
    }
    return ctx->backend->matmul(ctx->dev, &a);
}
