#pragma once

#include "kernels/types.cuh"
#include "params/merge_states.h"

namespace mlxcel::cuda {

/// exp2(x - y) where both may be -inf (an empty state weighs nothing, whatever it is merged with).
__device__ __forceinline__ float weight_of(float x, float max) {
  return max == -INFINITY ? 0.0f : exp2f(x - max);
}

/// A few neighbouring elements of a running merge of attention states.
template <int N>
struct MergedState {
  float max = -INFINITY, sum = 0.0f;  // of the states' lse, log2
  float v[N] = {};

  __device__ __forceinline__ void add(float lse, const float (&x)[N]) {
    const float m = fmaxf(max, lse);
    const float keep = weight_of(max, m), take = weight_of(lse, m);
    max = m;
    sum = sum * keep + take;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // Values of an empty state are not looked at: they may be NaN.
      v[i] = v[i] * keep + (take == 0.0f ? 0.0f : x[i] * take);
    }
  }

  /// Adds to the denominator alone.
  __device__ __forceinline__ void add_sink(float logit_log2) {
    const float zero[N] = {};
    add(logit_log2, zero);
  }

  __device__ __forceinline__ float lse() const { return sum == 0.0f ? -INFINITY : max + log2f(sum); }
  __device__ __forceinline__ float scale() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }
};

/// Merges rows [begin, end) of one head, in order; the reads of kAhead rows are in flight together.
template <class T, int N>
__device__ __forceinline__ MergedState<N> merge_rows(const T* v, const float* lse, int begin,
                                                     int end, int64_t row_stride_v,
                                                     int64_t row_stride_lse) {
  constexpr int kAhead = 8;
  MergedState<N> state;
  for (int row = begin; row < end; row += kAhead) {
    Vec<T, N> x[kAhead];
    float s[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (row + i < end) {
        s[i] = __ldcg(lse + (row + i) * row_stride_lse);
        if constexpr (sizeof(x[i]) == 16) {
          const int4 raw = __ldcg(reinterpret_cast<const int4*>(v + (row + i) * row_stride_v));
          x[i] = *reinterpret_cast<const Vec<T, N>*>(&raw);
        } else {
          x[i] = load_vec<T, N>(v + (row + i) * row_stride_v);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (row + i < end) {
        float f[N];
#pragma unroll
        for (int e = 0; e < N; ++e) f[e] = to_float(x[i].at[e]);
        state.add(s[i], f);
      }
    }
  }
  return state;
}

/// Grid-stride over (group, head, piece of N elements).
template <class T, int N>
__global__ void merge_states_kernel(const __grid_constant__ MergeStatesParams p,
                                    const T* __restrict__ v_in, const float* __restrict__ lse_in,
                                    const int* __restrict__ o_indptr, T* __restrict__ v_out,
                                    float* __restrict__ lse_out) {
  const int pieces = p.head_dim / N;
  const int64_t total = static_cast<int64_t>(p.num_out) * p.num_heads * pieces;
  const int64_t row_stride = static_cast<int64_t>(p.num_heads) * p.head_dim;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int d = static_cast<int>(i % pieces) * N;
    const int64_t out = i / pieces;  // group * num_heads + head
    const int head = static_cast<int>(out % p.num_heads);
    const int group = static_cast<int>(out / p.num_heads);
    const auto state =
        merge_rows<T, N>(v_in + static_cast<int64_t>(head) * p.head_dim + d, lse_in + head,
                         o_indptr[group], o_indptr[group + 1], row_stride, p.num_heads);
    Vec<T, N> result;
#pragma unroll
    for (int e = 0; e < N; ++e) result.at[e] = from_float<T>(state.v[e] * state.scale());
    store_vec(v_out + out * p.head_dim + d, result);
    if (d == 0) lse_out[out] = state.lse();
  }
}

}  // namespace mlxcel::cuda
