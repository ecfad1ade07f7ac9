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

/// Calls f(kernel, shared bytes of a block) with the decode kernel of a choice.
template <class T, int D, class F>
decltype(auto) with_decode(const AttentionConfig& config, const PagedAttentionParams& params,
                           F&& f) {
  using Shapes = AttentionShapes<D>;
  auto call = [&]<int ColumnTiles>() {
    int bytes = Shapes::template Decode<T, ColumnTiles>::shared_bytes(config.warps);
    if (config.cluster > 1) {
      bytes += ClusterMerge<T, D>::shared_bytes(query_rows(params), config.cluster);
    }
    return f(paged_decode_kernel<T, D, ColumnTiles, Shapes::kDecodeKeys, Shapes::kDecodeStages>,
             bytes);
  };
  if constexpr (Shapes::kMaxColumnTiles >= 4) {
    if (config.column_tiles == 4) return call.template operator()<4>();
  }
  if (config.column_tiles == 2) return call.template operator()<2>();
  return call.template operator()<1>();
}

template <class T, int D>
int decode_cluster(const AttentionConfig& config, const PagedAttentionParams& params,
                   const DeviceInfo& device) {
  AttentionConfig wanted = config;
  wanted.cluster = params.chunks_each;
  return with_decode<T, D>(wanted, params, [&](auto kernel, int bytes) {
    if (bytes > device.max_shared_bytes) return 1;
    const int held = resident_clusters(reinterpret_cast<const void*>(kernel), wanted.cluster,
                                       wanted.warps * kWarp, static_cast<size_t>(bytes));
    return held * wanted.cluster >= params.num_tiles * params.num_kv_heads ? wanted.cluster : 1;
  });
}

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
  with_decode<T, D>(config, params, [&](auto kernel, int bytes) {
    launch.in_clusters(config.cluster > 1 ? config.cluster : 0, kernel, grid, config.warps * kWarp,
                       bytes, params, arrays);
  });
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
  template int decode_cluster<f16, D>(const AttentionConfig&, const PagedAttentionParams&,     \
                                      const DeviceInfo&);                                      \
  template int decode_cluster<bf16, D>(const AttentionConfig&, const PagedAttentionParams&,    \
                                       const DeviceInfo&);                                     \
  template void launch_attention<f16, D>(const AttentionConfig&, const PagedAttentionParams&,  \
                                         const AttentionArrays&, Launch&);                     \
  template void launch_attention<bf16, D>(const AttentionConfig&, const PagedAttentionParams&, \
                                          const AttentionArrays&, Launch&);

}  // namespace mlxcel::cuda
