#pragma once

#include "kernels/sample_select.cuh"

// The first k tokens of a row, for small k: a threshold from the maxima of the warps (or of their
// lanes) lets few tokens through, which rank 0's block ranks by counting.

namespace mlxcel::cuda {

constexpr int kMaxListed = 512;   // largest k
constexpr int kListSlots = 2048;  // tokens that a threshold may let through

struct TokenList {
  int count;
  float threshold;
  uint64_t key[kListSlots];   // as they came
  uint64_t rank[kMaxListed];  // in rank
};

/// What kernels with a list keep in shared memory before the row's values.
template <int C>
struct alignas(16) ListShared {
  ExchangeSlots<C> slots;
  TokenList list;
};

/// A value that at least k tokens reach; k <= kMaxListed. `thread_max` is the largest of the
/// thread's tokens, and the last exchange brought each warp's largest as its first word.
template <int C>
__device__ float top_threshold(RowCluster<C>& cluster, TokenList& list, int k, float thread_max) {
  constexpr int kWarps = RowCluster<C>::kWarps;
  const Packet* packets = cluster.packets();
  if (k <= kWarps) {  // the k-th largest of the warps' maxima
    const int mine = threadIdx.x;
    if (mine < kWarps) {
      const float v = __uint_as_float(packets[mine].word[0]);
      int above = 0;
#pragma unroll 8
      for (int i = 0; i < kWarps; ++i) {
        const float other = __uint_as_float(packets[i].word[0]);
        above += other > v || (other == v && i < mine);
      }
      if (above == k - 1) list.threshold = v;
    }
    __syncthreads();
    return list.threshold;
  }
  // Each warp has at least `each` lanes whose maxima reach the threshold.
  const int each = (k + kWarps - 1) / kWarps;
  const int lane = threadIdx.x % kWarp;
  int above = 0;
  for (int i = 0; i < kWarp; ++i) {
    const float other = __shfl_sync(0xffffffffu, thread_max, i);
    above += other > thread_max || (other == thread_max && i < lane);
  }
  const unsigned owner = __ballot_sync(0xffffffffu, above == min(each, kWarp) - 1);
  const float v = __shfl_sync(0xffffffffu, thread_max, __ffs(owner) - 1);
  packets = cluster.exchange(Packet{{__float_as_uint(v), 0, 0, 0}});
  float lowest = __uint_as_float(packets[lane % kWarps].word[0]);
  for (int i = lane + kWarp; i < kWarps; i += kWarp) {
    lowest = fminf(lowest, __uint_as_float(packets[i].word[0]));
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    lowest = fminf(lowest, __shfl_xor_sync(0xffffffffu, lowest, step));
  }
  return lowest;
}

struct Listed {
  double extra;
  int count;
  int reserved;
};

__device__ __forceinline__ Listed combine(const Listed& a, const Listed& b) {
  return {a.extra + b.extra, a.count + b.count, 0};
}

/// Sends the tokens that the cut keeps to the list of rank 0's block, which is empty. Returns their
/// number and the sum of the threads' `extra`. Where the number exceeds kListSlots the list is
/// incomplete.
template <int C>
__device__ Listed send_to_list(const HeldRow<C>& row, TokenList& list, Cut cut, double extra) {
  RowCluster<C>& cluster = row.cluster();
  int mine = 0;
  row.for_each([&](float v, int i) { mine += cut.keeps(v, i); });
  if (__any_sync(0xffffffffu, mine > 0)) {
    const int lane = threadIdx.x % kWarp;
    int until = mine;  // inclusive scan over the warp
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, until, step);
      if (lane >= step) until += before;
    }
    cluster.wait_for_start();
    int base = 0;
    if (lane == kWarp - 1) base = atomicAdd(cluster.remote(&list.count, 0), until);
    base = __shfl_sync(0xffffffffu, base, kWarp - 1) + until - mine;
    if (mine > 0) {
      uint64_t* keys = cluster.remote(list.key, 0);
      row.for_each([&](float v, int i) {
        if (cut.keeps(v, i)) {
          if (base < kListSlots) keys[base] = rank_key(v, i);
          ++base;
        }
      });
    }
  }
  return cluster.reduce(Listed{extra, mine, 0});
}

/// Puts the first min(k, n) of the list's n tokens in rank. For rank 0's block alone; n <=
/// kListSlots.
__device__ __forceinline__ int rank_list(TokenList& list, int n, int k) {
  for (int c = threadIdx.x; c < n; c += kRowThreads) {
    const uint64_t key = list.key[c];
    int above = 0;
#pragma unroll 8
    for (int i = 0; i < n; ++i) above += list.key[i] > key;
    if (above < k) list.rank[above] = key;
  }
  __syncthreads();
  return min(k, n);
}

}  // namespace mlxcel::cuda
