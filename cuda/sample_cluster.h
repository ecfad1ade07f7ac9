#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/sample_cluster.cuh"
#include "launch.h"

namespace mlxcel::cuda {

/// Calls f(std::integral_constant<int, size>{}) for a cluster size of 2, 4, 8 or 16.
template <class F>
void with_cluster(int size, F&& f) {
  switch (size) {
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

/// The same, or one block.
template <class F>
void with_cluster_or_block(int size, F&& f) {
  if (size == 1) return f(std::integral_constant<int, 1>{});
  with_cluster(size, f);
}

/// Lets the kernel have clusters of more than 8 blocks, and gives it `carveout` percent of a
/// multiprocessor's L1 as shared memory (-1: as the driver chooses).
template <class Kernel>
void allow_cluster(Kernel kernel, int size, int carveout = -1) {
  if (carveout >= 0) {
    MLXCEL_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout));
  }
  if (size > 8) {
    MLXCEL_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
}

/// Blocks that share a row: so many that the batch has at least `blocks`, and no more than the row
/// has tiles. Clusters of 16 are slow to place: for one or two long rows alone.
inline int cluster_for(int rows, int vocab, int blocks) {
  const int most = rows <= 2 && vocab > 65536 ? 16 : 8;
  int size = 1;
  while (size < most && size * rows < blocks && vocab > size * kTile) size *= 2;
  return size;
}

/// The same where blocks hold their tokens in shared memory: two fit a multiprocessor.
inline int held_cluster(int rows, int vocab) {
  constexpr int kHeldTokens = 20480;
  int size = std::max(2, cluster_for(rows, vocab, device_info().num_sms));
  while (size < 16 && vocab > size * kHeldTokens) size *= 2;
  return size;
}

template <int C>
size_t held_bytes(int vocab) {
  return size_t{sizeof(float) * kTile} * tiles_per_block<C>(vocab);
}

/// MLX's buffers are aligned; a slice of one may not be.
inline Logits logits_of(const void* data, FloatType dtype, int vocab) {
  const size_t item = dtype == FloatType::f32 ? 4 : 2;
  return {data, dtype, vocab % 4 == 0 && all_aligned(4 * item, data)};
}

}  // namespace mlxcel::cuda
