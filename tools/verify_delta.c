/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify_delta.c - makers of the kinds gdn and kda: the whole pass, decoding, and the maps of
 * dense files; and of cp-gdn and cp-kda: the whole pass of a stream that the file cuts over ranks.
 * The names of records are those of the formulas (h0, dht, S, M, G).
 */
#include "verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Rows of B and C are state columns: S[k,v] = B[v,k]. */
static void gather_bias(const dr_verify_job *job, const dr_verify_item *item, const double *from,
                        double *to)
{
    const int64_t K = job->c.K, V = job->c.V;
    for (int64_t i = 0; i < item->count; i++) {
        int64_t v = i % V, k = i / V % K, map = i / (V * K);
        to[i] = from[map * (V + K) * K + v * K + k];
    }
}

/* M acts from the left, A from the right: M[i,j] = A[j,i]. */
static void gather_transition(const dr_verify_job *job, const dr_verify_item *item,
                              const double *from, double *to)
{
    const int64_t K = job->c.K, V = job->c.V;
    for (int64_t i = 0; i < item->count; i++) {
        int64_t column = i % K, row = i / K % K, map = i / (K * K);
        to[i] = from[map * (V + K) * K + (V + column) * K + row];
    }
}

/* The adjoint's map has the transpose of M: R[i,j] = M[i,j]. */
static void gather_adjoint_transition(const dr_verify_job *job, const dr_verify_item *item,
                                      const double *from, double *to)
{
    const int64_t K = job->c.K, V = job->c.V;
    for (int64_t i = 0; i < item->count; i++)
        to[i] = from[i / (K * K) * (V + K) * K + V * K + i % (K * K)];
}

static void read_delta_dims(dr_verify_maker *m, dr_case *c)
{
    const dr_record *q = dr_verify_record(m, "q", DR_E4(-1, -1, -1, -1));
    c->B = q->shape[0];
    c->T = q->shape[1];
    c->H = (int32_t)q->shape[2];
    c->K = (int32_t)q->shape[3];
    const dr_record *v = dr_verify_record(m, "v", DR_E4(c->B, c->T, -1, -1));
    c->HV = (int32_t)v->shape[2];
    c->V = (int32_t)v->shape[3];
    c->gate = DR_GATE_LOG;
    c->beta = DR_BETA_VALUE;
    dr_verify_offsets(m, c);
    if (c->flags & DR_CASE_NO_STATE)
        return;
    c->scale = dr_verify_number(m, "scale");
    if (c->scale == 0)
        dr_verify_refuse(m, "record \"scale\": must not be 0");
    bool h0 = dr_verify_has(m, "h0"), dht = dr_verify_has(m, "dht");
    if (h0 != dht)
        dr_verify_refuse(m, "records \"h0\" and \"dht\": both or neither, got \"%s\" alone",
                         h0 ? "h0" : "dht");
    if (!h0)
        c->flags |= DR_CASE_FRESH;
}

static void add_delta_inputs(dr_verify_maker *m, dr_verify_job *job, bool adjoint)
{
    const dr_case *c = &job->c;
    dr_verify_extents keys = DR_E4(c->B, c->T, c->H, c->K), rows = DR_E4(c->B, c->T, c->HV, c->V);
    dr_verify_extents heads = DR_E3(c->B, c->T, c->HV);
    dr_verify_extents state = DR_E4(c->offsets ? c->N : c->B, c->HV, c->K, c->V);
    dr_verify_input(m, job, "q", dr_verify_record(m, "q", keys));
    dr_verify_input(m, job, "k", dr_verify_record(m, "k", keys));
    dr_verify_input(m, job, "v", dr_verify_record(m, "v", rows));
    dr_verify_input(
        m, job, "g",
        dr_verify_record(m, "g", c->variant == DR_KDA ? DR_E4(c->B, c->T, c->HV, c->K) : heads));
    dr_verify_input(m, job, "beta", dr_verify_record(m, "beta", heads));
    const dr_record *h0 = dr_verify_has(m, "h0") ? dr_verify_record(m, "h0", state) : NULL;
    dr_verify_input(m, job, "initial_state", h0); /* decoding starts from zeros without one */
    if (!adjoint)
        return;
    dr_verify_input(m, job, "d_o", dr_verify_record(m, "do", rows));
    if (h0 != NULL)
        dr_verify_input(m, job, "d_final_state", dr_verify_record(m, "dht", state));
}

static double product_norm(const dr_record *a, const dr_record *b)
{
    double sum = 0;
    for (int64_t i = 0; a->count == b->count && i < a->count; i++)
        sum += a->values[i] * b->values[i] * a->values[i] * b->values[i];
    return sqrt(sum);
}

/* Files hold dg as chunkwise sums of q*dq and k*dk, of which little may be left under a strong
 * decay: the rounding of those products, 2^-53 of each, is then all that the record says. */
static double doubt_of_dg(dr_verify_maker *m, dr_verify_extents keys)
{
    const dr_record *q = dr_verify_record(m, "q", keys), *dq = dr_verify_record(m, "dq", keys);
    const dr_record *k = dr_verify_record(m, "k", keys), *dk = dr_verify_record(m, "dk", keys);
    return 0x1p-50 * (product_norm(q, dq) + product_norm(k, dk)); /* a few of them in each dg */
}

static void add_delta_outputs(dr_verify_maker *m, dr_verify_job *job)
{
    const dr_case *c = &job->c;
    dr_verify_extents keys = DR_E4(c->B, c->T, c->H, c->K), rows = DR_E4(c->B, c->T, c->HV, c->V);
    dr_verify_extents heads = DR_E3(c->B, c->T, c->HV);
    dr_verify_extents gates = c->variant == DR_KDA ? DR_E4(c->B, c->T, c->HV, c->K) : heads;
    dr_verify_extents state = DR_E4(c->offsets ? c->N : c->B, c->HV, c->K, c->V);
    dr_verify_output(m, job, "o", dr_verify_record(m, "o", rows));
    dr_verify_output(m, job, "dq", dr_verify_record(m, "dq", keys));
    dr_verify_output(m, job, "dk", dr_verify_record(m, "dk", keys));
    dr_verify_output(m, job, "dv", dr_verify_record(m, "dv", rows));
    dr_verify_output(m, job, "dg", dr_verify_record(m, "dg", gates))->doubt = doubt_of_dg(m, keys);
    dr_verify_output(m, job, "dbeta", dr_verify_record(m, "dbeta", heads));
    if (c->flags & DR_CASE_NO_STATE)
        return;
    dr_verify_output(m, job, "final_state", dr_verify_record(m, "ht", state));
    if (!(c->flags & DR_CASE_FRESH))
        dr_verify_output(m, job, "d_initial_state", dr_verify_record(m, "dh0", state));
}

/* The states entering all chunks, from one record per chunk, [B,HV,K,V], to [B*chunks,...]. */
static void add_chunk_states(dr_verify_maker *m, dr_verify_job *job)
{
    dr_case *c = &job->c;
    int64_t C = dr_verify_integer(m, "chunk", 1, INT32_MAX), chunks = (c->T + C - 1) / C, all;
    if (c->offsets != NULL || !dr_verify_has(m, "chunk0.H") || m->set->problem[0] != '\0')
        return;
    const dr_verify_extents states = DR_E4(c->B, c->HV, c->K, c->V);
    const int64_t count = dr_verify_record(m, "chunk0.H", states)->count, state = count / c->B;
    double *values = NULL;
    if (!__builtin_mul_overflow(count, chunks, &all) && all <= DR_VERIFY_MAX_VALUES)
        values = m->set->owned[0] = malloc((size_t)all * sizeof *values);
    if (values == NULL) {
        dr_verify_refuse(m, "no memory for the states of %lld chunks", (long long)chunks);
        return;
    }
    for (int64_t i = 0; i < chunks; i++) {
        char name[64];
        snprintf(name, sizeof name, "chunk%lld.H", (long long)i);
        const dr_record *r = dr_verify_record(m, name, states);
        if (r->values == NULL)
            return;
        for (int64_t b = 0; b < c->B; b++)
            memcpy(values + (b * chunks + i) * state, r->values + b * state,
                   (size_t)state * sizeof *values);
    }
    c->flags |= DR_CASE_CHUNK_STATES;
    dr_verify_item *item = dr_verify_output(m, job, "chunk_states", NULL);
    snprintf(item->label, sizeof item->label, "chunk*.H");
    item->values = values;
    item->count = all;
    item->chunk = C;
}

static void make_delta(dr_verify_maker *m, dr_variant variant)
{
    dr_verify_job *whole = dr_verify_start(m, DR_CASE_DELTA);
    whole->c.variant = variant;
    m->set->has_chunks = true;
    read_delta_dims(m, &whole->c);
    if (m->set->problem[0] != '\0')
        return;
    dr_verify_job *step = dr_verify_start(m, DR_CASE_STEP);
    step->c = whole->c;
    step->c.op = DR_CASE_STEP;
    step->c.flags &= ~(uint32_t)DR_CASE_FRESH;
    add_delta_inputs(m, whole, true);
    add_delta_outputs(m, whole);
    add_chunk_states(m, whole);

    add_delta_inputs(m, step, false);
    const dr_verify_item *outputs = whole->outputs;
    for (int i = 0; i < whole->n_outputs; i++) /* what decoding computes too */
        if (strcmp(outputs[i].tensor, "o") == 0 || strcmp(outputs[i].tensor, "final_state") == 0) {
            dr_verify_item *item = &step->outputs[step->n_outputs++];
            *item = outputs[i];
            snprintf(item->label, sizeof item->label, "%s (step)",
                     strcmp(item->tensor, "o") == 0 ? "o" : "ht");
        }
    if (!dr_verify_has(m, "S"))
        return;
    dr_verify_job *maps = dr_verify_start(m, DR_CASE_STAGES);
    maps->c = whole->c;
    maps->c.op = DR_CASE_STAGES;
    maps->c.flags &= ~(uint32_t)DR_CASE_CHUNK_STATES;
    add_delta_inputs(m, maps, true);
    dr_verify_input(m, maps, "states", NULL);
    const dr_case *c = &maps->c;
    dr_verify_extents state = DR_E4(c->B, c->HV, c->K, c->V),
                      square = DR_E4(c->B, c->HV, c->K, c->K);
    dr_verify_output(m, maps, "maps", dr_verify_record(m, "S", state))->gather = gather_bias;
    dr_verify_output(m, maps, "maps", dr_verify_record(m, "M", square))->gather = gather_transition;
    dr_verify_output(m, maps, "d_maps", dr_verify_record(m, "G", state))->gather = gather_bias;
    dr_verify_item *r = dr_verify_output(m, maps, "d_maps", dr_verify_record(m, "M", square));
    r->gather = gather_adjoint_transition;
    snprintf(r->label, sizeof r->label, "M (adjoint)");
}

/* Streams over ranks start from zero states and keep the usual scale. */
void dr_verify_cp(dr_verify_maker *m)
{
    const dr_record *g = dr_vectors_find(m->file, "g");
    const bool wide = g != NULL && g->rank == 4;
    m->set->kind = wide ? "cp-kda" : "cp-gdn";
    m->set->has_chunks = true;
    dr_verify_job *job = dr_verify_start(m, DR_CASE_DELTA);
    job->c.variant = wide ? DR_KDA : DR_GDN;
    job->c.flags = DR_CASE_NO_STATE;
    read_delta_dims(m, &job->c);
    if (m->set->problem[0] != '\0')
        return;
    dr_verify_cuts(m, &job->c);
    add_delta_inputs(m, job, true);
    add_delta_outputs(m, job);
}

void dr_verify_gdn(dr_verify_maker *m) { make_delta(m, DR_GDN); }
void dr_verify_kda(dr_verify_maker *m) { make_delta(m, DR_KDA); }
