#pragma once

#include "params/sample_chain.h"
#include "sample_draw.h"

namespace mlxcel {

// Chain speculative sampling. Each part of a row finds out by itself how many drafts are accepted,
// which takes one probability of each distribution a position, and draws its share of the token
// after them; chain_pick joins the parts.

// The row's key at a position of its chain: draw index draw + position.
METAL_FUNC DrawKey chain_key(ChainRow row, int position) {
  const ulong draw = (ulong(row.draw[1]) << 32 | row.draw[0]) + ulong(position);
  return {uint2(row.seed[0], row.seed[1]), uint2(uint(draw), uint(draw >> 32))};
}

// Drafts that are accepted, the same in every lane: a simdgroup looks at 32 positions in one go.
METAL_FUNC int accepted_drafts(constant ChainParams& params, ChainRow row, const device int* ids,
                               const device float* draft, const device float* target, int lane) {
  for (int begin = 0; begin < params.num_draft; begin += int(kSimdWidth)) {
    const int i = begin + lane;
    bool accepted = true;
    if (i < params.num_draft) {
      const int id = ids[i];
      accepted = id >= 0 && id < params.vocab;
      if (accepted) {
        const size_t at = size_t(i) * size_t(params.vocab) + size_t(id);
        const float u = uniform_of(philox(chain_key(row, i), 0, RngStream::accept).x);
        accepted = u * draft[at] < target[at];
      }
    }
    const int first_refused = simd_min(accepted ? params.num_draft : i);
    if (first_refused < params.num_draft) return first_refused;
  }
  return params.num_draft;
}

// Where row b begins, `count` distributions a row.
METAL_FUNC size_t chain_offset(constant ChainParams& params, uint b, int count) {
  return size_t(b) * size_t(count) * size_t(params.vocab);
}

}  // namespace mlxcel

using namespace mlxcel;

// Grid: (parts of `part_size` tokens, rows). A part's summary has the leader of the residual
// relu(target - draft) as `drawn`, and that of the target, for rows without a residual, as `top`. A
// score is weight / exponential: monotone in log(weight) + noise.

[[kernel]] void chain_scan(const device int* draft_ids [[buffer(0)]],       // [B, n]
                           const device float* draft_probs [[buffer(1)]],   // [B, n, V]
                           const device float* target_probs [[buffer(2)]],  // [B, n + 1, V]
                           const device ChainRow* rows [[buffer(3)]],       // [B]
                           device RowSummary* parts [[buffer(4)]],          // [B, parts]
                           constant ChainParams& params [[buffer(5)]],
                           constant int& part_size [[buffer(6)]],  // a multiple of 4
                           uint3 group [[threadgroup_position_in_grid]],
                           uint3 groups [[threadgroups_per_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint3 threads [[threads_per_threadgroup]],
                           uint simdgroup [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]],
                           uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup RowSummary slots[kScanSimdgroups];
  const uint b = group.y;
  const int n = params.num_draft;
  const ChainRow row = rows[b];
  const device float* draft = draft_probs + chain_offset(params, b, n);
  const device float* target = target_probs + chain_offset(params, b, n + 1);
  const int position =
      accepted_drafts(params, row, draft_ids + size_t(b) * size_t(n), draft, target, int(lane));
  const DrawKey key = chain_key(row, position);
  const bool has_draft = position < n;
  target += size_t(position) * size_t(params.vocab);
  draft += size_t(position) * size_t(params.vocab);

  RowSummary mine = no_summary();
  const int begin = int(group.x) * part_size;
  const int end = min(begin + part_size, params.vocab);
  for (int first = begin + 4 * int(thread_index); first < end; first += 4 * int(threads.x)) {
    const uint4 bits = philox(key, uint(first) / 4, RngStream::gumbel);
    MLXCEL_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (first + i >= end) continue;
      const float p = target[first + i];
      if (!(p > 0.0f)) continue;
      const float per_weight = 1.0f / exponential_of(bits[i]);
      const float residual = has_draft ? p - draft[first + i] : 0.0f;
      offer(mine.top, p * per_weight, first + i);
      if (residual > 0.0f) offer(mine.drawn, residual * per_weight, first + i);
    }
  }
  mine = threadgroup_summary(mine, slots, simdgroup, lane, num_simdgroups);
  if (thread_index == 0) parts[size_t(b) * groups.x + group.x] = mine;
}

// One simdgroup a row.
[[kernel]] void chain_pick(const device int* draft_ids [[buffer(0)]],       // [B, n]
                           const device float* draft_probs [[buffer(1)]],   // [B, n, V]
                           const device float* target_probs [[buffer(2)]],  // [B, n + 1, V]
                           const device ChainRow* rows [[buffer(3)]],       // [B]
                           const device RowSummary* parts [[buffer(4)]],    // [B, num_parts]
                           device int* ids [[buffer(5)]],                   // [B, n + 1]
                           device int* num_accepted [[buffer(6)]],          // [B]
                           constant ChainParams& params [[buffer(7)]],
                           constant int& num_parts [[buffer(8)]],
                           uint b [[threadgroup_position_in_grid]],
                           uint lane [[thread_index_in_simdgroup]]) {
  const int n = params.num_draft;
  const device int* drafted = draft_ids + size_t(b) * size_t(n);
  const int position =
      accepted_drafts(params, rows[b], drafted, draft_probs + chain_offset(params, b, n),
                      target_probs + chain_offset(params, b, n + 1), int(lane));
  const RowSummary all = join_parts(parts + size_t(b) * size_t(num_parts), num_parts, lane);
  const int last = all.drawn.index != kNoToken ? all.drawn.index : max(all.top.index, 0);
  device int* out = ids + size_t(b) * size_t(n + 1);
  for (int i = int(lane); i <= n; i += int(kSimdWidth)) {
    out[i] = i < position ? drafted[i] : i == position ? last : -1;
  }
  if (lane == 0) num_accepted[b] = position;
}
