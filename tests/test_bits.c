/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_bits.c - the same bits, forward and backward, at any number of threads, on the host's
 * own pool, in any workspace, however the same call is spelt, and whatever else is asked for.
 */
#include "subjects.h"

#include <pthread.h>

/* ---- the same bits ------------------------------------------------------------------------ */

typedef struct job {
    pthread_t thread;
    dr_task_fn *body;
    void *arg;
    int64_t i;
} job;

static void *do_job(void *arg)
{
    job *j = arg;
    j->body(j->arg, j->i);
    return NULL;
}

/* A host program's pool: a thread for each of the last tasks, the others here, backwards. */
static void host_parallel(void *user, int64_t n, dr_task_fn *body, void *arg)
{
    job jobs[3];
    int64_t extra = n < 3 ? n : 3;
    ++*(int *)user;
    for (int64_t i = 0; i < extra; i++) {
        jobs[i] = (job){.body = body, .arg = arg, .i = n - 1 - i};
        if (pthread_create(&jobs[i].thread, NULL, do_job, &jobs[i]) != 0)
            abort();
    }
    for (int64_t i = n - 1 - extra; i >= 0; i--)
        body(arg, i);
    for (int64_t i = 0; i < extra; i++)
        pthread_join(jobs[i].thread, NULL);
}

static void test_threads_change_no_bit(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 130, 131, 131, 190, 300};
    static const int32_t threads[] = {1, 2, 3, 5, 4 /* of the host's own pool */};
    FOR_EACH_SUBJECT(u, variant)
    for (int form_of = FORM_CALL; form_of <= FORM_STEP; form_of++) {
        spec s = plain(u, *variant, 300);
        s.p.offsets = offsets;
        s.p.sequences = 5;
        trial x = trial_make(&s);
        how h = {.form = (form)form_of};
        result want = trial_run(u->ctx, &x, h);
        for (size_t i = 0; i < DR_COUNT(threads); i++) {
            int calls = 0;
            bool own = i + 1 == DR_COUNT(threads);
            dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
            options.threads = threads[i];
            options.parallel = own ? host_parallel : NULL;
            options.parallel_user = &calls;
            dr_context *ctx;
            MUST(dr_context_create(u->name, &options, &ctx));
            assert_int_equal(dr_context_threads(ctx), threads[i]);
            result got = trial_run(ctx, &x, h);
            expect_same("threads", &got, &want, 0);
            assert_true(!own || calls > 0);
            result_free(&got);
            dr_context_destroy(ctx);
        }
        result_free(&want);
        trial_free(&x);
    }
}

static void test_poisoned_workspace_changes_no_bit(void **state)
{
    (void)state;
    FOR_EACH_SUBJECT(u, variant)
    for (int form_of = FORM_CALL; form_of <= FORM_STEP; form_of++) {
        spec s = plain(u, *variant, 65);
        trial x = trial_make(&s);
        result want = trial_run(u->ctx, &x, (how){.form = (form)form_of, .clean = true});
        result got = trial_run(u->ctx, &x, (how){.form = (form)form_of});
        expect_same("poisoned workspace", &got, &want, 0);
        result_free(&got);
        result_free(&want);
        trial_free(&x);
    }
}

/* No initial state against zeros; dense against one packed document; B left out; any stride
 * where an axis has one element. */
static void test_spellings_change_no_bit(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 129};
    FOR_EACH_SUBJECT(u, variant)
    {
        spec s = plain(u, *variant, 129);
        trial x = trial_make(&s);
        double *zero = calloc((size_t)view_count(&x.io.initial_state), sizeof *zero);
        view_write(&x.t[S_initial_state].view, zero);
        view_write(&x.t[S_d_final_state].view, zero);
        free(zero);
        tensor_remember(&x.t[S_initial_state]);
        tensor_remember(&x.t[S_d_final_state]);
        result want = trial_run(u->ctx, &x, (how){0});
        trial y = x;
        y.io.initial_state.data = y.io.d_final_state.data = NULL;
        result none = trial_run(u->ctx, &y, (how){0});
        expect_same("no state against zeros", &none, &want, 0);
        trial z = x;
        z.p.offsets = offsets;
        z.p.sequences = 1;
        result packed = trial_run(u->ctx, &z, (how){0});
        expect_same("packed against dense", &packed, &want, 0);
        trial w = x;
        for (int i = 0; i < SLOTS; i++) {
            dr_tensor *t = io_slot(&w.io, i);
            if (t->data == NULL || slots[i].letters[0] != 'B')
                continue;
            t->rank--;
            memmove(t->shape, t->shape + 1, sizeof t->shape - sizeof *t->shape);
            memmove(t->stride, t->stride + 1, sizeof t->stride - sizeof *t->stride);
        }
        result flat = trial_run(u->ctx, &w, (how){0});
        expect_same("without the batch axis", &flat, &want, 0);
        trial v = x;
        for (int i = 0; i < SLOTS; i++)
            if (io_slot(&v.io, i)->data != NULL && strchr("BN", slots[i].letters[0]))
                io_slot(&v.io, i)->stride[0] = i % 2 ? INT64_MAX : INT64_MIN;
        result odd = trial_run(u->ctx, &v, (how){0});
        expect_same("a stride that nobody uses", &odd, &want, 0);
        result *all[] = {&want, &none, &packed, &flat, &odd};
        for (size_t i = 0; i < DR_COUNT(all); i++)
            result_free(all[i]);
        trial_free(&x);
    }
}

/* Leaving an output out, or updating the state in place, changes no other output. */
static void test_wanted_outputs_change_no_bit(void **state)
{
    (void)state;
    FOR_EACH_SUBJECT(u, variant)
    {
        spec s = plain(u, *variant, 100);
        trial x = trial_make(&s);
        result want = trial_run(u->ctx, &x, exact(u));
        for (int i = 0; i < SLOTS; i++) {
            if (slots[i].role != ROLE_OUTPUT && slots[i].role != ROLE_GRADIENT)
                continue;
            how h = exact(u), alone = h;
            h.unwanted = 1u << i;
            result got = trial_run(u->ctx, &x, h);
            expect_same("one output less", &got, &want, 0);
            result_free(&got);
            alone.unwanted = ~(1u << i);
            if (slots[i].role == ROLE_GRADIENT)
                alone.unwanted &= ~BIT(final_state); /* forward must have something to do */
            got = trial_run(u->ctx, &x, alone);
            expect_same("one output alone", &got, &want, 0);
            result_free(&got);
        }
        trial y = x;
        tensor place = carried(&x, u->inner, want.value[S_final_state]);
        double *start = view_read(&x.io.initial_state);
        for (int form_of = FORM_CALL; form_of <= FORM_STEP; form_of++) {
            how h = {.form = (form)form_of, .out = u->inner, .forward_only = true};
            result plainly = trial_run(u->ctx, &x, h);
            view_write(&place.view, start);
            y.io.initial_state = y.io.final_state = place.view;
            h.unwanted = BIT(final_state);
            result got = trial_run(u->ctx, &y, h);
            got.value[S_final_state] = view_read(&place.view);
            got.count[S_final_state] = view_count(&place.view);
            expect_same("in place", &got, &plainly, 0);
            result_free(&got);
            result_free(&plainly);
        }
        free(start);
        tensor_free(&place);
        result_free(&want);
        trial_free(&x);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads_change_no_bit),
        cmocka_unit_test(test_poisoned_workspace_changes_no_bit),
        cmocka_unit_test(test_spellings_change_no_bit),
        cmocka_unit_test(test_wanted_outputs_change_no_bit),
    };
    return cmocka_run_group_tests(tests, open_subjects, close_subjects);
}
