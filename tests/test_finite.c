/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_finite.c - every gradient of the delta rule on backend ref under every option,
 * against differences (finite.h).
 */
#include "finite.h"

/* Options of a case beside gate and beta. */
enum {
    L2NORM = 1,
    TILED = 2,
    PACKED = 4,
    NO_D_O = 8,
    NO_D_FINAL = 16,
    NO_STATE = 32,
    SMALL_CHUNK = 64
};

typedef struct delta_case {
    dr_plan *plan;
    dr_buffers buffers;
    dr_io io;
} delta_case;

static double delta_loss(void *op)
{
    delta_case *c = op;
    MUST(dr_forward(c->plan, &c->io, &c->buffers));
    return share(&c->io.o, &c->io.d_o) + share(&c->io.final_state, &c->io.d_final_state);
}

static dr_problem delta_problem(dr_variant variant, const gate_row *gate, double beta_scale,
                                int bits)
{
    dr_problem p = DR_PROBLEM_INIT;
    p.variant = variant;
    p.batch = bits & PACKED ? 1 : 2;
    p.tokens = T;
    p.heads = H;
    p.value_heads = HV;
    p.key_dim = K;
    p.value_dim = V;
    p.gate = gate->gate;
    p.lower_bound = gate->gate == DR_GATE_LOWER_BOUND ? -3 : 0;
    p.beta = beta_scale == 0 ? DR_BETA_VALUE : DR_BETA_LOGIT;
    p.beta_scale = beta_scale;
    p.l2norm = bits & L2NORM;
    p.head_map = bits & TILED ? DR_HEADS_TILED : DR_HEADS_INTERLEAVED;
    p.chunk = bits & SMALL_CHUNK ? 2 : 0;
    if (bits & PACKED) {
        p.offsets = packed_offsets;
        p.sequences = SEQUENCES;
    }
    return p;
}

static void fill_inputs(dr_io *io, const dr_problem *p, const gate_row *gate, int bits, rng *r)
{
    int64_t B = p->batch, W = p->variant == DR_KDA ? K : 1, N = p->offsets ? p->sequences : B;
    int32_t rank = p->variant == DR_KDA ? 4 : 3;
    double reach = bits & L2NORM ? 1 : 0.5;
    io->q = f64(uniforms(r, B * T * H * K, -reach, reach), 4, B, T, H, K);
    io->k = f64(uniforms(r, B * T * H * K, -reach, reach), 4, B, T, H, K);
    io->v = f64(normals(r, B * T * HV * V), 4, B, T, HV, V);
    double low = p->gate == DR_GATE_FACTOR ? 0 : -1.5, high = p->gate == DR_GATE_FACTOR ? 1 : 0;
    double *g = uniforms(r, B * T * HV * W, low, high);
    if (p->gate == DR_GATE_FACTOR)
        g[W] = 0; /* the gradient of a factor holds where it wipes the state */
    if (p->gate != DR_GATE_NONE)
        io->g = f64(g, rank, B, T, HV, W);
    io->beta = f64(uniforms(r, B * T * HV, 0.1, 0.9), 3, B, T, HV, 0);
    if (gate->a_log)
        io->a_log = f64(uniforms(r, HV, -1, 1), 1, HV, 0, 0, 0);
    if (gate->dt_bias)
        io->dt_bias = f64(normals(r, HV * W), rank - 2, HV, W, 0, 0);
    if (!(bits & NO_STATE))
        io->initial_state = f64(normals(r, N * HV * K * V), 4, N, HV, K, V);
    io->o = f64(unwritten(B * T * HV * V), 4, B, T, HV, V);
    io->final_state = f64(unwritten(N * HV * K * V), 4, N, HV, K, V);
    if (!(bits & NO_D_O))
        io->d_o = f64(normals(r, B * T * HV * V), 4, B, T, HV, V);
    if (!(bits & NO_D_FINAL))
        io->d_final_state = f64(normals(r, N * HV * K * V), 4, N, HV, K, V);
}

static void check_delta(dr_variant variant, const gate_row *gate, double beta_scale, int bits)
{
    char what[128];
    snprintf(what, sizeof what, "%s, gate %s, beta scale %g, bits %d",
             variant == DR_GDN ? "gdn" : "kda", gate->name, beta_scale, bits);
    rng r = {(uint64_t)bits * 977 + (uint64_t)variant};
    dr_problem p = delta_problem(variant, gate, beta_scale, bits);
    delta_case c = {.io = DR_IO_INIT};
    dr_io *io = &c.io;
    MUST(dr_plan_create(ctx, &p, &c.plan));
    MUST(dr_buffers_create(c.plan, &c.buffers));
    fill_inputs(io, &p, gate, bits, &r);
    io->dq = gradient_of(&io->q);
    io->dk = gradient_of(&io->k);
    io->dv = gradient_of(&io->v);
    io->dg = gradient_of(&io->g);
    io->dbeta = gradient_of(&io->beta);
    io->da_log = gradient_of(&io->a_log);
    io->ddt_bias = gradient_of(&io->dt_bias);
    io->d_initial_state = gradient_of(&io->initial_state);
    delta_loss(&c);
    MUST(dr_backward(c.plan, io, &c.buffers));
    const leaf leaves[] = {
        leaf_of("dq", &io->q, &io->dq),
        leaf_of("dk", &io->k, &io->dk),
        leaf_of("dv", &io->v, &io->dv),
        leaf_of("dg", &io->g, &io->dg),
        leaf_of("dbeta", &io->beta, &io->dbeta),
        leaf_of("da_log", &io->a_log, &io->da_log),
        leaf_of("ddt_bias", &io->dt_bias, &io->ddt_bias),
        leaf_of("d_initial_state", &io->initial_state, &io->d_initial_state),
    };
    check_leaves(what, leaves, DR_COUNT(leaves), delta_loss, &c);
    dr_buffers_destroy(&c.buffers);
    dr_plan_destroy(c.plan);
    arrays_free();
}

/* Every gate with every form of beta; l2norm, head maps, packing, short chunks and absent
 * parts in a few combinations of each. */
static void test_delta(void **state)
{
    (void)state;
    static const int combinations[] = {
        0, L2NORM | TILED | PACKED | SMALL_CHUNK, PACKED | NO_D_O, L2NORM | NO_D_FINAL,
        TILED | NO_STATE | SMALL_CHUNK, L2NORM | PACKED | NO_STATE | NO_D_FINAL,
    };
    static const double scales[] = {0, 1, 2};
    for (dr_variant variant = DR_GDN; variant <= DR_KDA; variant++)
        for (size_t g = 0; g < DR_COUNT(gates); g++)
            for (size_t s = 0; s < DR_COUNT(scales); s++)
                for (size_t i = 0; i < DR_COUNT(combinations); i++)
                    check_delta(variant, &gates[g], scales[s], combinations[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_delta),
    };
    return cmocka_run_group_tests(tests, finite_setup, finite_teardown);
}
