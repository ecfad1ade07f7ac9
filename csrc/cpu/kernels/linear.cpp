#include "cpu/kernels/linear.h"

#include <algorithm>
#include <memory>
#include <new>

#include "common/cpu_features.h"
#include "common/parallel.h"
#include "cpu/kernels/linear_impl.h"

namespace mlxcel::cpu {

#if defined(__x86_64__)
extern decltype(&linear_kernels) const linear_kernels_avx2;
extern decltype(&linear_kernels) const linear_kernels_avx512;
#endif

namespace {

/// Weights that one thread multiplies in about the time that it takes to wake another (some 20 us).
constexpr int64_t kGrainWeights = 1 << 17;
/// Rows of x packed at a time: a dequantized panel serves this many, which makes its cost small
/// (about 8 rows' worth), while the scratch stays below kMaxRows * k floats.
constexpr int64_t kMaxRows = 384;

LinearKernels choose_kernels(const LinearParams& params) {
  auto choose = &linear_kernels;
#if defined(__x86_64__)
  if (cpu_features().avx2) choose = linear_kernels_avx2;
  if (cpu_features().avx512) choose = linear_kernels_avx512;
#endif
  return choose(params.format, params.dtype);
}

struct Free {
  void operator()(float* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Scratch = std::unique_ptr<float[], Free>;

Scratch scratch(int64_t floats) {
  return Scratch(static_cast<float*>(
      ::operator new[](static_cast<size_t>(floats) * sizeof(float), std::align_val_t(64))));
}

void few(const LinearKernels& kernels, const LinearParams& params, const LinearArrays& arrays) {
  const int64_t groups = params.group_size ? params.k / params.group_size : 0;
  const Scratch x = scratch(params.rows * (params.k + groups));
  float* sums = x.get() + params.rows * params.k;
  kernels.widen_x(params, arrays, x.get(), sums);
  const int64_t tasks = (params.n + kTaskColumns - 1) / kTaskColumns;
  const int64_t grain = kGrainWeights / (int64_t{kTaskColumns} * params.k) + 1;
  parallel_for(tasks, grain, [&](size_t begin, size_t end) {
    kernels.few_rows(params, arrays, x.get(), sums, static_cast<int>(begin) * kTaskColumns,
                     std::min(static_cast<int>(end) * kTaskColumns, params.n));
  });
}

void many(const LinearKernels& kernels, const LinearParams& params, const LinearArrays& arrays) {
  // Equal parts, so that the last one is not a thin one; whole tiles, for all but the last.
  const int64_t parts = (params.rows + kMaxRows - 1) / kMaxRows;
  const int64_t tiles_in_part =
      (params.rows + parts * kernels.tile_rows - 1) / (parts * kernels.tile_rows);
  const int64_t rows_in_part = tiles_in_part * kernels.tile_rows;
  const int64_t most_rows = std::min(rows_in_part, params.rows);
  const int64_t groups = params.group_size ? params.k / params.group_size : 0;
  const Scratch packed = scratch(most_rows * (params.k + groups));
  float* sums = packed.get() + most_rows * params.k;
  const int64_t tasks = (params.n + kTaskColumns - 1) / kTaskColumns;
  for (int64_t first = 0; first < params.rows; first += rows_in_part) {
    const int rows = static_cast<int>(std::min(rows_in_part, params.rows - first));
    const int tiles = (rows + kernels.tile_rows - 1) / kernels.tile_rows;
    parallel_for(tiles, 65536 / (params.k * kernels.tile_rows) + 1, [&](size_t begin, size_t end) {
      kernels.pack_x(params, arrays, first, rows, static_cast<int>(begin), static_cast<int>(end),
                     packed.get(), sums);
    });
    parallel_for(tasks, 1, [&](size_t begin, size_t end) {
      const Scratch totals = scratch(int64_t{rows} * kTaskColumns);
      const Scratch panels = scratch(kernels.panel_bytes / int64_t{sizeof(float)});
      for (size_t task = begin; task < end; ++task) {
        kernels.many_rows(params, arrays, packed.get(), sums, first, rows,
                          static_cast<int>(task) * kTaskColumns, totals.get(), panels.get());
      }
    });
  }
}

}  // namespace

void linear(const LinearParams& params, const LinearArrays& arrays) {
  if (params.rows == 0 || params.n == 0) return;
  const LinearKernels kernels = choose_kernels(params);
  if (params.rows <= kFewRows) {
    few(kernels, params, arrays);
  } else {
    many(kernels, params, arrays);
  }
}

void pack_linear(const LinearParams& params, const LinearArrays& from, void* weight, void* scales,
                 void* offsets) {
  const LinearKernels kernels = choose_kernels(params);
  const int64_t groups = (params.n + kGroupRows - 1) / kGroupRows;
  parallel_for(groups, 65536 / (kGroupRows * params.k) + 1, [&](size_t begin, size_t end) {
    kernels.pack_weight(params, from, static_cast<int>(begin), static_cast<int>(end), weight,
                        scales, offsets);
  });
}

}  // namespace mlxcel::cpu
