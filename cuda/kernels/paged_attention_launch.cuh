#pragma once

#include <algorithm>
#include <utility>

#include "kernels/paged_mixed_sm90.cuh"
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

  template <class T, int ColumnTiles, class Maps = NoMaps>
  using Decode = PagedDecode<T, D, ColumnTiles, kDecodeKeys, kDecodeStages, Maps>;
  template <class T>
  using Ragged = PagedRagged<T, D, kRaggedWarps, kRaggedRowTiles, kRaggedKeys>;

  // Boxes of the tensor memory accelerator are 64 columns wide, and the accumulators of warpgroup
  // products of 64 rows fit the registers.
  static constexpr bool kHasSm90 = D == 64 || D == 128;
#if defined(MLXCEL_CUDA_SM90A)
  static constexpr bool kHasWarpgroups = kHasSm90;
#else
  static constexpr bool kHasWarpgroups = false;
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

/// Calls f.operator()<ColumnTiles>() with those of a choice.
template <int D, class F>
void with_column_tiles(const AttentionConfig& config, F&& f) {
  if constexpr (AttentionShapes<D>::kMaxColumnTiles >= 4) {
    if (config.column_tiles == 4) return f.template operator()<4>();
  }
  if (config.column_tiles == 2) return f.template operator()<2>();
  f.template operator()<1>();
}

/// The kernel of decode clusters, and the shared memory of a block.
template <class T, int D>
auto cluster_kernel(const AttentionConfig& config, const PagedAttentionParams& params,
                    int cluster) {
  using Shapes = AttentionShapes<D>;
  const int bytes = Shapes::template Decode<T, 1, PoolMaps>::shared_bytes(config.warps) +
                    ClusterMerge<T, D>::shared_bytes(query_rows(params), cluster);
  auto* kernel =
      paged_decode_sm90_kernel<T, D, 1, Shapes::kDecodeKeys, Shapes::kDecodeStages, true>;
  return std::pair(kernel, bytes);
}

template <class T, int D>
int decode_cluster([[maybe_unused]] const AttentionConfig& config,
                   [[maybe_unused]] const PagedAttentionParams& params,
                   [[maybe_unused]] const DeviceInfo& device) {
  if constexpr (AttentionShapes<D>::kHasSm90) {
    const int wanted = params.chunks_each;
    const auto [kernel, bytes] = cluster_kernel<T, D>(config, params, wanted);
    if (bytes > device.max_shared_bytes) return 1;
    const int held = resident_clusters(reinterpret_cast<const void*>(kernel), wanted,
                                       config.warps * kWarp, static_cast<size_t>(bytes));
    return held * wanted >= params.num_tiles * params.num_kv_heads ? wanted : 1;
  } else {
    return 1;
  }
}

template <class T, int D>
void launch_decode_sm90(const AttentionConfig& config, const PagedAttentionParams& params,
                        const AttentionArrays& arrays, dim3 grid, Launch& launch) {
  using Shapes = AttentionShapes<D>;
  const auto map = [&](const void* pool) {
    return pool_map(params, pool, CU_TENSOR_MAP_L2_PROMOTION_NONE);
  };
  const CUtensorMap k_map = map(arrays.k_pages), v_map = map(arrays.v_pages);
  const int threads = config.warps * kWarp;
  if (config.cluster > 1) {
    const auto [kernel, bytes] = cluster_kernel<T, D>(config, params, config.cluster);
    launch.in_clusters(config.cluster, kernel, grid, threads, bytes, params, arrays, k_map, v_map,
                       page_groups(params));
    return;
  }
  with_column_tiles<D>(config, [&]<int ColumnTiles>() {
    launch(paged_decode_sm90_kernel<T, D, ColumnTiles, Shapes::kDecodeKeys, Shapes::kDecodeStages,
                                    false>,
           grid, threads,
           Shapes::template Decode<T, ColumnTiles, PoolMaps>::shared_bytes(config.warps), params,
           arrays, k_map, v_map, page_groups(params));
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
  if constexpr (Shapes::kHasWarpgroups) {
    const auto launch_sm90 = [&](auto* kernel, dim3 blocks, int threads, int bytes) {
      const auto map = [&](const void* pool) {
        return pool_map(params, pool, CU_TENSOR_MAP_L2_PROMOTION_NONE);
      };
      launch(kernel, blocks, threads, bytes, params, arrays, map(arrays.k_pages),
             map(arrays.v_pages), page_groups(params));
    };
    if (config.kernel == AttentionKernel::ragged_sm90) {
      launch_sm90(paged_ragged_sm90_kernel<T, D, Shapes::kDecodeStages>, grid, 4 * kWarp,
                  Shapes::template sm90_shared_bytes<T>());
      return;
    }
    if (config.kernel == AttentionKernel::mixed_sm90) {
      using Mixed = PagedMixedSm90<T, D>;
      const unsigned blocks = std::min<unsigned>(grid.x, device_info().num_sms);
      launch_sm90(paged_mixed_sm90_kernel<T, D>, blocks, Mixed::kThreads, Mixed::kSharedBytes);
      return;
    }
  }
  if constexpr (Shapes::kHasSm90) {
    if (config.kernel == AttentionKernel::decode_sm90) {
      launch_decode_sm90<T, D>(config, params, arrays, grid, launch);
      return;
    }
  }
  with_column_tiles<D>(config, [&]<int ColumnTiles>() {
    launch(paged_decode_kernel<T, D, ColumnTiles, Shapes::kDecodeKeys, Shapes::kDecodeStages>, grid,
           config.warps * kWarp,
           Shapes::template Decode<T, ColumnTiles>::shared_bytes(config.warps), params, arrays);
  });
}

template <int D>
AttentionLimits attention_limits() {
  using Shapes = AttentionShapes<D>;
  AttentionLimits limits{};
  limits.max_column_tiles = Shapes::kMaxColumnTiles;
  auto put = [&]<class Decode>(AttentionLimits::Decode& of, int i) {
    of.warp_bytes[i] = Decode::kWarpBytes;
    of.other_bytes[i] = Decode::shared_bytes(0);
  };
  auto put_all = [&]<class Maps>(AttentionLimits::Decode& of) {
    put.template operator()<typename Shapes::template Decode<bf16, 1, Maps>>(of, 0);
    put.template operator()<typename Shapes::template Decode<bf16, 2, Maps>>(of, 1);
    put.template operator()<typename Shapes::template Decode<bf16, 4, Maps>>(of, 2);
  };
  put_all.template operator()<NoMaps>(limits.decode);
  if constexpr (Shapes::kHasSm90) put_all.template operator()<PoolMaps>(limits.decode_sm90);
  limits.has_sm90 = Shapes::kHasSm90;
  limits.has_warpgroups = Shapes::kHasWarpgroups;
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
