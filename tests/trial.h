/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trial.h - one delta-rule problem with data, run on any context in any form: a spec says
 * what, a trial holds the inputs, a result the outputs as doubles. Every run poisons its
 * workspace, fences every buffer, and checks that inputs, gaps and canaries are untouched.
 *
 * The tensors of dr_io are a table (SLOT_LIST), so that builders, comparisons and fault
 * injection treat them alike. Letters of a shape: B T H K V as in deltarule.h, J value
 * heads, N sequences, C chunks, G the width of the gate (left out for GDN).
 */
#ifndef DR_TRIAL_H
#define DR_TRIAL_H

#include "test.h"

#include "core/core.h"

#include <deltarule/cp.h>

typedef enum role { ROLE_INPUT, ROLE_OUTPUT, ROLE_COTANGENT, ROLE_GRADIENT } role;

#define SLOT_LIST(X)                    \
    X(q, INPUT, "BTHK")                 \
    X(k, INPUT, "BTHK")                 \
    X(v, INPUT, "BTJV")                 \
    X(g, INPUT, "BTJG")                 \
    X(beta, INPUT, "BTJ")               \
    X(a_log, INPUT, "J")                \
    X(dt_bias, INPUT, "JG")             \
    X(initial_state, INPUT, "NJKV")     \
    X(o, OUTPUT, "BTJV")                \
    X(final_state, OUTPUT, "NJKV")      \
    X(chunk_states, OUTPUT, "CJKV")     \
    X(d_o, COTANGENT, "BTJV")           \
    X(d_final_state, COTANGENT, "NJKV") \
    X(dq, GRADIENT, "BTHK")             \
    X(dk, GRADIENT, "BTHK")             \
    X(dv, GRADIENT, "BTJV")             \
    X(dg, GRADIENT, "BTJG")             \
    X(dbeta, GRADIENT, "BTJ")           \
    X(da_log, GRADIENT, "J")            \
    X(ddt_bias, GRADIENT, "JG")         \
    X(d_initial_state, GRADIENT, "NJKV")

enum {
#define SLOT_ENUM(name, role, letters) S_##name,
    SLOT_LIST(SLOT_ENUM)
#undef SLOT_ENUM
        SLOTS
};

typedef struct slot {
    const char *name;
    role role;
    const char *letters;
    size_t at; /* in dr_io */
} slot;

static const slot slots[SLOTS] = {
#define SLOT_ROW(name, role, letters) {#name, ROLE_##role, letters, offsetof(dr_io, name)},
    SLOT_LIST(SLOT_ROW)
#undef SLOT_ROW
};

#define BIT(slot) (1u << S_##slot)

static inline dr_tensor *io_slot(dr_io *io, int i)
{
    return (dr_tensor *)((char *)io + slots[i].at);
}

/* How strongly states fade, and other shapes of the data. */
typedef enum decay {
    DECAY_MILD = 0,  /* around -0.3 */
    DECAY_WEAK,      /* around -1e-4 */
    DECAY_STRONG,    /* -20 */
    DECAY_CRUSH,     /* -1000 */
    DECAY_ALTERNATE, /* 0 and -1000 in turn */
    DECAY_MIXED,     /* any of these in any channel */
    DECAY_ZERO
} decay;

typedef struct spec {
    dr_problem p;
    dr_dtype dtype, gate_dtype, state_dtype; /* 0: f32; of q k v, of g beta and parameters */
    layout layout;
    decay decay;
    bool repeated_keys;
    bool wide_beta;  /* near the upper end of what is allowed */
    uint32_t absent; /* bits of slots left out */
    uint64_t seed;
} spec;

typedef struct trial {
    spec s;
    dr_problem p; /* completed */
    int64_t N;
    tensor t[SLOTS];
    dr_io io; /* inputs and cotangents */
    rng random;
} trial;

typedef enum form { FORM_CALL = 0, FORM_STAGED, FORM_STEP } form;

typedef struct how {
    form form;
    bool forward_only;
    bool clean;        /* zeroed workspace instead of a poisoned one */
    dr_dtype out;      /* of every output; 0: as the inputs */
    uint32_t unwanted; /* bits of output slots left out */
} how;

typedef struct result {
    double *value[SLOTS];
    int64_t count[SLOTS];
    dr_dtype dtype[SLOTS];
    int32_t chunk;
} result;

static inline dr_problem problem_make(dr_variant variant, int64_t T, int32_t H, int32_t HV,
                                      int32_t K, int32_t V)
{
    dr_problem p = DR_PROBLEM_INIT;
    p.variant = variant;
    p.tokens = T;
    p.heads = H;
    p.value_heads = HV;
    p.key_dim = K;
    p.value_dim = V;
    p.gate = DR_GATE_LOG;
    p.beta = DR_BETA_VALUE;
    return p;
}

static inline bool gate_is_raw(const dr_problem *p)
{
    return p->gate == DR_GATE_SOFTPLUS || p->gate == DR_GATE_LOWER_BOUND;
}

static inline bool slot_used(const trial *x, int i)
{
    bool a_log = gate_is_raw(&x->p) && !(x->s.absent & BIT(a_log));
    bool dt_bias = gate_is_raw(&x->p) && !(x->s.absent & BIT(dt_bias));
    if (x->s.absent & 1u << i)
        return false;
    if (i == S_g || i == S_dg)
        return x->p.gate != DR_GATE_NONE;
    if (i == S_a_log || i == S_da_log)
        return a_log;
    if (i == S_dt_bias || i == S_ddt_bias)
        return dt_bias;
    return true;
}

static inline int32_t slot_shape(const dr_problem *p, int64_t N, int64_t NT, int i, int64_t *shape)
{
    const char *letters = slots[i].letters;
    bool turn = p->state_v_first && strstr(letters, "KV") != NULL;
    int32_t rank = 0;
    for (const char *c = letters; *c != 0; c++) {
        char x = turn && *c == 'K' ? 'V' : turn && *c == 'V' ? 'K' : *c;
        if (x == 'G' && p->variant == DR_GDN)
            continue;
        shape[rank++] = x == 'B'   ? p->batch
                        : x == 'T' ? p->tokens
                        : x == 'H' ? p->heads
                        : x == 'J' ? p->value_heads
                        : x == 'N' ? N
                        : x == 'C' ? NT
                        : x == 'V' ? p->value_dim
                                   : p->key_dim;
    }
    return rank;
}

static inline dr_dtype slot_dtype(const spec *s, int i)
{
    uint32_t gate = BIT(g) | BIT(beta) | BIT(a_log) | BIT(dt_bias) | BIT(dg) | BIT(dbeta) |
                    BIT(da_log) | BIT(ddt_bias);
    dr_dtype d = strchr(slots[i].letters, 'N') || strchr(slots[i].letters, 'C') ? s->state_dtype
                 : gate & 1u << i                                               ? s->gate_dtype
                                                                                : s->dtype;
    return d ? d : DR_F32;
}

static inline double draw_decay(rng *r, decay fade, int64_t i)
{
    static const decay any[] = {DECAY_MILD, DECAY_WEAK, DECAY_STRONG, DECAY_CRUSH, DECAY_ZERO};
    switch (fade) {
    case DECAY_MILD:
        return -fabs(0.3 * rng_normal(r));
    case DECAY_WEAK:
        return -2e-4 * rng_uniform(r, 0, 1);
    case DECAY_STRONG:
        return -20;
    case DECAY_CRUSH:
        return -1000;
    case DECAY_ALTERNATE:
        return i % 2 ? -1000 : 0;
    case DECAY_MIXED:
        return draw_decay(r, RNG_PICK(r, any), i);
    case DECAY_ZERO:
        return 0;
    }
    return 0;
}

/* The g of one token, head and channel in the form that the problem takes. */
static inline double draw_gate(trial *x, int64_t token)
{
    double g = draw_decay(&x->random, x->s.decay, token);
    if (x->p.gate == DR_GATE_LOG)
        return g;
    if (x->p.gate == DR_GATE_FACTOR)
        return exp(g);
    return g < -2 ? 8 : g > -0.01 ? -8 : 2 * rng_normal(&x->random); /* raw: strong, weak, any */
}

static inline void draw_slot(trial *x, int i, double *values, const int64_t *shape, int32_t rank)
{
    rng *r = &x->random;
    int64_t n = 1, width = shape[rank - 1], per_token = 1;
    for (int32_t a = 0; a < rank; a++)
        n *= shape[a];
    for (int32_t a = 2; a < rank; a++)
        per_token *= shape[a];
    double top = x->s.wide_beta ? 2 : 1, low = x->s.wide_beta ? 1.9 : 0;
    for (int64_t m = 0; m < n; m++)
        values[m] = i == S_g       ? draw_gate(x, per_token > 0 ? m / per_token : 0)
                    : i == S_a_log ? rng_uniform(r, -1, 1)
                    : i == S_beta && x->p.beta == DR_BETA_VALUE ? rng_uniform(r, low, top)
                    : i == S_beta && x->s.wide_beta             ? 6 + rng_normal(r)
                                                                : rng_normal(r);
    if (i == S_k && x->s.repeated_keys)
        for (int64_t m = per_token; m < n; m++)
            values[m] = values[m % per_token];
    for (int64_t row = 0; (i == S_q || i == S_k) && !x->p.l2norm && row < n; row += width) {
        double sum = 0;
        for (int64_t m = 0; m < width; m++)
            sum += values[row + m] * values[row + m];
        for (int64_t m = 0; m < width; m++)
            values[row + m] /= sqrt(sum);
    }
}

static inline trial trial_make(const spec *s)
{
    trial x = {.s = *s, .random = {s->seed * 1000003 + 17}, .io = DR_IO_INIT};
    MUST(dr_problem_complete(&s->p, &x.p));
    x.N = x.p.offsets ? x.p.sequences : x.p.batch;
    for (int i = 0; i < SLOTS; i++) {
        if (slots[i].role == ROLE_OUTPUT || slots[i].role == ROLE_GRADIENT || !slot_used(&x, i))
            continue;
        int64_t shape[DR_MAX_RANK], n = 1;
        int32_t rank = slot_shape(&x.p, x.N, 0, i, shape);
        for (int32_t a = 0; a < rank; a++)
            n *= shape[a];
        double *values = malloc(sizeof *values * (size_t)(n + 1));
        assert_non_null(values);
        draw_slot(&x, i, values, shape, rank);
        x.t[i] = tensor_make(&x.random, s->layout, slot_dtype(s, i), rank, shape);
        view_write(&x.t[i].view, values);
        free(values);
        tensor_remember(&x.t[i]);
        *io_slot(&x.io, i) = x.t[i].view;
    }
    return x;
}

static inline void trial_free(trial *x)
{
    for (int i = 0; i < SLOTS; i++) {
        tensor_check(&x->t[i], slots[i].name, false);
        tensor_free(&x->t[i]);
    }
}

/* Tokens [from, to) of batch row b as a problem of its own, with the states of sequence n;
 * its inputs are views of x. */
static inline trial trial_cut(const trial *x, int64_t b, int64_t from, int64_t to, int64_t n)
{
    trial y = {.s = x->s, .p = x->p, .N = 1, .io = x->io, .random = x->random};
    y.p.batch = y.s.p.batch = 1;
    y.p.tokens = y.s.p.tokens = to - from;
    y.p.offsets = y.s.p.offsets = NULL;
    y.p.sequences = y.s.p.sequences = 0;
    for (int i = 0; i < SLOTS; i++) {
        dr_tensor *t = io_slot(&y.io, i);
        if (t->data != NULL && slots[i].letters[0] == 'B')
            *t = view_cut(view_cut(*t, 0, b, b + 1), 1, from, to);
        if (t->data != NULL && slots[i].letters[0] == 'N')
            *t = view_cut(*t, 0, n, n + 1);
    }
    return y;
}

static inline void run_form(const dr_plan *plan, const dr_io *io, const dr_buffers *b, const how *h)
{
    if (h->form == FORM_STEP) {
        MUST(dr_step(plan, io, b));
        return;
    }
    if (h->form == FORM_CALL) {
        MUST(dr_forward(plan, io, b));
        if (!h->forward_only)
            MUST(dr_backward(plan, io, b));
        return;
    }
    const dr_direction ways[] = {DR_FORWARD, DR_ADJOINT};
    for (int i = 0; i < (h->forward_only ? 1 : 2); i++) {
        MUST(dr_prepare(plan, ways[i], io, b));
        MUST(dr_recur(plan, ways[i], io, b, NULL, NULL));
        MUST(dr_output(plan, ways[i], io, b));
    }
}

static inline bool slot_wanted(const trial *x, const how *h, int i)
{
    bool step = h->form == FORM_STEP;
    return slot_used(x, i) && !(h->unwanted & 1u << i) && !(step && i == S_chunk_states) &&
           (slots[i].role == ROLE_OUTPUT ||
            (slots[i].role == ROLE_GRADIENT && !h->forward_only && !step));
}

/* Runs x and reads everything that came out. */
static inline result trial_run(const dr_context *ctx, trial *x, how h)
{
    dr_plan *plan;
    MUST(dr_plan_create(ctx, &x->p, &plan));
    dr_plan_info info = DR_PLAN_INFO_INIT;
    MUST(dr_plan_describe(plan, &info));
    size_t scratch = h.form == FORM_STAGED                          ? info.staged_scratch
                     : h.form == FORM_STEP                          ? info.forward_scratch
                     : info.forward_scratch > info.backward_scratch ? info.forward_scratch
                                                                    : info.backward_scratch;
    fenced_buffers b = buffers_make(info.saved_bytes, scratch, h.clean ? 0 : UNWRITTEN);
    result out = {.chunk = info.chunk};
    tensor made[SLOTS] = {0};
    dr_io io = x->io;
    rng r = x->random;
    for (int i = 0; i < SLOTS; i++) {
        if (!slot_wanted(x, &h, i))
            continue;
        int64_t shape[DR_MAX_RANK];
        int32_t rank = slot_shape(&x->p, x->N, info.chunks, i, shape);
        out.dtype[i] = h.out ? h.out : slot_dtype(&x->s, i);
        made[i] = tensor_make(&r, x->s.layout, out.dtype[i], rank, shape);
        tensor_remember(&made[i]);
        *io_slot(&io, i) = made[i].view;
    }
    run_form(plan, &io, &b.b, &h);
    for (int i = 0; i < SLOTS; i++) {
        if (made[i].view.data == NULL)
            continue;
        tensor_check(&made[i], slots[i].name, true);
        out.count[i] = view_count(&made[i].view);
        out.value[i] = view_read(&made[i].view);
        tensor_free(&made[i]);
    }
    for (int i = 0; i < SLOTS; i++)
        tensor_check(&x->t[i], slots[i].name, false);
    buffers_free(&b);
    dr_plan_destroy(plan);
    return out;
}

static inline void result_free(result *r)
{
    for (int i = 0; i < SLOTS; i++) {
        free(r->value[i]);
        r->value[i] = NULL;
    }
}

/* ---- comparing results ------------------------------------------------------------------- */

static inline const char *spec_text(const spec *s, char *text, size_t size)
{
    const dr_problem *p = &s->p;
    snprintf(
        text, size,
        "%s B%lld T%lld H%d HV%d K%d V%d N%lld gate%d beta%d/%g l2norm%d tiled%d vfirst%d chunk%d "
        "keep%d %s/%s/%s layout%d decay%d keys%d wide%d absent%x seed%llu",
        p->variant == DR_KDA ? "kda" : "gdn", (long long)p->batch, (long long)p->tokens, p->heads,
        p->value_heads, p->key_dim, p->value_dim, (long long)p->sequences, (int)p->gate,
        (int)p->beta, p->beta_scale, p->l2norm, (int)p->head_map, p->state_v_first, p->chunk,
        (int)p->keep, dr_dtype_name(slot_dtype(s, S_q)), dr_dtype_name(slot_dtype(s, S_g)),
        dr_dtype_name(slot_dtype(s, S_initial_state)), (int)s->layout, (int)s->decay,
        s->repeated_keys, s->wide_beta, (unsigned)s->absent, (unsigned long long)s->seed);
    return text;
}

/* The worst relative L2 error of every tensor and element type so far. */
typedef struct error_table {
    double worst[SLOTS][DR_F64 + 1];
    int64_t compared;
} error_table;

static inline void expect_close(const char *what, const result *got, const result *want,
                                double budget, error_table *table)
{
    for (int i = 0; i < SLOTS; i++) {
        if (got->value[i] == NULL || want->value[i] == NULL)
            continue;
        if (got->count[i] != want->count[i])
            fail_msg("%s: %s: %lld elements against %lld", what, slots[i].name,
                     (long long)got->count[i], (long long)want->count[i]);
        bool sums = i == S_da_log || i == S_ddt_bias;
        if (sums && want->value[S_dg] == NULL)
            continue; /* terms that cancel: without dg nothing says what their rounding may be */
        /* A sum of n terms whose vector is right to `budget` of its norm is right to sqrt(n) times
         * that, by Cauchy and Schwarz, however much the terms cancel. */
        double base = sums ? norm_of(want->value[S_dg], want->count[S_dg]) *
                                 sqrt((double)want->count[S_dg] / (double)want->count[i])
                           : 0;
        difference d =
            compare(got->value[i], want->value[i], got->count[i], got->dtype[i], budget, base);
        if (!d.allowed)
            fail_msg("%s: %s: relative L2 error %.3g, largest %.3g", what, slots[i].name, d.l2,
                     d.max);
        if (table != NULL) {
            table->worst[i][got->dtype[i]] = fmax(table->worst[i][got->dtype[i]], d.l2);
            table->compared++;
        }
    }
}

/* The same bits; skip: slots that need not agree. */
static inline void expect_same(const char *what, const result *got, const result *want,
                               uint32_t skip)
{
    for (int i = 0; i < SLOTS; i++) {
        if (got->value[i] == NULL || want->value[i] == NULL || (skip & 1u << i))
            continue;
        assert_int_equal(got->count[i], want->count[i]);
        for (int64_t m = 0; m < got->count[i]; m++)
            if (memcmp(&got->value[i][m], &want->value[i][m], sizeof(double)) != 0)
                fail_msg("%s: %s[%lld]: %.17g is not %.17g", what, slots[i].name, (long long)m,
                         got->value[i][m], want->value[i][m]);
    }
}

static inline void error_table_print(const error_table *t)
{
    print_message("worst relative L2 error of %lld tensors\n%-16s", (long long)t->compared, "");
    for (int d = DR_F32; d <= DR_F64; d++)
        print_message(" %9s", dr_dtype_name((dr_dtype)d));
    print_message("\n");
    for (int i = 0; i < SLOTS; i++) {
        if (slots[i].role != ROLE_OUTPUT && slots[i].role != ROLE_GRADIENT)
            continue;
        print_message("%-16s", slots[i].name);
        for (int d = DR_F32; d <= DR_F64; d++)
            print_message(" %9.2g", t->worst[i][d]);
        print_message("\n");
    }
}

#endif
