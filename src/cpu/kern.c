/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern.c - which instruction set to use. Compiled without any ISA flag. The environment
 * variable DR_CPU caps the choice ("c", "avx2", "avx512", "neon"); what this machine or this build
 * lacks is refused, never replaced.
 */
#include "cpu/cpu.h"
#include "base/cpu.h"

#include <stdio.h>
#include <stdlib.h>

/* Worst to best. */
static const dr_kern *const table[] = {
#ifdef DR_ISA_C
    &dr_kern_c,
#endif
#ifdef DR_ISA_NEON
    &dr_kern_neon,
#endif
#ifdef DR_ISA_AVX2
    &dr_kern_avx2,
#endif
#ifdef DR_ISA_AVX512
    &dr_kern_avx512,
#endif
};

static const char *const known[] = {"c", "neon", "avx2", "avx512"};

const dr_kern *dr_kern_at(int index)
{
    return index >= 0 && (size_t)index < DR_COUNT(table) ? table[index] : NULL;
}

static dr_status find_cap(const char *name, uint32_t features, size_t *cap)
{
    for (size_t i = 0; i < DR_COUNT(table); i++)
        if (strcmp(table[i]->isa, name) == 0) {
            if (table[i]->needs & ~features)
                return dr_fail(DR_ERR_SUPPORT, "DR_CPU: must name an instruction set that this "
                               "machine has, got \"%s\"", name);
            *cap = i;
            return DR_OK;
        }
    for (size_t i = 0; i < DR_COUNT(known); i++)
        if (strcmp(known[i], name) == 0)
            return dr_fail(DR_ERR_SUPPORT, "DR_CPU: must name an instruction set that this build "
                           "holds, got \"%s\"", name);
    return dr_fail(DR_ERR_SUPPORT, "DR_CPU: must be c, neon, avx2 or avx512, got \"%s\"", name);
}

dr_status dr_cpu_choose(const dr_kern **out, char reason[160])
{
    const uint32_t features = dr_cpu_features();
    const char *name = getenv("DR_CPU");
    size_t cap = DR_COUNT(table) - 1;
    if (name != NULL && *name != 0)
        DR_TRY(find_cap(name, features, &cap));
    for (size_t i = 0; i <= cap; i++)
        if (!(table[i]->needs & ~features))
            *out = table[i];
    if (name != NULL && *name != 0)
        snprintf(reason, 160, "DR_CPU=%s in the environment", name);
    else
        snprintf(reason, 160, "the best of this build that this machine has");
    return DR_OK;
}
