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

  /// Adds a logit to the denominator alone.
  __device__ __forceinline__ void add_sink(float logit_log2) {
    const float m = fmaxf(max, logit_log2), keep = weight_of(max, m);
    sum = sum * keep + weight_of(logit_log2, m);
    max = m;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= keep;
  }

  __device__ __forceinline__ float lse() const {
    return sum == 0.0f ? -INFINITY : max + log2f(sum);
  }
  __device__ __forceinline__ float scale() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }

  /// The same state with its values divided: sum is 1, or 0 in an empty one.
  __device__ __forceinline__ MergedState divided() const {
    MergedState state{lse(), sum == 0.0f ? 0.0f : 1.0f};
#pragma unroll
    for (int i = 0; i < N; ++i) state.v[i] = v[i] * scale();
    return state;
  }
};

/// Merges rows [begin, end) of one head, in order, `Batch` at a time: their reads are in flight
/// together, and the sum is rescaled once for all of them.
template <class T, int N, int Batch>
__device__ __forceinline__ MergedState<N> merge_rows(const T* v, const float* lse, int begin,
                                                     int end, int64_t row_stride_v,
                                                     int64_t row_stride_lse) {
  MergedState<N> state;
  for (int row = begin; row < end; row += Batch) {
    Vec<T, N> x[Batch];
    float weight[Batch];
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      weight[i] = -INFINITY;
      if (row + i < end) {
        weight[i] = __ldcg(lse + (row + i) * row_stride_lse);
        x[i] = load_vec_l2<T, N>(v + (row + i) * row_stride_v);
      }
    }
    float max = state.max;
#pragma unroll
    for (int i = 0; i < Batch; ++i) max = fmaxf(max, weight[i]);
    const float keep = weight_of(state.max, max);
    state.max = max;
    state.sum *= keep;
#pragma unroll
    for (int e = 0; e < N; ++e) state.v[e] *= keep;
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      weight[i] = weight_of(weight[i], max);
      state.sum += weight[i];
#pragma unroll
      for (int e = 0; e < N; ++e) {
        // Values of an empty state are not looked at: they may be NaN.
        state.v[e] += weight[i] == 0.0f ? 0.0f : to_float(x[i].at[e]) * weight[i];
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
  // Offsets made on the device are not checked by the host.
  auto clamp = [&](int row) { return min(max(row, 0), p.num_in); };
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int d = static_cast<int>(i % pieces) * N;
    const int64_t out = i / pieces;  // group * num_heads + head
    const int head = static_cast<int>(out % p.num_heads);
    const int group = static_cast<int>(out / p.num_heads);
    const auto state = merge_rows<T, N, 8>(v_in + static_cast<int64_t>(head) * p.head_dim + d,
                                           lse_in + head, clamp(o_indptr[group]),
                                           clamp(o_indptr[group + 1]), row_stride, p.num_heads);
    Vec<T, N> result;
#pragma unroll
    for (int e = 0; e < N; ++e) result.at[e] = from_float<T>(state.v[e] * state.scale());
    store_vec(v_out + out * p.head_dim + d, result);
    if (d == 0) lse_out[out] = state.lse();
  }
}

}  // namespace mlxcel::cuda
