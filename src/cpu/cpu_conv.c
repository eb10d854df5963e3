/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_conv.c - the causal depthwise convolution of the CPU backend, forward and adjoint.
 *
 * Everything happens on tiles of some tokens by some channels, a row of floats per token: one
 * output row is W weighted input rows (kernel conv_rows), one gradient row is the same with the
 * taps reversed. Rows come from the tensor itself, from a tile that was loaded (other types and
 * strides, states), or are a row of zeros, and the kernels see pointers to rows only. So there
 * is one path, for any width, dilation, element type, layout and history.
 *
 * Letters: T tokens, D channels, W taps. Inside a sequence tokens count from its first one, and
 * its history is tokens -1, -2, ...: column n of a state of width w is token n - w (and
 * token L - w + n for the final state of a sequence of L tokens).
 *
 * NOTE [Dilation]: tokens that are `dilation` apart form a phase; phases do not meet. A tile
 * holds tokens of one phase, and within it the convolution has no holes.
 *
 * NOTE [Groups of taps]: tiles hold the rows of at most TAPS taps; a wider convolution adds up
 * groups of taps, and its adjoint makes one pass over the tokens per group.
 *
 * The preactivation is recomputed in the adjoint. A task owns its channels over all tokens
 * there, so the sums of dweight and dbias need no second party: fp32 within FLUSH tokens, double
 * between, in the order of the tokens.
 */
#include "cpu/cpu_conv.h"
#include "base/half.h"

#define NO_CARRY INT64_MIN

enum {
    TAPS = 32,            /* largest group of taps */
    BLOCK = 256,          /* tokens of a forward task, in tiles */
    TALLEST = 64,         /* tokens of a tile; with token rows of many channels it is */
    SHORTEST = 8,         /* shorter, with rows of few channels taller */
    FORWARD_ROOM = 8192,  /* floats of a task's memory */
    ADJOINT_ROOM = 16384,
    FLUSH = 128
};

/* Lines come with the tiles that states need, 16 channels wide. */
_Static_assert((2 * SHORTEST + 2 * TAPS + 1) * 16 + DR_CPU_LINE_ROOM <= FORWARD_ROOM, "forward");
_Static_assert((4 * SHORTEST + 8 * TAPS + 3) * 16 + DR_CPU_LINE_ROOM <= ADJOINT_ROOM, "adjoint");

typedef struct conv {
    const dr_kern *kern;
    const dr_conv_args *a;
    int64_t B, T, D, W, step, halo; /* step: the dilation */
    int64_t pieces;
    int64_t span;                   /* tokens of a batch row that belong to some piece */
    int64_t group, groups;          /* of taps: largest, and how many */
    int64_t tile;                   /* tokens of a tile */
    int64_t cols, col_blocks;       /* channels of a task, and tasks across the channels */
    int64_t block, row_blocks;      /* tokens of a forward task, and tasks along a batch row */
    bool lines;                     /* channel by channel: cpu_conv_lines.c */
} conv;

typedef struct piece {
    int64_t n, b, begin, len;
} piece;

/* What a task works in: n channels from d0 on. */
typedef struct bench {
    const conv *c;
    piece p;
    int64_t d0, n, ld;
    float *x, *out, *w, *bias, *zero; /* tiles and rows; ld floats a row */
    float *d, *dy, *sums;             /* adjoint */
    float *lines;
    double *totals;
    int64_t summed;                   /* tokens in sums */
    const float *row[TALLEST + 2 * (TAPS - 1)]; /* input rows of the tile, */
    int64_t row_t, rows;              /* the first one's token, and how many there are */
    const float *d_row[TALLEST + TAPS - 1];
    int64_t d_ld;                     /* distance of neighbours in d_row, inside the piece */
    int64_t carry;                    /* token of the first row of d; NO_CARRY: of no use */
} bench;

static piece piece_at(const conv *c, int64_t n)
{
    const int64_t *o = c->a->offsets;
    return o ? (piece){n, 0, o[n], o[n + 1] - o[n]} : (piece){n, n, 0, c->T};
}

static void set_piece(bench *s, piece p)
{
    s->p = p;
    s->rows = 0;
}

/* First piece of a packed row that has tokens at or past t. */
static int64_t piece_from(const conv *c, int64_t t)
{
    int64_t low = 0, high = c->pieces;
    while (low < high) {
        int64_t n = (low + high) / 2;
        if (c->a->offsets[n + 1] > t)
            high = n;
        else
            low = n + 1;
    }
    return low;
}

/* ---- rows -------------------------------------------------------------------------- */

/* A tensor [B,T,D] from token t of the piece on, one row per step. */
static dr_cpu_view token_view(const bench *s, const dr_tensor *t, int64_t token)
{
    dr_cpu_view v = dr_cpu_view_of(t, 1, 2, s->p.b, 0, 0);
    v = dr_cpu_view_at(v, s->p.begin + token, s->d0);
    v.row *= s->c->step;
    return v;
}

/* Column `col` of a state on, one row per column. Absent if the piece has no slot. */
static dr_cpu_view state_view(const bench *s, const dr_tensor *t, int64_t col)
{
    const int32_t *index = s->c->a->state_index;
    int64_t slot = index ? index[s->p.n] : s->p.n;
    if (t->data == NULL || slot < 0)
        return (dr_cpu_view){0};
    return dr_cpu_view_at(dr_cpu_view_of(t, 2, 1, slot, 0, 0), col, s->d0);
}

/* How many of `count` tokens t, t + step, .. stand before `end`. */
static int64_t before(const conv *c, int64_t t, int64_t end, int64_t count)
{
    return t >= end ? 0 : dr_min(count, dr_ceil_div(end - t, c->step));
}

/* A tile of tokens that will be read soon, if its channels are contiguous and all its tokens
 * exist; to be fetched while another is at work. */
typedef struct soon {
    const char *at;
    int64_t hop;
    int size;
} soon;

static soon soon_at(const bench *s, const dr_tensor *from, int64_t t)
{
    const conv *c = s->c;
    if (from->data == NULL || from->stride[2] != 1 || t < 0 ||
        before(c, t, s->p.len, c->tile) < c->tile)
        return (soon){0};
    dr_cpu_view v = token_view(s, from, t);
    int64_t size = dr_cpu_size(v.dtype);
    return (soon){v.data, v.row * size, (int)size};
}

/* Inputs at tokens t, t + step, ..: history, tokens, and zeros past the end. The forward, which
 * reads them once, takes them where they lie. */
static void input_rows(bench *s, int64_t t, int64_t count)
{
    const conv *c = s->c;
    const dr_tensor *state = &c->a->initial_state;
    if (t == s->row_t && count <= s->rows)
        return;
    s->row_t = t;
    s->rows = count;
    int64_t old = before(c, t, 0, count), end = before(c, t, s->p.len, count);
    dr_cpu_view v = {0};
    if (old > 0)
        v = state_view(s, state, state->shape[2] + t);
    if (v.data != NULL) {
        v.row *= c->step;
        dr_cpu_view_load(c->kern, &v, old, s->n, s->x, s->ld);
    }
    for (int64_t i = 0; i < old; i++)
        s->row[i] = v.data != NULL ? s->x + i * s->ld : s->zero;
    if (end > old) {
        v = token_view(s, &c->a->x, t + old * c->step);
        dr_cpu_tile x = {s->x + old * s->ld, s->ld};
        if (s->d == NULL)
            x = dr_cpu_tile_in(c->kern, &v, end - old, s->n, x.at, x.ld);
        else
            dr_cpu_view_load(c->kern, &v, end - old, s->n, x.at, x.ld);
        for (int64_t i = old; i < end; i++)
            s->row[i] = x.at + (i - old) * x.ld;
    }
    for (int64_t i = end; i < count; i++)
        s->row[i] = s->zero;
}

/* Taps [first, first + taps) of group g. */
static int64_t group_first(const conv *c, int64_t g) { return g * c->group; }
static int64_t group_taps(const conv *c, int64_t g)
{
    return dr_min(c->group, c->W - g * c->group);
}

static void load_taps(bench *s, int64_t g)
{
    dr_cpu_view w = dr_cpu_view_of(&s->c->a->weight, 1, 0, 0, 0, 0);
    w = dr_cpu_view_at(w, group_first(s->c, g), s->d0);
    dr_cpu_view_load(s->c->kern, &w, group_taps(s->c, g), s->n, s->w, s->ld);
}

/* act(p) at tokens t, t + step, .. of the piece. */
static void output_rows(bench *s, int64_t t, int64_t count, bool silu, dr_cpu_tile out, soon next)
{
    const conv *c = s->c;
    for (int64_t g = 0; g < c->groups; g++) {
        int64_t taps = group_taps(c, g), back = c->W - 1 - group_first(c, g);
        if (c->groups > 1)
            load_taps(s, g);
        input_rows(s, t - back * c->step, count + taps - 1);
        c->kern->conv_rows((int)s->n, (int)count, (int)taps, s->row, s->w, s->ld,
                           g == 0 ? s->bias : out.at, g == 0 ? 0 : out.ld,
                           silu && g + 1 == c->groups, out.at, out.ld, next.at, next.hop,
                           next.size);
    }
}

/* ---- set-up ------------------------------------------------------------------------ */

/* Channels for which a task's memory has room. */
static int64_t most_cols(const conv *c, int dir)
{
    int64_t rows = dir > 0 ? 2 * c->tile + 2 * c->group + 1 : 4 * c->tile + 8 * c->group + 3;
    return (dir > 0 ? FORWARD_ROOM : ADJOINT_ROOM) / rows / 16 * 16;
}

static conv conv_of(const dr_device *dev, const dr_conv_args *a, int dir)
{
    conv c = {.kern = dev->kern, .a = a, .B = a->x.shape[0], .T = a->x.shape[1],
              .D = a->x.shape[2], .W = a->weight.shape[1], .step = a->dilation};
    c.halo = (c.W - 1) * c.step;
    c.pieces = a->offsets ? a->sequences : c.B;
    c.span = a->offsets ? a->offsets[c.pieces] : c.T;
    c.group = dr_min(c.W, TAPS);
    c.groups = dr_ceil_div(c.W, c.group);
    /* Tokens that are contiguous want tall tiles; otherwise rows as wide as there is room, and
     * then as many as there is room for. Tasks of the adjoint are channels only: see that there
     * are some. */
    bool tall = a->x.stride[1] == 1 && a->x.stride[2] != 1 && c.step == 1;
    int64_t share = dir > 0 ? c.D : dr_max(64, dr_round_up(c.D / 32, 16));
    c.lines = dr_cpu_lines_fit(a, dir);
    c.tile = tall && !c.lines ? TALLEST : SHORTEST;
    if (c.lines)
        share = 16;
    int64_t cols = dr_max(16, dr_min(dr_round_up(share, 16), most_cols(&c, dir)));
    c.col_blocks = dr_ceil_div(c.D, cols);
    c.cols = dr_round_up(dr_ceil_div(c.D, c.col_blocks), 16);
    c.col_blocks = dr_ceil_div(c.D, c.cols);
    while (c.tile < TALLEST && !c.lines) {
        c.tile *= 2;
        if (most_cols(&c, dir) < c.cols) {
            c.tile /= 2;
            break;
        }
    }
    c.block = c.lines ? 2 * DR_CPU_LINE : BLOCK;
    c.row_blocks = dr_ceil_div(c.span, c.block);
    return c;
}

static float *take(float **at, int64_t rows, int64_t ld)
{
    float *p = *at;
    *at += rows * ld;
    return p;
}

static bench bench_of(const conv *c, int64_t col_block, bool adjoint, float *room)
{
    bench s = {.c = c, .d0 = col_block * c->cols, .ld = c->cols};
    s.n = dr_min(c->cols, c->D - s.d0);
    const int64_t more = c->group - 1;
    if (adjoint) {
        s.totals = (double *)room;
        room += 2 * (c->group + 1) * s.ld;
        s.sums = take(&room, c->group + 1, s.ld);
        s.d = take(&room, c->tile + more, s.ld);
        s.dy = take(&room, c->tile + more, s.ld);
    }
    s.x = take(&room, c->tile + (adjoint ? 2 : 1) * more, s.ld);
    s.out = take(&room, c->tile, s.ld);
    s.w = take(&room, c->group, s.ld);
    s.bias = take(&room, 1, s.ld);
    s.zero = take(&room, 1, s.ld);
    s.lines = room;
    memset(s.zero, 0, (size_t)s.ld * sizeof *s.zero);
    memset(s.bias, 0, (size_t)s.ld * sizeof *s.bias);
    if (c->a->bias.data != NULL) {
        dr_cpu_view b = dr_cpu_view_of(&c->a->bias, 0, 0, 0, 0, 0);
        b = dr_cpu_view_at(b, 0, s.d0);
        b.row = 1;
        dr_cpu_view_load(c->kern, &b, 1, s.n, s.bias, s.ld);
    }
    if (c->groups == 1)
        load_taps(&s, 0);
    return s;
}

static dr_cpu_lines lines_of(const bench *s)
{
    const dr_conv_args *a = s->c->a;
    int64_t slot = a->state_index ? a->state_index[s->p.n] : s->p.n;
    return (dr_cpu_lines){s->c->kern, a, s->p.b, s->p.begin, s->p.len, s->p.n, slot, s->lines};
}

/* ---- forward ----------------------------------------------------------------------- */

/* Tokens [from, to) of the piece. */
static void forward_range(bench *s, int64_t from, int64_t to)
{
    const conv *c = s->c;
    const int64_t stride = c->tile * c->step;
    for (int64_t phase = from; phase < dr_min(from + c->step, to); phase++)
        for (int64_t t = phase; t < to; t += stride) {
            int64_t count = before(c, t, to, c->tile);
            soon next = soon_at(s, &c->a->x, t + stride);
            dr_cpu_view y = token_view(s, &c->a->y, t);
            dr_cpu_tile out = dr_cpu_tile_out(&y, s->out, s->ld);
            output_rows(s, t, count, c->a->activation == DR_ACT_SILU, out, next);
            dr_cpu_tile_done(c->kern, out, count, s->n, &y);
        }
}

/* Rises through the columns, so that a final state in the memory of the initial one reads
 * each column before it is overwritten. */
static void write_final(bench *s)
{
    const conv *c = s->c;
    const dr_tensor *from = &c->a->initial_state, *to = &c->a->final_state;
    const int64_t width = to->shape[2], have = from->data ? from->shape[2] : 0;
    for (int64_t i = 0; i < width; i += c->tile) {
        int64_t count = dr_min(c->tile, width - i), t = s->p.len - width + i;
        int64_t none = dr_min(count, dr_max(0, -have - t)), old = dr_min(count, dr_max(0, -t));
        dr_cpu_view out = state_view(s, to, i);
        if (out.data == NULL)
            return;
        memset(s->x, 0, (size_t)(old * s->ld) * sizeof *s->x);
        if (old > none) {
            dr_cpu_view v = state_view(s, from, have + t + none);
            dr_cpu_view_load(c->kern, &v, old - none, s->n, s->x + none * s->ld, s->ld);
        }
        if (count > old) {
            dr_cpu_view v = token_view(s, &c->a->x, t + old);
            v.row = c->a->x.shape[1] > 1 ? c->a->x.stride[1] : 1;
            dr_cpu_view_load(c->kern, &v, count - old, s->n, s->x + old * s->ld, s->ld);
        }
        dr_cpu_view_store(c->kern, s->x, s->ld, count, s->n, &out);
    }
}

/* Whether one forward task has all tokens of the piece, and may write its state as well; other
 * states wait until nobody needs the initial ones any more. */
static bool within_block(const conv *c, const piece *p)
{
    return c->a->y.data != NULL && p->len > 0 &&
           p->begin / c->block == (p->begin + p->len - 1) / c->block;
}

static void forward_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const conv *c = arg;
    _Alignas(DR_ALIGN) float room[FORWARD_ROOM];
    bench s = bench_of(c, task % c->col_blocks, false, room);
    int64_t b = task / c->col_blocks / c->row_blocks;
    int64_t t0 = task / c->col_blocks % c->row_blocks * c->block;
    int64_t t1 = dr_min(t0 + c->block, c->span);
    int64_t n = c->a->offsets ? piece_from(c, t0) : b;
    int64_t last = c->a->offsets ? c->pieces : b + 1;
    for (; n < last; n++) {
        set_piece(&s, piece_at(c, n));
        if (s.p.begin >= t1)
            break;
        int64_t from = dr_max(t0 - s.p.begin, 0), to = dr_min(t1 - s.p.begin, s.p.len);
        const dr_cpu_lines l = lines_of(&s);
        if (!c->lines)
            forward_range(&s, from, to);
        for (int64_t i = 0; i < s.n && c->lines; i++)
            dr_cpu_lines_forward(&l, s.d0 + i, from, to);
        if (c->a->final_state.data != NULL && within_block(c, &s.p))
            write_final(&s);
    }
}

static void final_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const conv *c = arg;
    piece p = piece_at(c, task / c->col_blocks);
    if (within_block(c, &p))
        return;
    _Alignas(DR_ALIGN) float room[FORWARD_ROOM];
    bench s = bench_of(c, task % c->col_blocks, false, room);
    set_piece(&s, p);
    write_final(&s);
}

static bool finals_left(const conv *c)
{
    for (int64_t n = 0; n < c->pieces && c->a->final_state.data != NULL; n++) {
        piece p = piece_at(c, n);
        if (!within_block(c, &p))
            return true;
    }
    return false;
}

/* ---- adjoint ----------------------------------------------------------------------- */

/* Brings the row of a token that will be written soon into the cache. */
static void fetch_row(const bench *s, const dr_tensor *to, int64_t t)
{
    if (to->data == NULL || to->stride[2] != 1)
        return;
    const char *row = token_view(s, to, t).data;
    for (int64_t at = 0; at < s->n * dr_cpu_size(to->dtype); at += 64)
        __builtin_prefetch(row + at, 0, 2);
}

/* Gradients of the preactivation at tokens t, t + step, ..; zero outside the piece. Tiles come
 * in falling order, so that what one needs past its end is what the last one began with. */
static void preactivation_grads(bench *s, int64_t t, int64_t count, soon next)
{
    const conv *c = s->c;
    int64_t old = before(c, t, 0, count), end = before(c, t, s->p.len, count), new = end;
    for (int64_t i = 0; i < count; i++)
        s->d_row[i] = s->zero;
    s->d_ld = 0;
    if (end <= old || c->a->dy.data == NULL)
        return;
    if (s->carry > t && s->carry < t + end * c->step) {
        new = (s->carry - t) / c->step;
        memmove(s->d + new * s->ld, s->d, (size_t)((end - new) * s->ld) * sizeof *s->d);
    }
    dr_cpu_view v = token_view(s, &c->a->dy, t + old * c->step);
    if (c->a->activation == DR_ACT_SILU) {
        dr_cpu_tile fresh = {s->d + old * s->ld, s->ld};
        dr_cpu_view_load(c->kern, &v, new - old, s->n, s->dy, s->ld);
        output_rows(s, t + old * c->step, new - old, false, fresh, next);
        for (int64_t i = 0; i < new - old; i++) {
            fetch_row(s, &c->a->dx, t + (old + i) * c->step);
            c->kern->silu_grad((int)s->n, fresh.at + i * s->ld, s->dy + i * s->ld,
                               fresh.at + i * s->ld);
        }
    } else {
        dr_cpu_view_load(c->kern, &v, new - old, s->n, s->d + old * s->ld, s->ld);
    }
    for (int64_t i = old; i < end; i++)
        s->d_row[i] = s->d + i * s->ld;
    s->d_ld = s->ld;
    s->carry = old == 0 && c->groups == 1 ? t : NO_CARRY;
}

static void flush_sums(bench *s, int64_t taps)
{
    for (int64_t i = 0; i < (taps + 1) * s->ld; i++) {
        s->totals[i] += s->sums[i];
        s->sums[i] = 0;
    }
    s->summed = 0;
}

/* Adds count tokens from t on to the sums of group g; their gradients are d_row. */
static void add_sums(bench *s, int64_t g, int64_t t, int64_t count)
{
    const conv *c = s->c;
    int64_t taps = group_taps(c, g);
    input_rows(s, t - (c->W - 1 - group_first(c, g)) * c->step, count + taps - 1);
    c->kern->conv_sums((int)s->n, (int)count, (int)taps, s->d_row[0], s->d_ld, s->row, s->sums,
                       s->ld);
    s->summed += count;
    if (s->summed >= FLUSH)
        flush_sums(s, taps);
}

/* Rows of the gradient of tokens t, t + step, .. from group g; `first` of the groups starts
 * from what the final state passes back. */
static void input_grads(bench *s, int64_t g, bool first, int64_t t, int64_t count, dr_cpu_tile out,
                        soon next)
{
    const conv *c = s->c;
    const dr_tensor *final = &c->a->d_final_state;
    int64_t taps = group_taps(c, g), kept = count;
    if (first && final->data != NULL) {
        int64_t from = s->p.len - final->shape[2];
        kept = before(c, t, from, count);
        if (kept < count) {
            dr_cpu_view v = state_view(s, final, t + kept * c->step - from);
            v.row *= c->step;
            dr_cpu_view_load(c->kern, &v, count - kept, s->n, s->out + kept * s->ld, s->ld);
        }
    }
    const float *w = s->w + (taps - 1) * s->ld; /* the taps backwards */
    c->kern->conv_rows((int)s->n, (int)kept, (int)taps, s->d_row, w, -s->ld, first ? NULL : out.at,
                       out.ld, false, out.at, out.ld, next.at, next.hop, next.size);
    c->kern->conv_rows((int)s->n, (int)(count - kept), (int)taps, s->d_row + kept, w, -s->ld,
                       s->out + kept * s->ld, s->ld, false, out.at + kept * out.ld, out.ld, NULL, 0,
                       0);
}

/* Tokens [from, to) of the piece, history included: gradients to `to_view`, whose row 0 is
 * token `from`; and, for tokens proper, the sums of group `sums` (-1: none). */
static void adjoint_range(bench *s, int64_t from, int64_t to, const dr_cpu_view *to_view,
                          int64_t sums)
{
    const conv *c = s->c;
    const int64_t last = c->groups - 1, stride = c->tile * c->step;
    const bool rising = c->a->dy.data != NULL;
    for (int64_t phase = from; phase < dr_min(from + c->step, to); phase++) {
        s->carry = NO_CARRY;
        for (int64_t t = phase + (to - 1 - phase) / stride * stride; t >= phase; t -= stride) {
            int64_t count = before(c, t, to, c->tile);
            dr_cpu_view v = dr_cpu_view_at(*to_view, t - from, 0);
            v.row *= c->step;
            dr_cpu_tile out = dr_cpu_tile_out(&v, s->out, s->ld);
            soon dy_next = soon_at(s, &c->a->dy, t - stride);
            soon x_next = soon_at(s, &c->a->x, t - stride - c->halo); /* what is new to it */
            for (int64_t g = last; g >= 0 && v.data != NULL; g--) {
                int64_t ahead = c->W - group_first(c, g) - group_taps(c, g);
                preactivation_grads(s, t + ahead * c->step, count + group_taps(c, g) - 1,
                                    x_next);
                if (c->groups > 1)
                    load_taps(s, g);
                if (g == last && sums == last && rising)
                    add_sums(s, g, t, count);
                input_grads(s, g, g == last, t, count, out, dy_next);
            }
            dr_cpu_tile_done(c->kern, out, count, s->n, &v);
            if (sums >= 0 && (v.data == NULL || sums != last) && rising) {
                preactivation_grads(s, t, count, x_next);
                add_sums(s, sums, t, count);
            }
        }
    }
}

static void store_sums(bench *s, int64_t g)
{
    const dr_tensor *dw = &s->c->a->dweight, *db = &s->c->a->dbias;
    const int64_t taps = group_taps(s->c, g);
    flush_sums(s, taps);
    for (int64_t i = 0; i < s->n; i++) {
        for (int64_t j = 0; j < taps && dw->data != NULL; j++)
            dr_put(dr_at(dw, s->d0 + i, group_first(s->c, g) + j, 0, 0), dw->dtype, 0,
                   s->totals[j * s->ld + i]);
        if (g == 0 && db->data != NULL)
            dr_put(dr_at(db, s->d0 + i, 0, 0, 0), db->dtype, 0, s->totals[taps * s->ld + i]);
    }
}

static void adjoint_task(void *arg, int64_t task, int32_t lane)
{
    (void)lane;
    const conv *c = arg;
    const dr_conv_args *a = c->a;
    _Alignas(DR_ALIGN) float room[ADJOINT_ROOM];
    bench s = bench_of(c, task, true, room);
    const bool summing = a->dweight.data != NULL || a->dbias.data != NULL;
    const dr_cpu_view none = {0};
    for (int64_t pass = c->groups - 1; pass >= (summing ? 0 : c->groups - 1); pass--) {
        bool grads = pass == c->groups - 1;
        memset(s.totals, 0, (size_t)((c->group + 1) * s.ld) * sizeof *s.totals);
        memset(s.sums, 0, (size_t)((c->group + 1) * s.ld) * sizeof *s.sums);
        s.summed = 0;
        for (int64_t n = 0; n < c->pieces; n++) {
            set_piece(&s, piece_at(c, n));
            dr_cpu_view v = token_view(&s, &a->dx, 0);
            v.row = a->dx.shape[1] > 1 ? a->dx.stride[1] : 1;
            const dr_cpu_lines l = lines_of(&s);
            for (int64_t i = 0; i < s.n && c->lines; i++)
                dr_cpu_lines_adjoint(&l, s.d0 + i, summing ? s.totals + i : NULL, s.ld);
            if (s.p.len > 0 && !c->lines)
                adjoint_range(&s, 0, s.p.len, grads ? &v : &none, summing ? pass : -1);
            v = state_view(&s, &a->d_initial_state, 0);
            if (grads && v.data != NULL)
                adjoint_range(&s, -a->d_initial_state.shape[2], 0, &v, -1);
        }
        if (summing)
            store_sums(&s, pass);
    }
}

dr_status dr_cpu_conv(dr_device *dev, int dir, const dr_conv_args *a)
{
    if (a->x.shape[2] == 0)
        return DR_OK;
    conv c = conv_of(dev, a, dir);
    if (dir < 0) {
        dr_pool_run(&dev->pool, c.col_blocks, adjoint_task, &c);
        return DR_OK;
    }
    if (a->y.data != NULL)
        dr_pool_run(&dev->pool, c.B * c.row_blocks * c.col_blocks, forward_task, &c);
    if (finals_left(&c))
        dr_pool_run(&dev->pool, c.pieces * c.col_blocks, final_task, &c);
    return DR_OK;
}
