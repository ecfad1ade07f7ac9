#pragma once

#include "attention_tile.h"

namespace mlxcel {

// Attention of many query rows (prefill chunks, large groups) by 8x8 matrix units. A threadgroup
// takes 32 rows, eight a simdgroup, and walks their KV tokens in blocks that it stages in
// threadgroup memory, K then V in the same place. Scores and outputs stay in registers, in the
// layout of simdgroup_matrix: lane l holds elements (row, col) and (row, col + 1) of every 8x8
// block, with row and col from LaneCell below (MLX's steel kernels rely on the same).
//
// Grid: (KV heads, blocks of 32 rows, tiles) threadgroups of 128 threads.
constant constexpr int kMatrixSimdgroups = 4;
constant constexpr int kMatrixBlockRows = 8 * kMatrixSimdgroups;

using Matrix = simdgroup_matrix<float, 8, 8>;

struct LaneCell {
  int row;
  int col;
};

METAL_FUNC LaneCell lane_cell(uint lane) {
  const uint quad = lane / 4;
  return {int((quad & 4) + (lane / 2) % 4), int((quad & 2) * 2 + (lane % 2) * 2)};
}

// The lane that holds column `col` of this lane's row.
METAL_FUNC ushort lane_of_column(uint lane, int col) {
  return ushort((lane & 0x16) | uint(col >> 2 & 1) << 3 | uint(col >> 1 & 1));
}

// Maximum and sum over a row: the four lanes of a row differ in bits 0 and 3.
METAL_FUNC float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  return max(x, simd_shuffle_xor(x, 8));
}

METAL_FUNC float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}

// Tokens of a block: 32 where that takes at most 17 KiB.
template <typename T, int D>
constexpr int block_tokens() {
  return D * int(sizeof(T)) <= 512 ? 32 : 16;
}

// Copies tokens [begin, begin + Tokens) of a pool to threadgroup memory, zeros where they are not
// in [view.begin, end). Returns whether this simdgroup saw a NaN or an infinity.
template <typename T, int D, int Tokens, int Stride>
METAL_FUNC bool stage(constant PagedAttentionParams& params, const thread TileView& view,
                      const device T* pages, int begin, int end, int kv_head, threadgroup T* block,
                      uint simdgroup, uint lane) {
  using Vector = vec<T, 4>;
  bool finite = true;
  for (int row = int(simdgroup); row < Tokens; row += kMatrixSimdgroups) {
    const int t = begin + row;
    const bool inside = t < end;
    const device T* from = pages + (inside ? token_offset(params, view, t, kv_head) : 0);
    for (int d = int(lane) * 4; d < D; d += int(kSimdWidth) * 4) {
      const Vector x = inside ? *reinterpret_cast<const device Vector*>(from + d) : Vector(T(0.0f));
      *reinterpret_cast<threadgroup Vector*>(block + row * Stride + d) = x;
      for (int j = 0; j < 4; ++j) finite = finite && isfinite(float(x[j]));
    }
  }
  return !simd_all(finite);
}

template <typename T, int D>
[[kernel, max_total_threads_per_threadgroup(kMatrixSimdgroups * 32)]] void paged_attention_matrix(
    const device T* q [[buffer(0)]],  // [num_q, Hq, D]
    const device T* k_pages [[buffer(1)]], const device T* v_pages [[buffer(2)]],
    const device int* kv_indptr [[buffer(3)]],          // [B + 1]
    const device int* kv_indices [[buffer(4)]],         // page ids
    const device int* kv_last_page_len [[buffer(5)]],   // [B]
    const device AttentionTile* tiles [[buffer(6)]],    // [num_tiles]
    const device int* qo_indptr [[buffer(7)]],          // [B + 1] where has_qo_indptr
    const device int* first_page_offset [[buffer(8)]],  // [B] where has_first_page_offset
    const device float* sinks [[buffer(9)]],            // [Hq] where has_sinks
    device float* partial_v [[buffer(10)]],             // [num_partials, Hq, D]
    device float* partial_lse [[buffer(11)]],           // [num_partials, Hq] log2
    device T* out [[buffer(12)]],                       // [num_q, Hq, D]
    device float* lse [[buffer(13)]],                   // [num_q, Hq] log2
    constant PagedAttentionParams& params [[buffer(14)]],
    const device int* merge_indptr [[buffer(15)]],  // [num_q + 1]
    const device int* token_order [[buffer(16)]],   // of shared tiles, where has_token_order
    uint3 group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int kTokens = block_tokens<T, D>();
  constexpr int kStride = D + 16 / int(sizeof(T));  // spreads the rows over the banks
  constexpr int kBlocksD = D / 8;
  constexpr int kBlocksT = kTokens / 8;
  threadgroup T block[kTokens * kStride];
  threadgroup int special[kMatrixSimdgroups];  // which simdgroups staged a NaN or an infinity of V

  const int kv_head = int(group.x);
  const device AttentionTile& tile = tiles[group.z];
  const TileView view = view_tile(params, tile, kv_indptr, kv_indices, kv_last_page_len, qo_indptr,
                                  first_page_offset, token_order);
  const int block_row = int(group.y) * kMatrixBlockRows;
  if (block_row >= view.rows || view.rows < kMatrixRows) return;  // all threads alike
  const int last_row = min(block_row + kMatrixBlockRows, view.rows) - 1;

  const LaneCell cell = lane_cell(lane);
  const int row = block_row + int(simdgroup) * 8 + cell.row;
  const bool exists = row < view.rows;
  const int from = exists ? view.lowest(row) : 0;
  const int to = exists ? view.highest(row) : 0;

  vec<T, 2> query[kBlocksD];
  Matrix sum[kBlocksD];
  const size_t query_at = exists ? query_offset(params, view, row, kv_head) : 0;
  MLXCEL_UNROLL
  for (int b = 0; b < kBlocksD; ++b) {
    MLXCEL_UNROLL
    for (int j = 0; j < 2; ++j)
      query[b][j] = exists ? q[query_at + size_t(b * 8 + cell.col + j)] : T(0.0f);
    sum[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  float highest = -INFINITY;
  float total = 0.0f;

  const int end = view.highest(last_row);
  for (int begin = view.lowest(block_row); begin < end; begin += kTokens) {
    stage<T, D, kTokens, kStride>(params, view, k_pages, begin, end, kv_head, block, simdgroup,
                                  lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    Matrix scores[kBlocksT];
    MLXCEL_UNROLL
    for (int t = 0; t < kBlocksT; ++t) {
      // Two chains of sums: neither waits for the other, and rounding errors grow half as fast.
      Matrix chains[2] = {make_filled_simdgroup_matrix<float, 8, 8>(0.0f),
                          make_filled_simdgroup_matrix<float, 8, 8>(0.0f)};
      const threadgroup T* keys = block + (t * 8 + cell.col) * kStride + cell.row;
      MLXCEL_UNROLL
      for (int b = 0; b < kBlocksD; ++b) {
        Matrix left, right;
        MLXCEL_UNROLL
        for (int j = 0; j < 2; ++j) {
          left.thread_elements()[j] = float(query[b][j]);
          right.thread_elements()[j] = float(keys[j * kStride + b * 8]);  // K transposed
        }
        simdgroup_multiply_accumulate(chains[b % 2], left, right, chains[b % 2]);
      }
      MLXCEL_UNROLL
      for (int j = 0; j < 2; ++j) {
        scores[t].thread_elements()[j] =
            chains[0].thread_elements()[j] + chains[1].thread_elements()[j];
      }
    }

    // One step of the online softmax. Scores of tokens that the row does not see become -inf.
    float most = -INFINITY;
    MLXCEL_UNROLL
    for (int t = 0; t < kBlocksT; ++t) {
      MLXCEL_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int token = begin + t * 8 + cell.col + j;
        float score = scores[t].thread_elements()[j] * params.sm_scale_log2;
        if (has_soft_cap) score = soft_cap(score, params.logits_soft_cap);
        score = token >= from && token < to ? score : -INFINITY;
        scores[t].thread_elements()[j] = score;
        most = max(most, score);
      }
    }
    const float next = max(highest, row_max(most));
    const float base = next == -INFINITY ? 0.0f : next;
    const float scale = fast::exp2(highest - base);
    highest = next;
    float added = 0.0f;
    MLXCEL_UNROLL
    for (int t = 0; t < kBlocksT; ++t) {
      MLXCEL_UNROLL
      for (int j = 0; j < 2; ++j) {
        const float weight = fast::exp2(scores[t].thread_elements()[j] - base);
        scores[t].thread_elements()[j] = weight;
        added += weight;
      }
    }
    total = total * scale + row_sum(added);
    MLXCEL_UNROLL
    for (int b = 0; b < kBlocksD; ++b) {
      MLXCEL_UNROLL
      for (int j = 0; j < 2; ++j) sum[b].thread_elements()[j] *= scale;
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read K
    const bool saw_special = stage<T, D, kTokens, kStride>(params, view, v_pages, begin, end,
                                                           kv_head, block, simdgroup, lane);
    if (lane == 0) special[simdgroup] = saw_special;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    bool any_special = false;
    for (int s = 0; s < kMatrixSimdgroups; ++s) any_special = any_special || special[s] != 0;
    MLXCEL_UNROLL
    for (int b = 0; b < kBlocksD; ++b) {
      const threadgroup T* values = block + b * 8 + cell.col;
      if (!any_special) {
        MLXCEL_UNROLL
        for (int t = 0; t < kBlocksT; ++t) {
          Matrix right;
          MLXCEL_UNROLL
          for (int j = 0; j < 2; ++j) {
            right.thread_elements()[j] = float(values[(t * 8 + cell.row) * kStride + j]);
          }
          simdgroup_multiply_accumulate(sum[b], scores[t], right, sum[b]);
        }
      } else {
        // A weight of 0 times NaN is NaN, so rows must leave out what they do not see: rare, and
        // slow.
        MLXCEL_UNROLL
        for (int t = 0; t < kTokens; ++t) {
          const float weight =
              simd_shuffle(scores[t / 8].thread_elements()[t % 2], lane_of_column(lane, t % 8));
          if (begin + t < from || begin + t >= to) continue;
          MLXCEL_UNROLL
          for (int j = 0; j < 2; ++j)
            sum[b].thread_elements()[j] += weight * float(values[t * kStride + j]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read V
  }

  if (!exists) return;
  const float inverse = total != 0.0f ? 1.0f / total : 0.0f;
  const float row_lse = total != 0.0f ? highest + precise::log2(total) : -INFINITY;
  MLXCEL_UNROLL
  for (int b = 0; b < kBlocksD; ++b) {
    MLXCEL_UNROLL
    for (int j = 0; j < 2; ++j) {
      const MergedElement state{sum[b].thread_elements()[j] * inverse, row_lse};
      write_state(params, tile, view, row, kv_head, b * 8 + cell.col + j, state, sinks,
                  merge_indptr, partial_v, partial_lse, out, lse);
    }
  }
}

}  // namespace mlxcel
