#pragma once

#include "cpu/kernels/linear_table.h"
#include "cpu/kernels/linear_weights.h"

namespace mlxcel::cpu {
namespace {

#if defined(__AVX2__)
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
static_assert(kTaskPanels * kPanelColumns == kTaskColumns);
/// Row tiles that stay in the L2 cache while the panels of a task pass over them: 48 rows are 48
/// KB.
constexpr int kTilesInCache = 48 / kTileRows;

/// The f32 values of `n` neighbours.
template <class T>
void to_floats(const T* from, int n, float* to) {
  const int body = n - n % kLanes;
  for (int i = 0; i < body; i += kLanes) store(to + i, load(from + i));
  for (int i = body; i < n; ++i) to[i] = to_float(from[i]);
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

/// Adds the bias and writes columns [n0, n0 + kLanes) of one row, as far as they exist.
template <class T>
void store_out(const LinearParams& params, const LinearArrays& arrays, int64_t row, int n0,
               vfloat total) {
  T* out = static_cast<T*>(arrays.out) + row * params.n + n0;
  const int count = smaller(kLanes, params.n - n0);
  if (params.has_bias) {
    float bias[kLanes] = {};
    for (int i = 0; i < count; ++i) bias[i] = bias_at(params, arrays, n0 + i);
    total += load(bias);
  }
  if (count == kLanes) return store(out, total);
  T part[kLanes];
  store(part, total);
  for (int i = 0; i < count; ++i) out[i] = part[i];
}

// ---- few rows: each weight is read once and dequantized in registers ----

/// Rows [0, M) of x times rows [n0, n0 + R * kLanes) of the weight. R row groups hide the latency
/// of a sum's chain of additions: M * R chains run side by side.
template <WeightFormat F, class T, int M, int R>
void few_rows_unit(const LinearParams& params, const LinearArrays& arrays, const float* x, int n0) {
  using Group = RowGroup<F>;
  Group group[R];
  for (int r = 0; r < R; ++r) group[r].open(params, arrays, n0 + r * kLanes);
  vfloat total[M][R] = {};
  for (int k0 = 0; k0 < params.k; k0 += kBlockK) {
    const int k1 = smaller(k0 + kBlockK, params.k);
    for (Group& g : group) g.enter_block(k0);
    vfloat acc[M][R] = {};
    for (int k = k0; k < k1; k += Group::kStep) {
      vuint words[R][kWords];
      for (int r = 0; r < R; ++r) group[r].load_words(k, k1 - k, words[r]);
      const int g = group[0].group_in_block(k);
      const auto multiply = [&](int i, int j) {
        const int at = k + i * Group::kPerWord + j;
        vfloat xs[M];
        for (int m = 0; m < M; ++m) xs[m] = splat(x[static_cast<int64_t>(m) * params.k + at]);
        for (int r = 0; r < R; ++r) {
          const vfloat w = group[r].dequantize(words[r][i], j, g);
          for (int m = 0; m < M; ++m) acc[m][r] = fma(xs[m], w, acc[m][r]);
        }
      };
      if (k1 - k >= Group::kStep) {
        for (int i = 0; i < kWords; ++i) {
#pragma GCC unroll 8
          for (int j = 0; j < Group::kPerWord; ++j) multiply(i, j);
        }
      } else {
        for (int e = 0; e < k1 - k; ++e) multiply(e / Group::kPerWord, e % Group::kPerWord);
      }
    }
    for (int m = 0; m < M; ++m) {
      for (int r = 0; r < R; ++r) total[m][r] = k0 == 0 ? acc[m][r] : total[m][r] + acc[m][r];
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) {
      const int n = n0 + r * kLanes;
      if (n < params.n) store_out<T>(params, arrays, m, n, total[m][r]);
    }
  }
}

template <WeightFormat F, class T, int M>
void few_rows_units(const LinearParams& params, const LinearArrays& arrays, const float* x,
                    int begin, int end) {
  constexpr int kGroups = M <= 2 ? 4 : 2;
  for (int n0 = begin; n0 < end; n0 += kGroups * kLanes) {
    few_rows_unit<F, T, M, kGroups>(params, arrays, x, n0);
  }
}

template <WeightFormat F, class T>
void few_rows(const LinearParams& params, const LinearArrays& arrays, const float* x, int begin,
              int end) {
  switch (params.rows) {
    case 1:
      return few_rows_units<F, T, 1>(params, arrays, x, begin, end);
    case 2:
      return few_rows_units<F, T, 2>(params, arrays, x, begin, end);
    case 3:
      return few_rows_units<F, T, 3>(params, arrays, x, begin, end);
    case 4:
      return few_rows_units<F, T, 4>(params, arrays, x, begin, end);
  }
}

// ---- many rows: panels of dequantized weights, tiles of packed x ----

/// panel[k - k0][column]: kPanelColumns rows of the weight, elements [k0, k1), as f32.
template <WeightFormat F>
void fill_panel(const LinearParams& params, const LinearArrays& arrays, int n0, int k0, int k1,
                float* panel) {
  for (int v = 0; v < kPanelVectors; ++v) {
    RowGroup<F> group;
    group.open(params, arrays, n0 + v * kLanes);
    group.enter_block(k0);
    for (int k = k0; k < k1; k += RowGroup<F>::kStep) {
      vuint words[kWords];
      group.load_words(k, k1 - k, words);
      const int g = group.group_in_block(k);
      float* to = panel + static_cast<int64_t>(k - k0) * kPanelColumns + v * kLanes;
      if (k1 - k >= RowGroup<F>::kStep) {
        for (int i = 0; i < kWords; ++i) {
#pragma GCC unroll 8
          for (int j = 0; j < RowGroup<F>::kPerWord; ++j) {
            store(to, group.dequantize(words[i], j, g));
            to += kPanelColumns;
          }
        }
      } else {
        for (int e = 0; e < k1 - k; ++e, to += kPanelColumns) {
          store(to,
                group.dequantize(words[e / RowGroup<F>::kPerWord], e % RowGroup<F>::kPerWord, g));
        }
      }
    }
  }
}

/// One run of the sums of a tile: x (depth, M) packed, panel (depth, kPanelColumns).
template <int M>
void multiply_tile(const float* x, const float* panel, int depth, vfloat (*acc)[kPanelVectors]) {
  vfloat sum[M][kPanelVectors] = {};
  for (int k = 0; k < depth; ++k) {
    vfloat w[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v) w[v] = load(panel + k * kPanelColumns + v * kLanes);
    for (int m = 0; m < M; ++m) {
      const vfloat xs = splat(x[k * M + m]);
      for (int v = 0; v < kPanelVectors; ++v) sum[m][v] = fma(xs, w[v], sum[m][v]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < kPanelVectors; ++v) acc[m][v] = sum[m][v];
  }
}

void multiply_tile(int rows, const float* x, const float* panel, int depth,
                   vfloat (*sum)[kPanelVectors]) {
  static_assert(kTileRows <= 6);
  switch (rows) {
    case 1:
      return multiply_tile<1>(x, panel, depth, sum);
    case 2:
      return multiply_tile<2>(x, panel, depth, sum);
    case 3:
      return multiply_tile<3>(x, panel, depth, sum);
    case 4:
      return multiply_tile<4>(x, panel, depth, sum);
    case 5:
      return multiply_tile<5>(x, panel, depth, sum);
    case 6:
      return multiply_tile<6>(x, panel, depth, sum);
  }
}

/// Columns [n0, n0 + kTaskColumns) of `rows` rows that start at `first`; x is packed by pack_rows.
/// `totals` (rows, kTaskColumns) and `panels` (kBlockK, kTaskColumns) are scratch.
template <WeightFormat F, class T>
void many_rows(const LinearParams& params, const LinearArrays& arrays, const float* x,
               int64_t first, int rows, int n0, float* totals, float* panels) {
  const int columns = smaller(kTaskColumns, params.n - n0);
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  for (int k0 = 0; k0 < params.k; k0 += kBlockK) {
    const int k1 = smaller(k0 + kBlockK, params.k);
    for (int c = 0; c < columns; c += kPanelColumns) {
      fill_panel<F>(params, arrays, n0 + c, k0, k1, panels + static_cast<int64_t>(c) * kBlockK);
    }
    for (int tile0 = 0; tile0 < tiles; tile0 += kTilesInCache) {
      for (int c = 0; c < columns; c += kPanelColumns) {
        for (int tile = tile0; tile < smaller(tile0 + kTilesInCache, tiles); ++tile) {
          const int row = tile * kTileRows;
          const int m_end = smaller(kTileRows, rows - row);
          vfloat acc[kTileRows][kPanelVectors];
          // Before block k0, the rows of x take rows * k0 floats; before a tile of a block, row
          // runs of the block's depth.
          const float* packed =
              x + static_cast<int64_t>(rows) * k0 + static_cast<int64_t>(row) * (k1 - k0);
          multiply_tile(m_end, packed, panels + static_cast<int64_t>(c) * kBlockK, k1 - k0, acc);
          for (int m = 0; m < m_end; ++m) {
            for (int v = 0; v < kPanelVectors; ++v) {
              const int n = c + v * kLanes;
              float* total = totals + static_cast<int64_t>(row + m) * kTaskColumns + n;
              const vfloat sum = k0 == 0 ? acc[m][v] : load(total) + acc[m][v];
              if (k1 < params.k) {
                store(total, sum);
              } else if (n0 + n < params.n) {
                store_out<T>(params, arrays, first + row + m, n0 + n, sum);
              }
            }
          }
        }
      }
    }
  }
}

/// Tiles [begin, end) of `rows` rows of x that start at `first`, as f32 in the order in which
/// multiply_tile reads them: (block of k, tile, element, row of the tile).
template <class T>
void pack_rows(const LinearParams& params, const T* x, int64_t first, int rows, int begin, int end,
               float* packed) {
  for (int tile = begin; tile < end; ++tile) {
    const int row = tile * kTileRows;
    const int m_end = smaller(kTileRows, rows - row);
    for (int k0 = 0; k0 < params.k; k0 += kBlockK) {
      const int depth = smaller(kBlockK, params.k - k0);
      float* to = packed + static_cast<int64_t>(rows) * k0 + static_cast<int64_t>(row) * depth;
      for (int m = 0; m < m_end; ++m) {
        float line[kBlockK];
        to_floats(x + (first + row + m) * params.k + k0, depth, line);
        for (int k = 0; k < depth; ++k) to[k * m_end + m] = line[k];
      }
    }
  }
}

// ---- entry points: one per (format, type of x) ----

template <class T>
void pack(const LinearParams& params, const LinearArrays& arrays, int64_t first, int rows,
          int begin, int end, float* packed) {
  pack_rows(params, static_cast<const T*>(arrays.x), first, rows, begin, end, packed);
}

template <class T>
void widen(const LinearArrays& arrays, int n, float* to) {
  to_floats(static_cast<const T*>(arrays.x), n, to);
}

template <class T>
constexpr LinearKernels kernels_for(WeightFormat format) {
  LinearKernels k{kTileRows, nullptr, nullptr, &pack<T>, &widen<T>};
  switch (format) {
    case WeightFormat::f32:
      k.few_rows = &few_rows<WeightFormat::f32, T>;
      k.many_rows = &many_rows<WeightFormat::f32, T>;
      break;
    case WeightFormat::f16:
      k.few_rows = &few_rows<WeightFormat::f16, T>;
      k.many_rows = &many_rows<WeightFormat::f16, T>;
      break;
    case WeightFormat::bf16:
      k.few_rows = &few_rows<WeightFormat::bf16, T>;
      k.many_rows = &many_rows<WeightFormat::bf16, T>;
      break;
    case WeightFormat::q4:
      k.few_rows = &few_rows<WeightFormat::q4, T>;
      k.many_rows = &many_rows<WeightFormat::q4, T>;
      break;
    case WeightFormat::q8:
      k.few_rows = &few_rows<WeightFormat::q8, T>;
      k.many_rows = &many_rows<WeightFormat::q8, T>;
      break;
  }
  return k;
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
