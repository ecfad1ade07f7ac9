#pragma once

#include "kernels/sample_cluster.cuh"
#include "kernels/sample_noise.cuh"

// Gumbel-max draws: argmax of logit / temperature + noise, in one pass over the row.

namespace mlxcel::cuda {

/// The largest logit and the leading token of a draw.
struct Leader {
  float max;  // NaN where the row has a NaN
  float score;
  float value;  // logit of the token
  int index;    // vocab where no token has a score

  __device__ static Leader none(int vocab) { return {-INFINITY, -INFINITY, -INFINITY, vocab}; }

  /// In order of index: the first of equal scores leads.
  __device__ void offer(float s, float v, int i) {
    if (s > score) score = s, value = v, index = i;
  }
};

__device__ __forceinline__ Leader combine(const Leader& a, const Leader& b) {
  const bool first = a.score > b.score || (a.score == b.score && a.index < b.index);
  Leader best = first ? a : b;
  best.max = a.max > b.max || a.max != a.max ? a.max : b.max;
  return best;
}

/// scale: log2(e) / temperature, the units of gumbel().
__device__ __forceinline__ float draw_scale(const SampleRow& row) {
  return 1.44269504f / row.temperature;
}

__device__ __forceinline__ PhiloxKey philox_key(const SampleRow& row) {
  return {{row.seed[0], row.seed[1]}, {row.draw[0], row.draw[1]}};
}

/// Offers four tokens whose logits are q; without noise it is an argmax.
template <bool kNoise>
__device__ __forceinline__ void offer_quad(Leader& leader, const Quad& q, int index, float scale,
                                           const PhiloxKey& key) {
  uint4 bits;
  if constexpr (kNoise) bits = philox(key, index / 4, RngStream::gumbel);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = q.at[i];
    leader.offer(kNoise ? fmaf(x, scale, gumbel(word(bits, i))) : x, x, index + i);
  }
}

/// offer_quad with noise, for whole warps: the logarithms of four tokens are computed only where
/// their largest logit and their largest noise together would lead the warp.
__device__ __forceinline__ void offer_leading(Leader& leader, float& lead, const Quad& q, int index,
                                              float scale, const PhiloxKey& key) {
  constexpr float kSlack = 1e-4f;  // far above the rounding of gumbel()
  const uint4 bits = philox(key, index / 4, RngStream::gumbel);
  const float top = fmaxf(fmaxf(q.at[0], q.at[1]), fmaxf(q.at[2], q.at[3]));
  const uint32_t most = max(max(bits.x, bits.y), max(bits.z, bits.w));
  if (!__any_sync(0xffffffffu, fmaf(top, scale, gumbel(most)) + kSlack > lead)) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    leader.offer(fmaf(q.at[i], scale, gumbel(word(bits, i))), q.at[i], index + i);
  }
  lead = from_order_key(__reduce_max_sync(0xffffffffu, order_key(leader.score)));
}

__device__ __forceinline__ bool has_nan(const Quad& q) {
  return q.at[0] != q.at[0] || q.at[1] != q.at[1] || q.at[2] != q.at[2] || q.at[3] != q.at[3];
}

__device__ __forceinline__ void track_max(Leader& leader, bool& nan, const Quad& q) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    nan |= q.at[i] != q.at[i];
    leader.max = fmaxf(leader.max, q.at[i]);
  }
}

/// What a row of a draw gives; the id is in range whatever the row holds.
struct SampleOutput {
  int32_t* ids;
  bool* valid;
  int32_t* rounds;

  __device__ void write(int row, const Leader& leader, int vocab, int draws) const {
    ids[row] = leader.index < vocab ? leader.index : 0;
    valid[row] = leader.index < vocab && leader.max == leader.max;
    rounds[row] = draws;
  }
};

/// Greedy and temperature rows. A cluster's blocks are many: four to a multiprocessor hide the
/// latency of the loads. Blocks that have a row each are few, and have more loads in flight.
template <int C>
__global__ void MLXCEL_CLUSTER(C) __launch_bounds__(kRowThreads, C == 1 ? 2 : kMostRowBlocks)
    draw_kernel(SampleParams params, Logits logits, const SampleRow* __restrict__ rows,
                SampleOutput out) {
  __shared__ ExchangeSlots<C> slots;
  RowCluster<C> cluster(slots);
  const int vocab = params.vocab;
  RowReader<C, C == 1 ? 4 : 2, C == 1> reader(logits, cluster.row(), vocab, cluster.rank());
  const SampleRow row = rows[cluster.row()];
  const PhiloxKey key = philox_key(row);
  const float scale = draw_scale(row);
  Leader leader = Leader::none(vocab);
  bool nan = false;
  if (is_greedy(row)) {
    reader.for_quads([&](int, int index, const Quad& q) {
      nan |= has_nan(q);
      offer_quad<false>(leader, q, index, scale, key);
    });
  } else {
    float lead = -INFINITY;  // best score of the warp
    reader.for_quads([&](int, int index, const Quad& q) {
      nan |= has_nan(q);
      offer_leading(leader, lead, q, index, scale, key);
    });
  }
  leader.max = nan ? NAN : leader.score;
  leader = cluster.reduce(leader);
  if (cluster.rank() == 0 && threadIdx.x == 0) out.write(cluster.row(), leader, vocab, 0);
}

}  // namespace mlxcel::cuda
