#pragma once

#include <cuda.h>

#include "kernels/barrier.cuh"

namespace mlxcel::cuda {

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

}  // namespace mlxcel::cuda
