#pragma once

#include "common.h"
#include "params/add_rms_norm.h"

namespace mlxcel {

// One threadgroup a row. A thread owns the elements [4t, 4t + 4), [4t + 4n, ...) of it, so it reads
// back only sums that it wrote itself, and needs no barrier for that.
template <typename T>
[[kernel]] void add_rms_norm(const device T* x [[buffer(0)]],         // [rows, hidden]
                             const device T* residual [[buffer(1)]],  // [rows, hidden]
                             const device T* weight [[buffer(2)]],    // [hidden]
                             device T* normed [[buffer(3)]],          // [rows, hidden]
                             device T* new_residual [[buffer(4)]],    // [rows, hidden]
                             constant AddRmsNormParams& params [[buffer(5)]],
                             uint row [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_position_in_threadgroup]],
                             uint num_threads [[threads_per_threadgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]],
                             uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr int kElements = 4;
  threadgroup float partial[kSimdWidth];
  const size_t at = size_t(row) * size_t(params.hidden);
  const int stride = int(num_threads) * kElements;

  float squares = 0.0f;
  for (int begin = int(thread_index) * kElements; begin < params.hidden; begin += stride) {
    const int end = min(begin + kElements, params.hidden);
    for (int i = begin; i < end; ++i) {
      const T sum = T(float(x[at + i]) + float(residual[at + i]));
      new_residual[at + i] = sum;
      squares += float(sum) * float(sum);  // as rounded: what the next layer adds to
    }
  }
  squares = threadgroup_sum(squares, partial, simdgroup, lane, num_simdgroups);
  const float scale = precise::rsqrt(squares / float(params.hidden) + params.eps);

  for (int begin = int(thread_index) * kElements; begin < params.hidden; begin += stride) {
    const int end = min(begin + kElements, params.hidden);
    for (int i = begin; i < end; ++i) {
      const float w = float(weight[i]) + params.weight_bias;
      normed[at + i] = T(float(new_residual[at + i]) * scale * w);
    }
  }
}

}  // namespace mlxcel
