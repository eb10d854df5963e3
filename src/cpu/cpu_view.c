/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_view.c - see cpu_rows.h: rectangles of tensors to rows of floats and back. Contiguous
 * rows go through the conversions of the kernel table, contiguous columns are turned, and
 * anything else is fetched element by element.
 */
#include "cpu/cpu_rows.h"
#include "base/half.h"

dr_cpu_view dr_cpu_view_of(const dr_tensor *t, int row, int col, int64_t i0, int64_t i1,
                           int64_t i2)
{
    if (t->data == NULL)
        return (dr_cpu_view){NULL, t->dtype, 0, 0};
    int64_t at = i0 * t->stride[0] + (t->rank > 1 ? i1 * t->stride[1] : 0) +
                 (t->rank > 2 ? i2 * t->stride[2] : 0);
    return (dr_cpu_view){(char *)t->data + at * dr_cpu_size(t->dtype), t->dtype,
                         t->shape[row] > 1 ? t->stride[row] : 1,
                         t->shape[col] > 1 ? t->stride[col] : 1};
}

static void load_rows(const dr_kern *kern, dr_dtype dtype, int64_t rows, int64_t cols,
                      const void *src, int64_t stride, float *dst, int64_t ld)
{
    int pad = (int)dr_round_up(cols, 16);
    if (dtype == DR_F32)
        kern->load_f32((int)rows, (int)cols, pad, src, stride, 1, dst, ld, kern->nr);
    else if (dtype == DR_BF16)
        kern->load_bf16((int)rows, (int)cols, pad, src, stride, 1, dst, ld, kern->nr);
    else
        kern->load_f16((int)rows, (int)cols, pad, src, stride, 1, dst, ld, kern->nr);
}

static void store_rows(const dr_kern *kern, dr_dtype dtype, int64_t rows, int64_t cols,
                       const float *src, int64_t ld, void *dst, int64_t stride)
{
    if (dtype == DR_F32)
        kern->store_f32((int)rows, (int)cols, src, ld, kern->nr, dst, stride);
    else if (dtype == DR_BF16)
        kern->store_bf16((int)rows, (int)cols, src, ld, kern->nr, dst, stride);
    else
        kern->store_f16((int)rows, (int)cols, src, ld, kern->nr, dst, stride);
}

/* Columns that are contiguous in memory come in lines, a few columns by LINE rows at a time, so
 * that each cache line is read or written at once: columns are often a power of two apart, and
 * then only a few of them fit the cache side by side. The lines that come next are fetched. */
enum { LINE = 64, LINES = 8 };

static void fetch_lines(const dr_cpu_view *v, int64_t j, int64_t cols, int64_t rows)
{
    for (int64_t end = dr_min(j + LINES, cols); j < end; j++) {
        const char *line = dr_cpu_view_at(*v, 0, j).data;
        for (int64_t at = 0; at < rows * dr_cpu_size(v->dtype); at += 64)
            __builtin_prefetch(line + at);
    }
}

static void load_lines(const dr_kern *kern, const dr_cpu_view *v, int64_t rows, int64_t cols,
                       float *dst, int64_t ld)
{
    _Alignas(DR_ALIGN) float lines[LINES * LINE];
    for (int64_t i = 0; i < rows; i += LINE)
        for (int64_t j = 0; j < cols; j += LINES) {
            int64_t m = dr_min(LINES, cols - j), n = dr_min(LINE, rows - i);
            dr_cpu_view at = dr_cpu_view_at(*v, i, 0);
            fetch_lines(&at, j + LINES, cols, n);
            at = dr_cpu_view_at(at, 0, j);
            if (v->dtype == DR_F32) {
                kern->transpose((int)m, (int)n, (const float *)at.data, v->col, dst + i * ld + j,
                                ld);
                continue;
            }
            load_rows(kern, v->dtype, m, n, at.data, v->col, lines, LINE);
            kern->transpose((int)m, (int)n, lines, LINE, dst + i * ld + j, ld);
        }
}

static void store_lines(const dr_kern *kern, const float *src, int64_t ld, int64_t rows,
                        int64_t cols, const dr_cpu_view *v)
{
    _Alignas(DR_ALIGN) float lines[LINES * LINE];
    for (int64_t i = 0; i < rows; i += LINE)
        for (int64_t j = 0; j < cols; j += LINES) {
            int64_t m = dr_min(LINES, cols - j), n = dr_min(LINE, rows - i);
            dr_cpu_view at = dr_cpu_view_at(*v, i, j);
            if (v->dtype == DR_F32) {
                kern->transpose((int)n, (int)m, src + i * ld + j, ld, (float *)at.data, v->col);
                continue;
            }
            kern->transpose((int)n, (int)m, src + i * ld + j, ld, lines, LINE);
            store_rows(kern, v->dtype, m, n, lines, LINE, at.data, v->col);
        }
}

/* States and taps are a few rows wide: columns of up to LINES elements close together. */
static bool narrow(const dr_cpu_view *v, int64_t rows, int64_t cols)
{
    return v->row == 1 && rows <= LINES && cols > 1 && v->col >= rows && v->col <= LINES;
}

static void load_narrow(const dr_kern *kern, const dr_cpu_view *v, int64_t rows, int64_t cols,
                        float *dst, int64_t ld)
{
    _Alignas(DR_ALIGN) float block[LINES * LINE];
    if (v->dtype == DR_F32) {
        kern->narrow_in((int)cols, (int)rows, (const float *)v->data, v->col, dst, ld);
        return;
    }
    for (int64_t j = 0; j < cols; j += LINE) {
        int64_t m = dr_min(LINE, cols - j), n = (m - 1) * v->col + rows;
        load_rows(kern, v->dtype, 1, n, dr_cpu_view_at(*v, 0, j).data, 0, block, 0);
        kern->narrow_in((int)m, (int)rows, block, v->col, dst + j, ld);
    }
}

static void store_narrow(const dr_kern *kern, const float *src, int64_t ld, int64_t rows,
                         int64_t cols, const dr_cpu_view *v)
{
    _Alignas(DR_ALIGN) float block[LINES * LINE];
    if (v->dtype == DR_F32) {
        kern->narrow_out((int)cols, (int)rows, src, ld, (float *)v->data);
        return;
    }
    for (int64_t j = 0; j < cols; j += LINE) {
        int64_t m = dr_min(LINE, cols - j);
        kern->narrow_out((int)m, (int)rows, src + j, ld, block);
        store_rows(kern, v->dtype, 1, m * rows, block, 0, dr_cpu_view_at(*v, 0, j).data, 0);
    }
}

void dr_cpu_view_load(const dr_kern *kern, const dr_cpu_view *v, int64_t rows, int64_t cols,
                      float *dst, int64_t ld)
{
    if (v->col == 1) {
        load_rows(kern, v->dtype, rows, cols, v->data, v->row, dst, ld);
        return;
    }
    for (int64_t i = 0; i < rows && cols % 16 != 0; i++)
        memset(dst + i * ld + cols, 0, (size_t)(16 - cols % 16) * sizeof *dst);
    if (v->row == 1) {
        (narrow(v, rows, cols) ? load_narrow : load_lines)(kern, v, rows, cols, dst, ld);
        return;
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            dst[i * ld + j] = (float)dr_get(v->data, v->dtype, i * v->row + j * v->col);
}

void dr_cpu_view_store(const dr_kern *kern, const float *src, int64_t ld, int64_t rows,
                       int64_t cols, const dr_cpu_view *v)
{
    if (v->col == 1) {
        store_rows(kern, v->dtype, rows, cols, src, ld, v->data, v->row);
        return;
    }
    if (v->row == 1) {
        bool dense = narrow(v, rows, cols) && v->col == rows;
        (dense ? store_narrow : store_lines)(kern, src, ld, rows, cols, v);
        return;
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            dr_put(v->data, v->dtype, i * v->row + j * v->col, src[i * ld + j]);
}
