#pragma once

#include "common.h"
#include "params/sample.h"

namespace mlxcel {

// The noise of csrc/cpu/kernels/philox.h, in f32. Scores are in units of log2, and a constant
// factor inside the outer logarithm is dropped: neither moves an argmax.

struct DrawKey {
  uint2 seed;
  uint2 draw;
};

METAL_FUNC DrawKey draw_key(SampleRow row) {
  return {uint2(row.seed[0], row.seed[1]), uint2(row.draw[0], row.draw[1])};
}

METAL_FUNC uint4 philox(DrawKey key, uint block, RngStream stream) {
  uint4 c = uint4(block, uint(stream), key.draw.x, key.draw.y);
  uint2 k = key.seed;
  MLXCEL_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint high0 = mulhi(0xd2511f53u, c.x);
    const uint high1 = mulhi(0xcd9e8d57u, c.z);
    c = uint4(high1 ^ c.y ^ k.x, 0xcd9e8d57u * c.z, high0 ^ c.w ^ k.y, 0xd2511f53u * c.x);
    k += uint2(0x9e3779b9u, 0xbb67ae85u);
  }
  return c;
}

// (k + 0.5) / 2^23 for the upper 23 bits k: exact, never 0 or 1.
METAL_FUNC float uniform_of(uint bits) {
  return as_type<float>((bits >> 9) | 0x3f800000u) - 0.99999994f;
}

// -log2(u), an exponential variable up to a factor. The winners of a draw have u near 1, where the
// fast logarithm loses its relative accuracy: a series in 1 - u takes over there.
METAL_FUNC float exponential_of(uint bits) {
  const float u = uniform_of(bits);
  const float v = 1.0f - u;
  const float series =
      v *
      (1.44269504f + v * (0.72134752f + v * (0.48089835f + v * (0.36067376f + v * 0.28853901f))));
  return v < 0.0625f ? series : -fast::log2(u);
}

METAL_FUNC float gumbel_of(uint bits) {
  return -fast::log2(exponential_of(bits));
}

// The token in the lead. A score of -inf never leads, equal scores go to the lower index, in
// whatever order tokens are offered.
struct Leader {
  float score;
  int index;
};

constant constexpr int kNoToken = -1;

METAL_FUNC Leader no_leader() {
  return {-INFINITY, kNoToken};
}

METAL_FUNC void offer(thread Leader& leader, float score, int index) {
  if (score > leader.score || (score == leader.score && index < leader.index))
    leader = {score, index};
}

METAL_FUNC Leader simd_leader(Leader mine) {
  const float best = simd_max(mine.score);
  return {best, simd_min(mine.score == best ? mine.index : INT_MAX)};
}

// Rows are cut into parts: a scan kernel, with up to kScanSimdgroups * 32 threads a part, leaves a
// summary of each, a second kernel joins a row's. metal/sample_parts.h launches both, and gives
// them one numbering of buffers.
constant constexpr int kScanSimdgroups = 8;

// What a part of a row comes to.
struct RowSummary {
  Leader top;    // by value
  Leader drawn;  // by value and noise
  int has_nan;
};
static_assert(sizeof(RowSummary) == 20, "as in metal/sample_parts.h");

METAL_FUNC RowSummary no_summary() {
  return {no_leader(), no_leader(), 0};
}

METAL_FUNC RowSummary simd_summary(RowSummary mine) {
  return {simd_leader(mine.top), simd_leader(mine.drawn), simd_max(mine.has_nan)};
}

// The summary of the threadgroup in every thread. `slots` has room for one a simdgroup.
METAL_FUNC RowSummary threadgroup_summary(RowSummary mine, threadgroup RowSummary* slots,
                                          uint simdgroup, uint lane, uint num_simdgroups) {
  mine = simd_summary(mine);
  if (lane == 0) slots[simdgroup] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  RowSummary other = no_summary();
  if (lane < num_simdgroups) other = slots[lane];
  return simd_summary(other);
}

// The summary of a row's parts, in every lane of a simdgroup.
METAL_FUNC RowSummary join_parts(const device RowSummary* parts, int num_parts, uint lane) {
  RowSummary all = no_summary();
  for (int i = int(lane); i < num_parts; i += int(kSimdWidth)) {
    const RowSummary part = parts[i];
    offer(all.top, part.top.score, part.top.index);
    offer(all.drawn, part.drawn.score, part.drawn.index);
    all.has_nan = max(all.has_nan, part.has_nan);
  }
  return simd_summary(all);
}

}  // namespace mlxcel
