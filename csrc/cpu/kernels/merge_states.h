#pragma once

#include "params/merge_states.h"

namespace mlxcel::cpu {

/// Largest head_dim of merge_states; MLA has values of 512.
constexpr int kMaxMergeDim = 1024;

/// v_in (num_in, num_heads, head_dim), lse_in (num_in, num_heads) f32 log2, o_indptr (num_out + 1)
/// -> v_out (num_out, num_heads, head_dim), lse_out (num_out, num_heads). Offsets in o_indptr are
/// clamped to 0..num_in. Runs on the thread pool.
void merge_states(const MergeStatesParams& params, const void* v_in, const float* lse_in,
                  const int32_t* o_indptr, void* v_out, float* lse_out);

}  // namespace mlxcel::cpu
