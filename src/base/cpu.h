/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu.h - what this processor and its operating system let us use. Compiled without any
 * ISA flag: it must run on the oldest machine of the architecture.
 */
#ifndef DR_CPU_H
#define DR_CPU_H

#include "base/base.h"

enum dr_cpu_feature {
    DR_CPU_AVX2 = 1u << 0,   /* with FMA and F16C */
    DR_CPU_AVX512 = 1u << 1, /* F, BW, DQ, VL */
    DR_CPU_AVX512_BF16 = 1u << 2,
    DR_CPU_AMX_BF16 = 1u << 3,
    DR_CPU_NEON = 1u << 4
};

/* Features the hardware and the operating system offer. */
uint32_t dr_cpu_features(void);

#endif
