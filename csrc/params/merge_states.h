#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace mlxcel {

/// Merges groups of attention states: rows o_indptr[m] to o_indptr[m + 1] of (v, lse) become row m.
struct MergeStatesParams {
  int32_t num_in;   // rows of v_in, lse_in
  int32_t num_out;  // groups
  int32_t num_heads;
  int32_t head_dim;
  FloatType dtype;  // of v_in and v_out; lse is f32, log2
};
static_assert(sizeof(MergeStatesParams) == 20);

}  // namespace mlxcel
