#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/sample_cluster.cuh"
#include "launch.h"

namespace mlxcel::cuda {

/// Calls f(std::integral_constant<int, size>{}) for a cluster size of 1, 2, 4, 8 or 16.
template <class F>
void with_cluster(int size, F&& f) {
  const int most = device_info().max_cluster;
  if (size > most) {
    throw std::runtime_error("[sample] asks for clusters of " + std::to_string(size) +
                             " blocks; this GPU has at most " + std::to_string(most) + ".");
  }
  switch (size) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 4:
      return f(std::integral_constant<int, 4>{});
    case 8:
      return f(std::integral_constant<int, 8>{});
    default:
      return f(std::integral_constant<int, 16>{});
  }
}

/// Lets the kernel have clusters of more than 8 blocks, and gives it `carveout` percent of a
/// multiprocessor's L1 as shared memory (-1: as the driver chooses).
template <class Kernel>
void allow_cluster(Kernel kernel, int size, int carveout = -1) {
  if (carveout >= 0) {
    MLXCEL_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout));
  }
  if (size > 8) allow_large_clusters(reinterpret_cast<const void*>(kernel));
}

/// Blocks that share a row: so many that the batch has at least `blocks`, and no more than the row
/// has tiles. Clusters of 16 are slow to place: for one or two long rows alone.
inline int cluster_for(int rows, int vocab, int blocks) {
  const int most = std::min(rows <= 2 && vocab > 65536 ? 16 : 8, device_info().max_cluster);
  int size = 1;
  while (size < most && size * rows < blocks && vocab > size * kTile) size *= 2;
  return size;
}

/// Shared memory for a block's share of a row, as kept_row keeps it.
inline size_t held_bytes(int size, int vocab) {
  return size == 1 ? 0 : size_t{sizeof(float) * kTile} * tiles_per_block(size, vocab);
}

/// The same where blocks hold their tokens in shared memory, behind `other_bytes`: two fit a
/// multiprocessor. One block, which holds none, where the GPU has no clusters or too little memory.
inline int held_cluster(int rows, int vocab, size_t other_bytes) {
  constexpr int kHeldTokens = 20480;
  const DeviceInfo& device = device_info();
  const int most = device.max_cluster;
  int size = std::min(most, std::max(2, cluster_for(rows, vocab, device.num_sms)));
  while (size < most && vocab > size * kHeldTokens) size *= 2;
  return other_bytes + held_bytes(size, vocab) <= static_cast<size_t>(device.max_shared_bytes)
             ? size
             : 1;
}

/// MLX's buffers are aligned; a slice of one may not be.
inline Logits logits_of(const void* data, FloatType dtype, int vocab) {
  const size_t item = dtype == FloatType::f32 ? 4 : 2;
  return {data, dtype, vocab % 4 == 0 && all_aligned(4 * item, data)};
}

}  // namespace mlxcel::cuda
