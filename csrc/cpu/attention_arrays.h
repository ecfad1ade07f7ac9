#pragma once

#include "common/attention_inputs.h"

namespace mlxcel {

/// Of arrays in host memory.
inline AttentionInputs attention_arrays(const PagedAttentionParams& params,
                                        std::span<const mx::array> inputs) {
  return attention_inputs(params, inputs, []<class T>(const mx::array& a) { return a.data<T>(); });
}

}  // namespace mlxcel
