/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kernels.c - the kernels of every instruction set that this machine can run, one by one,
 * against plain computations in double (check_kern.h). For each record, from plain C upwards, each
 * row of the table is checked several times on memory with guard pages; a row without a check
 * fails the test.
 *
 * --isa NAME and --kernel NAME narrow the run, --seed N (or DR_SEED in the environment) sets the
 * random numbers.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/cpu.h"
#include "check_kern.h"
#include "check_kern_forward.h"
#include "check_kern_grad.h"
#include "check_kern_rows.h"

enum { ROUNDS = 24 };

#define NAME(type, name, args) #name,
static const char *const forward_names[] = {DR_KERN_LIST(NAME)};
static const char *const grad_names[] = {DR_KERN_GRAD_LIST(NAME)};
static const char *const row_names[] = {DR_KERN_ROWS_LIST(NAME)};

static const char *only_isa, *only_kernel;
static uint64_t seed = 1;

static const check_row *find(const check_row *table, const char *name)
{
    for (; table->name != NULL; table++)
        if (strcmp(table->name, name) == 0)
            return table;
    return NULL;
}

static void check_kernel(const dr_kern *kern, const check_row *row)
{
    check_env e = {.kern = kern, .row = row->name, .state = seed};
    for (int round = 0; round < ROUNDS; round++) {
        row->run(&e);
        fence_done(&e);
    }
    print_message("%-6s %-16s %8lld compared, worst %.2f of its bound\n", kern->isa, row->name,
                  (long long)e.compared, e.worst);
    if (e.failures > 0 || e.compared == 0)
        fail_msg("%s %s: %lld of %lld beyond their bound (seed %llu)", kern->isa, row->name,
                 (long long)e.failures, (long long)e.compared, (unsigned long long)seed);
}

static void check_list(const char *const *names, size_t n, const check_row *table)
{
    for (size_t i = 0; i < n; i++)
        if (find(table, names[i]) == NULL)
            fail_msg("kernel %s has no check", names[i]);
    for (int isa = 0; dr_kern_at(isa) != NULL; isa++) {
        const dr_kern *kern = dr_kern_at(isa);
        if (only_isa != NULL && strcmp(only_isa, kern->isa) != 0)
            continue;
        if ((kern->needs & ~dr_cpu_features()) != 0) {
            print_message("%s: not on this machine\n", kern->isa);
            continue;
        }
        for (size_t i = 0; i < n; i++)
            if (only_kernel == NULL || strcmp(only_kernel, names[i]) == 0)
                check_kernel(kern, find(table, names[i]));
    }
}

static void test_forward_kernels(void **state)
{
    (void)state;
    check_list(forward_names, DR_COUNT(forward_names), kernel_checks);
}

static void test_backward_kernels(void **state)
{
    (void)state;
    check_list(grad_names, DR_COUNT(grad_names), kernel_checks_grad);
}

static void test_row_kernels(void **state)
{
    (void)state;
    check_list(row_names, DR_COUNT(row_names), kernel_checks_rows);
}

int main(int argc, char **argv)
{
    const char *given = getenv("DR_SEED");
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--isa") == 0)
            only_isa = argv[i + 1];
        else if (strcmp(argv[i], "--kernel") == 0)
            only_kernel = argv[i + 1];
        else if (strcmp(argv[i], "--seed") == 0)
            given = argv[i + 1];
    }
    if (given != NULL)
        seed = strtoull(given, NULL, 10);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward_kernels),
        cmocka_unit_test(test_backward_kernels),
        cmocka_unit_test(test_row_kernels),
    };
    return cmocka_run_group_tests_name("kernels", tests, NULL, NULL);
}
