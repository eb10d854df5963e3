/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu.h - what the files of the CPU backend share: the device, and the stages and row
 * operations that cpu_backend.c puts into its table.
 */
#ifndef DR_CPU_BACKEND_H
#define DR_CPU_BACKEND_H

#include "backend.h"
#include "cpu/kern.h"

struct dr_device {
    dr_pool pool;
    const dr_kern *kern;
    char reason[160]; /* why this instruction set */
};

/* The best record that machine, build and the environment variable DR_CPU allow; reason
 * (160 bytes) says why. ERR_SUPPORT when DR_CPU asks for what is not there. */
dr_status dr_cpu_choose(const dr_kern **out, char reason[160]);

/* cpu_chunk.c */
dr_stage dr_cpu_forward_layout, dr_cpu_forward_prepare, dr_cpu_forward_summarize,
    dr_cpu_forward_recur, dr_cpu_forward_output;

/* cpu_grad.c */
dr_stage dr_cpu_adjoint_layout, dr_cpu_adjoint_prepare, dr_cpu_adjoint_summarize,
    dr_cpu_adjoint_recur, dr_cpu_adjoint_output;

/* cpu_step.c; its scratch is that of dr_cpu_forward_layout, unstaged */
dr_stage dr_cpu_step;

/* cpu_map.c; see dr_backend.apply */
dr_status dr_cpu_apply(const dr_device *dev, int64_t n, int32_t K, int32_t V, int32_t rows,
                       const float *in, const float *map, float *out);

/* cpu_rows*.c, cpu_matmul.c */
dr_status dr_cpu_conv(dr_device *dev, int dir, const dr_conv_args *a);
dr_status dr_cpu_gate(dr_device *dev, int dir, const dr_gate_args *a);
dr_status dr_cpu_beta(dr_device *dev, int dir, const dr_beta_args *a);
dr_status dr_cpu_l2norm(dr_device *dev, int dir, const dr_l2norm_args *a);
dr_status dr_cpu_norm(dr_device *dev, int dir, const dr_norm_args *a);
dr_status dr_cpu_matmul(dr_device *dev, const dr_matmul_args *a);

#endif
