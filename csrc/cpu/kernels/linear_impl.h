#pragma once

#include "cpu/kernels/linear_table.h"
#include "cpu/kernels/linear_weights.h"

namespace mlxcel::cpu {
namespace {

/// Rows of x in a tile, and rows up to which a tile is four vectors of the weight's rows wide
/// instead of two.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // 12 x 2 sums leave 8 of 32 registers for the operands
constexpr int kWideTileRows = 6;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;  // 6 x 2 sums leave 4 of 16 registers for the operands
constexpr int kWideTileRows = 2;
#elif defined(__aarch64__)
constexpr int kTileRows = 6;  // 6 x 4 sums leave 8 of 32 registers for the operands
constexpr int kWideTileRows = 6;
#else
constexpr int kTileRows = 4;  // 4 x 2 sums leave 8 of 16 registers for the operands
constexpr int kWideTileRows = 2;
#endif
/// Vectors of the weight's rows that are multiplied with M rows of x at a time. M times as many
/// sums run side by side, which hides the latency of an addition.
template <int M>
constexpr int kTileVectors = smaller(kGroupRows / kLanes, M == 1               ? 8
                                                          : M <= kWideTileRows ? 4
                                                                               : 2);
constexpr int kPanelVectors = kTileVectors<kTileRows>;
constexpr int kPanelColumns = kPanelVectors * kLanes;
/// Rows of x that stay in the L2 cache while the panels of a group pass over them: 48 KB.
constexpr int kRowsInCache = 48;

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

/// Adds the bias to totals (rows, kGroupRows) and writes them to columns [n0, n0 + kGroupRows), as
/// far as they exist, of rows [first, first + rows).
template <class T>
void store_rows(const LinearParams& params, const LinearArrays& arrays, int64_t first, int rows,
                int n0, const float* totals) {
  const int columns = smaller(kGroupRows, params.n - n0);
  const int body = columns - columns % kLanes;
  float bias[kGroupRows] = {};
  for (int c = 0; params.has_bias && c < columns; ++c) bias[c] = bias_at(params, arrays, n0 + c);
  for (int row = 0; row < rows; ++row, totals += kGroupRows) {
    T* out = static_cast<T*>(arrays.out) + (first + row) * params.out_stride + n0;
    const auto total = [&](int c) {
      const vfloat sum = load(totals + c);
      return params.has_bias ? sum + load(bias + c) : sum;
    };
    for (int c = 0; c < body; c += kLanes) store(out + c, total(c));
    if (body == columns) continue;
    T part[kLanes];
    store(part, total(body));
    for (int c = body; c < columns; ++c) out[c] = part[c - body];
  }
}

void store_out(const LinearParams& params, const LinearArrays& arrays, int64_t first, int rows,
               int n0, const float* totals) {
  switch (params.dtype) {
    case FloatType::f32:
      return store_rows<float>(params, arrays, first, rows, n0, totals);
    case FloatType::f16:
      return store_rows<f16>(params, arrays, first, rows, n0, totals);
    case FloatType::bf16:
      return store_rows<bf16>(params, arrays, first, rows, n0, totals);
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

/// What neighbours along k are multiplied with before they meet raised weights (see Format): enough
/// of them for whole vectors.
template <WeightFormat F>
struct LowerFactors {
  static constexpr int kCount = kLanes > Format<F>::kPerWord ? kLanes : Format<F>::kPerWord;
  constexpr LowerFactors() {
    for (int i = 0; i < kCount; ++i) at[i] = Format<F>::lower(i % Format<F>::kPerWord);
  }
  alignas(64) float at[kCount] = {};
};

/// A quantization group of one row to f32, lowered where asked for; returns the sum of x.
template <WeightFormat F, bool Lowers, class T>
float widen_group(const T* from, int group_size, float* to) {
  static constexpr LowerFactors<F> factors;
  vfloat acc = {};
  for (int i = 0; i < group_size; i += kLanes) {
    const vfloat x = load(from + i);
    acc += x;
    store(to + i, Lowers ? x * load(factors.at + i % factors.kCount) : x);
  }
  return sum(acc);
}

/// Rows [first + begin, first + end) of x in f32, as packed[block of k][row][element], and their
/// sums[quantization group][row]; rows: those of the whole of packed. Lowers: for weights that are
/// unpacked in registers.
template <WeightFormat F, bool Lowers, class T>
void pack_x(const LinearParams& params, const LinearArrays& arrays, int64_t first, int rows,
            int begin, int end, float* packed, float* sums) {
  for (int row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(arrays.x) + (first + row) * params.k;
    for (int k0 = 0; k0 < params.k; k0 += kBlockK) {
      const int depth = smaller(kBlockK, params.k - k0);
      float* line = packed + int64_t{rows} * k0 + int64_t{row} * kBlockK;
      if constexpr (Format<F>::kQuantized) {
        const int size = params.group_size;
        float* group_sum = sums + int64_t{k0} / size * rows + row;
        for (int k = 0; k < depth; k += size, group_sum += rows) {
          *group_sum = widen_group<F, Lowers>(x + k0 + k, size, line + k);
        }
      } else {
        widen(x + k0, depth, line);
      }
    }
  }
}

// ---- tiles ----

/// sum[m][r] += element(m) * weight(r). The shorter side waits in registers for the other.
template <int M, int R, class Element, class Weight>
[[gnu::always_inline]] inline void add_products(const Element& element, const Weight& weight,
                                                vfloat (&sum)[M][R]) {
  if constexpr (R <= M) {
    vfloat w[R];
    unroll<R>([&](auto r) __attribute__((always_inline)) { w[r] = weight(r); });
    unroll<M>([&](auto m) __attribute__((always_inline)) {
      // A multiply-add that loads x itself saves an instruction but loads x R times: with every
      // second row doing so, neither instructions nor loads hold up two multiply-adds a cycle.
      if constexpr (kFoldsBroadcasts && M > kWideTileRows && m % 2 == 0) {
        unroll<R>([&](auto r) __attribute__((always_inline)) {
          sum[m][r] = fma_broadcast(element(m), w[r], sum[m][r]);
        });
        return;
      }
      const vfloat x = in_register(splat(*element(m)));
      unroll<R>([&](auto r)
                    __attribute__((always_inline)) { sum[m][r] = fma(x, w[r], sum[m][r]); });
    });
  } else {
    vfloat x[M];
    unroll<M>([&](auto m) __attribute__((always_inline)) { x[m] = splat(*element(m)); });
    unroll<R>([&](auto r) __attribute__((always_inline)) {
      const vfloat w = weight(r);
      unroll<M>([&](auto m)
                    __attribute__((always_inline)) { sum[m][r] = fma(x[m], w, sum[m][r]); });
    });
  }
}

/// Adds one block of k of M rows of packed x times rows [column, column + R * kLanes) of the weight
/// to totals (M, kGroupRows). Source: a Block, whose words are unpacked in registers, or a Panel.
/// sums (groups of the block, sum_stride).
template <int M, int R, class Source>
void multiply_tile(const Source& source, int column, int depth, int run, const float* x,
                   const float* sums, int64_t sum_stride, float* totals) {
  totals += column;
  for (int g = 0, k = 0; k < depth; ++g, k += run) {
    // GCC would else keep the totals of all groups on the stack as well.
    asm("" : "+r"(totals));
    vfloat sum[M][R];
    each<M, R>([&](auto m, auto r) __attribute__((always_inline)) { sum[m][r] = vfloat{}; });
    source.template for_each_k<R>(
        column, k, smaller(k + run, depth),
        [&](int at, const auto& weight) __attribute__((always_inline)) {
          add_products<M, R>([&](auto m)
                                 __attribute__((always_inline)) { return x + (m * kBlockK + at); },
                             weight, sum);
        });
    const auto add = [&](auto r, const auto& join) __attribute__((always_inline)) {
      unroll<M>([&](auto m) __attribute__((always_inline)) {
        float* total = totals + m * kGroupRows + r * kLanes;
        store(total, join(load(total), sum[m][r], m));
      });
    };
    if constexpr (Source::kQuantized) {
      source.template for_each_scale<R>(
          g, column, [&](auto r, vfloat scale, vfloat offset) __attribute__((always_inline)) {
            add(r, [&](vfloat total, vfloat products, auto m) __attribute__((always_inline)) {
              return add_run(total, products, scale, offset, sums[g * sum_stride + m]);
            });
          });
    } else {
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        add(r, [](vfloat total, vfloat products, auto)
                   __attribute__((always_inline)) { return total + products; });
      });
    }
  }
}

/// Columns [0, columns) of a source, for a tile of `rows` rows, 1 to M.
template <int M = kTileRows, class Source>
void multiply_rows(int rows, const Source& source, int columns, int depth, int run, const float* x,
                   const float* sums, int64_t sum_stride, float* totals) {
  if (rows == M) {
    constexpr int R = smaller(kTileVectors<M>, Source::kVectors);
    for (int column = 0; column < columns; column += R * kLanes) {
      multiply_tile<M, R>(source, column, depth, run, x, sums, sum_stride, totals);
    }
  } else if constexpr (M > 1) {
    multiply_rows<M - 1>(rows, source, columns, depth, run, x, sums, sum_stride, totals);
  }
}

/// `count` rows of x in tiles of equal heights, so that none is a low one: f(row, rows).
template <class Fn>
void for_each_tile(int count, const Fn& f) {
  const int tiles = (count + kTileRows - 1) / kTileRows;
  for (int i = 0; i < tiles; ++i) {
    const int row = count * i / tiles;
    f(row, count * (i + 1) / tiles - row);
  }
}

// ---- a block of k: what few and many rows have in common ----

/// Fetches the lines that store_out() will write: each row of out is in other pages, and a store
/// would wait for memory.
inline void prefetch_out(const LinearParams& params, const LinearArrays& arrays, int64_t first,
                         int rows, int n0) {
  const int size = params.dtype == FloatType::f32 ? 4 : 2;
  const int bytes = smaller(kGroupRows, params.n - n0) * size;
  const char* out = static_cast<const char*>(arrays.out) + (first * params.out_stride + n0) * size;
  for (int row = 0; row < rows; ++row, out += int64_t{params.out_stride} * size) {
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(out + at, 1);
  }
}

/// Around multiply(), which adds the block at k0 to totals (rows, kGroupRows) of rows [first, first
/// + rows): sets them to zero before the first block, writes out after the last.
template <class Multiply>
void add_block(const LinearParams& params, const LinearArrays& arrays, int64_t first, int rows,
               int n0, int k0, float* totals, const Multiply& multiply) {
  const bool last = k0 + kBlockK >= params.k;
  if (k0 == 0) std::memset(totals, 0, sizeof(float) * rows * kGroupRows);
  if (last) prefetch_out(params, arrays, first, rows, n0);
  multiply();
  if (last) store_out(params, arrays, first, rows, n0, totals);
}

/// The block at k0 of columns [n0, n0 + kGroupRows), with weights that are unpacked in registers,
/// for each tile anew. Few: rows, so that each tile has a large share of what comes next to fetch.
template <WeightFormat F, bool Few>
void direct_block(const LinearParams& params, const LinearArrays& arrays, const float* packed,
                  const float* sums, int64_t first, int rows, int n0, int k0, float* totals) {
  const int run = run_length<F>(params);
  const int depth = smaller(kBlockK, params.k - k0);
  Block<F, kGroupRows, Few> block;
  block.open(params, arrays, n0, k0, k0 + depth);
  for_each_tile(rows, [&](int row, int count) {
    if (!Few) block.prefetch_next(row * kBlockK / rows, (row + count) * kBlockK / rows);
    float* to = totals + int64_t{row} * kGroupRows;
    add_block(params, arrays, first + row, count, n0, k0, to, [&] {
      multiply_rows(count, block, kGroupRows, depth, run,
                    packed + int64_t{rows} * k0 + int64_t{row} * kBlockK,
                    sums + int64_t{k0} / run * rows + row, rows, to);
    });
  });
}

// ---- few rows: each weight is read once ----

template <WeightFormat F>
void few_rows(const LinearParams& params, const LinearArrays& arrays, const float* packed,
              const float* sums, int n0) {
  alignas(64) float totals[kFewRows * kGroupRows];
  for (int k0 = 0; k0 < params.k; k0 += kBlockK) {
    direct_block<F, true>(params, arrays, packed, sums, 0, static_cast<int>(params.rows), n0, k0,
                          totals);
  }
}

// ---- many rows: panels of unpacked weights ----

/// Rows below which a panel does not pay for itself: there is little to unpack that it could save,
/// and in f32 nothing, however many rows there are.
template <WeightFormat F>
constexpr int kDirectRows = F == WeightFormat::bf16 ? 48 : 0;

/// kPanelColumns rows of the weight over one block of k, in f32.
template <bool quantized>
struct Panel {
  static constexpr bool kQuantized = quantized;
  static constexpr int kVectors = kPanelVectors;

  template <int R, class Step>
  [[gnu::always_inline]] void for_each_k(int column, int begin, int end, const Step& step) const {
    for (int k = begin; k < end; ++k) {
      step(k, [&](auto r)
                  __attribute__((always_inline)) { return load(weight[k] + column + r * kLanes); });
    }
  }

  template <int R, class Fn>
  [[gnu::always_inline]] void for_each_scale(int g, int column, const Fn& f) const {
    unroll<R>([&](auto r) __attribute__((always_inline)) {
      const int at = column + r * kLanes;
      f(r, load(scale[g] + at), load(offset[g] + at));
    });
  }

  float weight[kBlockK][kPanelColumns];
  float scale[kGroupsInBlock][kPanelColumns];
  float offset[kGroupsInBlock][kPanelColumns];
};

template <WeightFormat F>
void fill_panel(const LinearParams& params, const LinearArrays& arrays, int n0, int k0, int depth,
                Panel<Format<F>::kQuantized>* panel) {
  Block<F, kPanelColumns> block;
  block.open(params, arrays, n0, k0, k0 + depth);
  block.template for_each_word<kPanelVectors>(
      0, 0, depth, [&](int k, auto j, const vuint* words) __attribute__((always_inline)) {
        unroll<kPanelVectors>([&](auto v) __attribute__((always_inline)) {
          store(panel->weight[k] + v * kLanes, Format<F>::unpack(words[v], j));
        });
      });
  if constexpr (Format<F>::kQuantized) {
    for (int g = 0; g * params.group_size < depth; ++g) {
      block.template for_each_scale<kPanelVectors>(
          g, 0, [&](auto v, vfloat scale, vfloat offset) __attribute__((always_inline)) {
            store(panel->scale[g] + v * kLanes, scale);
            store(panel->offset[g] + v * kLanes, offset);
          });
    }
  }
}

/// As direct_block(), with weights that are unpacked into panels for all rows.
template <WeightFormat F>
void panel_block(const LinearParams& params, const LinearArrays& arrays, const float* packed,
                 const float* sums, int64_t first, int rows, int n0, int k0, float* totals,
                 Panel<Format<F>::kQuantized>* panels) {
  const int run = run_length<F>(params);
  const int depth = smaller(kBlockK, params.k - k0);
  const int columns = smaller(kGroupRows, params.n - n0);
  for (int c = 0; c < columns; c += kPanelColumns) {
    fill_panel<F>(params, arrays, n0 + c, k0, depth, panels + c / kPanelColumns);
  }
  for (int row0 = 0; row0 < rows; row0 += kRowsInCache) {
    const int rows_here = smaller(kRowsInCache, rows - row0);
    float* to = totals + int64_t{row0} * kGroupRows;
    add_block(params, arrays, first + row0, rows_here, n0, k0, to, [&] {
      for (int c = 0; c < columns; c += kPanelColumns) {
        for_each_tile(rows_here, [&](int tile, int count) {
          const int row = row0 + tile;
          multiply_rows(count, panels[c / kPanelColumns], kPanelColumns, depth, run,
                        packed + int64_t{rows} * k0 + int64_t{row} * kBlockK,
                        sums + int64_t{k0} / run * rows + row, rows,
                        to + int64_t{tile} * kGroupRows + c);
        });
      }
    });
  }
}

template <WeightFormat F>
void many_rows(const LinearParams& params, const LinearArrays& arrays, const float* packed,
               const float* sums, int64_t first, int rows, int n0, int columns, float* totals,
               void* panels) {
  for (int k0 = 0; k0 < params.k; k0 += kBlockK) {
    for (int c = 0; c < columns; c += kGroupRows) {
      float* group = totals + int64_t{rows} * c;
      if (F == WeightFormat::f32 || rows < kDirectRows<F>) {
        direct_block<F, false>(params, arrays, packed, sums, first, rows, n0 + c, k0, group);
      } else if constexpr (F != WeightFormat::f32) {
        panel_block<F>(params, arrays, packed, sums, first, rows, n0 + c, k0, group,
                       static_cast<Panel<Format<F>::kQuantized>*>(panels));
      }
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
  constexpr size_t kPanels = F == WeightFormat::f32 ? 0 : kGroupRows / kPanelColumns;
  return {kPanels * sizeof(Panel<Format<F>::kQuantized>),
          &few_rows<F>,
          &pack_x<F, true, T>,
          &many_rows<F>,
          &pack_x<F, false, T>,
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
