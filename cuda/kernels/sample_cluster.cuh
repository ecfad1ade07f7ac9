#pragma once

#include "kernels/cluster.cuh"
#include "kernels/reduce.cuh"
#include "kernels/types.cuh"

// One row of tokens is worked on by a cluster of C blocks. The blocks meet in `exchange`: each warp
// writes its partial result into every block's shared memory, and the writes themselves complete
// the barrier that the readers wait on. (A cluster barrier would order all of memory, at several
// times the cost, and would drop the L1 cache.)

namespace mlxcel::cuda {

constexpr int kRowThreads = 512;
constexpr int kRowWarps = kRowThreads / kWarp;
/// Of such blocks a multiprocessor holds at most these: it has 2,048 threads, on sm_120 1,536.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kMostRowBlocks = 3;
#else
constexpr int kMostRowBlocks = 4;
#endif
constexpr int kTile = 4 * kRowThreads;  // tokens that a block takes at a time

/// Tiles go round the blocks, so that a row whose large values lie together is still shared.
__host__ __device__ constexpr int tiles_per_block(int blocks, int vocab) {
  return (vocab + blocks * kTile - 1) / (blocks * kTile);
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

/// Combines 16-byte values of runs of `Width` lanes, in all of these. T has a commutative
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
struct alignas(16) ExchangeSlots {
  Packet packet[2][C * kRowWarps];
  uint64_t barrier[2];
  uint64_t arrived;  // of what `send` sends
};

template <int C>
class RowCluster {
 public:
  static constexpr int kWarps = C * kRowWarps;

  __device__ __forceinline__ explicit RowCluster(ExchangeSlots<C>& slots) : slots_(slots) {
    if constexpr (C > 1 && !kHasClusters) __trap();
    if constexpr (kShared) {
      if (threadIdx.x == 0) {
        for (const uint64_t* barrier : {&slots_.barrier[0], &slots_.barrier[1], &slots_.arrived}) {
          barrier_init(shared_address(barrier), 1);
        }
        barrier_init_fence();
      }
      // The other blocks' barriers are known to be there by the first exchange.
      cluster_arrive();
    }
  }

  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) % C; }
  __device__ __forceinline__ int row() const { return static_cast<int>(blockIdx.x) / C; }
  __device__ __forceinline__ int warp() const {
    return rank() * kRowWarps + static_cast<int>(threadIdx.x) / kWarp;
  }

  /// Gives every thread of the cluster the packets of all warps. `mine` is that of the calling
  /// warp, equal in all lanes. The packets stay until the exchange after next. The first exchange
  /// also makes what a block wrote to its own shared memory before it visible to the block.
  __device__ __forceinline__ const Packet* exchange(const Packet& mine) {
    const int parity = exchanges_ % 2, lane = threadIdx.x % kWarp;
    if constexpr (!kShared) {
      if (lane == 0) slots_.packet[parity][warp()] = mine;
      __syncthreads();
    } else {
      if (exchanges_ == 0) cluster_wait();
      const uint32_t barrier = shared_address(&slots_.barrier[parity]);
      if (threadIdx.x == 0) barrier_expect(barrier, sizeof(Packet) * kWarps);
      if (lane < C) {
        const uint32_t slot = shared_address(&slots_.packet[parity][warp()]);
        store_remote_16(lane, slot, mine.word, barrier);
      }
      barrier_wait(barrier, exchanges_ / 2 % 2);
    }
    ++exchanges_;
    return slots_.packet[parity];
  }

  /// The packet of one of the warps; zeros past the last one, as in a cluster of a single block,
  /// which has fewer warps than a warp has lanes.
  __device__ __forceinline__ static Packet packet_of(const Packet* packets, int warp) {
    return warp < kWarps ? packets[warp] : Packet{};
  }

  /// The packets of the last exchange.
  __device__ __forceinline__ const Packet* packets() const {
    return slots_.packet[(exchanges_ + 1) % 2];
  }

  /// Combines a value of each thread over the cluster, in all of them, in an order that is fixed:
  /// over lanes, then over warps. T has 16 bytes and a commutative combine(a, b).
  template <class T>
  __device__ __forceinline__ T reduce(const T& value) {
    const Packet* packets = exchange(as_packet(warp_reduce(value)));
    const int lane = threadIdx.x % kWarp;
    T all = from_packet<T>(packets[lane % kWarps]);
#pragma unroll
    for (int i = kWarp; i < kWarps; i += kWarp) {
      all = combine(all, from_packet<T>(packets[lane + i]));
    }
    return warp_reduce<(kWarps < kWarp ? kWarps : kWarp)>(all);  // one block has half a warp's
  }

  /// Sum over the cluster, in all threads.
  __device__ __forceinline__ int sum(int value) {
    const uint32_t mine = __reduce_add_sync(0xffffffffu, value);
    const Packet* packets = exchange({{mine, 0, 0, 0}});
    const int lane = threadIdx.x % kWarp;
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kWarps; i += kWarp) {
      all += packet_of(packets, lane + i).word[0];
    }
    return static_cast<int>(__reduce_add_sync(0xffffffffu, all));
  }

  /// The largest of the blocks' values, none of them NaN; a block's threads have the same.
  __device__ __forceinline__ float max(float value) {
    const Packet* packets = exchange({{__float_as_uint(value), 0, 0, 0}});
    for (int block = 0; block < C; ++block) {
      value = fmaxf(value, __uint_as_float(packets[block * kRowWarps].word[0]));
    }
    return value;
  }

  /// Writes 8 bytes to a shared address of rank 0's block, as given for the caller's own. A cluster
  /// sends once, to one receiver, after an exchange.
  __device__ __forceinline__ void send(uint32_t address, uint64_t value) {
    if constexpr (!kShared) {
      asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
    } else {
      store_remote_8(0, address, value, shared_address(&slots_.arrived));
    }
  }

  /// Waits, in rank 0's block, for the `count` values that the cluster sends.
  __device__ __forceinline__ void receive(int count) {
    if constexpr (!kShared) {
      __syncthreads();
    } else {
      const uint32_t barrier = shared_address(&slots_.arrived);
      if (threadIdx.x == 0) barrier_expect(barrier, 8 * count);
      barrier_wait(barrier, 0);
    }
  }

 private:
  static constexpr bool kShared = C > 1 && kHasClusters;

  ExchangeSlots<C>& slots_;
  uint32_t exchanges_ = 0;
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
  __device__ __forceinline__ float at(int64_t i) const {
    if (dtype == FloatType::f32) return static_cast<const float*>(data)[i];
    if (dtype == FloatType::bf16) return to_float(static_cast<const bf16*>(data)[i]);
    return to_float(static_cast<const f16*>(data)[i]);
  }
};

/// Reads the calling thread's tokens of a row, kBatch tiles at a time.
template <int C, int kBatch>
class RowReader {
 public:
  /// Starts to load: what the caller reads next has its latency hidden by this, and the other way
  /// round.
  __device__ __forceinline__ RowReader(const Logits& logits, int row, int vocab, int rank)
      : logits_(logits),
        vocab_(vocab),
        first_(rank * kTile + 4 * static_cast<int>(threadIdx.x)),
        begin_(static_cast<int64_t>(row) * vocab) {
    load(0);
  }

  /// Calls fn(tile, index of the first of four tokens, the four), in order of index. Once.
  template <class Fn>
  __device__ __forceinline__ void for_quads(Fn fn) {
    const int tiles = tiles_per_block(C, vocab_);
#pragma unroll 1
    for (int t = 0; t < tiles; t += kBatch) {
      if (t > 0) load(t);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (t + i < tiles) fn(t + i, (t + i) * C * kTile + first_, quads_[i]);
      }
    }
  }

 private:
  __device__ __forceinline__ void load(int tile) {
    if (logits_.dtype == FloatType::f32)
      load_as<float>(tile);
    else if (logits_.dtype == FloatType::bf16)
      load_as<bf16>(tile);
    else
      load_as<f16>(tile);
  }
  template <class T>
  __device__ __forceinline__ void load_as(int tile) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = (tile + i) * C * kTile + first_;
      quads_[i] = logits_.template load<T>(begin_ + index, index, vocab_);
    }
  }

  const Logits& logits_;
  int vocab_;
  int first_;
  int64_t begin_;
  Quad quads_[kBatch];
};

/// Four tokens of each thread for each of the tiles that are on their way.
struct alignas(16) TileRing {
  static constexpr int kDepth = 4;
  float4 quad[kDepth][kRowThreads];
};

/// Streams the calling thread's tokens of a row through shared memory, TileRing::kDepth tiles
/// ahead. Each thread reads only what it asked for itself, so that no barrier is needed.
template <int C>
class RowStream {
 public:
  /// Starts to load.
  __device__ __forceinline__ RowStream(TileRing& ring, const Logits& logits, int row, int vocab,
                                       int rank)
      : logits_(logits),
        vocab_(vocab),
        first_(rank * kTile + 4 * static_cast<int>(threadIdx.x)),
        tiles_(tiles_per_block(C, vocab)),
        begin_(static_cast<int64_t>(row) * vocab),
        ring_(&ring.quad[0][threadIdx.x]),
        address_(shared_address(ring_)) {
    with_type([&](auto type) {
#pragma unroll 1
      for (int tile = 0; tile < TileRing::kDepth; ++tile) ask<decltype(type)>(tile, tile);
    });
  }

  /// Largest value of the first tiles, NaN left out.
  __device__ __forceinline__ float first_max() const {
    float max = -INFINITY;
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    with_type([&](auto type) {
#pragma unroll 1
      for (int tile = 0; tile < min(TileRing::kDepth, tiles_); ++tile) {
        const Quad q = take<decltype(type)>(tile);
        max = fmaxf(max, fmaxf(fmaxf(q.at[0], q.at[1]), fmaxf(q.at[2], q.at[3])));
      }
    });
    return max;
  }

  /// Calls fn(index of the first of four tokens, the four), in order of index, and between() when
  /// the ring has gone round. Once.
  template <class Fn, class Between>
  __device__ __forceinline__ void for_quads(Fn fn, Between between) {
    with_type([&](auto type) {
      int slot = 0;
#pragma unroll 1
      for (int tile = 0; tile < tiles_; ++tile) {
        asm volatile("cp.async.wait_group %0;" ::"n"(TileRing::kDepth - 1) : "memory");
        fn(tile * C * kTile + first_, take<decltype(type)>(slot));
        ask<decltype(type)>(tile + TileRing::kDepth, slot);
        if (++slot == TileRing::kDepth) {
          slot = 0;
          between();
        }
      }
    });
  }
  template <class Fn>
  __device__ __forceinline__ void for_quads(Fn fn) {
    for_quads(fn, [] {});
  }

 private:
  /// The branch on the type is outside the loops.
  template <class Fn>
  __device__ __forceinline__ void with_type(Fn fn) const {
    if (logits_.dtype == FloatType::f32)
      fn(float{});
    else if (logits_.dtype == FloatType::bf16)
      fn(bf16{});
    else
      fn(f16{});
  }

  template <class T>
  __device__ __forceinline__ Quad take(int slot) const {
    const Vec<T, 4> v = load_vec<T, 4>(reinterpret_cast<const T*>(ring_ + slot * kRowThreads));
    return {{to_float(v.at[0]), to_float(v.at[1]), to_float(v.at[2]), to_float(v.at[3])}};
  }

  template <class T>
  __device__ __forceinline__ void ask(int tile, int slot) const {
    const int index = tile * C * kTile + first_;
    const T* x = static_cast<const T*>(logits_.data) + begin_ + index;
    const uint32_t to = address_ + slot * static_cast<uint32_t>(sizeof(ring_[0]) * kRowThreads);
    if (logits_.wide && index < vocab_) {
      copy_async<4 * sizeof(T)>(to, x);
    } else if (tile < tiles_) {
      T* quad = reinterpret_cast<T*>(ring_ + slot * kRowThreads);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (sizeof(T) == 4 && index + i < vocab_)
          copy_async<4>(to + 4 * i, x + i);
        else
          quad[i] = index + i < vocab_ ? x[i] : from_float<T>(-INFINITY);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <int kBytes>
  __device__ static __forceinline__ void copy_async(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes)
                 : "memory");
  }

  const Logits& logits_;
  int vocab_;
  int first_;
  int tiles_;
  int64_t begin_;
  float4* ring_;
  uint32_t address_;  // of ring_
};

}  // namespace mlxcel::cuda
