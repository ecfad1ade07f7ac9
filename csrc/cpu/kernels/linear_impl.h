#pragma once

#include "cpu/kernels/linear_table.h"
#include "cpu/kernels/linear_weights.h"

namespace mlxcel::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // 12 x 32 sums leave 8 of 32 registers for the operands
constexpr int kPanelVectors = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;  // 6 x 16 sums leave 4 of 16 registers for the operands
constexpr int kPanelVectors = 2;
#elif defined(__aarch64__)
constexpr int kTileRows = 6;  // 6 x 16 sums in 24 of 32 registers
constexpr int kPanelVectors = 4;
#else
constexpr int kTileRows = 4;  // 4 x 8 sums in 8 of 16 registers
constexpr int kPanelVectors = 2;
#endif
constexpr int kPanelColumns = kPanelVectors * kLanes;
constexpr int kTaskPanels = kTaskColumns / kPanelColumns;
static_assert(kTaskPanels * kPanelColumns == kTaskColumns && kGroupRows % kPanelColumns == 0);
/// Row tiles that stay in the L2 cache while the panels of a task pass over them: 48 rows are 48
/// KB.
constexpr int kTilesInCache = 48 / kTileRows;

/// Products that are summed up from zero before they join the total.
template <WeightFormat F>
int run_length(const LinearParams& params) {
  return Format<F>::kQuantized ? params.group_size : kBlockK;
}

/// The total after a quantization group: the sum of x * q needs the group's scale, and the sum of x
/// its offset.
inline vfloat add_run(vfloat total, vfloat sum, vfloat scale, vfloat offset, float x_sum) {
  return fma(scale, sum, fma(offset, splat(x_sum), total));
}

inline float bias_at(const LinearParams& params, const LinearArrays& arrays, int n) {
  switch (params.bias) {
    case FloatType::f32:
      return static_cast<const float*>(arrays.bias)[n];
    case FloatType::f16:
      return to_float(static_cast<const f16*>(arrays.bias)[n]);
    case FloatType::bf16:
      return to_float(static_cast<const bf16*>(arrays.bias)[n]);
  }
  return 0.0f;
}

template <class T>
void store_columns(T* out, int count, vfloat total) {
  if (count == kLanes) return store(out, total);
  T part[kLanes];
  store(part, total);
  for (int i = 0; i < count; ++i) out[i] = part[i];
}

/// Adds the bias and writes columns [n0, n0 + kLanes) of one row, as far as they exist.
void store_out(const LinearParams& params, const LinearArrays& arrays, int64_t row, int n0,
               vfloat total) {
  const int64_t at = row * params.out_stride + n0;
  const int count = smaller(kLanes, params.n - n0);
  if (params.has_bias) {
    float bias[kLanes] = {};
    for (int i = 0; i < count; ++i) bias[i] = bias_at(params, arrays, n0 + i);
    total += load(bias);
  }
  switch (params.dtype) {
    case FloatType::f32:
      return store_columns(static_cast<float*>(arrays.out) + at, count, total);
    case FloatType::f16:
      return store_columns(static_cast<f16*>(arrays.out) + at, count, total);
    case FloatType::bf16:
      return store_columns(static_cast<bf16*>(arrays.out) + at, count, total);
  }
}

/// f(i, j) for i below M and j below N, both constants.
template <int M, int N, class Fn>
[[gnu::always_inline]] inline void each(const Fn& f) {
  unroll<M>([&](auto i) __attribute__((always_inline)) {
    unroll<N>([&](auto j) __attribute__((always_inline)) { f(i, j); });
  });
}

// ---- x ----

template <class T>
void widen(const T* from, int n, float* to) {
  const int body = n - n % kLanes;
  for (int i = 0; i < body; i += kLanes) store(to + i, load(from + i));
  for (int i = body; i < n; ++i) to[i] = to_float(from[i]);
}

/// Sums of x over the quantization groups of one row's elements [0, n): sums[group * stride].
void sum_groups(const float* x, int n, int group_size, float* sums, int64_t stride) {
  for (int k = 0; k < n; k += group_size) {
    vfloat acc = {};
    for (int i = 0; i < group_size; i += kLanes) acc += load(x + k + i);
    sums[k / group_size * stride] = sum(acc);
  }
}

/// x as few_rows reads it: f32, lowered as the format wants.
template <WeightFormat F, class T>
void widen_x(const LinearParams& params, const LinearArrays& arrays, float* x, float* sums) {
  widen(static_cast<const T*>(arrays.x), static_cast<int>(params.rows) * params.k, x);
  if constexpr (Format<F>::kQuantized) {
    constexpr int kPerWord = Format<F>::kPerWord;
    for (int m = 0; m < params.rows; ++m, x += params.k) {
      sum_groups(x, params.k, params.group_size, sums + m, params.rows);
      for (int k = 0; k < params.k; k += kPerWord) {
        for (int j = 0; j < kPerWord; ++j) x[k + j] *= Format<F>::lower(j);
      }
    }
  }
}

/// Order of packed: block of k, tile, element, row of the tile; as multiply_tile reads it.
template <class T>
void pack_x(const LinearParams& params, const LinearArrays& arrays, int64_t first, int rows,
            int begin, int end, float* packed, float* sums) {
  for (int row = begin * kTileRows; row < smaller(end * kTileRows, rows); ++row) {
    const int tile_row = row / kTileRows * kTileRows;
    const int tile_rows = smaller(kTileRows, rows - tile_row);
    const T* x = static_cast<const T*>(arrays.x) + (first + row) * params.k;
    for (int k0 = 0; k0 < params.k; k0 += kBlockK) {
      const int depth = smaller(kBlockK, params.k - k0);
      float line[kBlockK];
      widen(x + k0, depth, line);
      float* to = packed + int64_t{rows} * k0 + int64_t{tile_row} * depth + (row - tile_row);
      for (int k = 0; k < depth; ++k) to[k * tile_rows] = line[k];
      if (params.group_size) {
        sum_groups(line, depth, params.group_size,
                   sums + int64_t{k0} / params.group_size * rows + row, rows);
      }
    }
  }
}

// ---- few rows: each weight is read once and unpacked in registers ----

/// Vectors of rows of the weight that are multiplied with one row of x at a time.
constexpr int kFewVectors = kGroupRows / kLanes < 8 ? kGroupRows / kLanes : 8;

/// Rows [0, M) of x times rows [n0, n0 + R * kLanes) of the weight. R vectors of rows hide the
/// latency of a sum's chain of additions: M * R chains run side by side.
template <WeightFormat F, int M, int R>
void few_rows_unit(const LinearParams& params, const LinearArrays& arrays, const float* x,
                   const float* sums, int n0) {
  using Form = Format<F>;
  const int run = run_length<F>(params);
  Block<F, R * kLanes> block;
  vfloat total[M][R];
  each<M, R>([&](auto m, auto r) __attribute__((always_inline)) { total[m][r] = vfloat{}; });
  for (int k0 = 0; k0 < params.k; k0 += kBlockK) {
    const int depth = smaller(kBlockK, params.k - k0);
    block.open(params, arrays, n0, k0, k0 + depth);
    for (int g = 0, k = 0; k < depth; ++g, k += run) {
      vfloat sum[M][R];
      each<M, R>([&](auto m, auto r) __attribute__((always_inline)) { sum[m][r] = vfloat{}; });
      for_each_k(block, k, smaller(k + run, depth),
                 [&](int at, auto j, const vuint* words) __attribute__((always_inline)) {
                   vfloat xs[M];
                   unroll<M>([&](auto m) __attribute__((always_inline)) {
                     xs[m] = splat(x[int64_t{m} * params.k + k0 + at]);
                   });
                   unroll<R>([&](auto r) __attribute__((always_inline)) {
                     const vfloat w = Form::raise(words[r], j);
                     unroll<M>([&](auto m) __attribute__((always_inline)) {
                       sum[m][r] = fma(xs[m], w, sum[m][r]);
                     });
                   });
                 });
      if constexpr (Form::kQuantized) {
        block.for_each_scale(
            g, [&](auto r, vfloat scale, vfloat offset) __attribute__((always_inline)) {
              unroll<M>([&](auto m) __attribute__((always_inline)) {
                total[m][r] = add_run(total[m][r], sum[m][r], scale, offset, sums[g * M + m]);
              });
            });
      } else {
        each<M, R>([&](auto m, auto r)
                       __attribute__((always_inline)) { total[m][r] += sum[m][r]; });
      }
    }
    if constexpr (Form::kQuantized) sums += depth / run * M;
  }
  each<M, R>([&](auto m, auto r) __attribute__((always_inline)) {
    const int n = n0 + r * kLanes;
    if (n < params.n) store_out(params, arrays, m, n, total[m][r]);
  });
}

template <WeightFormat F, int M, int R>
void few_rows_units(const LinearParams& params, const LinearArrays& arrays, const float* x,
                    const float* sums, int begin, int end) {
  for (int n0 = begin; n0 < end; n0 += R * kLanes) {
    few_rows_unit<F, M, R>(params, arrays, x, sums, n0);
  }
}

template <WeightFormat F>
void few_rows(const LinearParams& params, const LinearArrays& arrays, const float* x,
              const float* sums, int begin, int end) {
  switch (params.rows) {
    case 1:
      return few_rows_units<F, 1, kFewVectors>(params, arrays, x, sums, begin, end);
    case 2:
      return few_rows_units<F, 2, kFewVectors / 2>(params, arrays, x, sums, begin, end);
    case 3:
      return few_rows_units<F, 3, kFewVectors / 4>(params, arrays, x, sums, begin, end);
    case 4:
      return few_rows_units<F, 4, kFewVectors / 4>(params, arrays, x, sums, begin, end);
  }
}

// ---- many rows: panels of unpacked weights, tiles of packed x ----

/// kPanelColumns rows of the weight over one block of k.
struct Panel {
  float weight[kBlockK][kPanelColumns];
  float scale[kGroupsInBlock][kPanelColumns];
  float offset[kGroupsInBlock][kPanelColumns];
};

template <WeightFormat F>
void fill_panel(const LinearParams& params, const LinearArrays& arrays, int n0, int k0, int depth,
                Panel* panel) {
  Block<F, kPanelColumns> block;
  block.open(params, arrays, n0, k0, k0 + depth);
  for_each_k(block, 0, depth,
             [&](int k, auto j, const vuint* words) __attribute__((always_inline)) {
               unroll<kPanelVectors>([&](auto v) __attribute__((always_inline)) {
                 store(panel->weight[k] + v * kLanes, Format<F>::unpack(words[v], j));
               });
             });
  if constexpr (Format<F>::kQuantized) {
    for (int g = 0; g * params.group_size < depth; ++g) {
      block.for_each_scale(g,
                           [&](auto v, vfloat scale, vfloat offset) __attribute__((always_inline)) {
                             store(panel->scale[g] + v * kLanes, scale);
                             store(panel->offset[g] + v * kLanes, offset);
                           });
    }
  }
}

/// Adds one block of k to the totals of a tile: x (depth, M) packed; sums (groups, sum_stride);
/// totals (M, kTaskColumns).
template <bool quantized, int M>
void multiply_tile(const float* x, const float* sums, int64_t sum_stride, const Panel& panel,
                   int depth, int run, bool first, float* totals) {
  for (int g = 0, k = 0; k < depth; ++g) {
    vfloat sum[M][kPanelVectors];
    each<M, kPanelVectors>([&](auto m, auto v)
                               __attribute__((always_inline)) { sum[m][v] = vfloat{}; });
    for (const int end = smaller(k + run, depth); k < end; ++k) {
      vfloat w[kPanelVectors];
      unroll<kPanelVectors>([&](auto v) __attribute__((always_inline)) {
        w[v] = load(panel.weight[k] + v * kLanes);
      });
      unroll<M>([&](auto m) __attribute__((always_inline)) {
        const vfloat xs = splat(x[k * M + m]);
        unroll<kPanelVectors>(
            [&](auto v) __attribute__((always_inline)) { sum[m][v] = fma(xs, w[v], sum[m][v]); });
      });
    }
    each<M, kPanelVectors>([&](auto m, auto v) __attribute__((always_inline)) {
      float* total = totals + m * kTaskColumns + v * kLanes;
      const vfloat before = first ? vfloat{} : load(total);
      if constexpr (quantized) {
        store(total, add_run(before, sum[m][v], load(panel.scale[g] + v * kLanes),
                             load(panel.offset[g] + v * kLanes), sums[g * sum_stride + m]));
      } else {
        store(total, before + sum[m][v]);
      }
    });
    first = false;
  }
}

/// A tile of `rows` rows, 1 to M.
template <bool quantized, int M = kTileRows>
void multiply_tile(int rows, const float* x, const float* sums, int64_t sum_stride,
                   const Panel& panel, int depth, int run, bool first, float* totals) {
  if (rows == M) {
    multiply_tile<quantized, M>(x, sums, sum_stride, panel, depth, run, first, totals);
  } else if constexpr (M > 1) {
    multiply_tile<quantized, M - 1>(rows, x, sums, sum_stride, panel, depth, run, first, totals);
  }
}

template <WeightFormat F>
void many_rows(const LinearParams& params, const LinearArrays& arrays, const float* packed,
               const float* sums, int64_t first, int rows, int n0, float* totals, void* scratch) {
  constexpr bool kQuantized = Format<F>::kQuantized;
  Panel* panels = static_cast<Panel*>(scratch);
  const int columns = smaller(kTaskColumns, params.n - n0);
  const int run = run_length<F>(params);
  const int rows_in_cache = kTilesInCache * kTileRows;
  for (int k0 = 0; k0 < params.k; k0 += kBlockK) {
    const int depth = smaller(kBlockK, params.k - k0);
    for (int c = 0; c < columns; c += kPanelColumns) {
      fill_panel<F>(params, arrays, n0 + c, k0, depth, panels + c / kPanelColumns);
    }
    for (int row0 = 0; row0 < rows; row0 += rows_in_cache) {
      for (int c = 0; c < columns; c += kPanelColumns) {
        for (int row = row0; row < smaller(row0 + rows_in_cache, rows); row += kTileRows) {
          multiply_tile<kQuantized>(smaller(kTileRows, rows - row),
                                    packed + int64_t{rows} * k0 + int64_t{row} * depth,
                                    sums + (kQuantized ? int64_t{k0} / run * rows + row : 0), rows,
                                    panels[c / kPanelColumns], depth, run, k0 == 0,
                                    totals + int64_t{row} * kTaskColumns + c);
        }
      }
    }
  }
  for (int row = 0; row < rows; ++row) {
    for (int c = 0; c < columns; c += kLanes) {
      store_out(params, arrays, first + row, n0 + c,
                load(totals + int64_t{row} * kTaskColumns + c));
    }
  }
}

// ---- the packed layout ----

/// Groups of rows [begin, end) of row-major weights.
void pack_weight(const LinearParams& params, const LinearArrays& from, int begin, int end,
                 void* weight, void* scales, void* offsets) {
  const int per_word = values_per_word(params.format);
  const int64_t row_words = (params.k + per_word - 1) / per_word;
  const auto pack_scales = [&]<class S>(const void* rows, int group, S* to) {
    const int groups = params.k / params.group_size;
    interleave_scales<kGroupRows>(params, static_cast<const S*>(rows), group * kGroupRows, 0,
                                  groups, to + int64_t{group} * groups * kGroupRows);
  };
  for (int group = begin; group < end; ++group) {
    interleave_words<kGroupRows>(params, from.weight, int64_t{params.k} * 4 / per_word,
                                 group * kGroupRows, 0, row_words,
                                 static_cast<uint32_t*>(weight) + group * row_words * kGroupRows);
    if (params.group_size == 0) continue;
    if (params.scales == FloatType::f32) {
      pack_scales(from.scales, group, static_cast<float*>(scales));
      pack_scales(from.offsets, group, static_cast<float*>(offsets));
    } else {  // both 16-bit types move alike
      pack_scales(from.scales, group, static_cast<f16*>(scales));
      pack_scales(from.offsets, group, static_cast<f16*>(offsets));
    }
  }
}

// ---- the table ----

template <WeightFormat F, class T>
constexpr LinearKernels kernels_of() {
  return {kTileRows,     int64_t{kTaskPanels} * sizeof(Panel),
          &few_rows<F>,  &widen_x<F, T>,
          &many_rows<F>, &pack_x<T>,
          &pack_weight};
}

template <class T>
LinearKernels kernels_for(WeightFormat format) {
  switch (format) {
    case WeightFormat::f32:
      return kernels_of<WeightFormat::f32, T>();
    case WeightFormat::f16:
      return kernels_of<WeightFormat::f16, T>();
    case WeightFormat::bf16:
      return kernels_of<WeightFormat::bf16, T>();
    case WeightFormat::q4:
      return kernels_of<WeightFormat::q4, T>();
    case WeightFormat::q8:
      return kernels_of<WeightFormat::q8, T>();
  }
  return {};
}

LinearKernels linear_kernels(WeightFormat format, FloatType dtype) {
  switch (dtype) {
    case FloatType::f32:
      return kernels_for<float>(format);
    case FloatType::f16:
      return kernels_for<f16>(format);
    case FloatType::bf16:
      return kernels_for<bf16>(format);
  }
  return {};
}

}  // namespace
}  // namespace mlxcel::cpu
