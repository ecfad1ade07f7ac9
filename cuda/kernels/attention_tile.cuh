#pragma once

#include "attention_arrays.h"
#include "kernels/merge_states.cuh"
#include "kernels/mma.cuh"
#include "kernels/reduce.cuh"

namespace mlxcel::cuda {

inline constexpr int kMergeRows =
    16;  // query rows, at most, of a tile that is merged in the launch
inline constexpr int kMergePiece = 4;  // elements of a row that a thread merges
inline constexpr float kLog2e = 1.4426950408889634f;

/// One tile with what its request's row of the page table says. Tokens are counted in slots of the
/// request's page row: token s is slot s % page_size of page s / page_size.
struct TileView {
  AttentionTile tile;
  const int32_t* pages;   // the request's page ids
  const int32_t* tokens;  // the tile's query tokens where it is shared, else null
  int begin, end;         // slots that any query of the tile sees, clipped to the tile's span
  int position;           // slot of the tile's first query token
  int window;             // params.window_left, -1 in shared tiles
  int first_partial;  // of a private tile: first partial row of its first query token, read early

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
    first_partial = 0;
    if (tile.chunk >= 0 && !tile.shared) first_partial = __ldg(a.merge_indptr + tile.q_begin);
    pages = a.kv_indices + first;
    const int kv_len = count == 0 ? 0 : (count - 1) * p.page_size + last;
    begin = max(tile.page_begin * p.page_size, skipped);
    end = min(tile.page_end * p.page_size, kv_len);
    if (tile.shared) {
      tokens = a.token_order + tile.q_begin;
      position = kUnmasked;
      window = -1;
    } else {
      tokens = nullptr;
      position = kv_len - (q_end - tile.q_begin);
      window = p.window_left;
      if (p.causal) end = min(end, position + tile.q_len);
      if (window >= 0) begin = max(begin, position - window);
    }
  }

  /// Row of q and out of query token i of the tile.
  __device__ __forceinline__ int token(int i) const {
    return tokens == nullptr ? tile.q_begin + i : __ldg(tokens + i);
  }

  /// Partial row of this tile's chunk of query token i.
  __device__ __forceinline__ int64_t partial_row(const AttentionArrays& a, int i) const {
    const bool known = i == 0 && tokens == nullptr;
    return (known ? first_partial : __ldg(a.merge_indptr + token(i))) + tile.chunk;
  }

  /// Where the state of query token i of the tile and a query head goes: a row of `out`, or of the
  /// partial states where there are several tiles. Fits 32 bits: a row is 128 bytes and more.
  __device__ __forceinline__ int64_t state_row(const PagedAttentionParams& p,
                                               const AttentionArrays& a, int i, int head) const {
    return (tile.chunk < 0 ? token(i) : partial_row(a, i)) * p.num_qo_heads + head;
  }

  /// First slot of the blocks of `keys` slots that the tile's are taken in. Blocks are aligned to
  /// the span's first page, for aligned copies.
  __device__ __forceinline__ int origin(const PagedAttentionParams& p, int keys) const {
    const int span = tile.page_begin * p.page_size;
    return span + max(begin - span, 0) / keys * keys;
  }
  __device__ __forceinline__ int blocks(int origin, int keys) const {
    return end > begin ? (end - origin + keys - 1) / keys : 0;
  }

  /// Slots [first_slot, end_slot) that query token i of the tile sees.
  __device__ __forceinline__ int first_slot(int i) const {
    return window >= 0 ? max(begin, position + i - window) : begin;
  }
  __device__ __forceinline__ int end_slot(const PagedAttentionParams& p, int i) const {
    return p.causal ? min(end, position + i + 1) : end;
  }

  /// Whether every query token of the tile sees all of [from, to).
  __device__ __forceinline__ bool all_see(const PagedAttentionParams& p, int from, int to) const {
    return from >= first_slot(tile.q_len - 1) && to <= end_slot(p, 0);
  }

 private:
  static constexpr int kUnmasked = 1 << 30;  // a position that sees every slot
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
  if (p.num_partials > 0) {
    const int token = threadIdx.x * kLine;
    if (token <= p.num_q) prefetch_l2(a.merge_indptr + token);
  }
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

/// A value that is not finite must reach the queries that see its key and no others, whose weight
/// for it, zero, would make it NaN. So where queries see different keys, such values are taken out
/// of shared memory (this), and added to the sums of those that see them at the end
/// (add_nonfinite), by reading them again: that is as rare as it is slow. Called by `Threads`
/// threads for `Keys` rows of V, before they synchronise; returns whether there was one in this
/// thread's share.
template <class T, int D, int Keys, class Layout, int Threads>
__device__ __forceinline__ bool take_out_nonfinite(uint32_t values, int rank) {
  constexpr int kPieces = D / 8;
  bool found = false;
  for (int i = rank; i < Keys * kPieces; i += Threads) {
    const uint32_t at = values + Layout::offset(i / kPieces, i % kPieces * 8);
    const uint4 x = load_shared_16(at), y = finite_part<T>(x);
    if (x.x == y.x && x.y == y.y && x.z == y.z && x.w == y.w) continue;
    store_shared_16(at, y);
    found = true;
  }
  return found;
}

/// Adds what take_out_nonfinite took out of `Keys` slots from `slot` on to the sums of one query
/// token (i of the tile): add(row of V) for each slot that it sees.
template <class T, int Keys, class Add>
__device__ __forceinline__ void add_nonfinite(const PagedAttentionParams& p,
                                              const AttentionArrays& a, const TileView& view,
                                              int kv_head, int i, int slot, Add add) {
  const int from = max(slot, view.first_slot(i)), to = min(slot + Keys, view.end_slot(p, i));
  for (int key = from; key < to; ++key) {
    const int64_t page = __ldg(view.pages + (key >> page_shift_of(p)));
    add(static_cast<const T*>(a.v_pages) + pool_offset(p, view, kv_head, key, page));
  }
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

  /// Whether logits are products times a positive scale, which can be folded into the exponent: not
  /// where they are capped, or the largest product is not the largest logit.
  __device__ __forceinline__ bool folded() const { return cap == 0.0f && scale > 0.0f; }

  __device__ __forceinline__ float operator()(float dot) const {
    const float x = dot * scale;
    if (cap == 0.0f) return x;
    if constexpr (Exact) return cap * tanhf(__fdiv_rn(x, cap));
    // tanh(y) = 1 - 2 / (e^2y + 1): exact at both ends, where e^2y is 0 or inf.
    const float e = exp2_fast(2.0f * kLog2e * x * inv_cap);
    return cap * (1.0f - __fdividef(2.0f, e + 1.0f));
  }
};

/// Whether a row's reference has to move for a logit (log2). Weights are relative to a logit of the
/// row that is at most 8 below the largest so far, so that they stay below 256, which f16 holds.
/// Past the first keys it seldom moves, and lanes need not ask each other for the row's largest:
/// shuffles pass through the port of shared memory, where they wait behind the operands of the
/// products (some 150 cycles each, H200, 2026-11-30). A row moves by its own logits alone. The
/// price: the largest weight is not 1, and is rounded to 16 bits as the others are, half a unit in
/// the last place where one key decides.
__device__ __forceinline__ bool above_headroom(float logit, float reference) {
  return logit > reference + 8.0f;
}

/// Writes `N` elements from d on of a query token's output, sinks included.
template <class T, int N>
__device__ __forceinline__ void write_output(const PagedAttentionParams& p,
                                             const AttentionArrays& a, int token, int head, int d,
                                             MergedState<N> state) {
  if (p.has_sinks) state.add_sink(a.sinks[head] * kLog2e);
  const int64_t row = static_cast<int64_t>(token) * p.num_qo_heads + head;
  Vec<T, N> result;
#pragma unroll
  for (int e = 0; e < N; ++e) result.at[e] = from_float<T>(state.v[e] * state.scale());
  store_vec(static_cast<T*>(a.out) + row * p.head_dim + d, result);
  if (d == 0 && a.lse != nullptr) a.lse[row] = state.lse();
}

/// Writes `N` elements from d on of the state of one query token (i of the tile) and query head:
/// the output where the tile's span is all that the token sees, else its partial row. `sum` is the
/// denominator, `max` the logit that it is relative to, v not yet divided.
template <class T, int N>
__device__ __forceinline__ void write_state(const PagedAttentionParams& p, const AttentionArrays& a,
                                            const TileView& view, int i, int head, int d,
                                            const MergedState<N>& state) {
  // Divided before a sink joins, as merged states are: one chunk and several give the same bits.
  const MergedState<N> whole = state.divided();
  if (view.tile.chunk < 0) {
    write_output<T, N>(p, a, view.token(i), head, d, whole);
    return;
  }
  const int64_t row = view.partial_row(a, i) * p.num_qo_heads + head;
  Vec<float, N> result;
#pragma unroll
  for (int e = 0; e < N; ++e) result.at[e] = whole.v[e];
  store_vec(a.partial_v + row * p.head_dim + d, result);
  if (d == 0) a.partial_lse[row] = whole.max;
}

/// Merges the partial states of one query token and head, N elements from d on, in the order of the
/// chunks, and writes the output.
template <class T, int N>
__device__ __forceinline__ void merge_token(const PagedAttentionParams& p, const AttentionArrays& a,
                                            int token, int begin, int end, int head, int d) {
  const int64_t row_stride = static_cast<int64_t>(p.num_qo_heads) * p.head_dim;
  const float* v = a.partial_v + static_cast<int64_t>(head) * p.head_dim + d;
  auto merge = [&]<int Batch>() {
    return merge_rows<float, N, Batch>(v, a.partial_lse + head, begin, end, row_stride,
                                       p.num_qo_heads);
  };
  // Few chunks: no arithmetic for rows that are not there. Many: fewer round trips.
  const int chunks = end - begin;
  write_output<T, N>(p, a, token, head, d,
                     chunks <= 4   ? merge.template operator()<4>()
                     : chunks <= 8 ? merge.template operator()<8>()
                                   : merge.template operator()<16>());
}

/// Called by all threads of a block after it wrote its partial states. A counter for each query
/// token and KV head tells which block wrote the last of a token's states: that one merges them.
template <class T>
__device__ __forceinline__ void merge_in_launch(const PagedAttentionParams& p,
                                                const AttentionArrays& a, const TileView& view,
                                                int kv_head) {
  if (a.counters == nullptr || view.tile.chunk < 0) return;
  __shared__ int num_complete;
  __shared__ int complete[kMergeRows][3];  // token, its rows of the partial buffers
  if (threadIdx.x == 0) num_complete = 0;
  int token = 0, begin = 0, end = 0;
  if (threadIdx.x < view.tile.q_len) {
    token = view.token(threadIdx.x);
    begin = __ldg(a.merge_indptr + token);
    end = __ldg(a.merge_indptr + token + 1);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x < view.tile.q_len) {
    int32_t* counter = a.counters + static_cast<int64_t>(token) * p.num_kv_heads + kv_head;
    if (atomicAdd(counter, 1) == end - begin - 1) {
      *counter = 0;  // for the next launch
      int* mine = complete[atomicAdd(&num_complete, 1)];
      mine[0] = token;
      mine[1] = begin;
      mine[2] = end;
    }
  }
  __syncthreads();
  if (num_complete == 0) return;
  __threadfence();

  constexpr int N = kMergePiece;
  const int group = p.num_qo_heads / p.num_kv_heads, pieces = p.head_dim / N;
  for (int item = threadIdx.x; item < num_complete * group * pieces; item += blockDim.x) {
    const int column = item / pieces, *merged = complete[column / group];
    merge_token<T, N>(p, a, merged[0], merged[1], merged[2], kv_head * group + column % group,
                      item % pieces * N);
  }
}

/// The same by a launch of its own, for all query tokens with partial states: blockIdx.x is the
/// token.
template <class T>
__global__ void paged_merge_kernel(const __grid_constant__ PagedAttentionParams p,
                                   const __grid_constant__ AttentionArrays a) {
  constexpr int N = kMergePiece;
  const int token = static_cast<int>(blockIdx.x);
  const int item = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  const int pieces = p.head_dim / N, head = item / pieces;
  const int begin = __ldg(a.merge_indptr + token), end = __ldg(a.merge_indptr + token + 1);
  // An empty range: its one tile wrote the output.
  if (begin == end || head >= p.num_qo_heads) return;
  merge_token<T, N>(p, a, token, begin, end, head, (item - head * pieces) * N);
}

}  // namespace mlxcel::cuda
