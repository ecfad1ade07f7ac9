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

/// What the cluster's lists hold. The tokens are sent where they fit, and where the row has a
/// distribution.
struct Gathered {
  float max;  // of the row; NaN where it has one
  int count;

  __device__ bool drawable() const { return max < INFINITY && max >= -FLT_MAX; }
};

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

/// The same with groups that are a few more than k.
template <class KeyAt>
__device__ __forceinline__ float block_threshold(int k, int count, KeyAt key_at) {
  constexpr int kFew = 128;
  return k <= kFew / 2 ? key_threshold<kFew>(k, count, key_at)
                       : key_threshold<kMaxListed>(k, count, key_at);
}
template <int C>
__device__ __forceinline__ float kept_threshold(const TopKShared<C>& shared, int k, int kept) {
  return block_threshold(k, kept,
                         [&](int i) { return static_cast<uint32_t>(shared.kept[i] >> 32); });
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

/// Drops kept tokens that are not among the block's first k so far, but for a few, where half of
/// the slots are taken. Returns the threshold for those to come.
template <int C>
__device__ __forceinline__ float drop_kept(TopKShared<C>& shared, int k, float threshold) {
  constexpr int kEach = kListSlots / kRowThreads;
  __syncthreads();
  const int kept = shared.count;
  __syncthreads();  // all have read it before one adds to it
  if (kept <= kListSlots / 2 || kept > kListSlots) return threshold;
  threshold = fmaxf(threshold, kept_threshold(shared, k, kept));
  uint64_t mine[kEach];
  int n = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int slot = i * kRowThreads + static_cast<int>(threadIdx.x);
    mine[i] = slot < kept ? shared.kept[slot] : 0;
    n += mine[i] >= rank_key(threshold, INT_MAX);
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  int slot = atomicAdd(&shared.count, n);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (mine[i] >= rank_key(threshold, INT_MAX)) shared.kept[slot++] = mine[i];
  }
  __syncthreads();
  return threshold;
}

/// Sends the block's `kept` tokens of at least `threshold` to rank 0's list. `max` is the largest
/// of the thread's tokens, NaN where there was one.
template <int C>
__device__ __forceinline__ Gathered gather(RowCluster<C>& cluster, TopKShared<C>& shared, int kept,
                                           float threshold, float max) {
  const int lane = threadIdx.x % kWarp;
  const bool fits = kept <= kListSlots;
  const uint64_t least = rank_key(threshold, INT_MAX);
  int mine = 0;
  if (fits) {
    for (int i = threadIdx.x; i < kept; i += kRowThreads) mine += shared.kept[i] >= least;
  }
  int until = mine;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, until, step);
    if (lane >= step) until += before;
  }
  const int warp_count = __shfl_sync(0xffffffffu, until, kWarp - 1);
  constexpr uint32_t kNan = 0xffffffffu;  // above the key of every number
  const uint32_t max_key = __reduce_max_sync(0xffffffffu, max == max ? order_key(max) : kNan);
  const Packet* packets = cluster.exchange(
      {{static_cast<uint32_t>(fits ? warp_count : kListSlots + 1), max_key, 0, 0}});
  uint32_t total = 0, before = 0, row_max = 0;
#pragma unroll
  for (int i = 0; i < RowCluster<C>::kWarps; i += kWarp) {
    const Packet packet = RowCluster<C>::packet_of(packets, lane + i);
    total += packet.word[0];
    before += lane + i < cluster.warp() ? packet.word[0] : 0;
    row_max = ::max(row_max, packet.word[1]);
  }
  row_max = __reduce_max_sync(0xffffffffu, row_max);
  const Gathered all{row_max == kNan ? NAN : from_order_key(row_max),
                     static_cast<int>(__reduce_add_sync(0xffffffffu, total))};
  if (all.count > kListSlots || !all.drawable()) return all;
  before = __reduce_add_sync(0xffffffffu, before);
  uint32_t slot = shared_address(shared.list.key) + 8 * (before + until - mine);
  for (int i = threadIdx.x; i < kept; i += kRowThreads) {
    if (shared.kept[i] < least) continue;
    cluster.send(slot, shared.kept[i]);
    slot += 8;
  }
  if (cluster.rank() == 0) cluster.receive(all.count);
  return all;
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
  if (is_greedy(row) || row.top_k <= 0 || row.top_k >= vocab) {
    const auto read = [&](auto fn) { stream.for_quads(fn); };
    const Leader leader = cluster.reduce(draw_row(row, vocab, read));
    if (writes) out.write(at, leader, vocab, 0);
    return;
  }

  shared.first_key[threadIdx.x] = order_key(stream.first_max());
  __syncthreads();
  float threshold =
      block_threshold(row.top_k, kRowThreads, [&](int i) { return shared.first_key[i]; });
  float max = -INFINITY;
  bool nan = false;
  stream.for_quads(
      [&](int index, const Quad& q) {
        nan |= has_nan(q);
#pragma unroll
        for (int i = 0; i < 4; ++i) max = fmaxf(max, q.at[i]);
        keep_quad(shared, q, index, {threshold, vocab - 1});
      },
      [&] {
        if (row.top_k > kRowThreads / 8) threshold = drop_kept(shared, row.top_k, threshold);
      });
  if (nan) max = NAN;
  __syncthreads();
  const int kept = shared.count;
  if (kept > row.top_k && kept <= kListSlots) {
    threshold = kept_threshold(shared, row.top_k, kept);
  }
  if constexpr (C > 2) {
    // At least k tokens of some block reach its threshold: the largest of these is enough for all.
    // Two blocks send few more tokens without it than the exchange is worth.
    threshold = cluster.max(threshold);
  }
  Gathered all = gather(cluster, shared, kept, threshold, max);
  if (!all.drawable()) {
    SampleRow plain = row;
    plain.temperature = 0.0f;  // the argmax
    const auto read = [&](auto fn) { again.for_quads(fn); };
    const Leader leader = cluster.reduce(draw_row(plain, vocab, read));
    if (writes) out.write(at, leader, vocab, 0);
    return;
  }

  const RowFilter filter(params, row, all.max);
  double mass = 0.0;
  if (filter.joint && filter.top_p < 1.0f) {
    mass = again.mass([&](float v) { return filter.weight(v); },
                      [](float v, int) { return v >= -FLT_MAX; });
  }
  if (all.count > kListSlots) {
    // More tokens than fit are close to the k-th, or tied with it: select it exactly.
    const Cut cut = again.select_top(row.top_k, {filter.floor, vocab - 1}, filter.max);
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    again.for_quads([&](int index, const Quad& q) { keep_quad(shared, q, index, cut); });
    __syncthreads();
    all = gather(cluster, shared, shared.count, -FLT_MAX, all.max);
  }
  if (cluster.rank() == 0) {
    draw_from_list(filter, key, shared.list, all.count, row.top_k, mass, at, vocab, out);
  }
}

}  // namespace mlxcel::cuda
