#pragma once

#include "common.h"

namespace mlxcel {

// One element of a merged softmax state.
struct MergedElement {
  float value;
  float lse;  // log2, of the whole state
};

// Element d of the states (row, head), begin <= row < end, of v [N, H, D] and lse [N, H] merged. A
// state with lse -inf is not read; no state at all is 0 and -inf; one state is copied bit for bit.
template <typename T>
METAL_FUNC MergedElement merge_element(const device T* v, const device float* lse, int begin,
                                       int end, uint head, uint num_heads, uint head_dim, uint d) {
  float highest = -INFINITY;
  for (int row = begin; row < end; ++row)
    highest = max(highest, lse[size_t(row) * num_heads + head]);

  bool any = false;
  float total = 0.0f;
  float sum = 0.0f;
  for (int row = begin; row < end; ++row) {
    const size_t state = size_t(row) * num_heads + head;
    const float state_lse = lse[state];
    if (state_lse == -INFINITY) continue;
    const float weight =
        state_lse == highest ? 1.0f : precise::exp2(state_lse - highest);  // a NaN goes on
    any = true;
    total += weight;
    sum += weight * float(v[state * head_dim + d]);
  }
  if (!any) return {0.0f, -INFINITY};
  return {sum / total, highest + precise::log2(total)};
}

// Lets the logit `sink` (natural logarithm) join the softmax's denominator.
METAL_FUNC MergedElement add_sink(MergedElement state, float sink) {
  const float sink_lse = sink * kLog2e;
  const float highest = max(state.lse, sink_lse);
  if (highest == -INFINITY) return state;
  const float scale = 1.0f / (1.0f + precise::exp2(sink_lse - state.lse));
  const float total = precise::exp2(state.lse - highest) + precise::exp2(sink_lse - highest);
  return {state.value * scale, highest + precise::log2(total)};
}

}  // namespace mlxcel
