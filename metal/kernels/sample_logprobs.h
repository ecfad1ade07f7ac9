#pragma once

#include "params/sample_logprobs.h"
#include "sample_select.h"

namespace mlxcel {

// Writes the first num_top tokens of a list, each at its rank, and what a list that is too short
// leaves free.
METAL_FUNC void write_top(threadgroup RowShared& shared, int num_listed, int num_top, float lse,
                          device int* top_ids, device float* top_logprobs, RowThread at) {
  for (int i = at.index; i < num_listed; i += at.count) {
    const float v = shared.values[i];
    const int index = shared.indices[i];
    const ulong key = rank_key(v, index);
    int rank = 0;
    for (int j = 0; j < num_listed; ++j)
      rank += rank_key(shared.values[j], shared.indices[j]) > key ? 1 : 0;
    if (rank >= num_top) continue;
    top_ids[rank] = index;
    top_logprobs[rank] = v - lse;
  }
  for (int i = num_listed + at.index; i < num_top; i += at.count) {
    top_ids[i] = 0;
    top_logprobs[i] = -INFINITY;
  }
}

// Grid: one threadgroup a row.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kMostRowSimdgroups * 32)]] void token_logprobs(
    const device T* logits [[buffer(0)]],      // [B, V]
    const device int* ids [[buffer(1)]],       // [B]
    device float* logprobs [[buffer(2)]],      // [B]
    device int* ranks [[buffer(3)]],           // [B]
    device int* top_ids [[buffer(4)]],         // [B, num_top]
    device float* top_logprobs [[buffer(5)]],  // [B, num_top]
    constant TokenLogprobsParams& params [[buffer(6)]], uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup RowShared shared;
  const RowThread at = {int(thread_index), int(threads), simdgroup, num_simdgroups, lane};
  const int vocab = params.vocab;
  const int num_top = params.num_top;
  const RowTokens<T> tokens = {logits + size_t(row) * size_t(vocab), vocab};
  // -inf is a value like others here: a row may have fewer finite tokens than are asked for.
  const Cut all = {-INFINITY, kLastIndex};

  RowSummary mine = no_summary();
  for (int i = at.index; i < vocab; i += at.count) offer(mine.top, tokens.value(i), i);
  const float thread_max = mine.top.score;
  const float top = row_summary(mine, shared, at).top.score;
  float lse = top;
  if (isfinite(top)) {
    const TokenWeight weight = {WeightKind::exponential, top, kLog2e};
    const Cut finite = {-FLT_MAX, kLastIndex};
    const ulong total = total_of(tokens, finite, weight, shared, at);
    lse += precise::log(float(total) * kFixedUnit);
  }
  const int id = ids[row];
  const float drawn = id >= 0 && id < vocab ? tokens.value(id) : -INFINITY;
  const Cut at_least = {drawn, kLastIndex};
  const ulong rank = total_of(tokens, at_least, each_one(), shared, at);
  if (thread_index == 0) {
    logprobs[row] = drawn - lse;
    ranks[row] = int(rank);
  }
  if (num_top == 0) return;

  Cut cut = all;
  if (num_top <= at.count) cut = near_top(thread_max, num_top, all, shared, at);
  int num_listed = list_tokens(tokens, cut, shared, at);
  if (num_listed > kListed) {
    cut = select(tokens, cut, each_one(), ulong(num_top), shared, at);
    num_listed = list_tokens(tokens, cut, shared, at);
  }
  const size_t out = size_t(row) * size_t(num_top);
  write_top(shared, num_listed, num_top, lse, top_ids + out, top_logprobs + out, at);
}

}  // namespace mlxcel
