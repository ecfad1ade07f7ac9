#pragma once

#include "kernels/paged_decode.cuh"
#include "kernels/paged_rows.cuh"

namespace mlxcel::cuda {

/// Attention of many query rows (tokens x heads of one KV head's group) over a span of pages, for
/// 16-bit types: prefill chunks and long verify runs.
///
/// Each warp owns 16 * RowTiles query rows; all share tiles of `Keys` tokens' K and V,
/// which are copied one tile ahead. S = Q K^T leaves its result in the layout that O += P V takes
/// as its left operand, so the weights never leave the registers.
template <class T, int D, int Warps, int RowTiles, int Keys>
struct PagedRagged {
  static constexpr int kWarps = Warps;
  static constexpr int kRows = kWarps * 16 * RowTiles;
  static constexpr int kRow = D + 8;  // padded: see PagedDecode
  static constexpr int kQueryBytes = kRows * kRow * sizeof(T);
  static constexpr int kTileBytes = Keys * kRow * sizeof(T);
  static constexpr int kSharedBytes = kQueryBytes + 4 * kTileBytes;  // two stages of K and V
  static constexpr int kSteps = D / 16, kKeyTiles = Keys / 8, kValueTiles = D / 8;
  static constexpr int kOwn = Keys / kWarps;  // keys that a warp copies

  const PagedAttentionParams& p;
  const AttentionArrays& a;
  const TileView& view;
  const int kv_head, group, rows, warp, lane, page_shift;
  const uint32_t query, ring;
  int origin, blocks;
  int warp_end;  // end of what this warp's rows see

  RowStrip<T, D> strips[RowTiles];

  __device__ PagedRagged(const PagedAttentionParams& p, const AttentionArrays& a,
                         const TileView& view, int kv_head, char* shared)
      : p(p),
        a(a),
        view(view),
        kv_head(kv_head),
        group(p.num_qo_heads / p.num_kv_heads),
        rows(view.tile.q_len * (p.num_qo_heads / p.num_kv_heads)),
        warp(threadIdx.x / kWarp),
        lane(threadIdx.x % kWarp),
        page_shift(page_shift_of(p)),
        query(shared_address(shared)),
        ring(shared_address(shared) + kQueryBytes) {
    origin = view.origin(p, Keys);
    blocks = view.blocks(origin, Keys);
    const int first_row = warp * 16 * RowTiles, last_row = first_row + 16 * RowTiles - 1;
    warp_end = first_row < rows ? view.end_slot(p, min(last_row, rows - 1) / group) : INT_MIN;
  }

  __device__ __forceinline__ StripPlace place(int r) const {
    return {(warp * RowTiles + r) * 16, rows, group};
  }

  __device__ __forceinline__ uint32_t keys_of(int block) const {
    return ring + static_cast<uint32_t>(block % 2 * 2 * kTileBytes);
  }

  __device__ __forceinline__ int page_in(int block) const {
    return page_of(view, page_shift, origin + block * Keys + warp * kOwn + lane % kOwn);
  }

  /// Starts this warp's share of the copy of a tile.
  __device__ __forceinline__ void copy_block(int block, int page) const {
    const int first = warp * kOwn;
    const int64_t from =
        pool_offset(p, view, kv_head, origin + block * Keys + first + lane % kOwn, page);
    copy_rows<T, D, kOwn, PaddedRows<T, D>>(a.k_pages, from, keys_of(block), first);
    copy_rows<T, D, kOwn, PaddedRows<T, D>>(a.v_pages, from, keys_of(block) + kTileBytes, first);
  }

  __device__ __forceinline__ void load_query() const {
    constexpr int kPieces = D / 8;
    for (int piece = threadIdx.x; piece < kRows * kPieces; piece += kWarps * kWarp) {
      const int row = piece / kPieces, d = piece % kPieces * 8;
      const bool used = row < rows;
      const int64_t token = view.token(used ? row / group : 0);
      const int head = kv_head * group + (used ? row % group : 0);
      copy_async_16(query + static_cast<uint32_t>((row * kRow + d) * sizeof(T)),
                    static_cast<const T*>(a.q) + (token * p.num_qo_heads + head) * D + d, used);
    }
  }

  __device__ __forceinline__ void scores(uint32_t keys, float (&s)[RowTiles][kKeyTiles][4]) const {
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[r][n][e] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t q[RowTiles][4];
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) {
        const int row = (warp * RowTiles + r) * 16 + lane % 16, d = k * 16 + lane / 16 * 8;
        load_matrices(q[r], query + static_cast<uint32_t>((row * kRow + d) * sizeof(T)));
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t key[4];
        const int row = n * 8 + lane / 16 * 8 + lane % 8, d = k * 16 + lane / 8 % 2 * 8;
        load_matrices(key, keys + static_cast<uint32_t>((row * kRow + d) * sizeof(T)));
#pragma unroll
        for (int r = 0; r < RowTiles; ++r) {
          mma_16x8x16<T>(s[r][n], q[r], key[0], key[1]);
          mma_16x8x16<T>(s[r][n + 1], q[r], key[2], key[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void add_values(uint32_t values,
                                             const float (&s)[RowTiles][kKeyTiles][4]) {
#pragma unroll
    for (int k = 0; k < Keys / 16; ++k) {
      uint32_t weights[RowTiles][4];
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) pack_weights<T>(s[r], k, weights[r]);
#pragma unroll
      for (int n = 0; n < kValueTiles; n += 2) {
        uint32_t value[4];
        const int row = k * 16 + lane / 8 % 2 * 8 + lane % 8, d = n * 8 + lane / 16 * 8;
        load_matrices_transposed(value,
                                 values + static_cast<uint32_t>((row * kRow + d) * sizeof(T)));
#pragma unroll
        for (int r = 0; r < RowTiles; ++r) {
          mma_16x8x16<T>(strips[r].o[n], weights[r], value[0], value[1]);
          mma_16x8x16<T>(strips[r].o[n + 1], weights[r], value[2], value[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void add_taken_out() {
    for (int block = 0; block < blocks; ++block) {
      const int slot = origin + block * Keys;
      if (view.all_see(p, slot, slot + Keys)) continue;
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) {
        strips[r].template add_taken_out<Keys>(p, a, view, kv_head, place(r), slot);
      }
    }
  }

  __device__ __forceinline__ void stream() {
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) strips[r].clear();
    load_query();
    if (blocks > 0) copy_block(0, page_in(0));
    copy_async_commit();
    int next = page_in(1);
    const LogitScale<> logit(p);
    bool taken_out = false;
    for (int block = 0; block < blocks; ++block) {
      copy_async_wait<0>();
      __syncthreads();  // tile `block` is there for all, and nobody reads the other stage any more
      if (block + 1 < blocks) copy_block(block + 1, next);
      copy_async_commit();
      next = page_in(block + 2);
      const int slot = origin + block * Keys;
      if (view.tile.q_len > 1 && !view.all_see(p, slot, slot + Keys)) {
        taken_out |= take_out_nonfinite<T, D, Keys, PaddedRows<T, D>, kWarps * kWarp>(
            keys_of(block) + kTileBytes, threadIdx.x);
        __syncthreads();
      }
      if (slot >= warp_end) continue;
      float s[RowTiles][kKeyTiles][4];
      scores(keys_of(block), s);
#pragma unroll
      for (int r = 0; r < RowTiles; ++r) {
        strips[r].weigh(p, view, logit, place(r), slot, s[r]);
      }
      add_values(keys_of(block) + kTileBytes, s);
    }
    copy_async_wait<0>();
    if (view.tile.q_len > 1 && __syncthreads_or(taken_out)) add_taken_out();
  }

  __device__ __forceinline__ void finish() const {
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) strips[r].write(p, a, view, kv_head, place(r));
  }
};

/// Tiles of at most eight query rows, such as the decode rows of a mixed step, take the decode
/// path: one launch serves both.
template <class T, int D, int Warps, int RowTiles, int Keys, int DecodeStages>
__global__ void __launch_bounds__(Warps* kWarp)
    paged_ragged_kernel(const __grid_constant__ PagedAttentionParams p,
                        const __grid_constant__ AttentionArrays a) {
  extern __shared__ __align__(16) char shared[];
  using Decode = PagedDecode<T, D, 1, 16, DecodeStages>;
  const int kv_head = blockIdx.x % p.num_kv_heads;
  prefetch_tables(p, a);
  const TileView view(p, a, blockIdx.x / p.num_kv_heads);
  const int rows = view.tile.q_len * (p.num_qo_heads / p.num_kv_heads);
  if (rows <= Decode::kColumns && !p.batch_invariant) {
    Decode decode(p, a, view, kv_head, 4, shared);
    decode.run(shared);
  } else {
    PagedRagged<T, D, Warps, RowTiles, Keys> ragged(p, a, view, kv_head, shared);
    ragged.stream();
    ragged.finish();
  }
}

}  // namespace mlxcel::cuda
