#pragma once

#include <cuda.h>

#include "kernels/barrier.cuh"

namespace mlxcel::cuda {

/// Rows of D elements in shared memory as `wgmma` reads them: groups of eight rows, in a group the
/// blocks of 64 columns, in a block the rows of 128 bytes, whose eight 16-byte pieces are permuted
/// by the row's number: the hardware's 128-byte swizzle. Aligned to 1024 bytes.
template <class T, int D>
struct SwizzledRows {
  static constexpr int kBlockBytes = 8 * 128;
  static constexpr int kGroupBytes = D / 64 * kBlockBytes;
  static __device__ __forceinline__ uint32_t offset(int row, int column) {
    const int piece = column % 64 / 8;
    return static_cast<uint32_t>(row / 8 * kGroupBytes + column / 64 * kBlockBytes + row % 8 * 128 +
                                 ((piece ^ (row & 7)) * 16));
  }
};

/// Starts the copy of a box of a five-dimensional tensor by the tensor memory accelerator, sm_90
/// and later; its bytes count towards the barrier.
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap& map, int c0, int c1,
                                         int c2, int c3, int c4, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}

/// The same with a policy of the L2 cache.
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap& map, int c0, int c1,
                                         int c2, int c3, int c4, uint32_t barrier,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier), "l"(policy)
      : "memory");
}

/// Starts to fetch a map, which the first copy would wait for.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Orders this thread's accesses to shared memory before those of the copy engine and the tensor
/// cores.
__device__ __forceinline__ void fence_shared_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace mlxcel::cuda
