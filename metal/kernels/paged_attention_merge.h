#pragma once

#include "attention_tile.h"

namespace mlxcel {

// Merges the partial states of each query token into the output; tokens whose one tile has written
// it already have an empty range. Grid: (D, Hq, num_q), one thread an element.
template <typename T>
[[kernel]] void paged_attention_merge(
    const device float* partial_v [[buffer(0)]],    // [num_partials, Hq, D]
    const device float* partial_lse [[buffer(1)]],  // [num_partials, Hq]
    const device int* merge_indptr [[buffer(2)]],   // [num_q + 1]
    const device float* sinks [[buffer(3)]],        // [Hq] where has_sinks
    device T* out [[buffer(4)]],                    // [num_q, Hq, D]
    device float* lse [[buffer(5)]],                // [num_q, Hq] log2
    constant PagedAttentionParams& params [[buffer(6)]], uint3 at [[thread_position_in_grid]]) {
  const int begin = merge_indptr[at.z];
  const int end = merge_indptr[at.z + 1];
  if (begin == end) return;
  const uint num_heads = uint(params.num_qo_heads);
  const uint head_dim = uint(params.head_dim);
  MergedElement state =
      merge_element(partial_v, partial_lse, begin, end, at.y, num_heads, head_dim, at.x);
  if (has_sinks) state = add_sink(state, sinks[at.y]);
  const size_t row = size_t(at.z) * num_heads + at.y;
  out[row * head_dim + at.x] = T(state.value);
  if (at.x == 0) lse[row] = state.lse;
}

}  // namespace mlxcel
