/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify_layer.c - makers of the kinds layer-gdn and layer-kda, whose parameters have names of
 * their own, and layer, which uses the library's and records the whole configuration, carried
 * states included.
 */
#include "verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct param_name {
    const char *record, *tensor;
} param_name;

static const param_name gdn_params[] = {{"in_proj_qkv", "in_proj_qkv.weight"},
                                        {"in_proj_z", "in_proj_z.weight"},
                                        {"in_proj_b", "in_proj_b.weight"},
                                        {"in_proj_a", "in_proj_a.weight"},
                                        {"conv_weight", "conv1d.weight"},
                                        {"conv_bias", "conv1d.bias"},
                                        {"A_log", "A_log"},
                                        {"dt_bias", "dt_bias"},
                                        {"norm", "norm.weight"},
                                        {"out_proj", "out_proj.weight"},
                                        {NULL, NULL}};
static const param_name kda_params[] = {
    {"q_proj", "q_proj.weight"},   {"k_proj", "k_proj.weight"},
    {"v_proj", "v_proj.weight"},   {"q_conv", "q_conv1d.weight"},
    {"k_conv", "k_conv1d.weight"}, {"v_conv", "v_conv1d.weight"},
    {"b_proj", "b_proj.weight"},   {"A_log", "A_log"},
    {"dt_bias", "dt_bias"},        {"o_norm", "o_norm.weight"},
    {"o_proj", "o_proj.weight"},   {NULL, NULL}};
static const param_name kda_full[] = {{"g_proj", "g_proj.weight"}, {NULL, NULL}};
static const param_name kda_pairs[] = {{"f_a_proj", "f_a_proj.weight"},
                                       {"f_b_proj", "f_b_proj.weight"},
                                       {"g_a_proj", "g_a_proj.weight"},
                                       {"g_b_proj", "g_b_proj.weight"},
                                       {NULL, NULL}};

/* A record "param.NAME" or "grad.NAME" of any shape: the layer knows the size it needs. */
static const dr_record *param_record(dr_verify_maker *m, const char *part, const char *name)
{
    char full[2 * DR_CASE_NAME];
    snprintf(full, sizeof full, "%s.%s", part, name);
    const dr_record *r = dr_vectors_find(m->file, full);
    dr_verify_extents e = {r != NULL && r->rank <= 4 ? r->rank : 1, {0}};
    for (int32_t i = 0; i < e.rank; i++)
        e.n[i] = -1;
    return dr_verify_record(m, full, e);
}

static void add_params(dr_verify_maker *m, dr_verify_job *job, const param_name *names)
{
    for (const param_name *p = names; p->record != NULL; p++) {
        char full[DR_CASE_NAME];
        snprintf(full, sizeof full, "param.%s", p->record);
        if (!dr_verify_has(m, full))
            continue; /* a tensor of the layer without a record is found when it is filled */
        dr_verify_input(m, job, p->tensor, param_record(m, "param", p->record));
        snprintf(full, sizeof full, "grad.%s", p->tensor);
        dr_verify_output(m, job, full, param_record(m, "grad", p->record));
    }
}

static dr_verify_job *start_layer(dr_verify_maker *m, dr_variant variant)
{
    dr_verify_job *job = dr_verify_start(m, DR_CASE_LAYER);
    dr_case *c = &job->c;
    const dr_record *x = dr_verify_record(m, "x", DR_E3(-1, -1, -1)),
                    *dims = dr_verify_record(m, "dims", DR_E1(4));
    m->set->f32_only = true;
    c->variant = variant;
    c->flags = DR_CASE_NO_STATE;
    c->B = x->shape[0];
    c->T = x->shape[1];
    c->hidden = (int32_t)x->shape[2];
    int32_t *fields[] = {&c->H, &c->HV, &c->K, &c->V};
    for (int i = 0; dims->values != NULL && i < 4; i++) {
        double n = dims->values[i];
        if (n < 1 || n > 65536 || n != floor(n)) {
            dr_verify_refuse(m,
                             "record \"dims\": value %d must be a whole number from 1 to 65536, "
                             "got %g",
                             i, n);
            return job;
        }
        *fields[i] = (int32_t)n;
    }
    c->eps = 1e-6; /* of every norm in these files */
    dr_verify_offsets(m, c);
    dr_verify_extents rows = DR_E3(c->B, c->T, c->hidden);
    dr_verify_input(m, job, "x", x);
    dr_verify_input(m, job, "dy", dr_verify_record(m, "dy", rows));
    dr_verify_output(m, job, "y", dr_verify_record(m, "y", rows));
    dr_verify_output(m, job, "dx", dr_verify_record(m, "dx", rows));
    return job;
}

void dr_verify_layer_gdn(dr_verify_maker *m)
{
    dr_verify_job *job = start_layer(m, DR_GDN);
    const dr_record *taps = dr_verify_record(m, "param.conv_weight", DR_E2(-1, -1));
    job->c.width = (int32_t)taps->shape[1];
    job->c.gate = DR_GATE_SOFTPLUS;
    job->c.flags |= dr_verify_has(m, "param.conv_bias") ? 0 : DR_CASE_NO_BIAS;
    add_params(m, job, gdn_params);
}

/* Of a product F = second first: d_first = second^T dF, d_second = dF first^T. */
static void gather_first(const dr_verify_job *job, const dr_verify_item *item, const double *from,
                         double *to)
{
    const dr_record *second = item->factor;
    const int64_t rank = second->shape[1], D = job->c.hidden;
    memset(to, 0, (size_t)item->count * sizeof *to);
    for (int64_t i = 0; i < second->shape[0]; i++)
        for (int64_t r = 0; r < rank; r++)
            for (int64_t d = 0; d < D; d++)
                to[r * D + d] += second->values[i * rank + r] * from[i * D + d];
}

static void gather_second(const dr_verify_job *job, const dr_verify_item *item, const double *from,
                          double *to)
{
    const dr_record *first = item->factor;
    const int64_t rank = first->shape[0], D = job->c.hidden;
    for (int64_t i = 0; i < item->count; i++) {
        to[i] = 0;
        for (int64_t d = 0; d < D; d++)
            to[i] += from[i / rank * D + d] * first->values[i % rank * D + d];
    }
}

/* Gives the layer a pair of the file as one matrix; the pair's gradients follow from its. */
static void add_product(dr_verify_maker *m, dr_verify_job *job, char letter, int64_t rows,
                        double **owned)
{
    const int64_t D = job->c.hidden;
    char name[DR_CASE_NAME], tensor[DR_CASE_NAME];
    snprintf(name, sizeof name, "%c_a_proj", letter);
    const dr_record *first = param_record(m, "param", name);
    dr_verify_item *d_first, *d_second;
    const int64_t rank = first->shape[0];
    snprintf(name, sizeof name, "param.%c_a_proj", letter);
    dr_verify_record(m, name, DR_E2(rank, D));
    snprintf(name, sizeof name, "param.%c_b_proj", letter);
    const dr_record *second = dr_verify_record(m, name, DR_E2(rows, rank));
    if (m->set->problem[0] != '\0')
        return;
    double *product = NULL;
    if (rows * D <= DR_VERIFY_MAX_VALUES) /* each is at most 2^31 */
        product = *owned = calloc((size_t)(rows * D), sizeof *product);
    if (product == NULL) {
        dr_verify_refuse(m, "no memory for a projection of %lld x %lld", (long long)rows,
                         (long long)D);
        return;
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t r = 0; r < rank; r++)
            for (int64_t d = 0; d < D; d++)
                product[i * D + d] += second->values[i * rank + r] * first->values[r * D + d];
    snprintf(tensor, sizeof tensor, "%c_proj.weight", letter);
    dr_verify_item *f = dr_verify_input(m, job, tensor, NULL);
    f->values = product;
    f->count = rows * D;
    snprintf(tensor, sizeof tensor, "grad.%c_proj.weight", letter);
    snprintf(name, sizeof name, "grad.%c_a_proj", letter);
    d_first = dr_verify_output(m, job, tensor, dr_verify_record(m, name, DR_E2(rank, D)));
    d_first->gather = gather_first;
    d_first->factor = second;
    snprintf(name, sizeof name, "grad.%c_b_proj", letter);
    d_second = dr_verify_output(m, job, tensor, dr_verify_record(m, name, DR_E2(rows, rank)));
    d_second->gather = gather_second;
    d_second->factor = first;
}

/* In the file the decay projection is a pair and the output gate's a matrix or a pair, of its
 * own width. The layer takes two matrices, or two pairs of one width. */
void dr_verify_layer_kda(dr_verify_maker *m)
{
    dr_verify_job *job = start_layer(m, DR_KDA);
    dr_case *c = &job->c;
    const dr_record *taps = dr_verify_record(m, "param.q_conv", DR_E2(-1, -1));
    const dr_record *f = param_record(m, "param", "f_a_proj");
    c->width = (int32_t)taps->shape[1];
    c->gate = DR_GATE_LOWER_BOUND;
    c->lower_bound = dr_verify_number(m, "lower_bound");
    c->flags |= DR_CASE_NO_BIAS;
    add_params(m, job, kda_params);
    const dr_record *g = dr_vectors_find(m->file, "param.g_a_proj");
    if (g != NULL && g->rank == 2 && g->shape[0] == f->shape[0]) {
        c->gate_rank = (int32_t)f->shape[0];
        add_params(m, job, kda_pairs);
        return;
    }
    add_product(m, job, 'f', (int64_t)c->HV * c->K, &m->set->owned[0]);
    if (g != NULL)
        add_product(m, job, 'g', (int64_t)c->HV * c->V, &m->set->owned[1]);
    else
        add_params(m, job, kda_full);
}

/* ------------------------------------------------------------------------ */
/* The library's own names                                                  */
/* ------------------------------------------------------------------------ */

/* Puts the record "config" into c: numbers in the order of dr_layer_config's fields. */
static void read_config(dr_verify_maker *m, dr_case *c)
{
    int32_t kind = 0, conv_bias = 0, gate = 0;
    const struct {
        int32_t *whole;
        double *real;
    } fields[] = {{&kind, NULL},           {&c->hidden, NULL},     {&c->H, NULL},
                  {&c->HV, NULL},          {&c->K, NULL},          {&c->V, NULL},
                  {&c->width, NULL},       {&conv_bias, NULL},     {&gate, NULL},
                  {NULL, &c->lower_bound}, {NULL, &c->beta_scale}, {&c->gate_rank, NULL},
                  {NULL, &c->eps}};
    enum { FIELDS = sizeof fields / sizeof fields[0] };
    const dr_record *r = dr_verify_record(m, "config", DR_E1(FIELDS));
    for (int i = 0; r->values != NULL && i < FIELDS; i++) {
        double x = r->values[i];
        if (fields[i].real != NULL)
            *fields[i].real = x;
        else if (x >= 0 && x <= 65536 && x == floor(x))
            *fields[i].whole = (int32_t)x;
        else
            dr_verify_refuse(m,
                             "record \"config\": value %d must be a whole number from 0 to "
                             "65536, got %g",
                             i, x);
    }
    c->variant = kind == DR_LAYER_GDN ? DR_GDN : DR_KDA;
    c->gate = (dr_gate)gate;
    c->flags |= conv_bias ? 0 : DR_CASE_NO_BIAS;
    if (kind != DR_LAYER_GDN && kind != DR_LAYER_KDA)
        dr_verify_refuse(m, "record \"config\": value 0 must be 1 (GDN) or 2 (KDA), got %d", kind);
    if (c->H < 1 || c->K < 1 || c->V < 1 || c->width < 1)
        dr_verify_refuse(m, "record \"config\": heads and widths must be 1 or more");
}

static void add_states(dr_verify_maker *m, dr_verify_job *job)
{
    const dr_case *c = &job->c;
    const int64_t N = c->offsets ? c->N : c->B, HV = c->HV ? c->HV : c->H;
    const dr_verify_extents state = DR_E4(N, HV, c->K, c->V);
    const dr_verify_extents conv = DR_E3(N, 2 * (int64_t)c->H * c->K + HV * c->V, c->width - 1);
    static const char *const inputs[] = {"conv_in", "state_in", "d_conv_out", "d_state_out"};
    static const char *const outputs[] = {"conv_out", "state_out", "d_conv_in", "d_state_in"};
    for (int i = 0; i < 4; i++) {
        const dr_verify_extents e = i % 2 ? state : conv;
        dr_verify_input(m, job, inputs[i], dr_verify_record(m, inputs[i], e));
        dr_verify_output(m, job, outputs[i], dr_verify_record(m, outputs[i], e));
    }
}

void dr_verify_layer(dr_verify_maker *m)
{
    dr_verify_job *job = dr_verify_start(m, DR_CASE_LAYER);
    dr_case *c = &job->c;
    m->set->f32_only = true;
    read_config(m, c);
    const dr_record *x = dr_verify_record(m, "x", DR_E3(-1, -1, c->hidden));
    const dr_verify_extents rows = DR_E3(x->shape[0], x->shape[1], c->hidden);
    c->B = x->shape[0];
    c->T = x->shape[1];
    dr_verify_record(m, "layout", DR_E1(2)); /* the extents of x again */
    if (dr_verify_has(m, "offsets"))
        dr_verify_offsets(m, c);
    dr_verify_input(m, job, "x", x);
    dr_verify_input(m, job, "dy", dr_verify_record(m, "dy", rows));
    dr_verify_output(m, job, "y", dr_verify_record(m, "y", rows));
    dr_verify_output(m, job, "dx", dr_verify_record(m, "d_x", rows));
    for (int64_t i = 0; i < m->file->count; i++) {
        const char *name = m->file->records[i].name;
        if (strncmp(name, "param.", 6) != 0)
            continue;
        const dr_record *grad = param_record(m, "grad", name + 6);
        dr_verify_input(m, job, name + 6, param_record(m, "param", name + 6));
        dr_verify_output(m, job, grad->name, grad);
    }
    if (dr_verify_has(m, "state_in"))
        add_states(m, job);
    else
        c->flags |= DR_CASE_NO_STATE;
}
