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

/// Cosine and sine of a token's pairs of elements, for threads that take N pairs each. Pairs N
/// apart are neighbours: threads that read their i-th pairs together touch different banks.
template <int N>
struct RopeTable {
  float2* cos_sin;
  int columns;

  static __host__ __device__ int columns_of(int pairs) { return (pairs + N - 1) / N; }
  static __host__ __device__ int bytes(int pairs) {
    return N * columns_of(pairs) * static_cast<int>(sizeof(float2));
  }
  __device__ __forceinline__ float2& at(int pair) const {
    return cos_sin[pair % N * columns + pair / N];
  }
};

/// One item: where its pieces are, and what is in them. Heads of a token are in the order q, k, v.
template <class T, int N>
struct RopeItem {
  int head;
  bool is_q, is_k, across;  // across: the pieces rotate with each other
  int a, b;                 // positions of the pieces in the head
  bool has_a, has_b;
  Vec<T, N> first, second;

  /// Item j of the row-th head of a token.
  __device__ __forceinline__ RopeItem(const RopeAppendParams& p, int row, int j) {
    const int half = p.rotary_dim / 2;
    is_q = row < p.num_qo_heads;
    is_k = !is_q && row < p.num_qo_heads + p.num_kv_heads;
    head = is_q ? row : is_k ? row - p.num_qo_heads : row - p.num_qo_heads - p.num_kv_heads;
    across = !p.interleaved && j < half / N && (is_q || is_k);
    if (across) {
      a = j * N;
      b = half + a;
    } else if (p.interleaved || !(is_q || is_k)) {
      a = 2 * j * N;
      b = a + N;
    } else {
      a = p.rotary_dim + 2 * (j - half / N) * N;
      b = a + N;
    }
    const bool inside = row < p.num_qo_heads + 2 * p.num_kv_heads;
    has_a = inside && a < p.head_dim;
    has_b = inside && b < p.head_dim;
  }

  __device__ __forceinline__ void load(const RopeAppendParams& p, int64_t token, const T* q,
                                       const T* k, const T* v, int64_t q_stride,
                                       int64_t kv_stride) {
    const T* from = is_q ? q : is_k ? k : v;
    from += token * (is_q ? q_stride : kv_stride) + head * p.head_dim;
    if (has_a) first = load_vec_once<T, N>(from + a);
    if (has_b) second = load_vec_once<T, N>(from + b);
  }

  __device__ __forceinline__ void rotate(const RopeAppendParams& p, const RopeTable<N>& table) {
    auto turn = [](T& x, T& y, float2 cs) {
      const float u = to_float(x), w = to_float(y);
      x = from_float<T>(u * cs.x - w * cs.y);
      y = from_float<T>(w * cs.x + u * cs.y);
    };
    if (across) {
#pragma unroll
      for (int i = 0; i < N; ++i) turn(first.at[i], second.at[i], table.at(a + i));
    } else if (p.interleaved && (is_q || is_k)) {
      if constexpr (N == 1) {
        if (a < p.rotary_dim) turn(first.at[0], second.at[0], table.at(a / 2));
      } else {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
          if (a + i < p.rotary_dim) turn(first.at[i], first.at[i + 1], table.at((a + i) / 2));
          if (b + i < p.rotary_dim) turn(second.at[i], second.at[i + 1], table.at((b + i) / 2));
        }
      }
    }
  }

  __device__ __forceinline__ void store(const RopeAppendParams& p, int64_t token, int slot,
                                        T* q_rot, T* k_pages, T* v_pages) const {
    T* to;
    if (is_q) {
      to = q_rot + (token * p.num_qo_heads + head) * p.head_dim;
    } else {
      const int page = slot >> (31 - __clz(p.page_size));
      if (slot < 0 || page >= p.num_pages) return;
      to = (is_k ? k_pages : v_pages) + page * p.stride_page +
           (slot & (p.page_size - 1)) * p.stride_token + head * p.stride_head;
    }
    if (has_a) store_vec(to + a, first);
    if (has_b) store_vec(to + b, second);
  }
};

/// Grid (tokens, slices of the token's heads), block (items of a head, heads), one item a thread.
/// The cosines of a token are made once a block, while the loads of its data are in flight.
template <class T, int N>
__global__ void rope_append_kernel(const __grid_constant__ RopeAppendParams p,
                                   const T* __restrict__ q, const T* __restrict__ k,
                                   const T* __restrict__ v, int64_t q_stride, int64_t kv_stride,
                                   const int* __restrict__ slots, const int* __restrict__ positions,
                                   const float* __restrict__ inv_freq, T* __restrict__ q_rot,
                                   T* __restrict__ k_pages, T* __restrict__ v_pages) {
  extern __shared__ float2 shared[];
  const int pairs = p.rotary_dim / 2, rank = threadIdx.y * blockDim.x + threadIdx.x;
  const RopeTable<N> table{shared, RopeTable<N>::columns_of(pairs)};
  const int64_t token = blockIdx.x;
  const int slot = slots[token], position = positions[token];
  RopeItem<T, N> item(p, blockIdx.y * blockDim.y + threadIdx.y, threadIdx.x);
  item.load(p, token, q, k, v, q_stride, kv_stride);
  for (int i = rank; i < pairs; i += blockDim.x * blockDim.y) {
    // The angle is formed and reduced in f64: at position 100,000 an f32 product is off by 0.004.
    constexpr double kPerTurn = 0.15915494309189535;  // 1 / (2 pi)
    const double turns =
        static_cast<double>(position) * static_cast<double>(inv_freq[i]) * kPerTurn;
    float sine, cosine;
    sincospif(2.0f * static_cast<float>(turns - rint(turns)), &sine, &cosine);
    table.at(i) = make_float2(cosine * p.scale, sine * p.scale);
  }
  __syncthreads();
  item.rotate(p, table);
  item.store(p, token, slot, q_rot, k_pages, v_pages);
}

}  // namespace mlxcel::cuda
