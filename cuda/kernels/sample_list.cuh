#pragma once

#include "kernels/sample_select.cuh"

// The first k tokens of a row, for small k: a threshold from the maxima of the warps (or of their
// lanes) lets few tokens through, which rank 0's block ranks by counting.

namespace mlxcel::cuda {

constexpr int kMaxListed = kMaxListedTopK;
constexpr int kListSlots = 2048;  // tokens that a threshold may let through

struct TokenList {
  uint64_t key[kListSlots];   // as they came
  uint64_t rank[kMaxListed];  // in rank
  float score[kMaxListed];    // of a draw, in rank
};

/// What kernels with a list keep in shared memory before the row's values.
template <int C>
struct alignas(16) ListShared {
  ExchangeSlots<C> slots;
  TokenList list;
};

/// The largest 16-bit prefix of a key that at least k of the keys which a warp's lanes hold reach,
/// or 0. Every warp of the cluster has the same keys.
template <int N>
__device__ __forceinline__ uint32_t reached_by(const uint32_t (&keys)[N], int k) {
  uint32_t found = 0;
#pragma unroll 1
  for (uint32_t bit = 0x80000000u; bit >= 0x10000u; bit /= 2) {
    const uint32_t trial = found | bit;
    int reach = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) reach += keys[i] >= trial;
    if (__reduce_add_sync(0xffffffffu, reach) >= k) found = trial;
  }
  return found;
}

/// A value that at least k tokens reach, if that many are above -inf; k <= kMaxListed.
/// `thread_max` is the largest of the thread's tokens, and the last exchange brought each warp's
/// largest as its first word.
template <int C>
__device__ __forceinline__ float top_threshold(RowCluster<C>& cluster, int k, float thread_max) {
  constexpr int kWarps = RowCluster<C>::kWarps;
  const int lane = threadIdx.x % kWarp;
  const Packet* packets = cluster.packets();
  // Up to kWarps, the k-th largest of the warps' maxima will do. Above, each warp gives the maximum
  // of one of its lanes, below those of `each` - 1 others.
  const int each = (k + kWarps - 1) / kWarps;
  if (each > 1) {
    int above = 0;
#pragma unroll 8
    for (int i = 0; i < kWarp; ++i) {
      const float other = __shfl_sync(0xffffffffu, thread_max, i);
      above += other > thread_max || (other == thread_max && i < lane);
    }
    const unsigned owner = __ballot_sync(0xffffffffu, above == each - 1);
    const float v = __shfl_sync(0xffffffffu, thread_max, __ffs(owner) - 1);
    packets = cluster.exchange({{__float_as_uint(v), 0, 0, 0}});
    k = kWarps;
  }
  uint32_t keys[(kWarps + kWarp - 1) / kWarp];
#pragma unroll
  for (int i = 0; i < kWarps; i += kWarp) {
    const bool there = lane + i < kWarps;  // one block has half a warp's
    keys[i / kWarp] = there ? order_key(__uint_as_float(packets[lane + i].word[0])) : 0;
  }
  const float value = from_order_key(reached_by(keys, k));
  return value == value ? value : -INFINITY;  // keys below that of -inf are NaN
}

struct Listed {
  double extra;
  int count;
  int before;  // counts of the warps before the caller's
};

__device__ __forceinline__ Listed combine(const Listed& a, const Listed& b) {
  return {a.extra + b.extra, a.count + b.count, a.before + b.before};
}

/// Sends the tokens that the cut keeps to the list of rank 0's block, where they fit. Returns their
/// number, and the sum of the threads' `extra`.
template <class Row>
__device__ __forceinline__ Listed send_to_list(const Row& row, TokenList& list, Cut cut,
                                               float extra) {
  using Cluster = typename Row::Cluster;
  Cluster& cluster = row.cluster();
  const int lane = threadIdx.x % kWarp;
  int mine = 0;
  row.for_each([&](float v, int i) { mine += cut.keeps(v, i); });
  int until = mine;  // inclusive scan over the warp
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, until, step);
    if (lane >= step) until += before;
  }
  const int warp_count = __shfl_sync(0xffffffffu, until, kWarp - 1);
  const Packet* packets = cluster.exchange(as_packet(Listed{warp_sum(extra), warp_count, 0}));
  Listed all{};
#pragma unroll
  for (int i = 0; i < Cluster::kWarps; i += kWarp) {
    Listed other = from_packet<Listed>(Cluster::packet_of(packets, lane + i));
    other.before = lane + i < cluster.warp() ? other.count : 0;
    all = combine(all, other);
  }
  all = warp_reduce(all);
  if (all.count > kListSlots) return all;
  if (mine > 0) {
    uint32_t slot = shared_address(list.key) + 8 * (all.before + until - mine);
    row.for_each([&](float v, int i) {
      if (!cut.keeps(v, i)) return;
      cluster.send(slot, rank_key(v, i));
      slot += 8;
    });
  }
  if (cluster.rank() == 0) cluster.receive(all.count);
  return all;
}

/// Sorts the list's n tokens by rank, by a bitonic network.
__device__ __forceinline__ void sort_list(TokenList& list, int n) {
  int size = kRowThreads;
  while (size < n) size *= 2;
  for (int i = n + static_cast<int>(threadIdx.x); i < size; i += kRowThreads) list.key[i] = 0;
#pragma unroll 1
  for (int width = 2; width <= size; width *= 2) {
#pragma unroll 1
    for (int step = width / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += kRowThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const uint64_t a = list.key[low], b = list.key[high];
        const bool descends = (low & width) == 0;
        if (descends ? a < b : a > b) list.key[low] = b, list.key[high] = a;
      }
    }
  }
  __syncthreads();
}

/// Puts the first min(k, n) of the list's n tokens in rank, and calls ranked(rank, key) for each in
/// one thread. For rank 0's block alone; n <= kListSlots. Short lists are ranked by counting, four
/// lanes to a token.
template <class Ranked>
__device__ __forceinline__ int rank_list(TokenList& list, int n, int k, Ranked ranked) {
  constexpr int kLanes = 4, kCounted = 256;
  const int first = min(k, n);
  if (n > kCounted) {
    sort_list(list, n);
    for (int i = threadIdx.x; i < first; i += kRowThreads) {
      list.rank[i] = list.key[i];
      ranked(i, list.key[i]);
    }
  } else {
    const int part = threadIdx.x % kLanes;
    for (int begin = 0; begin < n; begin += kRowThreads / kLanes) {
      const int c = begin + static_cast<int>(threadIdx.x) / kLanes;
      const uint64_t key = c < n ? list.key[c] : 0;
      int above = 0;
#pragma unroll 8
      for (int i = part; i < n; i += kLanes) above += list.key[i] > key;
      above += __shfl_xor_sync(0xffffffffu, above, 1);
      above += __shfl_xor_sync(0xffffffffu, above, 2);
      if (part == 0 && c < n && above < k) {
        list.rank[above] = key;
        ranked(above, key);
      }
    }
  }
  __syncthreads();
  return first;
}
__device__ __forceinline__ int rank_list(TokenList& list, int n, int k) {
  return rank_list(list, n, k, [](int, uint64_t) {});
}

/// The cut after the first k tokens of those that `within` keeps, for k <= kMaxListed; arguments as
/// for top_threshold and send_to_list. None is larger than `max`.
template <class Row>
__device__ __forceinline__ Cut select_listed(const Row& row, TokenList& list, int k, Cut within,
                                             float thread_max, float max) {
  auto& cluster = row.cluster();
  const float threshold = fmaxf(within.value, top_threshold(cluster, k, thread_max));
  const Listed listed = send_to_list(row, list, {threshold, row.vocab() - 1}, 0.0f);
  if (listed.count > kListSlots) return row.select_top(k, within, max);
  uint64_t last = 0;
  if (cluster.rank() == 0 && rank_list(list, listed.count, k) == k) last = list.rank[k - 1];
  const Packet* packets =
      cluster.exchange({{static_cast<uint32_t>(last), static_cast<uint32_t>(last >> 32), 0, 0}});
  last = packets[0].word[0] | static_cast<uint64_t>(packets[0].word[1]) << 32;
  return last == 0 ? within : Cut{key_value(last), key_index(last)};
}

}  // namespace mlxcel::cuda
