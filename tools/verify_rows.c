/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify_rows.c - makers of the kinds conv and gate. The history of a convolution is [B,h,D] in
 * the file, any number h of tokens before the first document, and a state per sequence, [N,D,halo],
 * in the library.
 */
#include "verify.h"

#include <stdio.h>

/* History [B,h,D] of the first document to states [N,D,halo], the newest token last. */
static void gather_state(const dr_verify_job *job, const dr_verify_item *item, const double *from,
                         double *to)
{
    const dr_case *c = &job->c;
    const int64_t D = c->HV, h = job->history, halo = (int64_t)(c->width - 1) * c->dilation;
    const int64_t rows = item->count / (h * D), N = c->offsets ? c->N : rows;
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0; i < D * halo; i++) {
            int64_t d = i / halo, token = i % halo + h - halo;
            to[n * D * halo + i] = n < rows && token >= 0 ? from[(n * h + token) * D + d] : 0;
        }
}

static void gather_history(const dr_verify_job *job, const dr_verify_item *item, const double *from,
                           double *to)
{
    const dr_case *c = &job->c;
    const int64_t D = c->HV, h = job->history, halo = (int64_t)(c->width - 1) * c->dilation;
    for (int64_t i = 0; i < item->count; i++) {
        int64_t d = i % D, column = i / D % h - (h - halo), row = i / (D * h);
        to[i] = column >= 0 ? from[(row * D + d) * halo + column] : 0;
    }
}

void dr_verify_conv(dr_verify_maker *m)
{
    dr_verify_job *job = dr_verify_start(m, DR_CASE_CONV);
    dr_case *c = &job->c;
    const dr_record *x = dr_verify_record(m, "x", DR_E3(-1, -1, -1));
    c->B = x->shape[0];
    c->T = x->shape[1];
    c->HV = (int32_t)x->shape[2];
    const dr_record *w = dr_verify_record(m, "w", DR_E2(c->HV, -1));
    c->width = (int32_t)w->shape[1];
    c->dilation = (int32_t)dr_verify_integer(m, "dilation", 1, 1 << 20);
    c->activation = DR_ACT_SILU;
    dr_verify_offsets(m, c);
    const dr_record *history = dr_vectors_find(m->file, "history");
    job->history = history != NULL && history->rank == 3 ? history->shape[1] : 0;
    history = dr_verify_record(m, "history", DR_E3(c->B, job->history, c->HV));
    dr_verify_extents rows = DR_E3(c->B, c->T, c->HV);
    dr_verify_input(m, job, "x", x);
    dr_verify_input(m, job, "weight", w);
    dr_verify_input(m, job, "bias", dr_verify_record(m, "bias", DR_E1(c->HV)));
    dr_verify_input(m, job, "dy", dr_verify_record(m, "dy", rows));
    dr_verify_output(m, job, "y", dr_verify_record(m, "y", rows));
    dr_verify_output(m, job, "dx", dr_verify_record(m, "dx", rows));
    dr_verify_output(m, job, "dweight", dr_verify_record(m, "dw", DR_E2(c->HV, c->width)));
    dr_verify_output(m, job, "dbias", dr_verify_record(m, "dbias", DR_E1(c->HV)));
    if (job->history == 0 || c->width == 1) {
        c->flags |= DR_CASE_NO_STATE;
        return;
    }
    int64_t halo = (int64_t)(c->width - 1) * c->dilation, values;
    if (__builtin_mul_overflow(halo, (c->offsets ? c->N : c->B) * c->HV, &values) ||
        values > DR_VERIFY_MAX_VALUES) {
        dr_verify_refuse(m, "records \"w\" and \"dilation\": a history of %lld tokens is too long",
                         (long long)halo);
        return;
    }
    dr_verify_input(m, job, "initial_state", history)->gather = gather_state;
    dr_verify_input(m, job, "d_final_state", NULL);
    const dr_record *d = dr_verify_record(m, "dhistory", DR_E3(c->B, job->history, c->HV));
    dr_verify_output(m, job, "d_initial_state", d)->gather = gather_history;
}

static const dr_record *gate_record(dr_verify_maker *m, const char *variant, const char *name,
                                    dr_verify_extents e)
{
    char full[96];
    snprintf(full, sizeof full, "%s.%s", variant, name);
    return dr_verify_record(m, full, e);
}

static void make_gate_job(dr_verify_maker *m, dr_variant variant, dr_gate gate)
{
    const char *v = variant == DR_KDA ? "kda" : "gdn";
    dr_verify_job *job = dr_verify_start(m, DR_CASE_GATE);
    dr_case *c = &job->c;
    const dr_record *x =
        gate_record(m, v, "x", variant == DR_KDA ? DR_E4(-1, -1, -1, -1) : DR_E3(-1, -1, -1));
    c->variant = variant;
    c->B = x->shape[0];
    c->T = x->shape[1];
    c->H = c->HV = (int32_t)x->shape[2];
    c->K = variant == DR_KDA ? (int32_t)x->shape[3] : 1;
    c->gate = gate;
    c->lower_bound = gate == DR_GATE_LOWER_BOUND ? dr_verify_number(m, "lower_bound") : 0;
    dr_verify_extents rows =
        variant == DR_KDA ? DR_E4(c->B, c->T, c->HV, c->K) : DR_E3(c->B, c->T, c->HV);
    dr_verify_extents biases = DR_E1((int64_t)c->HV * c->K);
    dr_verify_input(m, job, "x", x);
    dr_verify_input(m, job, "a_log", gate_record(m, v, "a_log", DR_E1(c->HV)));
    dr_verify_input(m, job, "dt_bias", gate_record(m, v, "bias", biases));
    dr_verify_input(m, job, "dg", gate_record(m, v, "dg", rows));
    const char *form = gate == DR_GATE_SOFTPLUS ? "softplus" : "bounded";
    const struct {
        const char *tensor, *record;
        dr_verify_extents e;
    } outputs[] = {{"g", "g", rows},
                   {"dx", "dx", rows},
                   {"da_log", "da_log", DR_E1(c->HV)},
                   {"ddt_bias", "dbias", biases}};
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s.%s", form, outputs[i].record);
        dr_verify_output(m, job, outputs[i].tensor, gate_record(m, v, name, outputs[i].e));
    }
}

void dr_verify_gate(dr_verify_maker *m)
{
    make_gate_job(m, DR_GDN, DR_GATE_SOFTPLUS);
    make_gate_job(m, DR_GDN, DR_GATE_LOWER_BOUND);
    make_gate_job(m, DR_KDA, DR_GATE_SOFTPLUS);
    make_gate_job(m, DR_KDA, DR_GATE_LOWER_BOUND);
}
