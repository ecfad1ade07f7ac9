#pragma once

#include "kernels/sample_filter.cuh"

// Rows that filter by a small top-k, beside rows that do not filter. The row streams by once: each
// block keeps the tokens that reach the k-th largest of the maxima which its threads saw first.
// These are few, and rank 0's block finishes as in sample_filter.cuh.

namespace mlxcel::cuda {

template <int C>
struct alignas(16) TopKShared {
  ExchangeSlots<C> slots;
  TokenList list;             // of the row, in rank 0's block
  uint64_t kept[kListSlots];  // rank keys of the block's tokens
  TileRing ring;
  uint32_t first_key[kRowThreads];  // of the largest of each thread's first tokens
  int count;                        // of `kept`, or more where they did not fit
};

/// What a block knows when its tokens have passed.
struct TopKEnd {
  float max;        // NaN where there is one
  float threshold;  // at least k tokens of some block reach it
  uint32_t overflow;
  uint32_t unused;
};

__device__ __forceinline__ TopKEnd combine(const TopKEnd& a, const TopKEnd& b) {
  return {a.max > b.max || a.max != a.max ? a.max : b.max, fmaxf(a.threshold, b.threshold),
          a.overflow | b.overflow, 0};
}

/// A value that at least k of `count` keys reach, if that many are above -inf, and few more: the
/// k-th largest of the maxima of groups of keys. Every warp finds it by itself: it costs no
/// barriers.
template <int kGroups, class KeyAt>
__device__ __forceinline__ float key_threshold(int k, int count, KeyAt key_at) {
  uint32_t keys[kGroups / kWarp];
#pragma unroll
  for (int i = 0; i < kGroups / kWarp; ++i) {
    keys[i] = 0;
    const int group = i * kWarp + static_cast<int>(threadIdx.x) % kWarp;
    for (int at = group; at < count; at += kGroups) keys[i] = max(keys[i], key_at(at));
  }
  const float value = from_order_key(reached_by(keys, k));
  return value > -FLT_MAX ? value : -FLT_MAX;  // NaN too: below the key of -inf
}

/// The same with as few groups as k allows.
template <class KeyAt>
__device__ __forceinline__ float block_threshold(int k, int count, KeyAt key_at) {
  constexpr int kFew = 128;
  return k <= kFew ? key_threshold<kFew>(k, count, key_at)
                   : key_threshold<kMaxListed>(k, count, key_at);
}

/// Appends the tokens of at least `threshold`.
template <int C>
__device__ __forceinline__ void keep_quad(TopKShared<C>& shared, const Quad& q, int index,
                                          Cut cut) {
  int n = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) n += cut.keeps(q.at[i], index + i);
  if (n == 0) return;
  int slot = atomicAdd(&shared.count, n);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!cut.keeps(q.at[i], index + i)) continue;
    if (slot < kListSlots) shared.kept[slot] = rank_key(q.at[i], index + i);
    ++slot;
  }
}

/// Sends the block's tokens of at least `threshold` to rank 0's list; returns how many all blocks
/// have. Sends nothing where they do not fit.
template <int C>
__device__ __forceinline__ int gather(RowCluster<C>& cluster, TopKShared<C>& shared, int kept,
                                      float threshold) {
  const int lane = threadIdx.x % kWarp;
  const uint64_t least = rank_key(threshold, INT_MAX);
  int mine = 0;
  for (int i = threadIdx.x; i < kept; i += kRowThreads) mine += shared.kept[i] >= least;
  int until = mine;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, until, step);
    if (lane >= step) until += before;
  }
  const int warp_count = __shfl_sync(0xffffffffu, until, kWarp - 1);
  const Packet* packets = cluster.exchange({{static_cast<uint32_t>(warp_count), 0, 0, 0}});
  uint32_t total = 0, before = 0;
#pragma unroll
  for (int i = 0; i < RowCluster<C>::kWarps; i += kWarp) {
    const uint32_t count = RowCluster<C>::packet_of(packets, lane + i).word[0];
    total += count;
    before += lane + i < cluster.warp() ? count : 0;
  }
  total = __reduce_add_sync(0xffffffffu, total);
  before = __reduce_add_sync(0xffffffffu, before);
  if (total > kListSlots) return static_cast<int>(total);
  uint32_t slot = shared_address(shared.list.key) + 8 * (before + until - mine);
  for (int i = threadIdx.x; i < kept; i += kRowThreads) {
    if (shared.kept[i] < least) continue;
    cluster.send(slot, shared.kept[i]);
    slot += 8;
  }
  if (cluster.rank() == 0) cluster.receive(total);
  return static_cast<int>(total);
}

template <int C>
__global__ void MLXCEL_CLUSTER(C) __launch_bounds__(kRowThreads, 2)
    top_k_kernel(SampleParams params, Logits logits, const SampleRow* __restrict__ rows,
                 SampleOutput out) {
  extern __shared__ float4 dynamic_shared[];
  auto& shared = *reinterpret_cast<TopKShared<C>*>(dynamic_shared);
  if (threadIdx.x == 0) shared.count = 0;
  RowCluster<C> cluster(shared.slots);
  const int vocab = params.vocab, at = cluster.row();
  const RowParams row_params(rows, at);
  RowStream<C> stream(shared.ring, logits, at, vocab, cluster.rank());
  const SampleRow row = row_params.take();
  const PhiloxKey key = philox_key(row);
  const bool writes = cluster.rank() == 0 && threadIdx.x == 0;
  const ReadRow<C> again(cluster, logits, vocab);
  const bool listed = !is_greedy(row) && row.top_k > 0 && row.top_k < vocab;

  TopKEnd end{-INFINITY, -FLT_MAX, 0, 0};
  if (listed) {
    bool nan = false;
    shared.first_key[threadIdx.x] = order_key(stream.first_max());
    __syncthreads();
    end.threshold =
        block_threshold(row.top_k, kRowThreads, [&](int i) { return shared.first_key[i]; });
    stream.for_quads([&](int index, const Quad& q) {
      nan |= has_nan(q);
#pragma unroll
      for (int i = 0; i < 4; ++i) end.max = fmaxf(end.max, q.at[i]);
      keep_quad(shared, q, index, {end.threshold, vocab - 1});
    });
    __syncthreads();
    const int kept = shared.count;
    if (kept > kListSlots) {
      end.overflow = 1;
    } else if (kept > row.top_k) {
      end.threshold = block_threshold(
          row.top_k, kept, [&](int i) { return static_cast<uint32_t>(shared.kept[i] >> 32); });
    }
    if (nan) end.max = NAN;
    end = cluster.reduce(end);
  }
  if (!listed || !(end.max < INFINITY) || end.max < -FLT_MAX) {
    // No filter, or no distribution: the argmax with noise, or without.
    SampleRow plain = row;
    if (listed) plain.temperature = 0.0f;
    const Leader leader =
        cluster.reduce(draw_row(plain, vocab, [&](auto fn) { again.for_quads(fn); }));
    if (writes) out.write(at, leader, vocab, 0);
    return;
  }

  const RowFilter filter(params, row, end.max);
  const auto weight = [&](float v) { return filter.weight(v); };
  double mass = 0.0;
  if (filter.joint && filter.top_p < 1.0f) {
    mass = again.mass(weight, [](float v, int) { return v >= -FLT_MAX; });
  }
  float threshold = fmaxf(filter.floor, end.threshold);
  int total = kListSlots + 1;
  if (!end.overflow) total = gather(cluster, shared, shared.count, threshold);
  if (total > kListSlots) {
    // More tokens than fit are close to the k-th, or tied with it: select it exactly.
    const Cut cut = again.select_top(row.top_k, {filter.floor, vocab - 1}, filter.max);
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    again.for_quads([&](int index, const Quad& q) { keep_quad(shared, q, index, cut); });
    __syncthreads();
    total = gather(cluster, shared, shared.count, -FLT_MAX);
  }
  if (cluster.rank() == 0) {
    draw_from_list(filter, key, shared.list, total, row.top_k, mass, at, vocab, out);
  }
}

}  // namespace mlxcel::cuda
