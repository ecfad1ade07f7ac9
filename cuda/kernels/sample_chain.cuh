#pragma once

#include "kernels/sample_draw.cuh"
#include "params/sample_chain.h"

// Chain speculative sampling: a cluster for each request. Acceptance needs one probability of each
// distribution a position; the token after it one pass over two rows.

namespace mlxcel::cuda {

__device__ __forceinline__ PhiloxKey chain_key(const ChainRow& row, int position) {
  const uint64_t draw = (row.draw[0] | static_cast<uint64_t>(row.draw[1]) << 32) + position;
  return {{row.seed[0], row.seed[1]},
          {static_cast<uint32_t>(draw), static_cast<uint32_t>(draw >> 32)}};
}

/// Number of drafts accepted; the same in every warp.
__device__ __forceinline__ int accepted_drafts(const ChainParams& params, const ChainRow& row,
                                               const int32_t* ids, const float* draft,
                                               const float* target) {
  const int lane = threadIdx.x % kWarp;
  for (int begin = 0; begin < params.num_draft; begin += kWarp) {
    const int i = begin + lane;
    bool rejected = false;
    if (i < params.num_draft) {
      const int id = ids[i];
      rejected = id < 0 || id >= params.vocab;
      if (!rejected) {
        const int64_t at = static_cast<int64_t>(i) * params.vocab + id;
        const float u = uniform(philox(chain_key(row, i), 0, RngStream::accept).x);
        rejected = !(u * draft[at] < target[at]);
      }
    }
    const unsigned votes = __ballot_sync(0xffffffffu, rejected);
    if (votes != 0) return begin + __ffs(votes) - 1;
  }
  return params.num_draft;
}

/// Draws in proportion to relu(target - draft), or to target where `draft` is null. The score is
/// weight / exponential: monotone in log(weight) + noise.
template <int C>
__device__ __forceinline__ Leader draw_weights(RowCluster<C>& cluster, const float* target,
                                               const float* draft, int vocab,
                                               const PhiloxKey& key) {
  const int tiles = tiles_per_block(C, vocab);
  const int first = cluster.rank() * kTile + 4 * static_cast<int>(threadIdx.x);
  const bool wide = vocab % 4 == 0;  // then every row starts at a multiple of 16 bytes
  const Logits p{target, FloatType::f32, wide}, q{draft, FloatType::f32, wide};
  Leader leader = Leader::none(vocab);
  leader.score = 0.0f;
  constexpr int kBatch = 2;
#pragma unroll 1
  for (int t = 0; t < tiles; t += kBatch) {
    Quad weights[kBatch], less[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = (t + i) * C * kTile + first;
      weights[i] = p.load<float>(index, index, vocab);
      less[i] = draft != nullptr ? q.load<float>(index, index, vocab) : Quad{};
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = (t + i) * C * kTile + first;
      if (index >= vocab) continue;
      const uint4 bits = philox(key, index / 4, RngStream::gumbel);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Past the end of the row this is -inf - -inf or -inf - 0, which no draw takes.
        const float w = weights[i].at[j] - less[i].at[j];
        leader.offer(__fdividef(w, exponential(word(bits, j))), w, index + j);
      }
    }
  }
  leader.max = 0.0f;
  return cluster.reduce(leader);
}

template <int C>
__global__ void MLXCEL_CLUSTER(C) __launch_bounds__(kRowThreads, 2)
    chain_kernel(ChainParams params, const int32_t* __restrict__ draft_ids,
                 const float* __restrict__ draft_probs, const float* __restrict__ target_probs,
                 const ChainRow* __restrict__ rows, int32_t* ids, int32_t* num_accepted) {
  __shared__ ExchangeSlots<C> slots;
  RowCluster<C> cluster(slots);
  const int n = params.num_draft, vocab = params.vocab;
  const int64_t b = cluster.row();
  const ChainRow row = rows[b];
  const int32_t* drafted = draft_ids + b * n;
  const float* draft = draft_probs + b * n * vocab;
  const float* target = target_probs + b * (n + 1) * vocab;

  const int pos = accepted_drafts(params, row, drafted, draft, target);
  const PhiloxKey key = chain_key(row, pos);
  target += static_cast<int64_t>(pos) * vocab;
  draft += static_cast<int64_t>(pos) * vocab;
  const float* less = pos < n ? draft : nullptr;
  Leader leader;
#pragma unroll 1
  for (;;) {
    leader = draw_weights(cluster, target, less, vocab, key);
    if (leader.index < vocab || less == nullptr) break;
    less = nullptr;  // no residual: the target itself
  }
  if (cluster.rank() != 0) return;
  for (int i = threadIdx.x; i <= n; i += kRowThreads) {
    const int last = leader.index < vocab ? leader.index : 0;
    ids[b * (n + 1) + i] = i < pos ? drafted[i] : i == pos ? last : -1;
  }
  if (threadIdx.x == 0) num_accepted[b] = pos;
}

}  // namespace mlxcel::cuda
