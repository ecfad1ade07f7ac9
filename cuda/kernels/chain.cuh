#pragma once

namespace mlxcel::cuda {

// Kernels that a chain (encoder.h) starts before the one in front of them has ended: they call
// these two, which do nothing elsewhere.

/// Lets the next kernel of the chain start, as far as there is room.
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Waits until the kernel in front has ended and what it wrote can be seen. Before this a kernel
/// may read what no kernel of the chain writes, and write nothing.
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace mlxcel::cuda
