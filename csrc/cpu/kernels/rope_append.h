#pragma once

#include "params/rope_append.h"

namespace mlxcel::cpu {

/// Operands of rope_append; pools are laid out as RopeAppendParams says.
struct RopeAppendArrays {
  const void* q;     // (nnz, Hq, D)
  const void* k;     // (nnz, Hkv, D)
  const void* v;     // (nnz, Hkv, D)
  int64_t q_stride;  // elements from one token to the next
  int64_t kv_stride;
  const int32_t* slots;    // (nnz)
  const float* rotations;  // (nnz, 2, rotary_dim / 2), see rope_rotations
  void* q_rot;             // (nnz, Hq, D), contiguous
  void* k_pages;
  void* v_pages;
};

/// Cosines, then sines, of each token's angles, times scale: equal for all layers of a step.
/// inv_freq (rotary_dim / 2).
void rope_rotations(const RopeAppendParams& params, const int32_t* positions, const float* inv_freq,
                    float* rotations);

/// A token whose slot is -1 is rotated but not written. Slots are distinct and inside the pool: the
/// caller has checked them. Runs on the thread pool.
void rope_append(const RopeAppendParams& params, const RopeAppendArrays& arrays);

}  // namespace mlxcel::cpu
