/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu.c - feature detection. A feature counts only when the operating system saves its
 * registers (XCR0), which the compiler's own cpu_supports checks for AVX and AVX-512.
 */
#include "base/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* AMX tiles are off until a process asks the kernel for them. */
static bool amx_granted(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

uint32_t dr_cpu_features(void)
{
    uint32_t features = 0;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        unsigned a, b, c, d;
        if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C))
            features |= DR_CPU_AVX2;
    }
    if ((features & DR_CPU_AVX2) && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        features |= DR_CPU_AVX512;
        unsigned a, b, c, d;
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5))
            features |= DR_CPU_AVX512_BF16;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & 1u << 22) && (d & 1u << 24) &&
            amx_granted())
            features |= DR_CPU_AMX_BF16;
    }
    return features;
}
#elif defined(__aarch64__)
uint32_t dr_cpu_features(void) { return DR_CPU_NEON; } /* part of the base architecture */
#else
uint32_t dr_cpu_features(void) { return 0; }
#endif
