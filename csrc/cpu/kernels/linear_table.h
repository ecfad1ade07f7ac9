#pragma once

// What linear.cpp gets from each instruction set's copy of linear_impl.h.

#include "cpu/kernels/linear.h"

namespace mlxcel::cpu {

/// Columns (rows of the weight) of one task of many_rows; scratch is sized by it.
constexpr int kTaskColumns = 64;
/// Products in one run of the sum (see linear.h), and the depth of a dequantized panel: 16 columns
/// of it are 16 KB, half of an L1 cache.
constexpr int kBlockK = 256;
/// Up to so many rows of x go through few_rows, which dequantizes in registers.
constexpr int kFewRows = 4;

struct LinearKernels {
  int tile_rows;  // rows of x that pack() interleaves

  /// Columns [begin, end) for all 1 to kFewRows rows; begin is a multiple of kTaskColumns.
  /// x (rows, k) f32.
  void (*few_rows)(const LinearParams& params, const LinearArrays& arrays, const float* x,
                   int begin, int end);

  /// Columns [n0, n0 + kTaskColumns) of rows [first, first + rows). packed: what pack() wrote for
  /// these rows. totals (rows, kTaskColumns) and panels (kBlockK, kTaskColumns) are scratch.
  void (*many_rows)(const LinearParams& params, const LinearArrays& arrays, const float* packed,
                    int64_t first, int rows, int n0, float* totals, float* panels);

  /// Packs tiles [begin, end) of rows [first, first + rows) of x into packed (rows * k) f32.
  void (*pack)(const LinearParams& params, const LinearArrays& arrays, int64_t first, int rows,
               int begin, int end, float* packed);

  /// to[i] = x[i] as f32, i in [0, n).
  void (*widen)(const LinearArrays& arrays, int n, float* to);
};

}  // namespace mlxcel::cpu
