#pragma once

#include "params/merge_states.h"
#include "softmax_states.h"

namespace mlxcel {

// Rows o_indptr[m] to o_indptr[m + 1] of (v_in, lse_in) become row m. Grid: (head_dim, heads,
// groups), one thread an element of the output. Rows are few, so every thread reads the group's lse
// by itself; neighbouring threads read neighbouring elements of v.
template <typename T>
[[kernel]] void merge_states(const device T* v_in [[buffer(0)]],        // [N, H, D]
                             const device float* lse_in [[buffer(1)]],  // [N, H] log2
                             const device int* o_indptr [[buffer(2)]],  // [M + 1]
                             device T* v_out [[buffer(3)]],             // [M, H, D]
                             device float* lse_out [[buffer(4)]],       // [M, H] log2
                             constant MergeStatesParams& params [[buffer(5)]],
                             uint3 at [[thread_position_in_grid]]) {
  const uint num_heads = uint(params.num_heads);
  const uint head_dim = uint(params.head_dim);
  const int begin = clamp(o_indptr[at.z], 0, params.num_in);
  const int end = clamp(o_indptr[at.z + 1], begin, params.num_in);
  const MergedElement merged =
      merge_element(v_in, lse_in, begin, end, at.y, num_heads, head_dim, at.x);
  const size_t out = size_t(at.z) * num_heads + at.y;
  v_out[out * head_dim + at.x] = T(merged.value);
  if (at.x == 0) lse_out[out] = merged.lse;
}

}  // namespace mlxcel
