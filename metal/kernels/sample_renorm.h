#pragma once

#include "params/sample_renorm.h"
#include "sample_select.h"

namespace mlxcel {

// Which of the row's tokens within `cut` are kept. `top` is the largest value, above 0 unless kind
// is top_k_mask.
template <typename T>
METAL_FUNC Cut renorm_cut(RowTokens<T> tokens, RenormKind kind, RenormValue value, Cut cut,
                          float top, float thread_max, threadgroup RowShared& shared,
                          RowThread at) {
  TokenWeight weight = {WeightKind::proportional, top, 0.0f};
  const bool top_k = kind == RenormKind::top_k_probs || kind == RenormKind::top_k_mask;
  ulong target;
  if (kind == RenormKind::min_p_probs) {
    if (!(value.p > 0.0f)) return cut;
    return {min(value.p, 1.0f) * top, kLastIndex};
  } else if (top_k) {
    if (value.k <= 0 || value.k >= tokens.size) return cut;
    weight.kind = WeightKind::one;
    target = ulong(value.k);
    if (value.k <= at.count) cut = near_top(thread_max, value.k, cut, shared, at);
  } else {
    if (value.p >= 1.0f) return cut;
    target = share_of(max(value.p, 0.0f), total_of(tokens, cut, weight, shared, at));
  }
  const int num_listed = list_tokens(tokens, cut, shared, at);
  if (num_listed <= kListed)
    return select(listed(shared, num_listed), cut, weight, target, shared, at);
  return select(tokens, cut, weight, target, shared, at);
}

// Grid: one threadgroup a row.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kMostRowSimdgroups * 32)]] void renorm(
    const device T* x [[buffer(0)]],                 // [B, V]
    const device RenormValue* values [[buffer(1)]],  // [B]
    device T* out [[buffer(2)]],                     // [B, V]
    constant RenormParams& params [[buffer(3)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup RowShared shared;
  const RowThread at = {int(thread_index), int(threads), simdgroup, num_simdgroups, lane};
  const size_t begin = size_t(row) * size_t(params.vocab);
  const RowTokens<T> tokens = {x + begin, params.vocab};
  const bool mask = params.kind == RenormKind::top_k_mask;
  const RenormValue value = values[row];

  RowSummary mine = no_summary();
  for (int i = at.index; i < params.vocab; i += at.count) offer(mine.top, tokens.value(i), i);
  const float thread_max = mine.top.score;
  const float top = row_summary(mine, shared, at).top.score;
  // Probabilities of 0 and below have no mass, as NaN has none.
  Cut cut = {mask ? -INFINITY : 0.0f, mask ? kLastIndex : -1};
  float scale = 0.0f;  // of value / top
  if (mask || (top > 0.0f && isfinite(top))) {
    cut = renorm_cut(tokens, params.kind, value, cut, top, thread_max, shared, at);
    const TokenWeight mass = {WeightKind::proportional, top, 0.0f};
    if (!mask) scale = 1.0f / (float(total_of(tokens, cut, mass, shared, at)) * kFixedUnit);
  }
  for (int i = at.index; i < params.vocab; i += at.count) {
    const float v = tokens.value(i);
    const bool keep = cut.keeps(v, i);
    out[begin + size_t(i)] =
        T(mask ? (keep ? v : -INFINITY) : (keep && scale > 0.0f ? v / top * scale : 0.0f));
  }
}

}  // namespace mlxcel
