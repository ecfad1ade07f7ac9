#pragma once

#include "params/rope_append.h"

namespace mlxcel::cpu {

/// q (nnz, Hq, D), k, v (nnz, Hkv, D), q_rot like q, pools as params says, all of params.dtype;
/// slots, positions (nnz); inv_freq (rotary_dim / 2). A token whose slot is -1 is rotated but not
/// written. Slots are distinct and inside the pool: the caller has checked them. Runs on the thread
/// pool.
void rope_append(const RopeAppendParams& params, const void* q, const void* k, const void* v,
                 const int32_t* slots, const int32_t* positions, const float* inv_freq, void* q_rot,
                 void* k_pages, void* v_pages);

}  // namespace mlxcel::cpu
