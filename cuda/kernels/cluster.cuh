#pragma once

#include "kernels/barrier.cuh"

namespace mlxcel::cuda {

// Clusters: blocks that reach each other's shared memory, sm_90 and later. Code for earlier GPUs
// knows clusters of one block alone; a kernel for a larger one is compiled there too, and stops
// when it is run. Launchers ask device_info().max_cluster.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;
#define MLXCEL_CLUSTER(size)
#else
inline constexpr bool kHasClusters = true;
#define MLXCEL_CLUSTER(size) __cluster_dims__(size, 1, 1)
#endif

/// Blocks of the caller's cluster, 1 where there is none, and its place among them.
__device__ __forceinline__ int cluster_blocks() {
  int blocks = 1;
  if constexpr (kHasClusters) asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return blocks;
}
__device__ __forceinline__ int cluster_rank() {
  int rank = 0;
  if constexpr (kHasClusters) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// Tells the other blocks that this one runs.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/// Waits until all blocks have told.
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Address of the same shared variable in another block of the cluster.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, int block) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  return remote;
}

/// Stores into another block's shared memory; the bytes count towards that block's barrier. Both
/// addresses are given as the calling block's own.
__device__ __forceinline__ void store_remote_16(int block, uint32_t address,
                                                const uint32_t (&words)[4], uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(remote_address(address, block)),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
      "r"(remote_address(barrier, block))
      : "memory");
}

__device__ __forceinline__ void store_remote_8(int block, uint32_t address, uint64_t value,
                                               uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
          remote_address(address, block)),
      "l"(value), "r"(remote_address(barrier, block))
      : "memory");
}

}  // namespace mlxcel::cuda
