#pragma once

#include <metal_simdgroup>
#include <metal_stdlib>

#include "params/dtype.h"

using namespace metal;

// Loops over arrays that must stay in registers: a variable index would push them to memory.
#define MLXCEL_UNROLL _Pragma("clang loop unroll(full)")

namespace mlxcel {

constant constexpr uint kSimdWidth = 32;
constant constexpr float kLog2e = 1.44269504f;

// Sum over the threadgroup, in every thread. `partial` has room for one float a simdgroup. The
// order of additions depends on the size of the threadgroup alone.
METAL_FUNC float threadgroup_sum(float x, threadgroup float* partial, uint simdgroup, uint lane,
                                 uint num_simdgroups) {
  x = simd_sum(x);
  if (lane == 0) partial[simdgroup] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < num_simdgroups ? partial[lane] : 0.0f);
}

}  // namespace mlxcel
