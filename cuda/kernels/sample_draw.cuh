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

/// Parameters of a row, asked for ahead of its logits, in whose queue they would wait, and taken
/// behind them. They come by lane and leave in uniform registers.
class RowParams {
 public:
  __device__ __forceinline__ RowParams(const SampleRow* rows, int row)
      : word_(reinterpret_cast<const uint32_t*>(rows + row)[threadIdx.x % kWords]) {}

  __device__ __forceinline__ SampleRow take() const {
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = __reduce_or_sync(0xffffffffu, threadIdx.x % kWarp == i ? word_ : 0);
    }
    SampleRow row;
    memcpy(&row, words, sizeof(row));
    return row;
  }

 private:
  static constexpr int kWords = sizeof(SampleRow) / 4;
  uint32_t word_;
};

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

/// Leader of a thread's tokens, and a bound that a token's score must pass to lead its warp.
struct WarpLeader {
  Leader mine;
  float lead = -INFINITY;  // best score of the warp
  float slack = INFINITY;  // kSlack - lead
  bool nan = false;

  __device__ explicit WarpLeader(int vocab) : mine(Leader::none(vocab)) {}

  /// offer_quad for whole warps, which computes scores only where one of the four may lead.
  /// Noise above n needs -log2(u) < 2^-n, and -log2(u) is at least (1 - u) * log2(e): one bound for
  /// the largest logit with the largest noise of the four. NaN passes every bound.
  template <bool kNoise>
  __device__ __forceinline__ void offer(const Quad& q, int index, float scale,
                                        const PhiloxKey& key) {
    const float top = max_or_nan(max_or_nan(q.at[0], q.at[1]), max_or_nan(q.at[2], q.at[3]));
    uint4 bits{};
    bool behind = top <= lead;
    if constexpr (kNoise) {
      bits = philox(key, static_cast<uint32_t>(index) / 4, RngStream::gumbel);
      const uint32_t most = max(max(bits.x, bits.y), max(bits.z, bits.w));
      behind = below_one(most) >= fast_exp2(fmaf(top, scale, slack));
    }
    if (!__any_sync(0xffffffffu, !behind)) return;
    nan |= top != top;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = q.at[i];
      mine.offer(kNoise ? fmaf(x, scale, gumbel(word(bits, i))) : x, x, index + i);
    }
    lead = from_order_key(__reduce_max_sync(0xffffffffu, order_key(mine.score)));
    // log2(log2(e)), and far above the rounding of scores.
    slack = fmaf(fabsf(lead), 0x1p-21f, -0.52876637f + 1e-4f) - lead;
  }

  /// The thread's leader; its max is NaN where there was one.
  __device__ Leader result() const {
    Leader leader = mine;
    leader.max = nan ? NAN : leader.score;
    return leader;
  }
};

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

/// Argmax of the row's scores, which the reader brings.
template <class Read>
__device__ __forceinline__ Leader draw_row(const SampleRow& row, int vocab, Read read) {
  WarpLeader leader(vocab);
  const PhiloxKey key = philox_key(row);
  const float scale = draw_scale(row);
  if (is_greedy(row))
    read([&](int index, const Quad& q) { leader.offer<false>(q, index, scale, key); });
  else
    read([&](int index, const Quad& q) { leader.offer<true>(q, index, scale, key); });
  return leader.result();
}

template <int C>
struct alignas(16) DrawShared {
  ExchangeSlots<C> slots;
  TileRing ring;
};

/// Greedy and temperature rows.
template <int C>
__global__ void MLXCEL_CLUSTER(C) __launch_bounds__(kRowThreads, kMostRowBlocks)
    draw_kernel(SampleParams params, Logits logits, const SampleRow* __restrict__ rows,
                SampleOutput out) {
  extern __shared__ float4 dynamic_shared[];
  auto& shared = *reinterpret_cast<DrawShared<C>*>(dynamic_shared);
  RowCluster<C> cluster(shared.slots);
  const int vocab = params.vocab;
  const RowParams row_params(rows, cluster.row());
  RowStream<C> stream(shared.ring, logits, cluster.row(), vocab, cluster.rank());
  const auto read = [&](auto fn) { stream.for_quads(fn); };
  const Leader leader = cluster.reduce(draw_row(row_params.take(), vocab, read));
  if (cluster.rank() == 0 && threadIdx.x == 0) out.write(cluster.row(), leader, vocab, 0);
}

}  // namespace mlxcel::cuda
