#pragma once

#include "attention_tile.h"

namespace mlxcel {

// Attention of a few query rows (decode, speculation): each K and V element is read once, by one
// lane, for all R rows of a threadgroup. Eight simdgroups take the tokens of the span in turn; a
// lane owns D / 32 elements of a head; at the end the simdgroups' states are merged through
// threadgroup memory.
//
// Grid: (KV heads, blocks of R rows, tiles) threadgroups of kAttentionSimdgroups * 32 threads.
constant constexpr int kAttentionSimdgroups = 8;

// Elements of a head by lane: runs of D / 32 where that is whole (one vector load), else every
// 32nd.
template <int D>
struct LaneElements {
  static constexpr constant int kCount = (D + 31) / 32;
  static constexpr constant bool kRuns = D % 32 == 0;
  static int at(int lane, int i) { return kRuns ? lane * kCount + i : i * 32 + lane; }
  static bool exists(int lane, int i) { return kRuns || at(lane, i) < D; }
};

template <typename T, int D>
METAL_FUNC void load_elements(const device T* head, int lane, thread float* out) {
  using E = LaneElements<D>;
  MLXCEL_UNROLL
  for (int i = 0; i < E::kCount; ++i)
    out[i] = E::exists(lane, i) ? float(head[E::at(lane, i)]) : 0.0f;
}

template <typename T, int D, int R>
[[kernel, max_total_threads_per_threadgroup(kAttentionSimdgroups * 32)]] void paged_attention(
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
    uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane_index [[thread_index_in_simdgroup]]) {
  using E = LaneElements<D>;
  constexpr int kSimdgroups = kAttentionSimdgroups;
  constexpr int kRowsPerPass = R * D <= 512 ? R : 512 / D;  // of the final merge: 16 KiB of states
  threadgroup float states[kSimdgroups][kRowsPerPass][D];
  threadgroup float maxima[kSimdgroups][R];
  threadgroup float sums[kSimdgroups][R];

  const int kv_head = int(group.x);
  const int first_row = int(group.y) * R;
  const int simdgroup = int(simdgroup_index);
  const int lane = int(lane_index);
  const device AttentionTile& tile = tiles[group.z];
  const TileView view = view_tile(params, tile, kv_indptr, kv_indices, kv_last_page_len, qo_indptr,
                                  first_page_offset, token_order);
  const bool mine = view.rows < kMatrixRows || params.batch_invariant != 0;
  if (first_row >= view.rows || !mine) return;  // all threads alike
  const int rows = min(R, view.rows - first_row);

  float query[R][E::kCount];
  float sum[R][E::kCount];
  float highest[R];
  float total[R];
  int from[R];
  int to[R];
  MLXCEL_UNROLL
  for (int r = 0; r < R; ++r) {
    highest[r] = -INFINITY;
    total[r] = 0.0f;
    from[r] = r < rows ? view.lowest(first_row + r) : 0;
    to[r] = r < rows ? view.highest(first_row + r) : 0;
    MLXCEL_UNROLL
    for (int i = 0; i < E::kCount; ++i) sum[r][i] = query[r][i] = 0.0f;
    if (r < rows) {
      load_elements<T, D>(q + query_offset(params, view, first_row + r, kv_head), lane, query[r]);
      MLXCEL_UNROLL
      for (int i = 0; i < E::kCount; ++i) query[r][i] *= params.sm_scale_log2;
    }
  }

  // Later rows start and end later, so the first row's begin and the last row's end span all.
  // A token's number says which simdgroup takes it: a row's sums do not depend on the rows beside
  // it.
  const int lowest = view.lowest(first_row);
  for (int t = lowest + ((simdgroup - lowest) & (kSimdgroups - 1));
       t < view.highest(first_row + rows - 1); t += kSimdgroups) {
    const long at = token_offset(params, view, t, kv_head);
    float key[E::kCount];
    float value[E::kCount];
    load_elements<T, D>(k_pages + at, lane, key);
    load_elements<T, D>(v_pages + at, lane, value);
    MLXCEL_UNROLL
    for (int r = 0; r < R; ++r) {
      if (t < from[r] || t >= to[r]) continue;  // the whole simdgroup alike; 0 * NaN would be NaN
      float score = 0.0f;
      MLXCEL_UNROLL
      for (int i = 0; i < E::kCount; ++i) score += query[r][i] * key[i];
      score = simd_sum(score);
      if (has_soft_cap) score = soft_cap(score, params.logits_soft_cap);
      const float next = max(highest[r], score);
      const float base = next == -INFINITY ? 0.0f : next;
      const float scale = fast::exp2(highest[r] - base);
      const float weight = fast::exp2(score - base);
      highest[r] = next;
      total[r] = total[r] * scale + weight;
      MLXCEL_UNROLL
      for (int i = 0; i < E::kCount; ++i) sum[r][i] = sum[r][i] * scale + weight * value[i];
    }
  }

  if (lane == 0) {
    MLXCEL_UNROLL
    for (int r = 0; r < R; ++r) {
      maxima[simdgroup][r] = highest[r];
      sums[simdgroup][r] = total[r];
    }
  }
  for (int pass = 0; pass < rows; pass += kRowsPerPass) {
    // Constant bounds keep the arrays of the rows in registers.
    MLXCEL_UNROLL
    for (int r = 0; r < R; ++r) {
      if (r < pass || r >= pass + kRowsPerPass) continue;
      MLXCEL_UNROLL
      for (int i = 0; i < E::kCount; ++i) {
        if (E::exists(lane, i)) states[simdgroup][r - pass][E::at(lane, i)] = sum[r][i];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int elements = min(kRowsPerPass, rows - pass) * D;
    for (int e = int(thread_index); e < elements; e += kSimdgroups * 32) {
      const int r = pass + e / D;
      const int d = e % D;
      float most = -INFINITY;
      for (int s = 0; s < kSimdgroups; ++s) most = max(most, maxima[s][r]);
      const float base = most == -INFINITY ? 0.0f : most;
      float denominator = 0.0f;
      float numerator = 0.0f;
      for (int s = 0; s < kSimdgroups; ++s) {
        const float weight = fast::exp2(maxima[s][r] - base);
        denominator += weight * sums[s][r];
        numerator += weight * states[s][r - pass][d];
      }
      MergedElement state{0.0f, -INFINITY};
      if (denominator != 0.0f) state = {numerator / denominator, most + precise::log2(denominator)};
      write_state(params, tile, view, first_row + r, kv_head, d, state, sinks, merge_indptr,
                  partial_v, partial_lse, out, lse);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

}  // namespace mlxcel
