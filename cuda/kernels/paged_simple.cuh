#pragma once

#include "kernels/attention_tile.cuh"
#include "kernels/reduce.cuh"

namespace mlxcel::cuda {

inline constexpr int kSimpleWarps = 4;
inline constexpr int kSimpleMaxHeadDim = 256;

/// Attention in plain f32 arithmetic, for f32 pools: a warp takes one query row at a time, its
/// lanes 32 keys at a time for the logits and the dimensions of the head for the weighted sum.
template <class T>
__global__ void __launch_bounds__(kSimpleWarps* kWarp)
    paged_simple_kernel(const __grid_constant__ PagedAttentionParams p,
                        const __grid_constant__ AttentionArrays a) {
  __shared__ float queries[kSimpleWarps][kSimpleMaxHeadDim];
  constexpr int kOwn = kSimpleMaxHeadDim / kWarp;  // dimensions a lane
  const int kv_head = blockIdx.x % p.num_kv_heads, lane = threadIdx.x % kWarp;
  const int group = p.num_qo_heads / p.num_kv_heads, page_shift = page_shift_of(p);
  const TileView view(p, a, blockIdx.x / p.num_kv_heads);
  const LogitScale<true> logit(p);
  float* query = queries[threadIdx.x / kWarp];
  const T* k_pages = static_cast<const T*>(a.k_pages);
  const T* v_pages = static_cast<const T*>(a.v_pages);

  for (int row = threadIdx.x / kWarp; row < view.tile.q_len * group; row += kSimpleWarps) {
    const int i = row / group, head = kv_head * group + row % group;
    const T* q = static_cast<const T*>(a.q) +
                 (static_cast<int64_t>(view.token(i)) * p.num_qo_heads + head) * p.head_dim;
    __syncwarp();
    for (int d = lane; d < p.head_dim; d += kWarp) query[d] = to_float(q[d]);
    __syncwarp();

    float max = -INFINITY, sum = 0.0f, o[kOwn] = {};
    const int to = view.end_slot(p, i);
    for (int base = view.first_slot(i); base < to; base += kWarp) {
      const int slot = base + lane, count = min(kWarp, to - base);
      int64_t offset = 0;
      float x = -INFINITY;
      if (slot < to) {
        offset = static_cast<int64_t>(view.pages[slot >> page_shift]) * p.stride_page +
                 static_cast<int64_t>(slot & (p.page_size - 1)) * p.stride_token +
                 static_cast<int64_t>(kv_head) * p.stride_head;
        float dot[4] = {};
        for (int d = 0; d < p.head_dim; d += 4) {
          const Vec<T, 4> k = load_vec<T, 4>(k_pages + offset + d);
#pragma unroll
          for (int e = 0; e < 4; ++e) dot[e] += query[d + e] * to_float(k.at[e]);
        }
        x = logit((dot[0] + dot[1]) + (dot[2] + dot[3]));
      }
      float m = fmaxf(max, x);
#pragma unroll
      for (int step = kWarp / 2; step > 0; step /= 2) {
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, step));
      }
      const float keep = weight_of(max, m), weight = weight_of(x, m);
      max = m;
      sum = sum * keep + warp_sum(weight);
#pragma unroll
      for (int e = 0; e < kOwn; ++e) o[e] *= keep;
      for (int j = 0; j < count; ++j) {
        const float w = __shfl_sync(0xffffffffu, weight, j);
        const T* v = v_pages + __shfl_sync(0xffffffffu, offset, j);
#pragma unroll
        for (int e = 0; e < kOwn; ++e) {
          const int d = e * kWarp + lane;
          if (d < p.head_dim) o[e] += w * to_float(v[d]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      const int d = e * kWarp + lane;
      MergedState<1> state{max, sum, {o[e]}};
      if (d < p.head_dim) write_state<T, 1>(p, a, view, i, head, d, state);
    }
  }
  merge_in_launch<T>(p, a, view, kv_head);
}

}  // namespace mlxcel::cuda
