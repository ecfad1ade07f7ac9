#pragma once

#include "common.h"
#include "params/merge_states.h"

namespace mlxcel {

// Rows o_indptr[m] to o_indptr[m + 1] of (v_in, lse_in) become row m: the sum of v weighted by exp2(lse - max).
// Grid: (head_dim, heads, groups), one thread an element of the output. Rows are few, so every thread reads the
// group's lse by itself; neighbouring threads read neighbouring elements of v.
template <typename T>
[[kernel]] void merge_states(const device T* v_in [[buffer(0)]],         // [N, H, D]
                             const device float* lse_in [[buffer(1)]],   // [N, H] log2
                             const device int* o_indptr [[buffer(2)]],   // [M + 1]
                             device T* v_out [[buffer(3)]],              // [M, H, D]
                             device float* lse_out [[buffer(4)]],        // [M, H] log2
                             constant MergeStatesParams& params [[buffer(5)]],
                             uint3 at [[thread_position_in_grid]]) {
  const size_t num_heads = size_t(params.num_heads);
  const size_t head_dim = size_t(params.head_dim);
  const int begin = o_indptr[at.z];
  const int end = o_indptr[at.z + 1];

  float highest = -INFINITY;
  for (int row = begin; row < end; ++row) highest = max(highest, lse_in[size_t(row) * num_heads + at.y]);

  float total = 0.0f;
  float sum = 0.0f;
  for (int row = begin; row < end; ++row) {
    const size_t state = size_t(row) * num_heads + at.y;
    const float lse = lse_in[state];
    if (!(lse > -INFINITY)) continue;  // an empty state counts for nothing, whatever its v
    const float weight = precise::exp2(lse - highest);
    total += weight;
    sum += weight * float(v_in[state * head_dim + at.x]);
  }

  const size_t out = at.z * num_heads + at.y;
  v_out[out * head_dim + at.x] = T(total > 0.0f ? sum / total : 0.0f);
  if (at.x == 0) lse_out[out] = total > 0.0f ? highest + precise::log2(total) : -INFINITY;
}

}  // namespace mlxcel
