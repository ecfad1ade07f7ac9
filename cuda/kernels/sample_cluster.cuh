#pragma once

#include <cooperative_groups.h>

#include "kernels/reduce.cuh"
#include "kernels/types.cuh"

// One row of tokens is worked on by a cluster of C blocks. Each thread keeps its tokens in shared
// memory, so that device memory is read once, and reads only what it wrote itself: the only
// barriers are those of `exchange`, where the blocks write their warps' partial results into each
// other's shared memory.

namespace mlxcel::cuda {

namespace cg = cooperative_groups;

constexpr int kRowThreads = 512;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kTile = 4 * kRowThreads;  // tokens that a block takes at a time

/// Tiles go round the blocks, so that a row whose large values lie together is still shared.
template <int C>
__host__ __device__ constexpr int tiles_per_block(int vocab) {
  return (vocab + C * kTile - 1) / (C * kTile);
}

/// What a warp contributes to an exchange.
struct alignas(16) Packet {
  uint32_t word[4];
};

/// A 16-byte value as words, and back.
template <class T>
__device__ __forceinline__ Packet as_packet(const T& value) {
  static_assert(sizeof(T) == sizeof(Packet));
  Packet p;
  memcpy(&p, &value, sizeof(p));
  return p;
}
template <class T>
__device__ __forceinline__ T from_packet(const Packet& p) {
  T value;
  memcpy(&value, &p, sizeof(value));
  return value;
}

/// Combines 16-byte values of a warp's first Width lanes, in all of these. T has a commutative
/// combine(a, b).
template <int Width = kWarp, class T>
__device__ __forceinline__ T warp_reduce(T value) {
#pragma unroll
  for (int step = Width / 2; step > 0; step /= 2) {
    Packet other = as_packet(value);
#pragma unroll
    for (int i = 0; i < 4; ++i) other.word[i] = __shfl_xor_sync(0xffffffffu, other.word[i], step);
    value = combine(value, from_packet<T>(other));
  }
  return value;
}

template <int C>
struct ExchangeSlots {
  Packet packet[2][C * kRowWarps];
};

template <int C>
class RowCluster {
 public:
  /// The packets of the last exchange.
  __device__ const Packet* packets() const { return slots_.packet[parity_]; }

  static constexpr int kWarps = C * kRowWarps;

  __device__ explicit RowCluster(ExchangeSlots<C>& slots) : slots_(slots) {
    arrive();  // the blocks are known to be there by the first exchange
  }

  __device__ int rank() const { return static_cast<int>(cluster_.block_rank()); }
  __device__ int row() const { return static_cast<int>(blockIdx.x) / C; }

  /// The same shared variable in another block of the cluster.
  template <class T>
  __device__ T* remote(T* local, int block) const {
    return cluster_.map_shared_rank(local, block);
  }

  /// Barrier before the first remote access other than an exchange.
  __device__ void wait_for_start() {
    if (!started_) wait();
    started_ = true;
  }

  /// Gives every thread of the cluster the packets of all warps, and orders what the blocks wrote
  /// remotely before. `mine` is that of the calling warp, equal in all lanes. The packets stay
  /// until the exchange after next.
  __device__ const Packet* exchange(const Packet& mine) {
    wait_for_start();
    parity_ ^= 1;
    Packet* slots = slots_.packet[parity_];
    const int lane = threadIdx.x % kWarp;
    if (lane < C) *remote(&slots[rank() * kRowWarps + threadIdx.x / kWarp], lane) = mine;
    arrive();
    wait();
    return slots;
  }

  /// Combines a value of each thread over the cluster, in an order that is fixed: over lanes, then
  /// over warps. T has 16 bytes and a commutative combine(a, b).
  template <class T>
  __device__ T reduce(T value) {
    value = warp_reduce(value);
    const Packet* packets = exchange(as_packet(value));
    const int lane = threadIdx.x % kWarp;
    T all = from_packet<T>(packets[lane % kWarps]);
    for (int i = lane + kWarp; i < kWarps; i += kWarp) {
      all = combine(all, from_packet<T>(packets[i]));
    }
    if constexpr (kWarps < kWarp) return warp_reduce<kWarps>(all);
    return warp_reduce(all);
  }

 private:
  __device__ static void arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  __device__ static void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }

  cg::cluster_group cluster_ = cg::this_cluster();
  ExchangeSlots<C>& slots_;
  bool started_ = false;
  int parity_ = 0;
};

/// Four tokens of a row; those past its end are -inf.
struct Quad {
  float at[4];
};

/// Logits of any type, and whether four of them may be read as one.
struct Logits {
  const void* data;
  FloatType dtype;
  bool wide;

  /// The four tokens from `index` on, whose offset in the array is `at`.
  template <class T>
  __device__ __forceinline__ Quad load(int64_t at, int index, int vocab) const {
    const T* x = static_cast<const T*>(data) + at;
    Quad q;
    if (wide && index < vocab) {
      const Vec<T, 4> v = load_vec<T, 4>(x);
#pragma unroll
      for (int i = 0; i < 4; ++i) q.at[i] = to_float(v.at[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) q.at[i] = index + i < vocab ? to_float(x[i]) : -INFINITY;
    }
    return q;
  }

  /// One token.
  __device__ float at(int64_t i) const {
    if (dtype == FloatType::f32) return static_cast<const float*>(data)[i];
    if (dtype == FloatType::bf16) return to_float(static_cast<const bf16*>(data)[i]);
    return to_float(static_cast<const f16*>(data)[i]);
  }
};

/// Calls fn(tile, index of the first of four tokens, the four) for the calling thread's tokens of
/// row `row`, in order of index. Loads run ahead of the calls by a batch.
template <int C, class Fn>
__device__ __forceinline__ void for_row(const Logits& logits, int row, int vocab, int rank, Fn fn) {
  constexpr int kBatch = 4;
  const int tiles = tiles_per_block<C>(vocab);
  const int64_t begin = static_cast<int64_t>(row) * vocab;
  const int first = rank * kTile + 4 * static_cast<int>(threadIdx.x);
  for (int t = 0; t < tiles; t += kBatch) {
    Quad q[kBatch];
    const auto load = [&](auto type) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = (t + i) * C * kTile + first;
        if (t + i < tiles) {
          q[i] = logits.template load<typename decltype(type)::type>(begin + index, index, vocab);
        }
      }
    };
    if (logits.dtype == FloatType::f32)
      load(Type<float>{});
    else if (logits.dtype == FloatType::bf16)
      load(Type<bf16>{});
    else
      load(Type<f16>{});
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (t + i < tiles) fn(t + i, (t + i) * C * kTile + first, q[i]);
    }
  }
}

}  // namespace mlxcel::cuda
