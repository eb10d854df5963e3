/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_api.c - what a user's build sees: each public header alone as C99 and as C++11, the
 * list of exported symbols, versions, the example of the README, and the refusals of the
 * context. Runs the compiler that built the library.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <deltarule/deltarule.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int run(const char *command)
{
    int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static char *read_all(FILE *f)
{
    size_t size = 0, room = 1 << 16;
    char *text = malloc(room + 1);
    assert_non_null(text);
    for (size_t n; (n = fread(text + size, 1, room - size, f)) > 0;) {
        size += n;
        if (size == room) {
            room *= 2;
            text = realloc(text, room + 1);
            assert_non_null(text);
        }
    }
    text[size] = 0;
    return text;
}

static const char *const headers[] = {"deltarule", "ops", "cp", "comm", "layer", "weights"};

static void headers_alone(const char *compiler)
{
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        char command[1024];
        snprintf(command, sizeof command,
                 "printf '#include <deltarule/%s.h>\\n#include <deltarule/%s.h>\\n' | %s -Wall -Wextra "
                 "-pedantic -Werror -fsyntax-only -I%s/include -",
                 headers[i], headers[i], compiler, DR_TEST_ROOT);
        if (run(command) != 0)
            fail_msg("%s.h does not compile alone: %s", headers[i], command);
    }
}

static void test_headers_c99(void **state)
{
    (void)state;
    headers_alone(DR_TEST_CC " -std=c99 -x c");
}

static void test_headers_cxx11(void **state)
{
    (void)state;
    if (run("command -v g++ >/dev/null") != 0)
        skip();
    headers_alone("g++ -std=c++11 -x c++");
}

/* The exported symbols are exactly those of exports.txt. */
static void test_exports(void **state)
{
    (void)state;
    FILE *f = popen("nm -D --defined-only " DR_TEST_LIBRARY
                    " | awk '$2 != \"A\" {print $3}' | grep -v '^_' | LC_ALL=C sort", "r");
    assert_non_null(f);
    char *got = read_all(f);
    assert_int_equal(pclose(f), 0);
    f = fopen(DR_TEST_ROOT "/tests/exports.txt", "r");
    assert_non_null(f);
    char *want = read_all(f);
    fclose(f);
    assert_string_equal(got, want);
    free(got);
    free(want);
}

static void test_version(void **state)
{
    (void)state;
    assert_int_equal(dr_version(), DR_VERSION);
    assert_string_equal(dr_status_text(DR_OK), "ok");
    assert_string_equal(dr_status_text(DR_ERR_COMM), "communication failure");
    assert_string_equal(dr_status_text((dr_status)77), "unknown status");
}

/* The first C block of the README compiles, runs and prints what the README says. */
static void test_readme_example(void **state)
{
    (void)state;
    if (DR_TEST_SANITIZE[0] != 0) /* a plain program cannot load an instrumented library */
        skip();
    FILE *f = fopen(DR_TEST_ROOT "/README.md", "r");
    assert_non_null(f);
    char *text = read_all(f);
    fclose(f);
    char *code = strstr(text, "```c\n");
    assert_non_null(code);
    code += 5;
    char *end = strstr(code, "```");
    assert_non_null(end);
    char *output = strstr(end, "prints `");
    assert_non_null(output);
    output += 8;
    *strchr(output, '`') = 0;
    char dir[] = "/tmp/deltarule-readme-XXXXXX", path[64], command[2048];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/example.c", dir);
    f = fopen(path, "w");
    assert_non_null(f);
    fwrite(code, 1, (size_t)(end - code), f);
    fclose(f);
    snprintf(command, sizeof command,
             "cd %s && %s -std=c99 -Wall -Wextra -Werror -I%s/include example.c -o example %s "
             "-Wl,-rpath,%s", dir, DR_TEST_CC, DR_TEST_ROOT, DR_TEST_LIBRARY, DR_TEST_BINARY_DIR);
    assert_int_equal(run(command), 0);
    snprintf(command, sizeof command, "%s/example", dir);
    f = popen(command, "r");
    assert_non_null(f);
    char *got = read_all(f);
    assert_int_equal(pclose(f), 0);
    got[strcspn(got, "\n")] = 0;
    assert_string_equal(got, output);
    free(got);
    free(text);
    snprintf(command, sizeof command, "rm -r %s", dir);
    assert_int_equal(run(command), 0);
}

static void refused(dr_status status, dr_status want, const char *sentence)
{
    assert_int_equal(status, want);
    if (strstr(dr_last_error(), sentence) == NULL)
        fail_msg("expected \"%s\" in \"%s\"", sentence, dr_last_error());
}

static int logged;
static void count_log(void *user, dr_status status, const char *sentence)
{
    (void)user;
    assert_int_equal(status, DR_ERR_ARG);
    assert_non_null(strstr(sentence, "backend"));
    logged++;
}

static void test_context(void **state)
{
    (void)state;
    dr_context *ctx = NULL;
    dr_set_log(count_log, NULL);
    refused(dr_context_create("cuda", NULL, &ctx), DR_ERR_ARG,
            "backend: must be \"cpu\" or \"ref\", got \"cuda\"");
    dr_set_log(NULL, NULL);
    assert_int_equal(logged, 1);
    assert_null(ctx);
    refused(dr_context_create(NULL, NULL, &ctx), DR_ERR_ARG, "backend: must be a name");
    dr_context_options options = DR_CONTEXT_OPTIONS_INIT;
    options.threads = -1;
    refused(dr_context_create("cpu", &options, &ctx), DR_ERR_ARG, "options.threads");
    options.size = 4;
    refused(dr_context_create("cpu", &options, &ctx), DR_ERR_ARG, "options.size");
    for (int i = 0; dr_backend_name(i) != NULL; i++) {
        dr_context_options three = DR_CONTEXT_OPTIONS_INIT;
        three.threads = 3;
        assert_int_equal(dr_context_create(dr_backend_name(i), &three, &ctx), DR_OK);
        assert_string_equal(dr_context_backend(ctx), dr_backend_name(i));
        assert_int_equal(dr_context_threads(ctx), 3);
        assert_true(strlen(dr_context_isa(ctx)) > 0 && strlen(dr_context_isa_reason(ctx)) > 0);
        dr_context_destroy(ctx);
    }
    dr_context_destroy(NULL);
    assert_int_equal(setenv("DR_CPU", "neverheardof", 1), 0);
    refused(dr_context_create("cpu", NULL, &ctx), DR_ERR_SUPPORT, "DR_CPU");
    unsetenv("DR_CPU");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_headers_c99),   cmocka_unit_test(test_headers_cxx11),
        cmocka_unit_test(test_exports),       cmocka_unit_test(test_version),
        cmocka_unit_test(test_readme_example), cmocka_unit_test(test_context),
    };
    return cmocka_run_group_tests_name("api", tests, NULL, NULL);
}
