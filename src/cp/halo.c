/* SPDX-License-Identifier: Apache-2.0 */
/*
 * halo.c - what a causal convolution must know of the tokens in front of a fragment. The history of
 * a piece that does not start its sequence is cut out of the slots before it, as many as it takes,
 * and out of the initial state where the sequence began less than a halo ago. Plan creation turns the
 * routed stream into a list of copies in token order, the same on all ranks; a call is one exchange
 * of at most one message per ordered pair of ranks, and its adjoint is the same list read backwards:
 * what was copied is added where it came from.
 *
 * NOTE [Halo sums]: a token may be in the halo of several later slots. Their gradients are added
 * in the order of the list once all have arrived, so the bits do not depend on who was first.
 */
#include "base/arena.h"
#include "core/delta.h"
#include "cp/cp_agree.h"
#include "plan/route.h"

#include <deltarule/comm.h>

/* Columns of history of one piece that come from one place. */
typedef struct copy {
    int32_t from, to;      /* ranks */
    bool state;            /* out of the initial state of a piece, else out of tokens of the span */
    int64_t source, first; /* on `from`: piece and column of its state; or row of the span, 0 */
    int64_t piece, column; /* on `to` */
    int64_t count;         /* columns */
    int64_t at;            /* place in this rank's packed messages, columns */
} copy;

/* The columns that one peer gets or gives, in list order. */
typedef struct share {
    int32_t peer;
    int64_t at, count;
} share;

typedef enum side { SENT, RECEIVED } side; /* as seen by the forward direction */

struct dr_halo {
    const dr_context *ctx;
    dr_comm *comm;
    dr_route route;
    int64_t channels, width; /* D, halo */
    int64_t n_copies;        /* only those that this rank takes part in */
    copy *copies;
    int64_t n_shares[2], columns[2]; /* by side */
    share *shares[2];
    size_t scratch;
};

/* The memory of one call. */
typedef struct work {
    float *packed[2];
    dr_transfer *transfers;
} work;

/* ---- the list of copies -------------------------------------------------------------------- */

/* Calls for every copy of the stream, in token order; those of this rank are written where there
 * is room. Returns how many there are. */
static int64_t list_copies(const dr_halo *h, const int64_t *offsets, copy *out)
{
    const dr_route *route = &h->route;
    const dr_slot *slots = route->slots;
    const int32_t me = h->comm->rank;
    int64_t n = 0, sequence = 0;
    for (int64_t s = 0; s < route->n_slots; s++) {
        if (!slots[s].from_previous || h->width == 0)
            continue;
        const int64_t begin = slots[s].begin;
        while (offsets != NULL && offsets[sequence + 1] <= begin)
            sequence++;
        const int64_t start = offsets != NULL ? offsets[sequence] : 0;
        const int64_t from = dr_max(start, begin - h->width);
        int64_t j = s - 1;
        while (slots[j].begin > from)
            j--;
        copy c = {.to = slots[s].rank, .piece = slots[s].first};
        if (begin - start < h->width) { /* then slot j holds the first token */
            c.from = slots[j].rank;
            c.state = true;
            c.source = slots[j].last;
            c.first = begin - start;
            c.count = h->width - c.first;
            if ((c.from == me || c.to == me) && out != NULL)
                out[n] = c;
            n += c.from == me || c.to == me;
            c.column = c.count;
        }
        for (c.state = false, c.first = 0; j < s; j++, c.column += c.count) {
            const int64_t at = dr_max(slots[j].begin, from);
            c.from = slots[j].rank;
            c.count = slots[j].end - at;
            c.source = c.from == me ? route->pieces[slots[j].first].begin + at - slots[j].begin : 0;
            if ((c.from == me || c.to == me) && out != NULL)
                out[n] = c;
            n += c.from == me || c.to == me;
        }
    }
    return n;
}

static int32_t peer_of(const copy *c, side s) { return s == SENT ? c->to : c->from; }

static bool travels(const dr_halo *h, const copy *c, side s)
{
    return c->from != c->to && (s == SENT ? c->from : c->to) == h->comm->rank;
}

/* Packs the copies of one side peer by peer. */
static dr_status share_out(dr_halo *h, side s)
{
    h->shares[s] = dr_alloc((size_t)h->comm->size * sizeof *h->shares[s]);
    if (h->shares[s] == NULL)
        return dr_fail(DR_ERR_MEMORY, "halo: no memory for %d peers", h->comm->size);
    for (int32_t r = 0; r < h->comm->size; r++) {
        const int64_t at = h->columns[s];
        for (int64_t i = 0; i < h->n_copies; i++) {
            copy *c = &h->copies[i];
            if (!travels(h, c, s) || peer_of(c, s) != r)
                continue;
            c->at = h->columns[s];
            h->columns[s] += c->count;
        }
        if (h->columns[s] > at)
            h->shares[s][h->n_shares[s]++] = (share){r, at, h->columns[s] - at};
    }
    return DR_OK;
}

/* ---- plans ------------------------------------------------------------------------------------ */

static work carve(const dr_halo *h, dr_arena *scratch)
{
    work w;
    for (int s = SENT; s <= RECEIVED; s++)
        w.packed[s] = DR_TAKE(scratch, float, h->columns[s], h->channels);
    w.transfers = DR_TAKE(scratch, dr_transfer, h->n_shares[SENT] + h->n_shares[RECEIVED], 1);
    return w;
}

static dr_status build(dr_halo *h, const dr_halo_config *config, dr_agreement *mine)
{
    const dr_partition *p = config->partition;
    if (config->size != sizeof *config)
        return dr_fail(DR_ERR_ARG, "config.size: must be %zu (DR_HALO_CONFIG_INIT), got %u", sizeof *config,
                       config->size);
    if (config->channels < 1 || config->width < 0)
        return dr_fail(DR_ERR_SHAPE, "channels, width: must be >= 1 and >= 0, got %lld, %lld",
                       (long long)config->channels, (long long)config->width);
    if (config->tokens < 0 || config->tokens > INT32_MAX)
        return dr_fail(DR_ERR_SHAPE, "tokens: must be 0 to %d, got %lld", INT32_MAX,
                       (long long)config->tokens);
    DR_TRY(dr_offsets_check("offsets", config->offsets, config->sequences, 1, config->tokens));
    DR_TRY(dr_route_build(&h->route, p, h->comm->rank, config->tokens, config->offsets,
                          config->sequences));
    if (p->ranks != h->comm->size)
        return dr_fail(DR_ERR_ARG, "partition.ranks: must be the size of the communicator (%d), got %d",
                       h->comm->size, p->ranks);
    h->channels = config->channels;
    h->width = config->width;
    h->n_copies = list_copies(h, config->offsets, NULL);
    h->copies = dr_alloc((size_t)dr_max(h->n_copies, 1) * sizeof *h->copies);
    if (h->copies == NULL)
        return dr_fail(DR_ERR_MEMORY, "halo: no memory for %lld copies", (long long)h->n_copies);
    list_copies(h, config->offsets, h->copies);
    DR_TRY(share_out(h, SENT));
    DR_TRY(share_out(h, RECEIVED));
    dr_arena scratch = {0};
    carve(h, &scratch);
    if (scratch.overflow)
        return dr_fail(DR_ERR_MEMORY, "halo: the messages of this plan exceed 2^62 bytes");
    h->scratch = scratch.used;
    const int64_t sizes[] = {config->channels, config->width, config->tokens};
    mine->digest[0] = dr_cp_digest(DR_DIGEST, sizes, sizeof sizes);
    mine->digest[1] = dr_cp_digest_offsets(config->offsets, config->sequences);
    mine->digest[2] = dr_cp_digest_partition(p);
    return DR_OK;
}

dr_status dr_halo_create(const dr_context *ctx, struct dr_comm *comm, const dr_halo_config *config,
                         dr_halo **out)
{
    static const char *const agreed[DR_AGREED] = {"channels, width, tokens", "offsets", "partition"};
    if (out == NULL)
        return dr_fail(DR_ERR_ARG, "out: must not be NULL");
    *out = NULL;
    if (ctx == NULL || comm == NULL || config == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL",
                       ctx == NULL ? "ctx" : comm == NULL ? "comm" : "config");
    dr_halo *h = dr_alloc(sizeof *h);
    if (h == NULL) {
        dr_comm_abort(comm, "no memory for a halo");
        return dr_fail(DR_ERR_MEMORY, "halo: no memory for %zu bytes", sizeof *h);
    }
    h->ctx = ctx;
    h->comm = comm;
    dr_agreement mine = {0};
    dr_agreement_set(&mine, build(h, config, &mine));
    dr_status status = dr_cp_agree(comm, &mine, agreed);
    if (status != DR_OK) {
        dr_halo_destroy(h);
        return status;
    }
    *out = h;
    return DR_OK;
}

void dr_halo_destroy(dr_halo *h)
{
    if (h == NULL)
        return;
    dr_route_clear(&h->route);
    dr_free(h->copies);
    dr_free(h->shares[SENT]);
    dr_free(h->shares[RECEIVED]);
    dr_free(h);
}

dr_status dr_halo_describe(const dr_halo *h, dr_cp_info *info)
{
    if (h == NULL || info == NULL || info->size != sizeof *info)
        return dr_fail(DR_ERR_ARG, "halo, info: must be given, info with size %zu (DR_CP_INFO_INIT)",
                       sizeof *info);
    *info = (dr_cp_info){sizeof *info, h->route.tokens, h->route.n_pieces, 0, h->scratch, {0, 0}, {0, 0}};
    for (int s = SENT; s <= RECEIVED; s++) {
        info->sends[s] = h->n_shares[s];
        info->send_bytes[s] = h->columns[s] * h->channels * (int64_t)sizeof(float);
    }
    return DR_OK;
}

/* ---- calls -------------------------------------------------------------------------------------- */

/* A column of channels: of a state [N,D,halo], or a row of the span [1,T,D]. */
typedef struct column {
    float *data; /* NULL: absent, reads as zero and takes nothing */
    int64_t stride;
} column;

static column state_column(const dr_tensor *t, int64_t piece, int64_t at)
{
    if (t->data == NULL)
        return (column){NULL, 0};
    return (column){(float *)t->data + piece * t->stride[0] + at * t->stride[2], t->stride[1]};
}

static column source_column(const copy *c, const dr_tensor *x, const dr_tensor *state, int64_t i)
{
    if (c->state)
        return state_column(state, c->source, c->first + i);
    return (column){(float *)x->data + (c->source + i) * x->stride[1], x->stride[2]};
}

static column packed_column(const dr_halo *h, float *packed, const copy *c, int64_t i)
{
    return (column){packed + (c->at + i) * h->channels, 1};
}

static void put(int64_t channels, column from, column to)
{
    for (int64_t d = 0; d < channels; d++)
        to.data[d * to.stride] = from.data != NULL ? from.data[d * from.stride] : 0;
}

static void add(int64_t channels, column from, column to)
{
    for (int64_t d = 0; to.data != NULL && d < channels; d++)
        to.data[d * to.stride] += from.data[d * from.stride];
}

/* Every piece that starts its sequence: out = in; the others: zero. */
static void copy_starts(const dr_halo *h, const dr_tensor *in, const dr_tensor *out)
{
    for (int64_t n = 0; out->data != NULL && n < h->route.n_pieces; n++)
        for (int64_t i = 0; i < h->width; i++)
            put(h->channels, h->route.pieces[n].starts ? state_column(in, n, i) : (column){NULL, 0},
                state_column(out, n, i));
}

static dr_status post(const dr_halo *h, side s, const work *w, bool send, dr_batch **out)
{
    if (h->n_shares[s] == 0)
        return DR_OK;
    for (int64_t i = 0; i < h->n_shares[s]; i++) {
        const share *p = &h->shares[s][i];
        w->transfers[i] = (dr_transfer){p->peer, send, w->packed[s] + p->at * h->channels,
                                        (size_t)(p->count * h->channels) * sizeof(float)};
    }
    return dr_comm_post(h->comm, w->transfers, (int32_t)h->n_shares[s], out);
}

/* What a call works on, in either direction. */
typedef struct call {
    dr_tensor x, state, history;
    work w;
} call;

static void pack(const dr_halo *h, const call *k, side s)
{
    for (int64_t n = 0; n < h->n_copies; n++) {
        const copy *c = &h->copies[n];
        for (int64_t i = 0; travels(h, c, s) && i < c->count; i++)
            put(h->channels, s == SENT ? source_column(c, &k->x, &k->state, i)
                                       : state_column(&k->history, c->piece, c->column + i),
                packed_column(h, k->w.packed[s], c, i));
    }
}

static void take_history(const dr_halo *h, const call *k)
{
    const int32_t me = h->comm->rank;
    for (int64_t n = 0; n < h->n_copies; n++) {
        const copy *c = &h->copies[n];
        for (int64_t i = 0; c->to == me && i < c->count; i++)
            put(h->channels, c->from == me ? source_column(c, &k->x, &k->state, i)
                                           : packed_column(h, k->w.packed[RECEIVED], c, i),
                state_column(&k->history, c->piece, c->column + i));
    }
}

static void add_gradients(const dr_halo *h, const call *k) /* NOTE [Halo sums] */
{
    const int32_t me = h->comm->rank;
    for (int64_t n = 0; n < h->n_copies; n++) {
        const copy *c = &h->copies[n];
        for (int64_t i = 0; c->from == me && i < c->count; i++)
            add(h->channels, c->to == me ? state_column(&k->history, c->piece, c->column + i)
                                         : packed_column(h, k->w.packed[SENT], c, i),
                source_column(c, &k->x, &k->state, i));
    }
}

/* Receives stand before anything is packed. On failure nobody is left waiting. */
static dr_status exchange(const dr_halo *h, const call *k, side sent)
{
    const side received = sent == SENT ? RECEIVED : SENT;
    work sending = k->w;
    sending.transfers += h->n_shares[received];
    dr_batch *batches[2] = {NULL, NULL};
    dr_status status = post(h, received, &k->w, false, &batches[0]);
    if (status == DR_OK) {
        pack(h, k, sent);
        status = post(h, sent, &sending, true, &batches[1]);
    }
    return dr_cp_settle(h->comm, status, batches, 2);
}

static dr_status check_one(const dr_halo *h, const dr_tensor *t, bool span, const char *name, bool required,
                           bool output, dr_tensor *out)
{
    const dr_expect row = {name, "[1,T,D]", 3, {1, h->route.tokens, h->channels, 0}, true, required, output};
    const dr_expect state = {name, "[N,D,halo]", 3, {h->route.n_pieces, h->channels, h->width, 0}, false,
                             required, output};
    if (t == NULL)
        return dr_fail(DR_ERR_ARG, "%s: must not be NULL", name);
    DR_TRY(dr_tensor_check(h->ctx, t, span ? &row : &state, out));
    if (out->data != NULL && out->dtype != DR_F32)
        return dr_fail(DR_ERR_SUPPORT, "%s: must be f32, got %s", name, dr_dtype_name(out->dtype));
    return DR_OK;
}

static dr_status check_call(const dr_halo *h, const dr_tensor *x, const dr_tensor *state,
                            const dr_tensor *history, bool back, const dr_buffers *buffers, call *k)
{
    *k = (call){0};
    DR_TRY(dr_buffers_check(buffers, 0, false, h->scratch));
    DR_TRY(check_one(h, x, true, back ? "dx" : "x", true, back, &k->x));
    DR_TRY(check_one(h, state, false, back ? "d_initial_state" : "initial_state", false, back, &k->state));
    return check_one(h, history, false, back ? "d_history" : "history", true, !back, &k->history);
}

static dr_status run(const dr_halo *h, const dr_tensor *x, const dr_tensor *state,
                     const dr_tensor *history, bool back, const dr_buffers *buffers)
{
    if (h == NULL)
        return dr_fail(DR_ERR_ARG, "halo: must not be NULL");
    if (h->comm->health != DR_OK)
        return dr_fail(DR_ERR_COMM, "comm: rank %d can no longer be used after a failure", h->comm->rank);
    call k;
    dr_status status = check_call(h, x, state, history, back, buffers, &k);
    if (status != DR_OK) { /* the peers are on their way into the exchange */
        dr_comm_abort(h->comm, dr_last_error());
        return status;
    }
    dr_arena scratch = {.base = buffers->scratch, .size = h->scratch};
    k.w = carve(h, &scratch);
    if (back)
        copy_starts(h, &k.history, &k.state);
    else
        copy_starts(h, &k.state, &k.history);
    status = exchange(h, &k, back ? RECEIVED : SENT);
    if (status == DR_OK)
        (back ? add_gradients : take_history)(h, &k);
    dr_arena_done(&scratch);
    return status;
}

dr_status dr_halo_forward(const dr_halo *halo, const dr_tensor *x, const dr_tensor *initial_state,
                          const dr_tensor *history, const dr_buffers *buffers)
{
    return run(halo, x, initial_state, history, false, buffers);
}

dr_status dr_halo_backward(const dr_halo *halo, const dr_tensor *d_history, const dr_tensor *dx,
                           const dr_tensor *d_initial_state, const dr_buffers *buffers)
{
    return run(halo, dx, d_initial_state, d_history, true, buffers);
}
