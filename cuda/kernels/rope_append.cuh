#pragma once

#include "kernels/types.cuh"
#include "params/rope_append.h"

namespace mlxcel::cuda {

/// Items of a head: each is two N-element pieces, which one thread moves.
/// NeoX: the halves' pieces that rotate together, then the pieces past rotary_dim in twos.
/// Interleaved: neighbouring pieces.
inline __host__ __device__ int rope_items(const RopeAppendParams& p, int n) {
  const int pieces = p.head_dim / n, rotated = p.interleaved ? 0 : p.rotary_dim / 2 / n;
  return rotated + (pieces - 2 * rotated + 1) / 2;
}

/// Grid (tokens, slices of the token's heads); one item a thread, heads in the order q, k, v.
/// The cosines of a token are made once a block, while the loads of its data are in flight.
template <class T, int N>
__global__ void rope_append_kernel(const __grid_constant__ RopeAppendParams p,
                                   const T* __restrict__ q, const T* __restrict__ k,
                                   const T* __restrict__ v, const int* __restrict__ slots,
                                   const int* __restrict__ positions,
                                   const float* __restrict__ inv_freq, T* __restrict__ q_rot,
                                   T* __restrict__ k_pages, T* __restrict__ v_pages) {
  extern __shared__ float2 cos_sin[];  // [rotary_dim / 2]
  const int64_t token = blockIdx.x;
  const int items = rope_items(p, N);
  const int item = blockIdx.y * blockDim.x + threadIdx.x;
  const int row = item / items, j = item % items;
  const int half = p.rotary_dim / 2;
  const bool is_q = row < p.num_qo_heads, is_k = !is_q && row < p.num_qo_heads + p.num_kv_heads;
  const int head = is_q ? row : (row - p.num_qo_heads) % p.num_kv_heads;
  const bool inside = row < p.num_qo_heads + 2 * p.num_kv_heads;
  const bool across = !p.interleaved && j < half / N && (is_q || is_k);  // pairs span the halves

  // Positions of the item's pieces in the head; b may lie past its end.
  int a, b;
  if (p.interleaved || !(is_q || is_k)) {
    a = 2 * j * N;
    b = a + N;
  } else if (across) {
    a = j * N;
    b = half + a;
  } else {
    a = p.rotary_dim + 2 * (j - half / N) * N;
    b = a + N;
  }
  const bool has_a = inside && a < p.head_dim, has_b = inside && b < p.head_dim;

  const T* from = is_q ? q : is_k ? k : v;
  from += (token * (is_q ? p.num_qo_heads : p.num_kv_heads) + head) * p.head_dim;
  Vec<T, N> first, second;
  if (has_a) first = load_vec<T, N>(from + a);
  if (has_b) second = load_vec<T, N>(from + b);
  const int slot = slots[token];

  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    float sine, cosine;
    sincosf(static_cast<float>(positions[token]) * inv_freq[i], &sine, &cosine);
    cos_sin[i] = make_float2(cosine * p.scale, sine * p.scale);
  }
  __syncthreads();

  auto rotate = [](T& x, T& y, float2 cs) {
    const float u = to_float(x), w = to_float(y);
    x = from_float<T>(u * cs.x - w * cs.y);
    y = from_float<T>(w * cs.x + u * cs.y);
  };
  if (across) {
#pragma unroll
    for (int i = 0; i < N; ++i) rotate(first.at[i], second.at[i], cos_sin[a + i]);
  } else if (p.interleaved && (is_q || is_k)) {
    if constexpr (N == 1) {
      if (a < p.rotary_dim) rotate(first.at[0], second.at[0], cos_sin[j]);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        if (a + i < p.rotary_dim) rotate(first.at[i], first.at[i + 1], cos_sin[(a + i) / 2]);
        if (b + i < p.rotary_dim) rotate(second.at[i], second.at[i + 1], cos_sin[(b + i) / 2]);
      }
    }
  }

  T* to;
  if (is_q) {
    to = q_rot + (token * p.num_qo_heads + head) * p.head_dim;
  } else {
    if (slot < 0) return;
    to = (is_k ? k_pages : v_pages) + static_cast<int64_t>(slot / p.page_size) * p.stride_page +
         static_cast<int64_t>(slot % p.page_size) * p.stride_token +
         static_cast<int64_t>(head) * p.stride_head;
  }
  if (has_a) store_vec(to + a, first);
  if (has_b) store_vec(to + b, second);
}

}  // namespace mlxcel::cuda
