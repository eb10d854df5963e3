/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_arguments.c - every tensor argument of every call, spoilt in every way: missing, of an
 * unknown type or one that the backend does not take, of a wrong rank or extent, misaligned,
 * folded, reaching beyond 64 bits. The refusal names the argument, the rule and the value, and
 * nothing is written. The rules are data, so a new tensor in dr_io is covered by its slot.
 */
#include "rig.h"

#include <deltarule/ops.h>

static const char *const backends[] = {"cpu", "ref"};

static spec plain(dr_variant variant)
{
    spec s = {.p = problem_make(variant, 20, 2, 4, 8, 6)};
    s.p.batch = 2;
    s.p.gate = DR_GATE_LOWER_BOUND;
    s.p.lower_bound = -5;
    return s;
}

/* ---- spoiling one tensor ------------------------------------------------------------------ */

typedef struct spoil {
    const char *what;
    dr_status status;
    const char *text;                         /* in the sentence, after the name */
    bool (*apply)(dr_tensor *t, bool output); /* false: does not apply to t */
} spoil;

static bool unknown_type(dr_tensor *t, bool output)
{
    (void)output;
    t->dtype = (dr_dtype)9;
    return true;
}

static bool no_type(dr_tensor *t, bool output)
{
    (void)output;
    t->dtype = (dr_dtype)0;
    return true;
}

static bool rank_zero(dr_tensor *t, bool output)
{
    (void)output;
    t->rank = 0;
    return true;
}

static bool rank_five(dr_tensor *t, bool output)
{
    (void)output;
    t->rank = 5;
    return true;
}

static bool rank_negative(dr_tensor *t, bool output)
{
    (void)output;
    t->rank = -1;
    return true;
}

static bool rank_less(dr_tensor *t, bool output)
{
    (void)output;
    return t->rank-- > 2;
}

static bool rank_more(dr_tensor *t, bool output)
{
    (void)output;
    if (t->rank == DR_MAX_RANK)
        return false;
    t->shape[t->rank] = 2;
    t->stride[t->rank++] = 1;
    return true;
}

static bool longer(dr_tensor *t, int32_t axis, int64_t by)
{
    if (axis >= t->rank)
        return false;
    t->shape[axis] += by;
    return true;
}

static bool longer0(dr_tensor *t, bool output) { return (void)output, longer(t, 0, 1); }
static bool longer1(dr_tensor *t, bool output) { return (void)output, longer(t, 1, 1); }
static bool longer2(dr_tensor *t, bool output) { return (void)output, longer(t, 2, 1); }
static bool longer3(dr_tensor *t, bool output) { return (void)output, longer(t, 3, 1); }
static bool shorter0(dr_tensor *t, bool output) { return (void)output, longer(t, 0, -1); }
static bool shorter3(dr_tensor *t, bool output) { return (void)output, longer(t, 3, -1); }
static bool negative(dr_tensor *t, bool output)
{
    return (void)output, longer(t, 0, -t->shape[0] - 3);
}
static bool enormous(dr_tensor *t, bool output)
{
    return (void)output, longer(t, 0, INT64_MAX / 2);
}

static bool misaligned(dr_tensor *t, bool output)
{
    (void)output;
    t->data = (char *)t->data + 1;
    return true;
}

static int32_t long_axis(const dr_tensor *t)
{
    for (int32_t a = 0; a < t->rank; a++)
        if (t->shape[a] > 2)
            return a;
    return -1;
}

static bool folded(dr_tensor *t, bool output)
{
    if (long_axis(t) < 0)
        return false;
    t->stride[long_axis(t)] = 0;
    return output;
}

/* Two axes whose elements share addresses although no stride is 0. */
static bool crossing(dr_tensor *t, bool output)
{
    int32_t a = long_axis(t);
    if (a < 0 || a + 1 >= t->rank || t->shape[a + 1] < 2)
        return false;
    t->stride[a] = t->stride[a + 1];
    return output;
}

static bool far(dr_tensor *t, int64_t stride)
{
    if (long_axis(t) < 0)
        return false;
    t->stride[long_axis(t)] = stride;
    return true;
}

static bool far_up(dr_tensor *t, bool output) { return (void)output, far(t, INT64_MAX / 2); }
static bool far_down(dr_tensor *t, bool output) { return (void)output, far(t, INT64_MIN); }

static const spoil spoils[] = {
    {"unknown type", DR_ERR_SHAPE, ": dtype must be one of f32, bf16, f16, f64, got 9",
     unknown_type},
    {"no type", DR_ERR_SHAPE, ": dtype must be one of f32, bf16, f16, f64, got 0", no_type},
    {"rank 0", DR_ERR_SHAPE, "rank must be ", rank_zero},
    {"rank 5", DR_ERR_SHAPE, "rank must be ", rank_five},
    {"rank -1", DR_ERR_SHAPE, "rank must be ", rank_negative},
    {"rank less", DR_ERR_SHAPE, ": expected ", rank_less},
    {"rank more", DR_ERR_SHAPE, ": expected ", rank_more},
    {"axis 0 longer", DR_ERR_SHAPE, ": expected ", longer0},
    {"axis 1 longer", DR_ERR_SHAPE, ": expected ", longer1},
    {"axis 2 longer", DR_ERR_SHAPE, ": expected ", longer2},
    {"axis 3 longer", DR_ERR_SHAPE, ": expected ", longer3},
    {"axis 0 shorter", DR_ERR_SHAPE, ": expected ", shorter0},
    {"axis 3 shorter", DR_ERR_SHAPE, ": expected ", shorter3},
    {"axis 0 negative", DR_ERR_SHAPE, ": expected ", negative},
    {"axis 0 enormous", DR_ERR_SHAPE, ": expected ", enormous},
    {"misaligned", DR_ERR_ARG, ": data must be aligned to its element (4 bytes)", misaligned},
    {"folded output", DR_ERR_SHAPE, ": an output needs distinct addresses, got stride[", folded},
    {"crossing output", DR_ERR_SHAPE, ": an output needs distinct addresses, got stride[",
     crossing},
    {"far up", DR_ERR_SHAPE, " must fit 64 bits, got ", far_up},
    {"far down", DR_ERR_SHAPE, " must fit 64 bits, got ", far_down},
};

static void expect_sentence(const char *call, const char *tensor_name, const char *what,
                            dr_status got, dr_status status, const char *text)
{
    size_t length = strlen(tensor_name);
    if (got != status || strncmp(dr_last_error(), tensor_name, length) != 0 ||
        strstr(dr_last_error(), text) == NULL)
        fail_msg("%s, %s, %s: expected %s, \"%s%s\"; got %s, \"%s\"", call, tensor_name, what,
                 dr_status_text(status), tensor_name, text, dr_status_text(got),
                 got == DR_OK ? "" : dr_last_error());
}

/* Whether a call of this direction reads or writes the slot. */
static bool concerns(int i, int dir)
{
    return slots[i].role == ROLE_INPUT || (dir > 0) == (slots[i].role == ROLE_OUTPUT);
}

static void test_spoilt_tensors(void **state)
{
    (void)state;
    for (size_t b = 0; b < DR_COUNT(backends); b++)
        for (int variant = DR_GDN; variant <= DR_KDA; variant++) {
            spec s = plain((dr_variant)variant);
            rig r = rig_make(backends[b], &s);
            for (size_t e = 0; e < DR_COUNT(rig_entries); e++)
                for (int i = 0; i < SLOTS; i++)
                    for (size_t m = 0; m < DR_COUNT(spoils); m++) {
                        dr_io io = r.io;
                        dr_tensor *t = io_slot(&io, i);
                        bool output =
                            slots[i].role == ROLE_OUTPUT || slots[i].role == ROLE_GRADIENT;
                        if (t->data == NULL || !concerns(i, rig_entries[e].dir) ||
                            (i == S_chunk_states && rig_entries[e].call == rig_step) ||
                            !spoils[m].apply(t, output))
                            continue;
                        dr_status got = rig_entries[e].call(&r, &io, &r.b.b);
                        expect_sentence(rig_entries[e].name, slots[i].name, spoils[m].what, got,
                                        spoils[m].status, spoils[m].text);
                        rig_untouched(&r);
                    }
            rig_free(&r);
        }
}

static void test_types_that_a_backend_does_not_take(void **state)
{
    (void)state;
    spec s = plain(DR_KDA);
    rig r = rig_make("cpu", &s);
    for (size_t e = 0; e < DR_COUNT(rig_entries); e++)
        for (int i = 0; i < SLOTS; i++) {
            dr_io io = r.io;
            dr_tensor *t = io_slot(&io, i);
            if (t->data == NULL || !concerns(i, rig_entries[e].dir) ||
                (i == S_chunk_states && rig_entries[e].call == rig_step))
                continue;
            t->dtype = DR_F64;
            expect_sentence(rig_entries[e].name, slots[i].name, "f64",
                            rig_entries[e].call(&r, &io, &r.b.b), DR_ERR_SUPPORT,
                            ": backend cpu does not take dtype f64");
            rig_untouched(&r);
        }
    rig_free(&r);
}

static void test_missing_tensors(void **state)
{
    (void)state;
    for (size_t b = 0; b < DR_COUNT(backends); b++)
        for (int gate = DR_GATE_LOG; gate <= DR_GATE_LOWER_BOUND; gate++) {
            spec s = plain(DR_GDN);
            s.p.gate = (dr_gate)gate;
            s.p.lower_bound = gate == DR_GATE_LOWER_BOUND ? -5 : 0;
            rig r = rig_make(backends[b], &s);
            for (size_t e = 0; e < DR_COUNT(rig_entries); e++) {
                const struct rig_entry *x = &rig_entries[e];
                for (int i = 0; i < SLOTS; i++) {
                    bool needed =
                        i <= S_beta || (i == S_a_log && gate == DR_GATE_SOFTPLUS) ||
                        (x->call == rig_step && (i == S_initial_state || i == S_final_state));
                    dr_io io = r.io;
                    io_slot(&io, i)->data = NULL;
                    if (i == S_a_log)
                        io.da_log.data = NULL;
                    if (i == S_dt_bias)
                        io.ddt_bias.data = NULL;
                    if (x->saved) { /* an earlier dr_prepare has taken it back */
                        MUST(dr_forward(r.plan, &r.io, &r.b.b));
                        rig_forget_outputs(&r);
                    }
                    dr_status got = x->call(&r, &io, &r.b.b);
                    if (needed)
                        expect_sentence(x->name, slots[i].name, "missing", got, DR_ERR_ARG,
                                        ": must be given");
                    else
                        MUST(got);
                    if (needed)
                        rig_untouched(&r);
                    rig_forget_outputs(&r);
                }
                dr_io io = r.io; /* nothing to do */
                io.o.data = io.final_state.data = io.chunk_states.data = NULL;
                if (x->call == rig_forward) /* a trip may be after maps or exits alone */
                    expect_sentence(x->name, "o", "no output", x->call(&r, &io, &r.b.b), DR_ERR_ARG,
                                    ": must be given, or else final_state or chunk_states");
                assert_int_equal(x->call(&r, NULL, &r.b.b), DR_ERR_ARG);
                assert_string_equal(dr_last_error(), "io: must not be NULL");
            }
            rig_free(&r);
        }
}

static void expect_absent(rig *r, int i, const dr_tensor *extra, int dir, const char *text)
{
    for (size_t e = 0; e < DR_COUNT(rig_entries); e++) {
        if (rig_entries[e].dir != dir)
            continue;
        dr_io io = r->io;
        *io_slot(&io, i) = *extra;
        expect_sentence(rig_entries[e].name, slots[i].name, "present",
                        rig_entries[e].call(r, &io, &r->b.b), DR_ERR_ARG, text);
        rig_untouched(r);
    }
}

/* What the problem has no use for must not be there: it would be ignored. */
static void test_tensors_without_a_use(void **state)
{
    (void)state;
    float room[2 * 20 * 4 * 8];
    for (size_t b = 0; b < DR_COUNT(backends); b++) {
        const dr_tensor g = dr_tensor_make(room, DR_F32, 3, 2, 20, 4, 0);
        const dr_tensor a_log = dr_tensor_make(room, DR_F32, 1, 4, 0, 0, 0);
        spec s = plain(DR_GDN);
        s.p.gate = DR_GATE_NONE;
        s.p.lower_bound = 0;
        rig r = rig_make(backends[b], &s);
        expect_absent(&r, S_g, &g, +1, ": must be absent with DR_GATE_NONE");
        expect_absent(&r, S_g, &g, -1, ": must be absent with DR_GATE_NONE");
        expect_absent(&r, S_dg, &g, -1, ": must be absent with DR_GATE_NONE");
        expect_absent(&r, S_a_log, &a_log, +1, ": must be absent unless the gate is raw");
        expect_absent(&r, S_dt_bias, &a_log, -1, ": must be absent unless the gate is raw");
        expect_absent(&r, S_da_log, &a_log, -1, ": must be absent when a_log is");
        expect_absent(&r, S_ddt_bias, &a_log, -1, ": must be absent when dt_bias is");
        dr_io io = r.io;
        REFUSED(dr_step(r.plan, &io, &r.b.b), DR_ERR_ARG,
                "chunk_states: must be absent in dr_step, which has no chunks");
        rig_untouched(&r);
        rig_free(&r);
    }
}

static void test_state_index(void **state)
{
    (void)state;
    static const struct {
        int32_t index[2];
        const char *text;
    } bad[] = {
        {{0, 2}, "state_index[1]: must be -1 or a slot below 2, got 2"},
        {{-2, 0}, "state_index[0]: must be -1 or a slot below 2, got -2"},
        {{INT32_MAX, 0}, "state_index[0]: must be -1 or a slot below 2, got 2147483647"},
        {{1, 1}, "state_index: slots of one call must differ, got slot 1 twice"},
    };
    static const int32_t good[2] = {1, 0}, paddings[2] = {-1, -1};
    for (size_t b = 0; b < DR_COUNT(backends); b++) {
        spec s = plain(DR_KDA);
        rig r = rig_make(backends[b], &s);
        for (size_t e = 0; e < DR_COUNT(rig_entries); e++) {
            const struct rig_entry *x = &rig_entries[e];
            dr_io io = r.io;
            for (size_t i = 0; i < DR_COUNT(bad); i++) {
                io.state_index = bad[i].index;
                assert_int_equal(x->call(&r, &io, &r.b.b), DR_ERR_ARG);
                if (x->dir > 0)
                    assert_string_equal(dr_last_error(), bad[i].text);
                else
                    assert_string_equal(dr_last_error(),
                                        "state_index: must be NULL for the adjoint");
                rig_untouched(&r);
            }
            if (x->dir < 0)
                continue;
            io.state_index = good;
            io.initial_state.data = io.final_state.data = NULL;
            REFUSED(x->call(&r, &io, &r.b.b), DR_ERR_ARG,
                    "state_index: needs initial_state or final_state");
            rig_untouched(&r);
            io = r.io;
            io.state_index = good;
            MUST(x->call(&r, &io, &r.b.b));
            io.state_index = paddings; /* -1 may come as often as it likes */
            MUST(x->call(&r, &io, &r.b.b));
            rig_forget_outputs(&r);
        }
        rig_free(&r);
    }
}

/* ---- row operations ------------------------------------------------------------------------ */

enum { IN = 0, OUT = 1, FORWARD = 2, BACKWARD = 4, NEEDED = 8, SETTER = 16 };

typedef struct op_field {
    const char *name;
    size_t at;
    const char *letters;
    int kind;
} op_field;

/* Any argument struct; all start with their size. */
typedef union op_args {
    uint32_t size;
    dr_conv_args conv;
    dr_gate_args gate;
    dr_beta_args beta;
    dr_l2norm_args l2norm;
    dr_norm_args norm;
    dr_matmul_args matmul;
} op_args;

typedef struct op {
    const char *name;
    op_args init;
    dr_status (*forward)(const dr_context *ctx, const op_args *a);
    dr_status (*backward)(const dr_context *ctx, const op_args *a);
    op_field fields[13];
} op;

#define OP_CALL(name, member, call)                                \
    static dr_status name(const dr_context *ctx, const op_args *a) \
    {                                                              \
        return call(ctx, a ? &a->member : NULL);                   \
    }
OP_CALL(conv, conv, dr_conv)
OP_CALL(conv_back, conv, dr_conv_backward)
OP_CALL(conv_one, conv, dr_conv_step)
OP_CALL(gate, gate, dr_gate_activate)
OP_CALL(gate_back, gate, dr_gate_backward)
OP_CALL(beta, beta, dr_beta_sigmoid)
OP_CALL(beta_back, beta, dr_beta_backward)
OP_CALL(l2norm, l2norm, dr_l2norm)
OP_CALL(l2norm_back, l2norm, dr_l2norm_backward)
OP_CALL(norm, norm, dr_gated_norm)
OP_CALL(norm_back, norm, dr_gated_norm_backward)
OP_CALL(matmul, matmul, dr_matmul)

#define CONV(name, letters, kind)                          \
    {                                                      \
#name, offsetof(dr_conv_args, name), letters, kind \
    }
#define CONV_FIELDS                                                                               \
    {                                                                                             \
        CONV(x, "BTD", NEEDED | SETTER | FORWARD | BACKWARD),                                     \
            CONV(weight, "DW", NEEDED | FORWARD | BACKWARD), CONV(bias, "D", FORWARD | BACKWARD), \
            CONV(initial_state, "BDh", FORWARD | BACKWARD), CONV(y, "BTD", OUT | FORWARD),        \
            CONV(final_state, "BDh", OUT | FORWARD | BACKWARD), CONV(dy, "BTD", BACKWARD),        \
            CONV(d_final_state, "BDh", BACKWARD), CONV(dx, "BTD", OUT | BACKWARD),                \
            CONV(dweight, "DW", OUT | BACKWARD), CONV(dbias, "D", OUT | BACKWARD),                \
            CONV(d_initial_state, "BDh", OUT | BACKWARD)                                          \
    }
#define GATE(name, letters, kind)                          \
    {                                                      \
#name, offsetof(dr_gate_args, name), letters, kind \
    }
#define BETA(name, kind)                                 \
    {                                                    \
#name, offsetof(dr_beta_args, name), "BTJ", kind \
    }
#define L2NORM(name, kind)                                  \
    {                                                       \
#name, offsetof(dr_l2norm_args, name), "BTJK", kind \
    }
#define NORM(name, letters, kind)                          \
    {                                                      \
#name, offsetof(dr_norm_args, name), letters, kind \
    }
#define MATMUL(name, letters, kind)                          \
    {                                                        \
#name, offsetof(dr_matmul_args, name), letters, kind \
    }

static const op ops[] = {
    {"dr_conv", {.conv = DR_CONV_ARGS_INIT}, conv, conv_back, CONV_FIELDS},
    {"dr_conv_step", {.conv = DR_CONV_ARGS_INIT}, conv_one, NULL, CONV_FIELDS},
    {"dr_gate",
     {.gate = DR_GATE_ARGS_INIT},
     gate,
     gate_back,
     {GATE(x, "BTJK", NEEDED | SETTER | FORWARD | BACKWARD),
      GATE(a_log, "J", NEEDED | FORWARD | BACKWARD), GATE(dt_bias, "JK", FORWARD | BACKWARD),
      GATE(g, "BTJK", NEEDED | OUT | FORWARD), GATE(dg, "BTJK", NEEDED | BACKWARD),
      GATE(dx, "BTJK", OUT | BACKWARD), GATE(da_log, "J", OUT | BACKWARD),
      GATE(ddt_bias, "JK", OUT | BACKWARD)}},
    {"dr_beta",
     {.beta = DR_BETA_ARGS_INIT},
     beta,
     beta_back,
     {BETA(x, NEEDED | SETTER | FORWARD | BACKWARD), BETA(beta, NEEDED | OUT | FORWARD),
      BETA(dbeta, NEEDED | BACKWARD), BETA(dx, NEEDED | OUT | BACKWARD)}},
    {"dr_l2norm",
     {.l2norm = DR_L2NORM_ARGS_INIT},
     l2norm,
     l2norm_back,
     {L2NORM(x, NEEDED | SETTER | FORWARD | BACKWARD), L2NORM(y, NEEDED | OUT | FORWARD),
      L2NORM(dy, NEEDED | BACKWARD), L2NORM(dx, NEEDED | OUT | BACKWARD)}},
    {"dr_gated_norm",
     {.norm = DR_NORM_ARGS_INIT},
     norm,
     norm_back,
     {NORM(x, "BTJV", NEEDED | SETTER | FORWARD | BACKWARD),
      NORM(gate, "BTJV", NEEDED | FORWARD | BACKWARD),
      NORM(weight, "V", NEEDED | FORWARD | BACKWARD), NORM(y, "BTJV", NEEDED | OUT | FORWARD),
      NORM(dy, "BTJV", NEEDED | BACKWARD), NORM(dx, "BTJV", OUT | BACKWARD),
      NORM(dgate, "BTJV", OUT | BACKWARD), NORM(dweight, "V", OUT | BACKWARD)}},
    {"dr_matmul",
     {.matmul = DR_MATMUL_ARGS_INIT},
     matmul,
     NULL,
     {MATMUL(a, "TJ", NEEDED | SETTER | FORWARD), MATMUL(b, "JV", NEEDED | SETTER | FORWARD),
      MATMUL(out, "TV", NEEDED | OUT | FORWARD)}},
};

typedef struct op_rig {
    op_args a;
    tensor t[13];
    int n;
} op_rig;

static op_rig op_make(const op *o)
{
    static const char letters[] = "BTDWhJKV";
    static const int64_t extents[] = {2, 5, 6, 4, 3, 3, 4, 7};
    op_rig r = {.a = o->init};
    rng random = {77};
    for (; o->fields[r.n].name != NULL; r.n++) {
        int64_t shape[DR_MAX_RANK] = {0};
        int32_t rank = (int32_t)strlen(o->fields[r.n].letters);
        for (int32_t i = 0; i < rank; i++)
            shape[i] = extents[strchr(letters, o->fields[r.n].letters[i]) - letters];
        r.t[r.n] = tensor_make(&random, LAYOUT_DENSE, DR_F32, rank, shape);
        if (!(o->fields[r.n].kind & OUT))
            memset(r.t[r.n].memory.data, 0, r.t[r.n].memory.bytes);
        tensor_remember(&r.t[r.n]);
        *(dr_tensor *)((char *)&r.a + o->fields[r.n].at) = r.t[r.n].view;
    }
    if (o->forward == gate)
        r.a.gate.gate = DR_GATE_SOFTPLUS;
    if (o->forward == norm)
        r.a.norm.activation = DR_ACT_SILU;
    return r;
}

static void op_untouched(op_rig *r, const op *o)
{
    for (int i = 0; i < r->n; i++)
        tensor_check(&r->t[i], o->fields[i].name, false);
}

static void op_free(op_rig *r)
{
    for (int i = 0; i < r->n; i++)
        tensor_free(&r->t[i]);
}

typedef dr_status op_call(const dr_context *ctx, const op_args *a);

static void spoil_op(const dr_context *ctx, const op *o, op_call *call, int dir)
{
    op_rig r = op_make(o);
    for (int i = 0; i < r.n; i++) {
        const op_field *f = &o->fields[i];
        if (!(f->kind & dir))
            continue;
        if (call == conv_back && strcmp(f->name, "final_state") == 0)
            continue; /* an output of the other direction, checked with it */
        for (size_t m = 0; m < DR_COUNT(spoils); m++) {
            op_args a = r.a;
            dr_tensor *t = (dr_tensor *)((char *)&a + f->at);
            bool shape = strstr(spoils[m].text, "expected") != NULL;
            if (((f->kind & SETTER) && (shape || strstr(spoils[m].text, "rank"))) ||
                !spoils[m].apply(t, f->kind & OUT))
                continue;
            if (strcmp(f->name, "weight") == 0 && dir != 0 &&
                o->init.size == sizeof(dr_conv_args) && (shape || strstr(spoils[m].text, "rank")))
                continue; /* sets W */
            if (strchr(f->letters, 'h') && spoils[m].apply == longer2)
                continue; /* halo + 1 is the other width of a state */
            expect_sentence(o->name, f->name, spoils[m].what, call(ctx, &a), spoils[m].status,
                            spoils[m].text);
            op_untouched(&r, o);
        }
        op_args a = r.a;
        ((dr_tensor *)((char *)&a + f->at))->data = NULL;
        if (f->kind & NEEDED) {
            expect_sentence(o->name, f->name, "missing", call(ctx, &a), DR_ERR_ARG,
                            ": must be given");
            op_untouched(&r, o);
        }
    }
    op_args a = r.a;
    a.size++;
    REFUSED(call(ctx, &a), DR_ERR_ARG, "args.size: must be ");
    REFUSED(call(ctx, NULL), DR_ERR_ARG, "args: must not be NULL");
    REFUSED(call(NULL, &r.a), DR_ERR_ARG, "ctx: must not be NULL");
    op_untouched(&r, o);
    MUST(call(ctx, &r.a));
    op_free(&r);
}

static void test_spoilt_operations(void **state)
{
    (void)state;
    for (size_t b = 0; b < DR_COUNT(backends); b++) {
        dr_context *ctx;
        MUST(dr_context_create(backends[b], NULL, &ctx));
        for (size_t i = 0; i < DR_COUNT(ops); i++) {
            spoil_op(ctx, &ops[i], ops[i].forward, FORWARD);
            if (ops[i].backward != NULL)
                spoil_op(ctx, &ops[i], ops[i].backward, BACKWARD);
        }
        dr_context_destroy(ctx);
    }
}

#define CONV_BAD(change, status, text)                   \
    do {                                                 \
        op_rig r = op_make(&ops[0]);                     \
        dr_conv_args *a = &r.a.conv;                     \
        change;                                          \
        REFUSED(dr_conv(ctx, a), status, text);          \
        REFUSED(dr_conv_backward(ctx, a), status, text); \
        op_untouched(&r, &ops[0]);                       \
        op_free(&r);                                     \
    } while (0)

static void test_spoilt_settings(void **state)
{
    (void)state;
    static const int64_t late[] = {1, 5};
    static const int32_t twice[] = {0, 0};
    for (size_t b = 0; b < DR_COUNT(backends); b++) {
        dr_context *ctx;
        MUST(dr_context_create(backends[b], NULL, &ctx));
        CONV_BAD(a->activation = DR_ACT_SIGMOID, DR_ERR_ARG,
                 "activation: must be DR_ACT_NONE (0) or DR_ACT_SILU");
        CONV_BAD(a->dilation = -1, DR_ERR_ARG, "dilation: must be 1 or more, got -1");
        CONV_BAD(a->weight.shape[1] = 0, DR_ERR_SHAPE, "weight: expected [D,W] or [D,1,W]");
        CONV_BAD(a->weight.rank = 1, DR_ERR_SHAPE, "weight: expected [D,W] or [D,1,W]");
        CONV_BAD(a->weight.shape[0] = 5, DR_ERR_SHAPE,
                 "weight: expected [D,W] = [6, 4], got [5, 4]");
        CONV_BAD(a->x.rank = 1, DR_ERR_SHAPE, "x: rank must be ");
        CONV_BAD(a->x.rank = 4, DR_ERR_SHAPE, "x: rank must be ");
        CONV_BAD(a->x.shape[1] = -1, DR_ERR_SHAPE, "x: shape[1] must be 0 or more");
        CONV_BAD(a->x.shape[1] = INT64_MAX / 2, DR_ERR_SHAPE, "the product must fit 64 bits");
        CONV_BAD(a->sequences = 1, DR_ERR_ARG, "offsets: absent although sequences is 1");
        CONV_BAD((a->offsets = late, a->sequences = 1), DR_ERR_SHAPE, "batch: must be 1");
        CONV_BAD(a->initial_state.shape[2] = 5, DR_ERR_SHAPE,
                 "initial_state: expected [N,D,halo] = [2, 6, 3]");
        op_rig r = op_make(&ops[0]);
        r.a.conv.state_index = twice;
        REFUSED(dr_conv(ctx, &r.a.conv), DR_ERR_ARG,
                "state_index: slots of one call must differ, got slot 0");
        REFUSED(dr_conv_backward(ctx, &r.a.conv), DR_ERR_ARG,
                "state_index: must be NULL for the backward");
        r.a.conv.state_index = NULL;
        r.a.conv.y.data = r.a.conv.final_state.data = NULL;
        REFUSED(dr_conv(ctx, &r.a.conv), DR_ERR_ARG, "y: must be given, or else final_state");
        REFUSED(dr_conv_step(ctx, &r.a.conv), DR_ERR_ARG, "must be given");
        op_untouched(&r, &ops[0]);
        op_free(&r);
        float x[4] = {0};
        dr_beta_args beta_args = DR_BETA_ARGS_INIT;
        beta_args.x = beta_args.beta = dr_tensor_make(x, DR_F32, 1, 4, 0, 0, 0);
        beta_args.scale = 3;
        REFUSED(dr_beta_sigmoid(ctx, &beta_args), DR_ERR_ARG, "scale: must be 1 or 2, got 3");
        dr_l2norm_args norm_args = DR_L2NORM_ARGS_INIT;
        norm_args.x = norm_args.y = beta_args.x;
        norm_args.eps = -1;
        REFUSED(dr_l2norm(ctx, &norm_args), DR_ERR_ARG, "eps: must be 1.17549e-38 to 3.40282e+38, got -1");
        dr_matmul_args m = DR_MATMUL_ARGS_INIT;
        m.a = m.b = m.out = dr_tensor_make(x, DR_F32, 2, 2, 2, 0, 0);
        m.alpha = NAN;
        REFUSED(dr_matmul(ctx, &m), DR_ERR_ARG, "alpha: must be finite");
        m.alpha = 1;
        m.b.shape[0] = 3;
        REFUSED(dr_matmul(ctx, &m), DR_ERR_SHAPE, "b: expected [k,n] = [2, 2], got [3, 2]");
        m.b.rank = 3;
        REFUSED(dr_matmul(ctx, &m), DR_ERR_SHAPE, "a, b: rank must be 2, got 2, 3");
        dr_context_destroy(ctx);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spoilt_tensors),
        cmocka_unit_test(test_types_that_a_backend_does_not_take),
        cmocka_unit_test(test_missing_tensors),
        cmocka_unit_test(test_tensors_without_a_use),
        cmocka_unit_test(test_state_index),
        cmocka_unit_test(test_spoilt_operations),
        cmocka_unit_test(test_spoilt_settings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
