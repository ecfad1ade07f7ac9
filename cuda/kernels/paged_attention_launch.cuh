#pragma once

#include <algorithm>

#include "kernels/paged_ragged.cuh"
#include "kernels/paged_ragged_sm90.cuh"
#include "paged_attention_dispatch.h"
#include "tensor_map.h"

namespace mlxcel::cuda {

/// The shapes of the tensor-core kernels for one head dimension.
template <int D>
struct AttentionShapes {
  // A decode warp keeps about 24 KB of K and V in flight: eight warps fill an SM's memory system.
  static constexpr int kDecodeKeys = 16;
  static constexpr int kDecodeStages = D <= 64 ? 5 : D <= 96 ? 4 : D <= 128 ? 3 : 2;
  // Four column tiles' accumulators do not fit the registers above 128.
  static constexpr int kMaxColumnTiles = D <= 128 ? 4 : 2;
  // Two row tiles a warp read each key from shared memory once for 32 rows; above 128 the
  // accumulators of one fill the registers.
  static constexpr int kRaggedRowTiles = D <= 128 ? 2 : 1;
  static constexpr int kRaggedWarps = 128 / 16 / kRaggedRowTiles;
  static constexpr int kRaggedKeys = D <= 128 ? 64 : 32;

  // Warps of a ragged block that stream a decode tile: what the ragged tile's shared memory holds.
  static constexpr int kRaggedDecodeWarps = 4;

  template <class T, int ColumnTiles>
  using Decode = PagedDecode<T, D, ColumnTiles, kDecodeKeys, kDecodeStages>;
  template <class T>
  using Ragged = PagedRagged<T, D, kRaggedWarps, kRaggedRowTiles, kRaggedKeys>;

  // Warpgroup products: where the accumulators of 64 rows a warpgroup fit the registers.
#if defined(MLXCEL_CUDA_SM90A)
  static constexpr bool kHasSm90 = D == 64 || D == 128;
#else
  static constexpr bool kHasSm90 = false;
#endif

  template <class T>
  static int sm90_shared_bytes() {
    return std::max(PagedRaggedSm90<T, D, 2>::kSharedBytes,
                    Decode<T, 1>::shared_bytes(kRaggedDecodeWarps));
  }

  template <class T>
  static int ragged_shared_bytes() {
    return std::max(Ragged<T>::kSharedBytes, Decode<T, 1>::shared_bytes(kRaggedDecodeWarps));
  }
};

template <class T, int D>
void launch_attention(const AttentionConfig& config, const PagedAttentionParams& params,
                      const AttentionArrays& arrays, Launch& launch) {
  using Shapes = AttentionShapes<D>;
  const dim3 grid(static_cast<unsigned>(params.num_tiles) * params.num_kv_heads);
  if (config.kernel == AttentionKernel::ragged) {
    launch(paged_ragged_kernel<T, D, Shapes::kRaggedWarps, Shapes::kRaggedRowTiles,
                               Shapes::kRaggedKeys, Shapes::kDecodeStages>,
           grid, Shapes::kRaggedWarps * kWarp, Shapes::template ragged_shared_bytes<T>(), params,
           arrays);
    return;
  }
  if constexpr (Shapes::kHasSm90) {
    if (config.kernel == AttentionKernel::ragged_sm90) {
      launch(paged_ragged_sm90_kernel<T, D, Shapes::kDecodeStages>, grid, 4 * kWarp,
             Shapes::template sm90_shared_bytes<T>(), params, arrays,
             pool_map(params, arrays.k_pages), pool_map(params, arrays.v_pages),
             page_groups(params));
      return;
    }
  }
  auto decode = [&]<int ColumnTiles>() {
    launch(paged_decode_kernel<T, D, ColumnTiles, Shapes::kDecodeKeys, Shapes::kDecodeStages>, grid,
           config.warps * kWarp,
           Shapes::template Decode<T, ColumnTiles>::shared_bytes(config.warps), params, arrays);
  };
  if (config.column_tiles == 1)
    decode.template operator()<1>();
  else if (config.column_tiles == 2)
    decode.template operator()<2>();
  else if constexpr (Shapes::kMaxColumnTiles >= 4)
    decode.template operator()<4>();
}

template <int D>
AttentionLimits attention_limits() {
  using Shapes = AttentionShapes<D>;
  AttentionLimits limits{};
  limits.max_column_tiles = Shapes::kMaxColumnTiles;
  auto put = [&]<int ColumnTiles>(int i) {
    using Decode = typename Shapes::template Decode<bf16, ColumnTiles>;
    limits.warp_bytes[i] = Decode::kWarpBytes;
    limits.query_bytes[i] = Decode::kQueryBytes;
  };
  put.template operator()<1>(0);
  put.template operator()<2>(1);
  put.template operator()<4>(2);
  limits.has_sm90 = Shapes::kHasSm90;
  limits.ragged_bytes = Shapes::template ragged_shared_bytes<bf16>();
  return limits;
}

#define MLXCEL_ATTENTION_HEAD_DIM(D)                                                           \
  template AttentionLimits attention_limits<D>();                                              \
  template void launch_attention<f16, D>(const AttentionConfig&, const PagedAttentionParams&,  \
                                         const AttentionArrays&, Launch&);                     \
  template void launch_attention<bf16, D>(const AttentionConfig&, const PagedAttentionParams&, \
                                          const AttentionArrays&, Launch&);

}  // namespace mlxcel::cuda
