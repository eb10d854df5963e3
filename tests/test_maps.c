/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_maps.c - the affine maps of token ranges on every backend: the exit of a run is the map
 * applied to its entry, maps of parts compose to that of the whole in any association, the
 * adjoint's transition is the transposed one, and a reset skips the product.
 */
#include "subjects.h"

/* ---- maps -------------------------------------------------------------------------------- */

/* A staged trip opened on x, up to its maps. */
typedef struct trip {
    dr_plan *plan;
    fenced_buffers b;
    dr_io io;
    tensor o;
} trip;

static trip trip_open(const subject *u, trial *x, dr_direction dir, float *maps)
{
    trip t = {.io = x->io};
    MUST(dr_plan_create(u->ctx, &x->p, &t.plan));
    dr_plan_info info = DR_PLAN_INFO_INIT;
    MUST(dr_plan_describe(t.plan, &info));
    t.b = buffers_make(info.saved_bytes, info.staged_scratch, UNWRITTEN);
    rng r = {9};
    int64_t shape[DR_MAX_RANK];
    int32_t rank = slot_shape(&x->p, x->N, 0, S_o, shape);
    t.o = tensor_make(&r, LAYOUT_DENSE, DR_F32, rank, shape);
    t.io.o = t.o.view;
    MUST(dr_prepare(t.plan, DR_FORWARD, &t.io, &t.b.b));
    if (dir == DR_ADJOINT) {
        MUST(dr_recur(t.plan, DR_FORWARD, &t.io, &t.b.b, NULL, NULL));
        MUST(dr_output(t.plan, DR_FORWARD, &t.io, &t.b.b));
        MUST(dr_prepare(t.plan, DR_ADJOINT, &t.io, &t.b.b));
    }
    MUST(dr_summarize(t.plan, dir, &t.io, &t.b.b, maps));
    return t;
}

static void trip_close(trip *t)
{
    dr_plan_destroy(t->plan);
    buffers_free(&t->b);
    tensor_free(&t->o);
}

static float *floats(int64_t n)
{
    float *x = malloc(sizeof *x * (size_t)(n + 1));
    assert_non_null(x);
    return x;
}

static void expect_near_f(const char *what, const float *got, const float *want, int64_t n,
                          double budget)
{
    double *g = malloc(sizeof *g * (size_t)(2 * n + 1));
    assert_non_null(g);
    for (int64_t i = 0; i < n; i++) {
        g[i] = got[i];
        g[n + i] = want[i];
    }
    expect_near(what, g, g + n, n, budget);
    free(g);
}

/* The exit of a run from any entry is the map applied to it. */
static void test_exit_is_the_map_applied(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 64, 65, 65, 130};
    FOR_EACH_SUBJECT(u, variant)
    for (int dir = 1; dir >= -1; dir -= 2) {
        spec s = plain(u, *variant, 130);
        s.p.offsets = offsets;
        s.p.sequences = 4;
        trial x = trial_make(&s);
        int32_t K = x.p.key_dim, V = x.p.value_dim;
        int64_t n = x.N * x.p.value_heads, map = (int64_t)(V + K) * K, size = (int64_t)V * K;
        float *maps = floats(n * map), *entry = floats(n * size), *out = floats(n * size),
              *applied = floats(n * size);
        rng r = {11};
        for (int zero = 0; zero < 2; zero++) {
            for (int64_t i = 0; i < n * size; i++)
                entry[i] = zero ? 0 : (float)rng_normal(&r);
            trip t = trip_open(u, &x, (dr_direction)dir, maps);
            MUST(dr_recur(t.plan, (dr_direction)dir, &t.io, &t.b.b, entry, out));
            MUST(dr_map_apply(u->ctx, n, K, V, zero ? NULL : entry, maps, applied));
            for (int64_t i = 0; i < n; i++)
                expect_near_f("exit", out + i * size, applied + i * size, size, BUDGET);
            if (zero) /* B itself */
                for (int64_t i = 0; i < n; i++)
                    assert_memory_equal(applied + i * size, maps + i * map,
                                        sizeof(float) * (size_t)size);
            else /* the empty document hands its entry on */
                assert_memory_equal(out + 2 * 4 * size, entry + 2 * 4 * size,
                                    sizeof(float) * (size_t)(4 * size));
            trip_close(&t);
        }
        for (int64_t i = 2 * 4; i < 3 * 4; i++) /* and its map is [0; I] */
            for (int64_t m = 0; m < map; m++)
                assert_true(maps[i * map + m] == (m >= size && (m - size) % (K + 1) == 0 ? 1 : 0));
        free(maps);
        free(entry);
        free(out);
        free(applied);
        trial_free(&x);
    }
}

/* Maps of the parts, composed, against the map of the whole; R against A transposed. */
static void test_maps_compose(void **state)
{
    (void)state;
    static const int64_t cuts[] = {0, 40, 64, 129, 150};
    FOR_EACH_SUBJECT(u, variant)
    {
        spec s = plain(u, *variant, 150);
        trial x = trial_make(&s);
        int32_t K = x.p.key_dim, V = x.p.value_dim, n = x.p.value_heads;
        int64_t map = (int64_t)(V + K) * K, all = n * map;
        float *whole[2] = {floats(all), floats(all)}, *piece[4], *left = floats(all),
              *right = floats(all), *pair = floats(all);
        for (int back = 0; back < 2; back++) {
            trip t = trip_open(u, &x, back ? DR_ADJOINT : DR_FORWARD, whole[back]);
            trip_close(&t);
            for (int i = 0; i < 4; i++) { /* in the order of travel */
                int at = back ? 3 - i : i;
                trial y = trial_cut(&x, 0, cuts[at], cuts[at + 1], 0);
                piece[i] = floats(all);
                trip p = trip_open(u, &y, back ? DR_ADJOINT : DR_FORWARD, piece[i]);
                trip_close(&p);
            }
            memcpy(left, piece[0], sizeof *left * (size_t)all);
            for (int i = 1; i < 4; i++) { /* ((1 2) 3) 4 */
                MUST(dr_map_compose(u->ctx, n, K, V, left, piece[i], right));
                memcpy(left, right, sizeof *left * (size_t)all);
            }
            MUST(dr_map_compose(u->ctx, n, K, V, piece[2], piece[3], pair)); /* (1 2) (3 4) */
            MUST(dr_map_compose(u->ctx, n, K, V, piece[0], piece[1], right));
            float *other = floats(all);
            MUST(dr_map_compose(u->ctx, n, K, V, right, pair, other));
            for (int j = 0; j < n; j++) {
                int64_t at = j * map, B = (int64_t)V * K;
                expect_near_f("B composed", left + at, whole[back] + at, B, BUDGET);
                expect_near_f("A composed", left + at + B, whole[back] + at + B, map - B, BUDGET);
                expect_near_f("B associated", other + at, left + at, B, BUDGET);
                expect_near_f("A associated", other + at + B, left + at + B, map - B, BUDGET);
            }
            free(other);
            for (int i = 0; i < 4; i++)
                free(piece[i]);
        }
        for (int j = 0; j < n; j++) {
            const float *A = whole[0] + j * map + V * K, *R = whole[1] + j * map + V * K;
            for (int a = 0; a < K; a++)
                for (int b = 0; b < K; b++)
                    pair[a * K + b] = A[b * K + a];
            expect_near_f("R against A transposed", R, pair, (int64_t)K * K, BUDGET);
        }
        free(whole[0]);
        free(whole[1]);
        free(left);
        free(right);
        free(pair);
        trial_free(&x);
    }
}

/* Absent states skip the product: a NaN in A does not spread. */
static void test_reset_skips_the_product(void **state)
{
    (void)state;
    enum { K = 5, V = 3 };
    float map[(V + K) * K], out[V * K];
    for (int i = 0; i < (V + K) * K; i++)
        map[i] = i < V * K ? (float)i : NAN;
    for (const subject *u = subjects; u < subjects + DR_COUNT(subjects); u++) {
        MUST(dr_map_apply(u->ctx, 1, K, V, NULL, map, out));
        assert_memory_equal(out, map, sizeof out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exit_is_the_map_applied),
        cmocka_unit_test(test_maps_compose),
        cmocka_unit_test(test_reset_skips_the_product),
    };
    return cmocka_run_group_tests(tests, open_subjects, close_subjects);
}
