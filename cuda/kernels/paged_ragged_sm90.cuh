#pragma once

#include "kernels/paged_ragged.cuh"
#include "kernels/wgmma.cuh"

namespace mlxcel::cuda {

/// PagedRagged with warpgroup products (sm_90a), head_dim 64 and 128: two warpgroups of 64 query
/// rows, tiles of 128 keys. While the tensor cores add the values of one tile, the warps turn the
/// logits of the next into weights.
template <class T, int D>
struct PagedRaggedSm90 : PagedRagged<T, D, 8, 1, 128> {
  using Base = PagedRagged<T, D, 8, 1, 128>;
  using Base::a, Base::blocks, Base::group, Base::kOwn, Base::kRows, Base::kSteps, Base::kv_head,
      Base::lane, Base::o, Base::origin, Base::p, Base::page_in, Base::rows, Base::view, Base::warp;
  static constexpr int kKeys = 128;
  using Rows = SwizzledRows<T, 128>;  // of Q, K and V alike
  static constexpr int kTile = 128 * D * sizeof(T);
  static constexpr int kAlignment = 1024;
  static constexpr int kSharedBytes = kAlignment + 5 * kTile;  // Q, two K, two V

  const uint32_t base;

  __device__ PagedRaggedSm90(const PagedAttentionParams& p, const AttentionArrays& a,
                             const TileView& view, int kv_head, char* shared)
      : Base(p, a, view, kv_head, shared),
        base((shared_address(shared) + kAlignment - 1) / kAlignment * kAlignment) {}

  __device__ __forceinline__ uint32_t keys_of(int block) const {
    return base + static_cast<uint32_t>(kTile + block % 2 * kTile);
  }
  __device__ __forceinline__ uint32_t values_of(int block) const {
    return base + static_cast<uint32_t>(3 * kTile + block % 2 * kTile);
  }

  /// Starts this warp's share of the copy of one block of a pool.
  __device__ __forceinline__ void copy(const void* pool, int block, int page, uint32_t to) const {
    if (block >= blocks) return;
    const int first = warp * kOwn;
    const int64_t from =
        pool_offset(p, view, kv_head, origin + block * kKeys + first + lane % kOwn, page);
    copy_rows<T, D, kOwn, Rows>(pool, from, to, first);
  }

  __device__ __forceinline__ void load_query() const {
    constexpr int kPieces = D / 8;
    for (int piece = threadIdx.x; piece < kRows * kPieces; piece += 8 * kWarp) {
      const int row = piece / kPieces, d = piece % kPieces * 8;
      const bool used = row < rows;
      const int64_t token = view.tile.q_begin + (used ? row / group : 0);
      const int head = kv_head * group + (used ? row % group : 0);
      copy_async_16(base + Rows::offset(row, d),
                    static_cast<const T*>(a.q) + (token * p.num_qo_heads + head) * D + d, used);
    }
  }

  /// Starts s = Q K^T of a block for this warpgroup's 64 rows.
  __device__ __forceinline__ void start_scores(int block, float (&s)[1][16][4]) const {
    float (&flat)[64] = reinterpret_cast<float (&)[64]>(s);
    const uint32_t q = base + static_cast<uint32_t>(warp / 4 * 64 * 128), k = keys_of(block);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t at = static_cast<uint32_t>(step / 4 * Rows::kBlockBytes + step % 4 * 32);
      wgmma_64x128<T>(flat, matrix_descriptor(q + at, 0), matrix_descriptor(k + at, 0), step > 0);
    }
    wgmma_commit();
  }

  /// Starts o += weights V of a block.
  __device__ __forceinline__ void start_values(int block, const uint32_t (&weights)[8][4]) {
    float (&flat)[D / 2] = reinterpret_cast<float (&)[D / 2]>(o);
    const uint32_t v = values_of(block);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      wgmma_add<T>(
          flat, weights[step],
          matrix_descriptor(v + static_cast<uint32_t>(step * 16 * 128), Rows::kBlockBytes));
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void pack_all(const float (&s)[1][16][4],
                                           uint32_t (&weights)[8][4]) const {
#pragma unroll
    for (int step = 0; step < 8; ++step) Base::pack_weights(s[0], step, weights[step]);
  }

  /// Waits for this thread's copies and shows them to all threads and to the tensor cores.
  __device__ __forceinline__ void publish() const {
    copy_async_wait<0>();
    fence_shared_for_wgmma();
    __syncthreads();
  }

  __device__ __forceinline__ void stream() {
    Base::clear();
    if (blocks == 0) return;
    load_query();
    copy(a.k_pages, 0, page_in(0), keys_of(0));
    copy_async_commit();
    // Page ids of this lane's slots in the next blocks of V and K to copy, read a tile ahead.
    int page_v = page_in(0), page_k = page_in(1);
    const LogitScale<> logit(p);
    float s[1][16][4], keep[1][2];
    uint32_t weights[8][4];

    publish();
    wgmma_begin();
    start_scores(0, s);
    copy(a.k_pages, 1, page_k, keys_of(1));
    copy(a.v_pages, 0, page_v, values_of(0));
    copy_async_commit();
    page_v = page_k;
    page_k = page_in(2);
    wgmma_wait<0>();
    hold(reinterpret_cast<float (&)[64]>(s));
    Base::softmax(Base::logits(0, logit, s), s, keep);
    pack_all(s, weights);

    for (int block = 0; block + 1 < blocks; ++block) {
      // K of block + 1 and V of block are there; K of block and V of block - 1 are done with.
      publish();
      hold(reinterpret_cast<float (&)[D / 2]>(o));
      wgmma_begin();
      start_scores(block + 1, s);
      start_values(block, weights);
      copy(a.k_pages, block + 2, page_k, keys_of(block));
      copy(a.v_pages, block + 1, page_v, values_of(block + 1));
      copy_async_commit();
      page_v = page_k;
      page_k = page_in(block + 3);
      wgmma_wait<1>();
      hold(reinterpret_cast<float (&)[64]>(s));
      Base::softmax(Base::logits(block + 1, logit, s), s, keep);
      wgmma_wait<0>();
      hold(reinterpret_cast<float (&)[D / 2]>(o));
      Base::rescale(keep);
      pack_all(s, weights);
    }
    publish();
    hold(reinterpret_cast<float (&)[D / 2]>(o));
    wgmma_begin();
    start_values(blocks - 1, weights);
    wgmma_wait<0>();
    hold(reinterpret_cast<float (&)[D / 2]>(o));
  }
};

template <class T, int D, int DecodeStages>
__global__ void __launch_bounds__(256, 1)
    paged_ragged_sm90_kernel(const __grid_constant__ PagedAttentionParams p,
                             const __grid_constant__ AttentionArrays a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) char shared[];
  using Decode = PagedDecode<T, D, 1, 16, DecodeStages>;
  const int kv_head = blockIdx.x % p.num_kv_heads;
  prefetch_tables(p, a);
  const TileView view(p, a, blockIdx.x / p.num_kv_heads);
  if (view.tile.q_len * (p.num_qo_heads / p.num_kv_heads) <= Decode::kColumns) {
    Decode decode(p, a, view, kv_head, 8, shared);
    decode.run(shared);
  } else {
    PagedRaggedSm90<T, D> ragged(p, a, view, kv_head, shared);
    ragged.stream();
    ragged.finish();
  }
  merge_in_launch<T>(p, a, view.tile, kv_head);
#endif
}

}  // namespace mlxcel::cuda
