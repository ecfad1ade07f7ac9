#pragma once

namespace mlxcel::cuda {

inline constexpr int kWarp = 32;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

/// Sum over a block of whole warps, in all threads, in an order that depends on the block's size
/// alone.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float partial[kWarp];
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  x = warp_sum(x);
  if (warps == 1) return x;
  if (lane == 0) partial[threadIdx.x / kWarp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

}  // namespace mlxcel::cuda
