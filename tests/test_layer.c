/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_layer.c - whole layers on every backend: against float64 files (golden/make_layers.py),
 * and against themselves where two ways must agree: packed and separate, split and whole,
 * step and forward, padded and not.
 */
#include "layer_trial.h"

static dr_context *contexts[64];
static size_t n_contexts;

static const dr_context *context(void **state, int32_t threads)
{
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = threads;
    assert_true(n_contexts < DR_COUNT(contexts));
    MUST(dr_context_create(*state, &options, &contexts[n_contexts]));
    return contexts[n_contexts++];
}

static int done(void **state)
{
    while (n_contexts > 0)
        dr_context_destroy(contexts[--n_contexts]);
    return forget(state);
}

static const dr_layer_kind kinds[] = {DR_LAYER_GDN, DR_LAYER_KDA};

/* ---- vector files ------------------------------------------------------------------- */

typedef struct record {
    char name[40];
    uint32_t rank;
    int64_t shape[DR_MAX_RANK], count;
    double *values;
} record;

typedef struct records {
    record r[64];
    size_t n;
} records;

static void read_exactly(FILE *f, void *to, size_t bytes)
{
    assert_int_equal(fread(to, 1, bytes, f), bytes);
}

static records records_read(const char *name)
{
    char path[512], magic[8];
    records out = {.n = 0};
    uint32_t length;
    snprintf(path, sizeof path, "%s/golden/layer_%s.bin", DR_TEST_SOURCE_DIR, name);
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        fail_msg("cannot open %s", path);
    read_exactly(f, magic, sizeof magic);
    assert_memory_equal(magic, "DRORACL1", sizeof magic);
    while (fread(&length, 1, sizeof length, f) == sizeof length) {
        assert_true(out.n < DR_COUNT(out.r));
        record *r = &out.r[out.n++];
        assert_true(length < sizeof r->name);
        read_exactly(f, r->name, length);
        read_exactly(f, &r->rank, sizeof r->rank);
        assert_true(r->rank <= DR_MAX_RANK);
        read_exactly(f, r->shape, r->rank * sizeof *r->shape);
        r->count = 1;
        for (uint32_t i = 0; i < r->rank; i++)
            r->count *= r->shape[i];
        r->values = (double *)floats(2 * r->count + 2, 0);
        read_exactly(f, r->values, (size_t)r->count * sizeof(double));
    }
    fclose(f);
    return out;
}

static const record *record_find(const records *all, const char *name)
{
    for (size_t i = 0; i < all->n; i++)
        if (strcmp(all->r[i].name, name) == 0)
            return &all->r[i];
    return NULL;
}

static float *record_floats(const record *r)
{
    float *f = floats(r->count, 0);
    for (int64_t i = 0; i < r->count; i++)
        f[i] = (float)r->values[i];
    return f;
}

static block golden_block(const dr_context *ctx, const records *all)
{
    const double *v = record_find(all, "config")->values;
    dr_layer_config c = DR_LAYER_CONFIG_INIT;
    c.kind = (dr_layer_kind)v[0];
    c.hidden = (int32_t)v[1];
    c.heads = (int32_t)v[2];
    c.value_heads = (int32_t)v[3];
    c.key_dim = (int32_t)v[4];
    c.value_dim = (int32_t)v[5];
    c.conv_width = (int32_t)v[6];
    c.conv_bias = (int32_t)v[7];
    c.gate = (dr_gate)v[8];
    c.lower_bound = v[9];
    c.beta_scale = v[10];
    c.gate_rank = (int32_t)v[11];
    rng r = {1};
    block b = block_make(ctx, &c, &r);
    int32_t seen = 0;
    for (size_t i = 0; i < all->n; i++) { /* the file's order is the layer's order */
        const record *rec = &all->r[i];
        dr_param_info info;
        if (strncmp(rec->name, "param.", 6) != 0)
            continue;
        MUST(dr_layer_param(b.layer, seen, &info));
        assert_string_equal(info.name, rec->name + 6);
        assert_int_equal(info.rank, rec->rank);
        assert_memory_equal(info.shape, rec->shape, rec->rank * sizeof *rec->shape);
        b.params[seen++].data = record_floats(rec);
    }
    assert_int_equal(seen, b.n);
    return b;
}

static void golden(void **state, const char *name)
{
    const double budget = 1e-5;
    records all = records_read(name);
    block b = golden_block(context(state, 2), &all);
    const record *at = record_find(&all, "offsets"), *shape = record_find(&all, "layout");
    int64_t offsets[16];
    for (int64_t i = 0; at != NULL && i < at->count; i++)
        offsets[i] = (int64_t)at->values[i];
    dr_layer_layout spread = dense((int64_t)shape->values[0], (int64_t)shape->values[1]);
    if (at != NULL)
        spread = packed(spread.tokens, offsets, at->count - 1);
    trial t = trial_plain(&b, &spread, record_find(&all, "conv_in") != NULL);
    for (int i = 0; i < SLOTS; i++)
        if (slots[i].role == ROLE_INPUT && record_find(&all, slots[i].name) != NULL)
            t.v[i] = record_floats(record_find(&all, slots[i].name));
    trial_run(&t);
    double worst = 0;
    for (int i = 0; i < SLOTS; i++) {
        const char *slot_name = i == S_dx ? "d_x" : slots[i].name;
        const record *want = record_find(&all, slot_name);
        if (slots[i].role == ROLE_INPUT || t.v[i] == NULL)
            continue;
        assert_non_null(want);
        assert_int_equal(want->count, t.n[i]);
        worst =
            fmax(worst, expect_close(name, slot_name, t.v[i], want->values, want->count, budget));
    }
    for (int32_t i = 0; i < b.n; i++) {
        char grad[64];
        snprintf(grad, sizeof grad, "grad.%s", param_name(&b, i));
        const record *want = record_find(&all, grad);
        assert_int_equal(want->count, b.count[i]);
        worst = fmax(worst, expect_close(name, grad, t.grad[i], want->values, want->count, budget));
    }
    print_message("%s %s: worst relative L2 error %.2g\n", (char *)*state, name, worst);
    dr_layer_destroy(b.layer);
}

static void test_golden(void **state)
{
    static const char *const names[] = {"gdn_dense", "gdn_packed", "kda_bounded", "kda_pair",
                                        "kda_single_tap"};
    for (size_t i = 0; i < DR_COUNT(names); i++)
        golden(state, names[i]);
}

/* ---- documents ------------------------------------------------------------------------ */

/* Row-wise slots of tokens [from, to) and states of sequence n as a trial of their own. */
static trial cut_document(const trial *t, int64_t from, int64_t to, int64_t n)
{
    dr_layer_layout spread = dense(1, to - from);
    trial one = trial_plain(t->b, &spread, t->states);
    for (int i = 0; i < SLOTS; i++) {
        if (t->v[i] == NULL)
            continue;
        int64_t hidden = t->b->c.hidden, per_state = t->N ? t->n[i] / t->N : 0;
        one.v[i] = t->v[i] + (slots[i].kind == 'x' ? from * hidden : n * per_state);
    }
    return one;
}

static void add_into(float *sum, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        sum[i] += x[i];
}

/* Documents of a packed run against each alone: the same bits where the matrix product rounds
 * a row the same way in any place (a BLAS need not: its block of rows decides); parameter
 * gradients are the sums over the documents. */
static void test_packed_is_separate(void **state)
{
    static const int64_t offsets[] = {0, 3, 3, 4, 70, 75};
    const int64_t N = DR_COUNT(offsets) - 1;
    const double budget = strcmp(*state, "ref") == 0 ? 0 : 1e-5;
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {11};
        dr_layer_config c = config_of(kinds[k]);
        block b = block_make(context(state, 2), &c, &r);
        dr_layer_layout spread = packed(77, offsets, N);
        trial all = trial_make(&b, &spread, true, &r);
        for (int64_t i = 75 * c.hidden; i < all.n[S_x]; i++) /* nobody's tokens */
            all.v[S_x][i] = all.v[S_dy][i] = NAN;
        trial_run(&all);
        float *sum[MAX_PARAMS];
        for (int32_t i = 0; i < b.n; i++)
            sum[i] = floats(b.count[i], 0);
        for (int64_t n = 0; n < N; n++) {
            trial want = cut_document(&all, offsets[n], offsets[n + 1], n), got = want;
            trial_run(&got);
            for (int32_t i = 0; i < b.n; i++) {
                add_into(sum[i], got.grad[i], b.count[i]);
                want.grad[i] = got.grad[i];
            }
            expect_same("one document", &got, &want, budget);
        }
        for (int32_t i = 0; i < b.n; i++)
            expect_close("sum of documents", param_name(&b, i), all.grad[i],
                         doubles_of(sum[i], b.count[i]), b.count[i], 1e-5);
        for (int64_t i = 75 * c.hidden; i < all.n[S_y]; i++)
            assert_true(all.v[S_y][i] == 0 && all.v[S_dx][i] == 0);
        dr_layer_destroy(b.layer);
    }
}

/* A document, or a batch row, full of NaN does not reach the other one. */
static void test_nan_stays(void **state)
{
    static const int64_t offsets[] = {0, 6, 12};
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {13};
        dr_layer_config c = config_of(kinds[k]);
        block b = block_make(context(state, 2), &c, &r);
        const dr_layer_layout both[] = {packed(12, offsets, 2), dense(2, 6)};
        for (int i = 0; i < 2; i++) {
            trial clean = trial_make(&b, &both[i], true, &r), sick = clean;
            sick.v[S_x] = floats(clean.n[S_x], NAN);
            memcpy(sick.v[S_x] + 6 * c.hidden, clean.v[S_x] + 6 * c.hidden,
                   (size_t)(6 * c.hidden) * sizeof(float));
            trial_run(&clean);
            trial_run(&sick);
            for (int v = S_y; v <= S_d_state_in; v++) {
                int64_t half = clean.n[v] / 2;
                expect_bits("beside NaN", slots[v].name, sick.v[v] + half, clean.v[v] + half, half);
            }
        }
        dr_layer_destroy(b.layer);
    }
}

/* Plans made from one layer, packed before plain, leave nothing behind: the plain runs equal
 * those of a fresh layer. */
static void test_no_boundaries_left_over(void **state)
{
    static const int64_t offsets[] = {0, 3, 8};
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {12};
        dr_layer_config c = config_of(kinds[k]);
        block used = block_make(context(state, 1), &c, &r), fresh = used;
        dr_layer_layout spread = packed(8, offsets, 2);
        trial t = trial_make(&used, &spread, true, &r);
        trial_run(&t);
        for (int64_t T = 8; T <= 9; T++) {
            dr_layer_layout plain = dense(1, T);
            trial a = trial_make(&used, &plain, true, &r), z = a;
            MUST(dr_layer_create(used.ctx, &c, &fresh.layer));
            z.b = &fresh;
            trial_run(&a);
            trial_run(&z);
            expect_same("after a packed call", &a, &z, 0);
            dr_layer_destroy(fresh.layer);
        }
        dr_layer_destroy(used.layer);
    }
}

/* ---- states --------------------------------------------------------------------------- */

static void expect_rows(const char *what, const trial *part, const trial *whole, int slot,
                        int64_t from)
{
    expect_close(what, slots[slot].name, part->v[slot],
                 doubles_of(whole->v[slot] + from * part->b->c.hidden, part->n[slot]),
                 part->n[slot], 1e-5);
}

/* Pieces forward with carried states, then backward with carried cotangents and accumulated
 * parameter gradients: one long sequence. */
static void split_is_whole(const block *b, rng *r)
{
    static const int64_t cuts[] = {0, 67, 69, 133};
    enum { PIECES = DR_COUNT(cuts) - 1 };
    dr_layer_layout spread = dense(1, cuts[PIECES]);
    trial whole = trial_make(b, &spread, true, r), piece[PIECES];
    dr_layer_plan *plan[PIECES];
    dr_buffers buffers[PIECES];
    dr_layer_io io[PIECES];
    dr_tensor grads[MAX_PARAMS];
    trial_run(&whole);
    for (int i = 0; i < PIECES; i++) {
        piece[i] = cut_document(&whole, cuts[i], cuts[i + 1], 0);
        if (i > 0) {
            piece[i].v[S_conv_in] = piece[i - 1].v[S_conv_out];
            piece[i].v[S_state_in] = piece[i - 1].v[S_state_out];
        }
        MUST(dr_layer_plan_create(b->layer, &piece[i].layout, &plan[i]));
        MUST(dr_layer_buffers_create(plan[i], &buffers[i]));
        io[i] = io_inputs(&piece[i]);
        add_outputs(&piece[i], ROLE_OUTPUT, &io[i]);
        MUST(dr_layer_forward(plan[i], &io[i], &buffers[i]));
        expect_rows("a piece", &piece[i], &whole, S_y, cuts[i]);
    }
    for (int32_t j = 0; j < b->n; j++) {
        grads[j] = b->params[j];
        grads[j].data = floats(b->count[j], 0);
    }
    for (int i = PIECES - 1; i >= 0; i--) {
        if (i < PIECES - 1) {
            io[i].d_conv_out = io[i + 1].d_conv_in;
            io[i].d_state_out = io[i + 1].d_state_in;
        }
        add_outputs(&piece[i], ROLE_GRADIENT, &io[i]);
        io[i].grads = grads;
        io[i].accumulate = 1;
        MUST(dr_layer_backward(plan[i], &io[i], &buffers[i]));
        expect_rows("a piece", &piece[i], &whole, S_dx, cuts[i]);
        dr_buffers_destroy(&buffers[i]);
        dr_layer_plan_destroy(plan[i]);
    }
    static const int first[] = {S_d_conv_in, S_d_state_in}, last[] = {S_conv_out, S_state_out};
    for (int i = 0; i < 2; i++) {
        expect_close("first piece", slots[first[i]].name, piece[0].v[first[i]],
                     doubles_of(whole.v[first[i]], whole.n[first[i]]), whole.n[first[i]], 1e-5);
        expect_close("last piece", slots[last[i]].name, piece[PIECES - 1].v[last[i]],
                     doubles_of(whole.v[last[i]], whole.n[last[i]]), whole.n[last[i]], 1e-5);
    }
    for (int32_t j = 0; j < b->n; j++)
        expect_close("accumulated over pieces", param_name(b, j), grads[j].data,
                     doubles_of(whole.grad[j], b->count[j]), b->count[j], 1e-5);
}

static void test_split_is_whole(void **state)
{
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {21};
        dr_layer_config c = config_of(kinds[k]);
        block b = block_make(context(state, 2), &c, &r);
        split_is_whole(&b, &r);
        dr_layer_destroy(b.layer);
    }
}

/* Token after token by dr_layer_step, states in pools and updated in place, against one
 * forward; slot 1 is in nobody's hands and must stay as it is. */
static void test_step_is_forward(void **state)
{
    enum { T = 9, N = 2, SLOT_COUNT = 3 };
    static const int32_t index[N] = {2, 0};
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {22};
        dr_layer_config c = config_of(kinds[k]);
        block b = block_make(context(state, 2), &c, &r);
        dr_layer_layout spread = dense(N, T), one = dense(N, 1);
        trial whole = trial_make(&b, &spread, true, &r);
        trial_run(&whole);
        int64_t conv = whole.n[S_conv_in] / N, rec = whole.n[S_state_in] / N, hidden = c.hidden;
        float *convs = drawn(&r, SLOT_COUNT * conv, 1), *states = drawn(&r, SLOT_COUNT * rec, 1);
        float *idle = floats(conv + rec, 0), *x = floats(N * hidden, 0),
              *y = floats(N * hidden, NAN);
        memcpy(idle, convs + conv, (size_t)conv * sizeof *idle);
        memcpy(idle + conv, states + rec, (size_t)rec * sizeof *idle);
        for (int n = 0; n < N; n++) {
            memcpy(convs + index[n] * conv, whole.v[S_conv_in] + n * conv,
                   (size_t)conv * sizeof *x);
            memcpy(states + index[n] * rec, whole.v[S_state_in] + n * rec, (size_t)rec * sizeof *x);
        }
        dr_layer_plan *plan;
        MUST(dr_layer_plan_create(b.layer, &one, &plan));
        dr_buffers buffers;
        MUST(dr_layer_buffers_create(plan, &buffers));
        dr_layer_io io = DR_LAYER_IO_INIT;
        io.params = b.params;
        io.x = dr_tensor_make(x, DR_F32, 3, N, 1, hidden, 0);
        io.y = dr_tensor_make(y, DR_F32, 3, N, 1, hidden, 0);
        io.conv_in = io.conv_out =
            dr_tensor_make(convs, DR_F32, 3, SLOT_COUNT, dr_layer_conv_channels(b.layer), 3, 0);
        io.state_in = io.state_out =
            dr_tensor_make(states, DR_F32, 4, SLOT_COUNT, c.value_heads, c.key_dim, c.value_dim);
        io.state_index = index;
        float *got = floats(N * T * hidden, NAN);
        for (int64_t t = 0; t < T; t++) {
            for (int n = 0; n < N; n++)
                memcpy(x + n * hidden, whole.v[S_x] + (n * T + t) * hidden,
                       (size_t)hidden * sizeof *x);
            MUST(dr_layer_step(plan, &io, &buffers));
            for (int n = 0; n < N; n++)
                memcpy(got + (n * T + t) * hidden, y + n * hidden, (size_t)hidden * sizeof *x);
        }
        expect_close("step", "y", got, doubles_of(whole.v[S_y], N * T * hidden), N * T * hidden,
                     1e-5);
        for (int n = 0; n < N; n++) {
            expect_close("step", "conv_out", convs + index[n] * conv,
                         doubles_of(whole.v[S_conv_out] + n * conv, conv), conv, 1e-5);
            expect_close("step", "state_out", states + index[n] * rec,
                         doubles_of(whole.v[S_state_out] + n * rec, rec), rec, 1e-5);
        }
        expect_bits("step", "idle conv slot", convs + conv, idle, conv);
        expect_bits("step", "idle state slot", states + rec, idle + conv, rec);
        dr_buffers_destroy(&buffers);
        dr_layer_plan_destroy(plan);
        dr_layer_destroy(b.layer);
    }
}

/* Several tokens of packed sequences in one step. */
static void test_packed_step(void **state)
{
    static const int64_t offsets[] = {0, 2, 2, 7};
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {23};
        dr_layer_config c = config_of(kinds[k]);
        block b = block_make(context(state, 2), &c, &r);
        dr_layer_layout spread = packed(8, offsets, 3);
        trial whole = trial_make(&b, &spread, true, &r), step = whole;
        trial_run(&whole);
        dr_layer_plan *plan;
        MUST(dr_layer_plan_create(b.layer, &spread, &plan));
        dr_buffers buffers;
        MUST(dr_layer_buffers_create(plan, &buffers));
        dr_layer_io io = io_inputs(&step);
        add_outputs(&step, ROLE_OUTPUT, &io);
        MUST(dr_layer_step(plan, &io, &buffers));
        for (int i = S_y; i <= S_state_out; i++)
            expect_close("packed step", slots[i].name, step.v[i],
                         doubles_of(whole.v[i], whole.n[i]), whole.n[i], 1e-5);
        dr_buffers_destroy(&buffers);
        dr_layer_plan_destroy(plan);
        dr_layer_destroy(b.layer);
    }
}

/* ---- padding -------------------------------------------------------------------------- */

/* A padded run, its padding full of NaN, against the packed run of its real runs: the same
 * bits for real tokens and parameters, zero for padding. */
static void padded(const block *b, int64_t B, int64_t T, const uint8_t *mask, rng *r)
{
    const int64_t hidden = b->c.hidden;
    int64_t offsets[64] = {0}, n = 0, real = 0;
    for (int64_t i = 0; i < B * T; i++) {
        if (mask[i] && (i % T == 0 || !mask[i - 1]))
            n++;
        real += mask[i];
        offsets[n] = real;
    }
    dr_layer_layout with = dense(B, T), without = packed(real, offsets, n);
    if (n == 1) /* one run is a plain sequence */
        without = dense(1, real);
    with.mask = mask;
    trial want = trial_make(b, &without, false, r), got = trial_plain(b, &with, false);
    got.v[S_x] = floats(got.n[S_x], NAN);
    got.v[S_dy] = floats(got.n[S_dy], NAN);
    for (int64_t i = 0, j = 0; i < B * T; i++) {
        if (!mask[i])
            continue;
        memcpy(got.v[S_x] + i * hidden, want.v[S_x] + j * hidden, (size_t)hidden * sizeof(float));
        memcpy(got.v[S_dy] + i * hidden, want.v[S_dy] + j++ * hidden,
               (size_t)hidden * sizeof(float));
    }
    trial_run(&want);
    trial_run(&got);
    static const int rows[] = {S_y, S_dx};
    const float *zeros = floats(hidden, 0);
    for (int s = 0; s < 2; s++)
        for (int64_t i = 0, j = 0; i < B * T; i++)
            expect_bits(mask[i] ? "a real token" : "a padding token", slots[rows[s]].name,
                        got.v[rows[s]] + i * hidden,
                        mask[i] ? want.v[rows[s]] + j++ * hidden : zeros, hidden);
    for (int32_t i = 0; i < b->n; i++)
        expect_bits("padding", param_name(b, i), got.grad[i], want.grad[i], b->count[i]);
}

static void test_padding(void **state)
{
    static const uint8_t left0[] = {1, 1, 1, 1, 1, 1}, left1[] = {0, 1, 1, 1, 1, 1, 1};
    static const uint8_t left5[] = {0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1}, right[] = {1, 1, 1, 0, 0};
    static const uint8_t holes[] = {0, 1, 1, 0, 1, 0, 0, 1};
    static const uint8_t batch[] = {0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1};
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {31};
        dr_layer_config c = config_of(kinds[k]);
        block b = block_make(context(state, 2), &c, &r);
        padded(&b, 1, DR_COUNT(left0), left0, &r);
        padded(&b, 1, DR_COUNT(left1), left1, &r);
        padded(&b, 1, DR_COUNT(left5), left5, &r);
        padded(&b, 1, DR_COUNT(right), right, &r);
        padded(&b, 1, DR_COUNT(holes), holes, &r);
        padded(&b, 2, 4, holes, &r);
        padded(&b, 3, 6, batch, &r);
        dr_layer_destroy(b.layer);
    }
}

/* ---- nothing to do -------------------------------------------------------------------- */

static void expect_zero(const char *what, const float *x, int64_t n)
{
    expect_bits("nothing to do", what, x, floats(n, 0), n);
}

/* No tokens at all, and nothing but padding: states pass through, gradients are zero. */
static void test_no_tokens(void **state)
{
    static const uint8_t nothing[6] = {0};
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {41};
        dr_layer_config c = config_of(kinds[k]);
        block b = block_make(context(state, 2), &c, &r);
        dr_layer_layout empty = dense(2, 0), padding = dense(2, 3);
        padding.mask = nothing;
        trial e = trial_make(&b, &empty, true, &r), p = trial_make(&b, &padding, false, &r);
        trial_run(&e);
        trial_run(&p);
        expect_bits("no tokens", "state_out", e.v[S_state_out], e.v[S_state_in], e.n[S_state_in]);
        expect_bits("no tokens", "conv_out", e.v[S_conv_out], e.v[S_conv_in], e.n[S_conv_in]);
        expect_bits("no tokens", "d_state_in", e.v[S_d_state_in], e.v[S_d_state_out],
                    e.n[S_state_in]);
        expect_bits("no tokens", "d_conv_in", e.v[S_d_conv_in], e.v[S_d_conv_out], e.n[S_conv_in]);
        expect_zero("y", p.v[S_y], p.n[S_y]);
        expect_zero("dx", p.v[S_dx], p.n[S_dx]);
        for (int32_t i = 0; i < b.n; i++) {
            expect_zero(param_name(&b, i), e.grad[i], b.count[i]);
            expect_zero(param_name(&b, i), p.grad[i], b.count[i]);
        }
        dr_layer_destroy(b.layer);
    }
}

/* ---- choices that must not matter ------------------------------------------------------ */

static void test_keep_and_threads(void **state)
{
    static const int64_t offsets[] = {0, 66, 70};
    static const dr_keep keeps[] = {DR_KEEP_INPUTS, DR_KEEP_STATES};
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {51};
        dr_layer_config c = config_of(kinds[k]);
        block b = block_make(context(state, 1), &c, &r), other = b;
        dr_layer_layout spread = packed(70, offsets, 2);
        trial want = trial_make(&b, &spread, true, &r), got = want;
        trial_run(&want);
        MUST(dr_layer_create(context(state, 3), &c, &other.layer));
        got.b = &other;
        trial_run(&got);
        expect_same("three threads", &got, &want, 0);
        dr_layer_destroy(other.layer);
        for (size_t i = 0; i < DR_COUNT(keeps); i++) {
            c.keep = keeps[i];
            MUST(dr_layer_create(b.ctx, &c, &other.layer));
            trial_run(&got);
            expect_same("another keep", &got, &want, 1e-5);
            dr_layer_destroy(other.layer);
        }
        dr_layer_destroy(b.layer);
    }
}

/* Each gradient alone, each gradient left out, and accumulation onto what was there; forward
 * without saved. */
static void test_wanted_gradients(void **state)
{
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {52};
        dr_layer_config c = config_of(kinds[k]);
        block b = block_make(context(state, 1), &c, &r);
        dr_layer_layout spread = dense(2, 5);
        trial all = trial_make(&b, &spread, false, &r);
        trial_run(&all);
        dr_layer_plan *plan;
        MUST(dr_layer_plan_create(b.layer, &spread, &plan));
        dr_buffers buffers, bare;
        MUST(dr_layer_buffers_create(plan, &buffers));
        bare = buffers;
        bare.saved = NULL;
        dr_layer_io io = io_inputs(&all);
        float *y = floats(all.n[S_y], NAN), *dx = floats(all.n[S_dx], NAN);
        io.y = slot_view(&all, S_y, y);
        MUST(dr_layer_forward(plan, &io, &bare));
        expect_bits("without saved", "y", y, all.v[S_y], all.n[S_y]);
        MUST(dr_layer_forward(plan, &io, &buffers));
        io.dx = slot_view(&all, S_dx, dx);
        MUST(dr_layer_backward(plan, &io, &buffers));
        expect_bits("dx alone", "dx", dx, all.v[S_dx], all.n[S_dx]);
        io.dx.data = NULL;
        dr_tensor grads[MAX_PARAMS];
        io.grads = grads;
        for (int32_t only = 0; only < b.n; only++) {
            for (int32_t i = 0; i < b.n; i++) {
                grads[i] = b.params[i];
                grads[i].data = i == only ? floats(b.count[i], NAN) : NULL;
            }
            io.accumulate = 0;
            MUST(dr_layer_backward(plan, &io, &buffers));
            expect_bits("alone", param_name(&b, only), grads[only].data, all.grad[only],
                        b.count[only]);
            io.accumulate = 1;
            MUST(dr_layer_backward(plan, &io, &buffers));
            float *twice = floats(b.count[only], 0);
            add_into(twice, all.grad[only], b.count[only]);
            add_into(twice, all.grad[only], b.count[only]);
            expect_close("twice", param_name(&b, only), grads[only].data,
                         doubles_of(twice, b.count[only]), b.count[only], 1e-6);
        }
        dr_buffers_destroy(&buffers);
        dr_layer_plan_destroy(plan);
        dr_layer_destroy(b.layer);
    }
}

/* Larger heads, several chunks, another backend: the yardstick is ref. */
static void test_against_ref(void **state)
{
    static const int64_t offsets[] = {0, 130, 131, 200};
    for (size_t k = 0; k < DR_COUNT(kinds); k++) {
        rng r = {71};
        dr_layer_config c = config_of(kinds[k]);
        c.hidden = 48;
        c.key_dim = 64;
        c.value_dim = 32;
        c.gate_rank = 0;
        void *ref = "ref";
        block b = block_make(context(&ref, 2), &c, &r), other = b;
        dr_layer_layout spread = packed(200, offsets, 3);
        for (int32_t i = 0; i < b.n; i++) /* projections of unit size */
            for (int64_t j = 0; b.params[i].rank == 2 && j < b.count[i]; j++)
                ((float *)b.params[i].data)[j] *= 0.3f;
        trial want = trial_make(&b, &spread, true, &r), got = want;
        memcpy(other.params, b.params, sizeof b.params);
        other.ctx = context(state, 2);
        MUST(dr_layer_create(other.ctx, &c, &other.layer));
        got.b = &other;
        trial_run(&want);
        trial_run(&got);
        expect_same("against ref", &got, &want, 1e-5);
        dr_layer_destroy(other.layer);
        dr_layer_destroy(b.layer);
    }
}

#define ON(test, backend)                                       \
    {                                                           \
#test " on " backend, test, NULL, done, (void *)backend \
    }
#define ON_ALL(test) ON(test, "ref"), ON(test, "cpu")

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_ALL(test_golden),           ON_ALL(test_packed_is_separate),
        ON_ALL(test_nan_stays),        ON_ALL(test_no_boundaries_left_over),
        ON_ALL(test_split_is_whole),   ON_ALL(test_step_is_forward),
        ON_ALL(test_packed_step),      ON_ALL(test_padding),
        ON_ALL(test_no_tokens),        ON_ALL(test_keep_and_threads),
        ON_ALL(test_wanted_gradients), ON(test_against_ref, "cpu"),
    };
    return cmocka_run_group_tests_name("layer", tests, NULL, NULL);
}
