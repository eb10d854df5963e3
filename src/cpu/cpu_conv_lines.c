/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_conv_lines.c - see cpu_conv.h. A line is a run of tokens of one channel, with the halo
 * before it. The adjoint recomputes the preactivation over the line and a halo past its end,
 * so that lines do not depend on one another; the gradient of the input is the same filter
 * run backwards.
 *
 * Letters: W taps, step the dilation, halo = (W-1) step; tokens count from the sequence's first.
 */
#include "cpu/cpu_conv.h"
#include "base/half.h"

bool dr_cpu_lines_fit(const dr_conv_args *a, int dir)
{
    const dr_tensor *forward[] = {&a->x, &a->y}, *adjoint[] = {&a->x, &a->dy, &a->dx};
    const dr_tensor *const *all = dir > 0 ? forward : adjoint;
    for (int i = 0; i < (dir > 0 ? 2 : 3); i++)
        if (all[i]->data != NULL && all[i]->stride[1] != 1)
            return false;
    int64_t W = a->weight.shape[1], pieces = a->offsets ? a->sequences : 1;
    return a->x.stride[2] != 1 && W <= DR_CPU_LINE_TAPS &&
           (W - 1) * a->dilation <= DR_CPU_LINE_HALO && a->x.shape[1] / pieces >= 128;
}

/* A tensor [B,T,D] from token t on, as one row. */
static dr_cpu_view line_view(const dr_cpu_lines *l, const dr_tensor *t, int64_t d, int64_t token)
{
    dr_cpu_view v = dr_cpu_view_of(t, 2, 1, l->b, 0, 0);
    return dr_cpu_view_at(v, d, l->begin + token);
}

/* Input tokens [t - halo, t + n), a pointer to token t; in `own` unless they lie so already. */
static const float *input_line(const dr_cpu_lines *l, int64_t d, int64_t t, int64_t n, float *own)
{
    const dr_tensor *state = &l->a->initial_state;
    const int64_t halo = (l->a->weight.shape[1] - 1) * l->a->dilation;
    const int64_t first = dr_max(t - halo, 0), before = first - (t - halo); /* of them history */
    dr_cpu_view v = line_view(l, &l->a->x, d, first);
    if (before == 0 && dr_cpu_view_direct(&v))
        return (const float *)v.data + (t - first);
    float *tokens = own + dr_round_up(before, 16);
    dr_cpu_view_load(l->kern, &v, 1, t + n - first, tokens, 0);
    for (int64_t i = 1; i <= before; i++) {
        bool known = state->data != NULL && l->slot >= 0;
        tokens[-i] = known ? (float)dr_get(dr_at(state, l->slot, d, state->shape[2] - i, 0),
                                           state->dtype, 0)
                           : 0;
    }
    return tokens + (t - first);
}

/* The taps of a channel, in their order or backwards; returns the bias. */
static float load_taps(const dr_cpu_lines *l, int64_t d, float *taps, float *backwards)
{
    const dr_tensor *w = &l->a->weight, *bias = &l->a->bias;
    const int64_t W = w->shape[1];
    for (int64_t j = 0; j < W; j++)
        taps[j] = backwards[W - 1 - j] = (float)dr_get(dr_at(w, d, j, 0, 0), w->dtype, 0);
    return bias->data ? (float)dr_get(dr_at(bias, d, 0, 0, 0), bias->dtype, 0) : 0;
}

void dr_cpu_lines_forward(const dr_cpu_lines *l, int64_t d, int64_t from, int64_t to)
{
    const dr_conv_args *a = l->a;
    const int W = (int)a->weight.shape[1];
    float taps[DR_CPU_LINE_TAPS], backwards[DR_CPU_LINE_TAPS];
    float *own = l->room + DR_CPU_LINE, bias = load_taps(l, d, taps, backwards);
    for (int64_t t = from; t < to; t += DR_CPU_LINE) {
        int64_t n = dr_min(DR_CPU_LINE, to - t);
        const float *x = input_line(l, d, t, n, own);
        dr_cpu_view y = line_view(l, &a->y, d, t);
        dr_cpu_tile out = dr_cpu_tile_out(&y, l->room, 0);
        l->kern->conv_line((int)n, W, a->dilation, x, taps, bias, a->activation == DR_ACT_SILU,
                           out.at);
        dr_cpu_tile_done(l->kern, out, 1, n, &y);
    }
}

/* What the final state passes back to tokens [t, t + n). */
static void add_final(const dr_cpu_lines *l, int64_t d, int64_t t, int64_t n, float *dx)
{
    const dr_tensor *final = &l->a->d_final_state;
    const int64_t first = l->len - (final->data != NULL ? final->shape[2] : 0);
    for (int64_t i = dr_max(t, first); i < dr_min(t + n, l->len); i++)
        dx[i - t] += (float)dr_get(dr_at(final, l->n, d, i - first, 0), final->dtype, 0);
}

void dr_cpu_lines_adjoint(const dr_cpu_lines *l, int64_t d, double *totals, int64_t ld)
{
    const dr_conv_args *a = l->a;
    const dr_kern *kern = l->kern;
    const int W = (int)a->weight.shape[1];
    const int64_t halo = (W - 1) * a->dilation;
    float taps[DR_CPU_LINE_TAPS], backwards[DR_CPU_LINE_TAPS];
    float bias = load_taps(l, d, taps, backwards);
    float *p = l->room, *own_dy = p + DR_CPU_LINE + DR_CPU_LINE_HALO;
    float *out = own_dy + DR_CPU_LINE + DR_CPU_LINE_HALO, *ones = out + DR_CPU_LINE;
    float *own_x = ones + DR_CPU_LINE;
    for (int64_t i = 0; i < dr_min(DR_CPU_LINE, l->len); i++)
        ones[i] = 1;
    for (int64_t t = 0; t < l->len; t += DR_CPU_LINE) {
        int64_t n = dr_min(DR_CPU_LINE, l->len - t), m = dr_min(n + halo, l->len - t);
        memset(p, 0, (size_t)(n + halo) * sizeof *p);
        if (a->dy.data != NULL) {
            const float *x = input_line(l, d, t, m, own_x);
            dr_cpu_view v = line_view(l, &a->dy, d, t);
            const float *dy = dr_cpu_tile_in(kern, &v, 1, m, own_dy, 0).at;
            if (a->activation == DR_ACT_SILU) {
                kern->conv_line((int)m, W, a->dilation, x, taps, bias, false, p);
                kern->silu_grad((int)m, p, dy, p);
            } else {
                memcpy(p, dy, (size_t)m * sizeof *p);
            }
            for (int j = 0; totals != NULL && j < W; j++)
                totals[j * ld] += kern->dot((int)n, p, x - (W - 1 - j) * (int64_t)a->dilation);
            if (totals != NULL)
                totals[W * ld] += kern->dot((int)n, p, ones);
        }
        dr_cpu_view v = line_view(l, &a->dx, d, t);
        if (v.data == NULL)
            continue;
        dr_cpu_tile dx = dr_cpu_tile_out(&v, out, 0);
        kern->conv_line((int)n, W, a->dilation, p + halo, backwards, 0, false, dx.at);
        add_final(l, d, t, n, dx.at);
        dr_cpu_tile_done(kern, dx, 1, n, &v);
    }
}
