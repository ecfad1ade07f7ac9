#pragma once

// What linear.cpp gets from each instruction set's copy of linear_impl.h.

#include "cpu/kernels/linear.h"

namespace mlxcel::cpu {

/// Rows of the weight that the packed layout interleaves: as many as few_rows multiplies with one
/// row of x at a time, so that it reads memory front to back. With groups of 8 and four streams the
/// hardware's prefetchers started anew every two kilobytes.
constexpr int kGroupRows = kPackedRows;
/// Columns of out (rows of the weight) of one task of many_rows; scratch is sized by it.
constexpr int kTaskColumns = 64;
/// Depth of a dequantized panel, 16 columns of which are 16 KB, half of an L1 cache; and products
/// in one run of the sum where the weight is dense (see linear.h).
constexpr int kBlockK = 256;
/// Up to so many rows of x go through few_rows, which unpacks weights in registers.
constexpr int kFewRows = 4;

struct LinearKernels {
  int tile_rows;        // rows of x that pack_x() interleaves
  int64_t panel_bytes;  // scratch of one task of many_rows for panels

  /// Columns [begin, end) for all 1 to kFewRows rows; begin is a multiple of kTaskColumns.
  /// x (rows, k) f32; sums (k / group_size, rows) of x over quantization groups.
  void (*few_rows)(const LinearParams& params, const LinearArrays& arrays, const float* x,
                   const float* sums, int begin, int end);

  /// x of all rows as f32, and its sums, for few_rows.
  void (*widen_x)(const LinearParams& params, const LinearArrays& arrays, float* x, float* sums);

  /// Columns [n0, n0 + kTaskColumns) of rows [first, first + rows). packed, sums: what pack_x()
  /// wrote for these rows. totals (rows, kTaskColumns) and panels are scratch.
  void (*many_rows)(const LinearParams& params, const LinearArrays& arrays, const float* packed,
                    const float* sums, int64_t first, int rows, int n0, float* totals,
                    void* panels);

  /// Packs tiles [begin, end) of rows [first, first + rows) of x into packed (rows * k) f32 and
  /// writes their sums (k / group_size, rows).
  void (*pack_x)(const LinearParams& params, const LinearArrays& arrays, int64_t first, int rows,
                 int begin, int end, float* packed, float* sums);

  /// Groups of kGroupRows rows [begin, end) of row-major weights into the packed layout.
  void (*pack_weight)(const LinearParams& params, const LinearArrays& from, int begin, int end,
                      void* weight, void* scales, void* offsets);
};

}  // namespace mlxcel::cpu
