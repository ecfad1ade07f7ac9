#pragma once

#include "kernels/reduce.cuh"
#include "kernels/types.cuh"

// One row of tokens is worked on by a cluster of C blocks. The blocks meet in `exchange`: each warp
// writes its partial result into every block's shared memory, and the writes themselves complete
// the barrier that the readers wait on. (A cluster barrier would order all of memory, at several
// times the cost, and would drop the L1 cache.)

namespace mlxcel::cuda {

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

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Address of the same shared variable in another block of the cluster.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, int block) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  return remote;
}

template <int C>
class RowCluster {
 public:
  static constexpr int kWarps = C * kRowWarps;

  __device__ __forceinline__ explicit RowCluster(ExchangeSlots<C>& slots) : slots_(slots) {
    if constexpr (C > 1) {
      if (threadIdx.x == 0) {
        for (const uint64_t* barrier : {&slots_.barrier[0], &slots_.barrier[1], &slots_.arrived}) {
          asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
      // The other blocks' barriers are known to be there by the first exchange.
      asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
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
    if constexpr (C == 1) {
      if (lane == 0) slots_.packet[parity][warp()] = mine;
      __syncthreads();
    } else {
      if (exchanges_ == 0) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      const uint32_t barrier = shared_address(&slots_.barrier[parity]);
      if (threadIdx.x == 0) expect(barrier, sizeof(Packet) * kWarps);
      if (lane < C) {
        const uint32_t slot = shared_address(&slots_.packet[parity][warp()]);
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, "
            "%4}, [%5];" ::"r"(remote_address(slot, lane)),
            "r"(mine.word[0]), "r"(mine.word[1]), "r"(mine.word[2]), "r"(mine.word[3]),
            "r"(remote_address(barrier, lane))
            : "memory");
      }
      await(barrier, exchanges_ / 2 % 2);
    }
    ++exchanges_;
    return slots_.packet[parity];
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
      all += lane + i < kWarps ? packets[lane + i].word[0] : 0;
    }
    return static_cast<int>(__reduce_add_sync(0xffffffffu, all));
  }

  /// Writes 8 bytes to a shared address of rank 0's block, as given for the caller's own. A cluster
  /// sends once, to one receiver, after an exchange.
  __device__ __forceinline__ void send(uint32_t address, uint64_t value) {
    if constexpr (C == 1) {
      asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
    } else {
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
              remote_address(address, 0)),
          "l"(value), "r"(remote_address(shared_address(&slots_.arrived), 0))
          : "memory");
    }
  }

  /// Waits, in rank 0's block, for the `count` values that the cluster sends.
  __device__ __forceinline__ void receive(int count) {
    if constexpr (C == 1) {
      __syncthreads();
    } else {
      const uint32_t barrier = shared_address(&slots_.arrived);
      if (threadIdx.x == 0) expect(barrier, 8 * count);
      await(barrier, 0);
    }
  }

 private:
  __device__ static __forceinline__ void expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
  }
  __device__ static __forceinline__ void await(uint32_t barrier, uint32_t phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni DONE;\n"
        "bra.uni WAIT;\n"
        "DONE:\n"
        "}" ::"r"(barrier),
        "r"(phase)
        : "memory");
  }

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

/// Reads the calling thread's tokens of a row, kBatch tiles at a time. With kAhead the next batch
/// is on its way meanwhile: for kernels with few threads to hide the latency.
template <int C, int kBatch, bool kAhead = false>
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

  /// Largest value of the first batch, NaN left out.
  __device__ __forceinline__ float first_max() const {
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i) max = fmaxf(max, quads_[i / 4].at[i % 4]);
    return max;
  }

  /// Calls fn(tile, index of the first of four tokens, the four), in order of index. Once.
  template <class Fn>
  __device__ __forceinline__ void for_quads(Fn fn) {
    const int tiles = tiles_per_block<C>(vocab_);
#pragma unroll 1
    for (int t = 0; t < tiles; t += kBatch) {
      if (!kAhead && t > 0) load(t);
      Quad now[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) now[i] = quads_[i];
      if (kAhead && t + kBatch < tiles) load(t + kBatch);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (t + i < tiles) fn(t + i, (t + i) * C * kTile + first_, now[i]);
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

}  // namespace mlxcel::cuda
