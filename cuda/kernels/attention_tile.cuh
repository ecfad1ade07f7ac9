#pragma once

#include "attention_arrays.h"
#include "kernels/merge_states.cuh"
#include "kernels/mma.cuh"
#include "kernels/reduce.cuh"

namespace mlxcel::cuda {

inline constexpr int kMaxTileTokens = 128;
inline constexpr float kLog2e = 1.4426950408889634f;

/// One tile with what its request's row of the page table says. Tokens are counted in slots of the
/// request's page row: token s is slot s % page_size of page s / page_size.
struct TileView {
  AttentionTile tile;
  const int32_t* pages;  // the request's page ids
  int kv_len;            // slots in use
  int begin, end;        // slots that any query of the tile sees, clipped to the tile's span
  int position;          // slot of the tile's first query token

  __device__ TileView(const PagedAttentionParams& p, const AttentionArrays& a, int index) {
    const int4* raw = reinterpret_cast<const int4*>(a.tiles + index);
    const int4 low = __ldg(raw), high = __ldg(raw + 1);
    tile = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const int first = __ldg(a.kv_indptr + tile.request);
    const int count = __ldg(a.kv_indptr + tile.request + 1) - first;
    const int last = __ldg(a.kv_last_page_len + tile.request);
    int q_end = tile.q_begin + 1;  // end of the request's query tokens
    if (p.has_qo_indptr) q_end = __ldg(a.qo_indptr + tile.request + 1);
    int skipped = 0;
    if (p.has_first_page_offset) skipped = __ldg(a.first_page_offset + tile.request);
    pages = a.kv_indices + first;
    kv_len = count == 0 ? 0 : (count - 1) * p.page_size + last;
    position = kv_len - (q_end - tile.q_begin);
    begin = max(tile.page_begin * p.page_size, skipped);
    end = min(tile.page_end * p.page_size, kv_len);
    if (p.causal) end = min(end, position + tile.q_len);
    if (p.window_left >= 0) begin = max(begin, position - p.window_left);
  }

  /// Slots [first_slot, end_slot) that query token i of the tile sees.
  __device__ __forceinline__ int first_slot(const PagedAttentionParams& p, int i) const {
    return p.window_left >= 0 ? max(begin, position + i - p.window_left) : begin;
  }
  __device__ __forceinline__ int end_slot(const PagedAttentionParams& p, int i) const {
    return p.causal ? min(end, position + i + 1) : end;
  }

  /// Whether every query token of the tile sees all of [from, to).
  __device__ __forceinline__ bool all_see(const PagedAttentionParams& p, int from, int to) const {
    return from >= first_slot(p, tile.q_len - 1) && to <= end_slot(p, 0);
  }
};

__device__ __forceinline__ int page_shift_of(const PagedAttentionParams& p) {
  return 31 - __clz(p.page_size);
}

/// Starts the reads that every tile waits for: the first links of the chain tile -> table row ->
/// page ids are cold in the L2 cache at the start of a launch. Each block fetches its share.
__device__ __forceinline__ void prefetch_tables(const PagedAttentionParams& p,
                                                const AttentionArrays& a) {
  constexpr int kLine = 32;  // int32 a cache line
  const int request = threadIdx.x * kLine;
  if (request <= p.num_requests) {
    prefetch_l2(a.kv_indptr + request);
    if (request < p.num_requests) prefetch_l2(a.kv_last_page_len + request);
  }
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kLine;
  if (threadIdx.x == 0 && index < a.num_indices) prefetch_l2(a.kv_indices + index);
}

/// Offset of a slot of the tile in the pools, or -1 where no query sees it: such slots read as
/// zeros. What is there may be NaN, and must not be touched past the request's pages.
__device__ __forceinline__ int64_t pool_offset(const PagedAttentionParams& p, const TileView& view,
                                               int kv_head, int slot, int page) {
  if (slot < view.begin || slot >= view.end) return -1;
  return static_cast<int64_t>(page) * p.stride_page +
         static_cast<int64_t>(slot & (p.page_size - 1)) * p.stride_token +
         static_cast<int64_t>(kv_head) * p.stride_head;
}

/// Shared memory rows of D elements and 16 bytes of padding: neighbouring rows start in different
/// banks for ldmatrix.
template <class T, int D>
struct PaddedRows {
  static __device__ __forceinline__ uint32_t offset(int row, int column) {
    return static_cast<uint32_t>((row * (D + 8) + column) * sizeof(T));
  }
};

/// Starts the copy of `Rows` neighbouring slots of a pool into rows [first_row, first_row + Rows)
/// of shared memory. Called by a whole warp, whose lane l gives the pool_offset of slot l % Rows.
template <class T, int D, int Rows, class Layout, class Policy = DefaultPolicy>
__device__ __forceinline__ void copy_rows(const void* pool, int64_t offset, uint32_t shared,
                                          int first_row, Policy policy = {}) {
  constexpr int kPieces = D / 8;  // 16-byte pieces a row
#pragma unroll
  for (int i = 0; i < Rows * kPieces / kWarp; ++i) {
    const int piece = i * kWarp + static_cast<int>(threadIdx.x) % kWarp;
    const int row = piece / kPieces, column = piece % kPieces * 8;
    const int64_t from = __shfl_sync(0xffffffffu, offset, row);
    copy_async_16(shared + Layout::offset(first_row + row, column),
                  static_cast<const T*>(pool) + (from >= 0 ? from + column : 0), from >= 0, policy);
  }
}

/// The page id of a slot, 0 where the tile does not read it.
__device__ __forceinline__ int page_of(const TileView& view, int page_shift, int slot) {
  return slot < view.end ? __ldg(view.pages + (slot >> page_shift)) : 0;
}

/// Logits in log2 units: scaled, and capped where a cap is set. Exact: to f32's last bits, else to
/// what a 16-bit product is worth.
template <bool Exact = false>
struct LogitScale {
  float scale, cap, inv_cap;

  __device__ explicit LogitScale(const PagedAttentionParams& p)
      : scale(p.sm_scale_log2),
        cap(p.logits_soft_cap * kLog2e),
        inv_cap(p.logits_soft_cap > 0.0f ? 1.0f / (p.logits_soft_cap * kLog2e) : 0.0f) {}

  __device__ __forceinline__ float operator()(float dot) const {
    const float x = dot * scale;
    if (cap == 0.0f) return x;
    if constexpr (Exact) return cap * tanhf(__fdiv_rn(x, cap));
    // tanh(y) = 1 - 2 / (e^2y + 1): exact at both ends, where e^2y is 0 or inf.
    const float e = exp2_fast(2.0f * kLog2e * x * inv_cap);
    return cap * (1.0f - __fdividef(2.0f, e + 1.0f));
  }
};

/// Writes `N` elements from d on of the state of one query token (i of the tile) and query head.
/// `sum` is the denominator, `max` the logit that it is relative to, v not yet divided.
template <class T, int N>
__device__ __forceinline__ void write_state(const PagedAttentionParams& p, const AttentionArrays& a,
                                            const AttentionTile& tile, int i, int head, int d,
                                            MergedState<N> state, bool with_sink) {
  if (tile.chunk < 0) {
    if (with_sink && p.has_sinks) state.add_sink(a.sinks[head] * kLog2e);
    const int64_t row = static_cast<int64_t>(tile.q_begin + i) * p.num_qo_heads + head;
    Vec<T, N> result;
#pragma unroll
    for (int e = 0; e < N; ++e) result.at[e] = from_float<T>(state.v[e] * state.scale());
    store_vec(static_cast<T*>(a.out) + row * p.head_dim + d, result);
    if (d == 0 && a.lse != nullptr) a.lse[row] = state.lse();
  } else {
    const int64_t row =
        static_cast<int64_t>(__ldg(a.merge_indptr + tile.q_begin + i) + tile.chunk) *
            p.num_qo_heads +
        head;
    Vec<float, N> result;
#pragma unroll
    for (int e = 0; e < N; ++e) result.at[e] = state.v[e] * state.scale();
    store_vec(a.partial_v + row * p.head_dim + d, result);
    if (d == 0) a.partial_lse[row] = state.lse();
  }
}

/// Called by all threads of a block after it wrote its partial states: the last block of the tile's
/// merge group merges the group's query tokens for this KV head and writes the output. The order of
/// the merge is that of the chunks, whichever block comes last.
template <class T>
__device__ __forceinline__ void merge_in_launch(const PagedAttentionParams& p,
                                                const AttentionArrays& a, const AttentionTile& tile,
                                                int kv_head) {
  if (a.counters == nullptr || tile.group < 0) return;
  __shared__ bool is_last;
  __shared__ int rows[kMaxTileTokens + 1];
  for (int i = threadIdx.x; i <= tile.q_len; i += blockDim.x) {
    rows[i] = __ldg(a.merge_indptr + tile.q_begin + i);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* counter = a.counters + static_cast<int64_t>(tile.group) * p.num_kv_heads + kv_head;
    is_last = atomicAdd(counter, 1) == rows[1] - rows[0] - 1;
    if (is_last) *counter = 0;  // for the next launch
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const int num_chunks = rows[1] - rows[0];

  constexpr int N = 4;
  const int group = p.num_qo_heads / p.num_kv_heads, pieces = p.head_dim / N;
  const int64_t row_stride = static_cast<int64_t>(p.num_qo_heads) * p.head_dim;
  AttentionTile direct = tile;
  direct.chunk = -1;
  for (int item = threadIdx.x; item < tile.q_len * group * pieces; item += blockDim.x) {
    const int d = item % pieces * N, column = item / pieces;
    const int i = column / group, head = kv_head * group + column % group;
    const float* v = a.partial_v + static_cast<int64_t>(head) * p.head_dim + d;
    auto merge = [&]<int Batch>() {
      return merge_rows<float, N, Batch>(v, a.partial_lse + head, rows[i], rows[i + 1], row_stride,
                                         p.num_qo_heads);
    };
    // Few chunks: no arithmetic for rows that are not there. Many: fewer round trips.
    const auto state = num_chunks <= 4   ? merge.template operator()<4>()
                       : num_chunks <= 8 ? merge.template operator()<8>()
                                         : merge.template operator()<16>();
    write_state<T, N>(p, a, direct, i, head, d, state, true);
  }
}

}  // namespace mlxcel::cuda
