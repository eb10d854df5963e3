/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_kern_grad.h - checks of the rows of cpu/kern_grad.h; see check_kern.h.
 */
#ifndef CHECK_KERN_GRAD_H
#define CHECK_KERN_GRAD_H

#include "check_kern.h"

static const check_row kernel_checks_grad[] = {
    {NULL, NULL},
};

#endif
