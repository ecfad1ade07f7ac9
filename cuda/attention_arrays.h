#pragma once

#include "params/attention_inputs.h"

namespace mlxcel::cuda {

/// Device pointers of one attention launch.
struct AttentionArrays : AttentionInputs {
  void* out;            // null where only partial states are wanted
  float* lse;           // null where not wanted
  float* partial_v;     // [num_partials, Hq, D] f32
  float* partial_lse;   // [num_partials, Hq]
  int32_t* counters;    // [num_q, Hkv] zeros, 2 or more, which the launch leaves as zeros; null:
                        // nothing is merged inside the launch, which must not be a mixed one
  int32_t num_indices;  // elements of kv_indices
  int32_t evict_first;  // set by the launcher: K and V leave the L2 cache first
};

}  // namespace mlxcel::cuda
