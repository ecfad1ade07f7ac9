#include "cpu/kernels/linear.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "common/cpu_features.h"
#include "common/parallel.h"
#include "cpu/kernels/linear_impl.h"
#include "cpu/kernels/swiglu.h"

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
/// Rows a thread from which on each takes rows of its own where there is nothing to unpack: fewer
/// would read the weights too often.
constexpr int64_t kOwnRows = 128;
/// Groups of columns that a task computes block by block of k: so many pass over a block of x while
/// it is in L2.
constexpr int64_t kMaxGroups = 4;

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

int64_t padded(int64_t k) {
  return (k + kBlockK - 1) / kBlockK * kBlockK;
}

/// Floats of one row of x as it is packed, with its sums over quantization groups.
int64_t packed_floats(const LinearParams& params) {
  return padded(params.k) + (params.group_size ? params.k / params.group_size : 0);
}

/// Rows of x in f32, and their sums over quantization groups.
struct PackedX {
  PackedX(const LinearParams& params, int64_t rows)
      : x(scratch(rows * packed_floats(params))), sums(x.get() + rows * padded(params.k)) {}

  Scratch x;
  float* sums;
};

/// Calls of few(), of every kind.
std::atomic<uint64_t> few_calls{0};

/// What a thread has packed last: all rows of one call of few(). Each thread packs for itself: a
/// copy that another core writes costs more than the packing, line by line, and the others wait.
struct OwnX {
  Scratch x;
  int64_t floats = 0;
  uint64_t call = 0;  // none is 0
};

const float* pack_own(const LinearKernels& kernels, const LinearParams& params,
                      const LinearArrays& arrays, uint64_t call) {
  static thread_local OwnX own;
  if (own.call == call) return own.x.get();
  const int rows = static_cast<int>(params.rows);
  const int64_t floats = rows * packed_floats(params);
  if (floats > own.floats) {
    own = {};
    own.x = scratch(floats);
    own.floats = floats;
  }
  kernels.pack_few(params, arrays, 0, rows, 0, rows, own.x.get(),
                   own.x.get() + rows * padded(params.k));
  own.call = call;
  return own.x.get();
}

int64_t num_groups(int64_t n) {
  return (n + kGroupRows - 1) / kGroupRows;
}

/// task(i, columns) for i below num_tasks, of which each computes groups_each groups of columns by
/// columns(group).
template <class Task>
void few(const LinearKernels& kernels, const LinearParams& params, const LinearArrays& arrays,
         int64_t num_tasks, int64_t groups_each, const Task& task) {
  const uint64_t call = ++few_calls;
  const int64_t products = groups_each * kGroupRows * params.k * params.rows;
  parallel_for(num_tasks, kGrainProducts / products + 1, [&](size_t begin, size_t end) {
    const float* packed = pack_own(kernels, params, arrays, call);
    const float* sums = packed + params.rows * padded(params.k);
    const auto columns = [&](int64_t group) {
      kernels.few_rows(params, arrays, packed, sums, static_cast<int>(group) * kGroupRows);
    };
    for (size_t i = begin; i < end; ++i) task(static_cast<int64_t>(i), columns);
  });
}

/// Groups of columns [begin, end) of the packed rows [first, first + rows), groups_each at a time.
void multiply_groups(const LinearKernels& kernels, const LinearParams& params,
                     const LinearArrays& arrays, const PackedX& packed, int64_t first, int rows,
                     int64_t begin, int64_t end, int64_t groups_each) {
  const Scratch totals = scratch(rows * groups_each * kGroupRows);
  const Scratch panels = scratch(kernels.panel_bytes / int64_t{sizeof(float)});
  for (int64_t group = begin; group < end; group += groups_each) {
    const int64_t columns = std::min(groups_each, end - group) * kGroupRows;
    kernels.many_rows(params, arrays, packed.x.get(), packed.sums, first, rows,
                      static_cast<int>(group) * kGroupRows, static_cast<int>(columns), totals.get(),
                      panels.get());
  }
}

/// Each thread takes rows of its own, so that no line of packed x or of out moves between cores.
void many_by_rows(const LinearKernels& kernels, const LinearParams& params,
                  const LinearArrays& arrays) {
  const int64_t threads = num_threads();
  const int64_t parts = (params.rows + kMaxRows * threads - 1) / (kMaxRows * threads) * threads;
  parallel_for(parts, 1, [&](size_t begin, size_t end) {
    const PackedX packed(params, (params.rows + parts - 1) / parts);
    for (int64_t part = begin; part < static_cast<int64_t>(end); ++part) {
      const int64_t first = params.rows * part / parts;
      const int rows = static_cast<int>(params.rows * (part + 1) / parts - first);
      kernels.pack_many(params, arrays, first, rows, 0, rows, packed.x.get(), packed.sums);
      multiply_groups(kernels, params, arrays, packed, first, rows, 0, num_groups(params.n),
                      kMaxGroups);
    }
  });
}

/// The threads share packed rows and divide the columns.
void many_by_columns(const LinearKernels& kernels, const LinearParams& params,
                     const LinearArrays& arrays) {
  // Equal parts, so that the last one is not a thin one.
  const int64_t parts = (params.rows + kMaxRows - 1) / kMaxRows;
  const int64_t rows_in_part = (params.rows + parts - 1) / parts;
  const PackedX packed(params, rows_in_part);
  const int64_t groups = num_groups(params.n);
  const int64_t groups_each = std::clamp<int64_t>(groups / (4 * num_threads()), 1, kMaxGroups);
  for (int64_t first = 0; first < params.rows; first += rows_in_part) {
    const int rows = static_cast<int>(std::min(rows_in_part, params.rows - first));
    parallel_for(rows, 65536 / params.k + 1, [&](size_t begin, size_t end) {
      kernels.pack_many(params, arrays, first, rows, static_cast<int>(begin), static_cast<int>(end),
                        packed.x.get(), packed.sums);
    });
    parallel_for((groups + groups_each - 1) / groups_each, 1, [&](size_t begin, size_t end) {
      multiply_groups(kernels, params, arrays, packed, first, rows,
                      static_cast<int64_t>(begin) * groups_each,
                      std::min(groups, static_cast<int64_t>(end) * groups_each), groups_each);
    });
  }
}

}  // namespace

void linear(const LinearParams& params, const LinearArrays& arrays) {
  if (params.rows == 0 || params.n == 0) return;
  const LinearKernels kernels = choose_kernels(params);
  if (params.rows <= kFewRows) {
    few(kernels, params, arrays, num_groups(params.n), 1,
        [](int64_t i, const auto& columns) { columns(i); });
  } else if (params.format == WeightFormat::f32 && params.rows >= kOwnRows * num_threads()) {
    many_by_rows(kernels, params, arrays);
  } else {
    many_by_columns(kernels, params, arrays);
  }
}

void linear_swiglu(const LinearParams& params, const LinearArrays& arrays, void* activated) {
  const int features = params.n / 2;
  const FloatType dtype = params.dtype;
  if (params.rows == 0 || params.rows > kFewRows || features % kGroupRows != 0) {
    linear(params, arrays);
    return swiglu({params.rows, features, 1, dtype}, arrays.out, nullptr, activated);
  }
  const int64_t half = features / kGroupRows;
  const int64_t size = dtype == FloatType::f32 ? 4 : 2;
  few(choose_kernels(params), params, arrays, half, 2, [&](int64_t i, const auto& columns) {
    columns(i);
    columns(i + half);
    for (int64_t row = 0; row < params.rows; ++row) {
      const int64_t at = i * kGroupRows;
      const char* gate =
          static_cast<const char*>(arrays.out) + (row * params.out_stride + at) * size;
      swiglu({1, kGroupRows, 0, dtype}, gate, gate + features * size,
             static_cast<char*>(activated) + (row * features + at) * size);
    }
  });
}

void pack_linear(const LinearParams& params, const LinearArrays& from, void* weight, void* scales,
                 void* offsets) {
  const LinearKernels kernels = choose_kernels(params);
  const int64_t groups = num_groups(params.n);
  parallel_for(groups, 65536 / (kGroupRows * params.k) + 1, [&](size_t begin, size_t end) {
    kernels.pack_weight(params, from, static_cast<int>(begin), static_cast<int>(end), weight,
                        scales, offsets);
  });
}

}  // namespace mlxcel::cpu
