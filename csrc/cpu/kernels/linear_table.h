#pragma once

// What linear.cpp gets from each instruction set's copy of linear_impl.h.

#include "cpu/kernels/linear.h"

namespace mlxcel::cpu {

/// Rows of the weight that the packed layout interleaves, and columns of out that a task computes:
/// as many as few_rows multiplies with one row of x at a time, so that it reads memory front to
/// back. With groups of 8 and four streams the hardware's prefetchers started anew every two
/// kilobytes.
constexpr int kGroupRows = kPackedRows;
/// Depth of a block of k: a dequantized panel of 16 columns is 16 KB then, half of an L1 cache; and
/// products in one run of the sum where the weight is dense (see linear.h).
constexpr int kBlockK = 256;
/// Up to so many rows of x go through few_rows. From here on it pays to unpack the weights into
/// panels once for all tiles of rows.
constexpr int kFewRows = 24;

struct LinearKernels {
  int64_t panel_bytes;  // scratch of one task of many_rows for panels

  /// Columns [n0, n0 + kGroupRows) of all 1 to kFewRows rows. packed, sums: what pack_few() wrote.
  void (*few_rows)(const LinearParams& params, const LinearArrays& arrays, const float* packed,
                   const float* sums, int n0);

  /// Rows [first + begin, first + end) of x in f32 into packed, which holds `rows` rows, padded to
  /// whole blocks of k, and their sums over quantization groups, (k / group_size, rows).
  void (*pack_few)(const LinearParams& params, const LinearArrays& arrays, int64_t first, int rows,
                   int begin, int end, float* packed, float* sums);

  /// Columns [n0, n0 + columns) of rows [first, first + rows); n0 and columns are multiples of
  /// kGroupRows. packed, sums: what pack_many() wrote for these rows. totals
  /// (columns / kGroupRows, rows, kGroupRows) and panels are scratch.
  void (*many_rows)(const LinearParams& params, const LinearArrays& arrays, const float* packed,
                    const float* sums, int64_t first, int rows, int n0, int columns, float* totals,
                    void* panels);

  /// As pack_few().
  void (*pack_many)(const LinearParams& params, const LinearArrays& arrays, int64_t first, int rows,
                    int begin, int end, float* packed, float* sums);

  /// Groups of kGroupRows rows [begin, end) of row-major weights into the packed layout.
  void (*pack_weight)(const LinearParams& params, const LinearArrays& from, int begin, int end,
                      void* weight, void* scales, void* offsets);
};

}  // namespace mlxcel::cpu
