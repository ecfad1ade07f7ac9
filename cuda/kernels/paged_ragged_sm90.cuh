#pragma once

#include "kernels/paged_decode.cuh"
#include "kernels/paged_rows.cuh"
#include "kernels/tma.cuh"
#include "kernels/wgmma.cuh"

namespace mlxcel::cuda {

/// Attention of up to 64 * Halves query rows with warpgroup products (sm_90a), head_dim 64 and 128:
/// one warpgroup, two blocks an SM. Tiles of 64 keys come by the tensor memory accelerator, 16 keys
/// a warp. While the tensor cores work for one half of the rows, the warps turn the logits of the
/// other into weights.
template <class T, int D, int Halves>
struct PagedRaggedSm90 {
  static constexpr int kKeys = 64, kSteps = D / 16;
  using Rows = SwizzledRows<T, D>;
  static constexpr int kQueryBytes = 128 * D * sizeof(T);
  static constexpr int kTileBytes = kKeys * D * sizeof(T);
  static constexpr int kAlignment = 1024;
  static constexpr int kSharedBytes = kAlignment + kQueryBytes + 4 * kTileBytes;

  const PagedAttentionParams& p;
  const AttentionArrays& a;
  const CUtensorMap &k_map, &v_map;
  const int page_groups;  // groups of eight tokens from a page to the next (tensor_map.h)
  const TileView& view;
  const int kv_head, group, rows, warp, lane, page_shift;
  const uint32_t base, barriers;
  int origin, blocks;

  RowStrip<T, D> strips[Halves];
  float s[Halves][kKeys / 8][4];
  uint32_t weights[Halves][kKeys / 16][4];

  __device__ PagedRaggedSm90(const PagedAttentionParams& p, const AttentionArrays& a,
                             const CUtensorMap& k_map, const CUtensorMap& v_map, int page_groups,
                             const TileView& view, int kv_head, char* shared, uint64_t* barriers)
      : p(p),
        a(a),
        k_map(k_map),
        v_map(v_map),
        page_groups(page_groups),
        view(view),
        kv_head(kv_head),
        group(p.num_qo_heads / p.num_kv_heads),
        rows(view.tile.q_len * (p.num_qo_heads / p.num_kv_heads)),
        warp(threadIdx.x / kWarp),
        lane(threadIdx.x % kWarp),
        page_shift(page_shift_of(p)),
        base((shared_address(shared) + kAlignment - 1) / kAlignment * kAlignment),
        barriers(shared_address(barriers)) {
    origin = view.origin(p, kKeys);
    blocks = view.blocks(origin, kKeys);
  }

  // Two stages of K and of V, and a barrier each.
  static constexpr int kNumBarriers = 4;
  __device__ __forceinline__ uint32_t keys_of(int block) const {
    return base + static_cast<uint32_t>(kQueryBytes + block % 2 * kTileBytes);
  }
  __device__ __forceinline__ uint32_t values_of(int block) const {
    return base + static_cast<uint32_t>(kQueryBytes + (2 + block % 2) * kTileBytes);
  }
  __device__ __forceinline__ uint32_t keys_there(int block) const {
    return barriers + block % 2 * 8;
  }
  __device__ __forceinline__ uint32_t values_there(int block) const {
    return barriers + 16 + block % 2 * 8;
  }

  __device__ __forceinline__ StripPlace place(int half) const {
    return {half * 64 + warp * 16, rows, group};
  }

  /// Each warp copies 16 tokens of a block: one box, or two of pages of 8 by lanes 0 and 1.
  __device__ __forceinline__ bool small_pages() const { return p.page_size < 16; }

  /// Where this lane's box begins in a block.
  __device__ __forceinline__ int box() const {
    return warp * 16 + (small_pages() ? lane % 2 * 8 : 0);
  }

  /// The page id of this lane's box of a block.
  __device__ __forceinline__ int page_in(int block) const {
    return page_of(view, page_shift, origin + block * kKeys + box());
  }

  /// Starts the copy of this warp's share of a block of a pool.
  __device__ __forceinline__ void copy(const CUtensorMap& map, int block, int page, uint32_t to,
                                       uint32_t barrier) const {
    const int tokens = small_pages() ? 8 : 16, slot = origin + block * kKeys + box();
    const bool valid =
        lane < (small_pages() ? 2 : 1) && slot < view.end && slot + tokens > view.begin;
    const int boxes = __popc(__ballot_sync(0xffffffffu, valid));
    if (lane == 0) barrier_expect(barrier, static_cast<uint32_t>(boxes * tokens * D * sizeof(T)));
    __syncwarp();
    if (valid) {
      copy_box(to + box() / 8 * Rows::kGroupBytes, map, 0, 0, 0, kv_head,
               page * page_groups + (slot & (p.page_size - 1)) / 8, barrier);
    }
  }

  __device__ __forceinline__ void load_query() const {
    constexpr int kPieces = D / 8;
    for (int piece = threadIdx.x; piece < Halves * 64 * kPieces; piece += 4 * kWarp) {
      const int row = piece / kPieces, d = piece % kPieces * 8;
      const bool used = row < rows;
      const int64_t token = view.token(used ? row / group : 0);
      const int head = kv_head * group + (used ? row % group : 0);
      copy_async_16(base + Rows::offset(row, d),
                    static_cast<const T*>(a.q) + (token * p.num_qo_heads + head) * D + d, used);
    }
    copy_async_commit();
  }

  /// Starts s = Q K^T of a block for 64 rows.
  __device__ __forceinline__ void start_scores(int half, int block) {
    float (&flat)[kKeys / 2] = reinterpret_cast<float (&)[kKeys / 2]>(s[half]);
    const uint64_t q = matrix_descriptor(base + half * 8 * Rows::kGroupBytes, Rows::kGroupBytes, 0);
    const uint64_t k = matrix_descriptor(keys_of(block), Rows::kGroupBytes, 0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = step / 4 * Rows::kBlockBytes + step % 4 * 32;
      wgmma_64x64<T>(flat, descriptor_at(q, at), descriptor_at(k, at), step > 0);
    }
  }

  /// Starts o += weights V of a block.
  __device__ __forceinline__ void start_values(int half, int block) {
    float (&flat)[D / 2] = reinterpret_cast<float (&)[D / 2]>(strips[half].o);
    const uint64_t v = matrix_descriptor(values_of(block), Rows::kGroupBytes, Rows::kBlockBytes);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      wgmma_add<T>(flat, weights[half][step], descriptor_at(v, step * 2 * Rows::kGroupBytes));
    }
  }

  /// Waits for the products that were started.
  __device__ __forceinline__ void finish_products() {
    wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < Halves; ++half) {
      hold(reinterpret_cast<float (&)[kKeys / 2]>(s[half]));
      hold(reinterpret_cast<float (&)[D / 2]>(strips[half].o));
    }
  }

  __device__ __forceinline__ void pack_all(int half) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) pack_weights<T>(s[half], k, weights[half][k]);
  }

  /// Called when this warp has done with K of a block and with V of the one before: starts the
  /// copies into their stages as soon as all warps have.
  __device__ __forceinline__ void refill(int block, int& page_k, int& page_v) const {
    __syncthreads();
    if (block + 2 < blocks) copy(k_map, block + 2, page_k, keys_of(block), keys_there(block));
    if (block + 1 < blocks) {
      copy(v_map, block + 1, page_v, values_of(block + 1), values_there(block + 1));
    }
    page_v = page_k;
    page_k = page_in(block + 3);
  }

  /// Puts zeros where no query sees a slot of a block of V (what is there may be NaN), and keeps
  /// what is not finite from queries that do not see it: returns whether there was such a value.
  __device__ __forceinline__ bool clean_values(int block) const {
    const int key = threadIdx.x / 2, slot = origin + block * kKeys + key;
    if (slot < view.begin || slot >= view.end) {
      for (int d = 0; d < D / 2; d += 8) {
        store_shared_16(values_of(block) + Rows::offset(key, threadIdx.x % 2 * (D / 2) + d), {});
      }
    }
    bool found = false;
    if (view.tile.q_len > 1) {
      __syncthreads();
      found = take_out_nonfinite<T, D, kKeys, Rows, 4 * kWarp>(values_of(block), threadIdx.x);
    }
    fence_shared_proxy();
    __syncthreads();
    return found;
  }

  __device__ __forceinline__ void add_taken_out() {
    for (int block = 0; block < blocks; ++block) {
      const int slot = origin + block * kKeys;
      if (view.all_see(p, slot, slot + kKeys)) continue;
#pragma unroll
      for (int half = 0; half < Halves; ++half) {
        strips[half].template add_taken_out<kKeys>(p, a, view, kv_head, place(half), slot);
      }
    }
  }

  __device__ __forceinline__ void stream() {
    // Page ids of this lane's box in the next blocks of V and K to copy, read a tile ahead.
    const int page = page_in(0);
    int page_v = page_in(1), page_k = page_in(2);
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < kNumBarriers; ++i) barrier_init(barriers + i * 8, 4);
      barrier_init_fence();
    }
#pragma unroll
    for (int half = 0; half < Halves; ++half) strips[half].clear();
    if (blocks == 0) return;
    __syncthreads();
    copy(k_map, 0, page, keys_of(0), keys_there(0));
    copy(v_map, 0, page, values_of(0), values_there(0));
    if (blocks > 1) copy(k_map, 1, page_v, keys_of(1), keys_there(1));
    load_query();
    copy_async_wait<0>();
    fence_shared_proxy();
    __syncthreads();

    const LogitScale<> logit(p);
    bool taken_out = false;
    barrier_wait(keys_there(0), 0);
    wgmma_begin();
    start_scores(0, 0);
    wgmma_commit();
    finish_products();
    for (int block = 0; block < blocks; ++block) {
      const int slot = origin + block * kKeys;
      if constexpr (Halves == 2) {
        wgmma_begin();
        start_scores(1, block);
        wgmma_commit();
      }
      strips[0].weigh(p, view, logit, place(0), slot, s[0]);
      if constexpr (Halves == 2) finish_products();
      pack_all(0);
      barrier_wait(values_there(block), block / 2 & 1);
      if (!view.all_see(p, slot, slot + kKeys)) taken_out |= clean_values(block);
      wgmma_begin();
      start_values(0, block);
      if constexpr (Halves == 2) {
        wgmma_commit();
        refill(block, page_k, page_v);
        strips[1].weigh(p, view, logit, place(1), slot, s[1]);
        finish_products();
        pack_all(1);
        wgmma_begin();
        start_values(1, block);
      }
      if (block + 1 < blocks) barrier_wait(keys_there(block + 1), (block + 1) / 2 & 1);
      start_scores(0, block + 1);  // past the last block: products that nobody looks at
      wgmma_commit();
      if constexpr (Halves == 1) refill(block, page_k, page_v);
      finish_products();
    }
    if (view.tile.q_len > 1 && __syncthreads_or(taken_out)) add_taken_out();
  }

  __device__ __forceinline__ void run() {
    stream();
#pragma unroll
    for (int half = 0; half < Halves; ++half) {
      strips[half].write(p, a, view, kv_head, place(half));
    }
  }
};

template <class T, int D, int DecodeStages>
__global__ void __launch_bounds__(128, 2)
    paged_ragged_sm90_kernel(const __grid_constant__ PagedAttentionParams p,
                             const __grid_constant__ AttentionArrays a,
                             const __grid_constant__ CUtensorMap k_map,
                             const __grid_constant__ CUtensorMap v_map, int page_groups) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) char shared[];
  __shared__ __align__(8) uint64_t barriers[PagedRaggedSm90<T, D, 1>::kNumBarriers];
  using Decode = PagedDecode<T, D, 1, 16, DecodeStages>;
  const int kv_head = blockIdx.x % p.num_kv_heads;
  prefetch_tables(p, a);
  const TileView view(p, a, blockIdx.x / p.num_kv_heads);
  const int rows = view.tile.q_len * (p.num_qo_heads / p.num_kv_heads);
  if (rows <= Decode::kColumns && !p.batch_invariant) {
    Decode decode(p, a, view, kv_head, 4, shared);
    decode.run(shared);
  } else if (rows <= 64) {
    PagedRaggedSm90<T, D, 1>(p, a, k_map, v_map, page_groups, view, kv_head, shared, barriers)
        .run();
  } else {
    PagedRaggedSm90<T, D, 2>(p, a, k_map, v_map, page_groups, view, kv_head, shared, barriers)
        .run();
  }
#endif
}

}  // namespace mlxcel::cuda
