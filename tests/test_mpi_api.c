/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_mpi_api.c - what a user's build sees of libdeltarule_mpi, and what a program hears that has
 * not started MPI properly: the header alone as C99 and as C++11, the exported symbols, what the
 * core links, refusals before, with too few threads and after. Runs without a launcher, as one
 * rank.
 */
#include "test.h"

#include <deltarule/mpi.h>

#include <pthread.h>
#include <sys/wait.h>

static int run(const char *command)
{
    int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void header_alone(const char *compiler)
{
    char command[2048];
    snprintf(command, sizeof command,
             "printf '#include <deltarule/mpi.h>\\n#include <deltarule/mpi.h>\\n' | %s -Wall "
             "-Wextra -pedantic "
             "-Werror -fsyntax-only %s -I%s/include -",
             compiler, DR_TEST_MPI_FLAGS, DR_TEST_ROOT);
    if (run(command) != 0)
        fail_msg("mpi.h does not compile alone: %s", command);
}

static void test_header(void **state)
{
    (void)state;
    header_alone(DR_TEST_CC " -std=c99 -x c");
    if (run("command -v g++ >/dev/null") == 0)
        header_alone("g++ -std=c++11 -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX -x c++");
}

static void expect_output(const char *command, const char *want)
{
    char got[4096];
    FILE *f = popen(command, "r");
    assert_non_null(f);
    got[fread(got, 1, sizeof got - 1, f)] = 0;
    pclose(f);
    if (strcmp(got, want) != 0)
        fail_msg("%s: expected \"%s\", got \"%s\"", command, want, got);
}

static void test_exports(void **state)
{
    (void)state;
    char want[4096];
    FILE *f = fopen(DR_TEST_ROOT "/tests/exports_mpi.txt", "r");
    assert_non_null(f);
    want[fread(want, 1, sizeof want - 1, f)] = 0;
    fclose(f);
    expect_output("nm -D --defined-only " DR_TEST_MPI_LIBRARY
                  " | awk '$2 != \"A\" {print $3}' | grep -v '^_' | LC_ALL=C sort",
                  want);
    expect_output("nm -D --undefined-only " DR_TEST_LIBRARY " | grep -c ' MPI_'", "0\n");
}

static void *elsewhere(void *arg)
{
    dr_comm *comm;
    REFUSED(dr_comm_mpi_create(MPI_COMM_SELF, &comm), DR_ERR_ARG, "MPI_THREAD_SERIALIZED or more");
    return arg;
}

/* DR_TEST_LEVEL names the thread level: an MPI starts once per process. */
static void test_start(void **state)
{
    (void)state;
    dr_comm *comm;
    int level;
    bool single = strcmp(getenv("DR_TEST_LEVEL"), "single") == 0;
    REFUSED(dr_comm_mpi_create(MPI_COMM_WORLD, &comm), DR_ERR_ARG, "must be initialised first");
    MPI_Init_thread(NULL, NULL, single ? MPI_THREAD_SINGLE : MPI_THREAD_FUNNELED, &level);
    if (single && level == MPI_THREAD_SINGLE)
        REFUSED(dr_comm_mpi_create(MPI_COMM_WORLD, &comm), DR_ERR_ARG, "got MPI_THREAD_SINGLE");
    dr_comm *late = NULL;
    if (!single) {
        MUST(dr_comm_mpi_create(MPI_COMM_WORLD, &comm));
        int32_t mine = 5, all = 0;
        MUST(dr_comm_allgather(comm, &mine, &all, sizeof mine));
        assert_int_equal(all, 5);
        dr_comm_close(comm);
        MUST(dr_comm_mpi_create(MPI_COMM_SELF, &late));
        pthread_t thread;
        if (level == MPI_THREAD_FUNNELED) {
            assert_int_equal(pthread_create(&thread, NULL, elsewhere, NULL), 0);
            pthread_join(thread, NULL);
        }
    }
    MPI_Finalize();
    dr_comm_close(late); /* too late, but harmless */
    REFUSED(dr_comm_mpi_create(MPI_COMM_WORLD, &comm), DR_ERR_ARG, "MPI_Finalize has been called");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_header),
        cmocka_unit_test(test_exports),
        cmocka_unit_test(test_start),
    };
    return cmocka_run_group_tests_name("mpi_api", tests, NULL, NULL);
}
