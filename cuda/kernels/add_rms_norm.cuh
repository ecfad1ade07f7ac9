#pragma once

#include "kernels/reduce.cuh"
#include "kernels/types.cuh"
#include "params/add_rms_norm.h"

namespace mlxcel::cuda {

/// One block a row. Each thread keeps its N-element pieces of the rounded sum in registers between
/// the two passes (Pieces of them), so x and residual are read once and every load of the row is in
/// flight before the first use. Pieces 0 reads the sum back instead: rows of any length.
template <class T, int N, int Pieces>
__global__ void add_rms_norm_kernel(const __grid_constant__ AddRmsNormParams p,
                                    const T* __restrict__ x, const T* __restrict__ residual,
                                    const T* __restrict__ weight, T* normed, T* new_residual) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.hidden;
  x += row;
  const bool adds = residual != nullptr;
  if (adds) residual += row;
  normed += row;
  new_residual += row;
  const int step = blockDim.x * N;

  auto add = [&](int i) {
    const Vec<T, N> a = load_vec_once<T, N>(x + i);
    if (!adds) return a;
    const Vec<T, N> b = load_vec_once<T, N>(residual + i);
    Vec<T, N> sum;
#pragma unroll
    for (int k = 0; k < N; ++k) sum.at[k] = from_float<T>(to_float(a.at[k]) + to_float(b.at[k]));
    return sum;
  };
  auto square = [](const Vec<T, N>& v) {
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < N; ++k) total += to_float(v.at[k]) * to_float(v.at[k]);
    return total;
  };
  auto scale = [&](const Vec<T, N>& v, const Vec<T, N>& w, float inv_rms) {
    Vec<T, N> out;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      out.at[k] = from_float<T>(to_float(v.at[k]) * inv_rms * (to_float(w.at[k]) + p.weight_bias));
    }
    return out;
  };
  auto inverse = [&](float total) {
    return rsqrtf(block_sum(total) / static_cast<float>(p.hidden) + p.eps);
  };

  if constexpr (Pieces > 0) {
    Vec<T, N> sum[Pieces], w[Pieces];
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
      const int i = threadIdx.x * N + j * step;
      if (i < p.hidden) {
        sum[j] = add(i);
        w[j] = load_vec<T, N>(weight + i);
      }
    }
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
      const int i = threadIdx.x * N + j * step;
      if (i < p.hidden) {
        total += square(sum[j]);
        store_vec(new_residual + i, sum[j]);
      }
    }
    const float inv_rms = inverse(total);
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
      const int i = threadIdx.x * N + j * step;
      if (i < p.hidden) store_vec(normed + i, scale(sum[j], w[j], inv_rms));
    }
  } else {
    float total = 0.0f;
    for (int i = threadIdx.x * N; i < p.hidden; i += step) {
      const Vec<T, N> sum = add(i);
      total += square(sum);
      store_vec(new_residual + i, sum);
    }
    const float inv_rms = inverse(total);
    for (int i = threadIdx.x * N; i < p.hidden; i += step) {
      store_vec(normed + i,
                scale(load_vec<T, N>(new_residual + i), load_vec<T, N>(weight + i), inv_rms));
    }
  }
}

}  // namespace mlxcel::cuda
