#pragma once

#include "launch.h"
#include "params/add_rms_norm.h"
#include "params/merge_states.h"
#include "params/rope_append.h"

namespace mlxcel::cuda {

// The launchers: device pointers and params in, kernels into `launch`. They know no MLX. Shapes are
// those of csrc/backend.h. Nothing is enqueued for empty shapes.

void launch_add_rms_norm(const AddRmsNormParams& params, const void* x, const void* residual,
                         const void* weight, void* normed, void* new_residual, Launch& launch);

void launch_merge_states(const MergeStatesParams& params, const void* v_in, const float* lse_in,
                         const int32_t* o_indptr, void* v_out, float* lse_out, Launch& launch);

/// Writes into k_pages and v_pages in place.
void launch_rope_append(const RopeAppendParams& params, const void* q, const void* k,
                        const void* v, const int32_t* slots, const int32_t* positions,
                        const float* inv_freq, void* q_rot, void* k_pages, void* v_pages,
                        Launch& launch);

}  // namespace mlxcel::cuda
