/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu_rows.h - a rectangle of a caller's tensor as the row operations see it: floats in rows.
 * Memory that already is f32 with contiguous rows is used where it lies; anything else goes
 * through a tile on the caller's stack. Kernels therefore know neither element types nor
 * strides.
 */
#ifndef DR_CPU_ROWS_H
#define DR_CPU_ROWS_H

#include "cpu/cpu.h"

/* Rows and columns of some tensor; strides in elements. data NULL: absent. */
typedef struct dr_cpu_view {
    char *data;
    dr_dtype dtype;
    int64_t row, col;
} dr_cpu_view;

/* Bytes of an element; a function call to learn them would show. */
DR_INLINE int64_t dr_cpu_size(dr_dtype dtype) { return dtype == DR_F32 ? 4 : 2; }

/* Axes `row` and `col` of t at indices i0, i1 of its first axes. An axis of extent 1 has
 * whatever stride suits. */
dr_cpu_view dr_cpu_view_of(const dr_tensor *t, int row, int col, int64_t i0, int64_t i1,
                           int64_t i2);

/* The view `rows` further down and `cols` to the right. */
DR_INLINE dr_cpu_view dr_cpu_view_at(dr_cpu_view v, int64_t rows, int64_t cols)
{
    if (v.data != NULL)
        v.data += (rows * v.row + cols * v.col) * dr_cpu_size(v.dtype);
    return v;
}

DR_INLINE bool dr_cpu_view_direct(const dr_cpu_view *v)
{
    return v->dtype == DR_F32 && v->col == 1 && v->data != NULL;
}

/* Elements [rows, cols) to dst and back; dst is 64-byte aligned, its rows ld (a multiple of 16,
 * at least cols) floats apart, and filled up with zeros to a multiple of 16. */
void dr_cpu_view_load(const dr_kern *kern, const dr_cpu_view *v, int64_t rows, int64_t cols,
                      float *dst, int64_t ld);
void dr_cpu_view_store(const dr_kern *kern, const float *src, int64_t ld, int64_t rows,
                       int64_t cols, const dr_cpu_view *v);

/* A rectangle in use: rows ld apart, in the tensor or in the tile. */
typedef struct dr_cpu_tile {
    float *at;
    int64_t ld;
} dr_cpu_tile;

/* For reading: loaded unless direct. */
DR_INLINE dr_cpu_tile dr_cpu_tile_in(const dr_kern *kern, const dr_cpu_view *v, int64_t rows,
                                     int64_t cols, float *tile, int64_t ld)
{
    if (dr_cpu_view_direct(v))
        return (dr_cpu_tile){(float *)v->data, v->row};
    dr_cpu_view_load(kern, v, rows, cols, tile, ld);
    return (dr_cpu_tile){tile, ld};
}

/* For writing: where to write, then the store that an indirect one needs. */
DR_INLINE dr_cpu_tile dr_cpu_tile_out(const dr_cpu_view *v, float *tile, int64_t ld)
{
    if (dr_cpu_view_direct(v))
        return (dr_cpu_tile){(float *)v->data, v->row};
    return (dr_cpu_tile){tile, ld};
}
DR_INLINE void dr_cpu_tile_done(const dr_kern *kern, dr_cpu_tile t, int64_t rows, int64_t cols,
                                const dr_cpu_view *v)
{
    if (v->data != NULL && !dr_cpu_view_direct(v))
        dr_cpu_view_store(kern, t.at, t.ld, rows, cols, v);
}

#endif
