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

/// Products that one thread computes in about the time that it takes to wake another (some 20 us).
constexpr int64_t kGrainProducts = 1 << 17;
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

/// Rows of x in f32, and their sums over quantization groups.
struct PackedX {
  PackedX(const LinearParams& params, int64_t rows)
      : x(scratch(rows *
                  (padded(params.k) + (params.group_size ? params.k / params.group_size : 0)))),
        sums(x.get() + rows * padded(params.k)) {}
  static int64_t padded(int64_t k) { return (k + kBlockK - 1) / kBlockK * kBlockK; }

  Scratch x;
  float* sums;
};

void few(const LinearKernels& kernels, const LinearParams& params, const LinearArrays& arrays) {
  const int rows = static_cast<int>(params.rows);
  const PackedX packed(params, rows);
  kernels.pack_few(params, arrays, 0, rows, 0, rows, packed.x.get(), packed.sums);
  const int64_t groups = (params.n + kGroupRows - 1) / kGroupRows;
  const int64_t grain = kGrainProducts / (int64_t{kGroupRows} * params.k * rows) + 1;
  parallel_for(groups, grain, [&](size_t begin, size_t end) {
    for (size_t group = begin; group < end; ++group) {
      kernels.few_rows(params, arrays, packed.x.get(), packed.sums,
                       static_cast<int>(group) * kGroupRows);
    }
  });
}

void many(const LinearKernels& kernels, const LinearParams& params, const LinearArrays& arrays) {
  // Equal parts, so that the last one is not a thin one.
  const int64_t parts = (params.rows + kMaxRows - 1) / kMaxRows;
  const int64_t rows_in_part = (params.rows + parts - 1) / parts;
  const PackedX packed(params, rows_in_part);
  const int64_t groups = (params.n + kGroupRows - 1) / kGroupRows;
  for (int64_t first = 0; first < params.rows; first += rows_in_part) {
    const int rows = static_cast<int>(std::min(rows_in_part, params.rows - first));
    parallel_for(rows, 65536 / params.k + 1, [&](size_t begin, size_t end) {
      kernels.pack_many(params, arrays, first, rows, static_cast<int>(begin), static_cast<int>(end),
                        packed.x.get(), packed.sums);
    });
    parallel_for(groups, 1, [&](size_t begin, size_t end) {
      const Scratch totals = scratch(int64_t{rows} * kGroupRows);
      const Scratch panels = scratch(kernels.panel_bytes / int64_t{sizeof(float)});
      for (size_t group = begin; group < end; ++group) {
        kernels.many_rows(params, arrays, packed.x.get(), packed.sums, first, rows,
                          static_cast<int>(group) * kGroupRows, totals.get(), panels.get());
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
