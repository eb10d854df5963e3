/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_kern_rows.h - checks of the rows of cpu/kern_rows.h; see check_kern.h.
 */
#ifndef CHECK_KERN_ROWS_H
#define CHECK_KERN_ROWS_H

#include "check_kern.h"

static const check_row kernel_checks_rows[] = {
    {NULL, NULL},
};

#endif
