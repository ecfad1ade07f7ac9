#pragma once

#include "kernels/attention_tile.cuh"
#include "kernels/cluster.cuh"

namespace mlxcel::cuda {

/// The states that the blocks of a cluster have of the same query rows, a chunk of keys each. Every
/// block merges and writes a share of the elements: the others store theirs into its shared memory,
/// and the stores themselves tell it when they are there. Called where blocks > 1 alone.
template <class T, int D>
class ClusterMerge {
  static constexpr int N = kMergePiece, kPieces = D / N;

 public:
  /// Shared memory that a block needs.
  static __host__ __device__ int shared_bytes(int columns, int blocks) {
    return blocks * share_of(columns, blocks) * kItemBytes;
  }

  const int blocks, rank;  // 1 and 0 without a cluster

  /// Called by all threads. `shared` has shared_bytes.
  __device__ __forceinline__ ClusterMerge(int columns, uint32_t shared, uint64_t* barrier)
      : blocks(cluster_blocks()),
        rank(cluster_rank()),
        items_(columns * kPieces),
        share_(share_of(columns, blocks)),
        values_(shared),
        logits_(shared + blocks * share_ * kValueBytes),
        barrier_(shared_address(barrier)) {
    if constexpr (kHasClusters) {
      if (blocks == 1) return;
      if (threadIdx.x == 0) {
        barrier_init(barrier_, 1);
        barrier_init_fence();
        barrier_expect(barrier_, static_cast<uint32_t>(own() * blocks * kItemBytes));
      }
      cluster_arrive();
    }
  }

  /// Called by all threads, before the first `send`.
  __device__ __forceinline__ void begin() const {
    if constexpr (kHasClusters) cluster_wait();
  }

  /// Gives an item (column * kPieces + piece) of this block's state, divided, to its owner.
  __device__ __forceinline__ void send(int item, const MergedState<N>& state) const {
    if constexpr (kHasClusters) {
      const int owner = item / share_, slot = rank * share_ + item % share_;
      const uint32_t words[] = {__float_as_uint(state.v[0]), __float_as_uint(state.v[1]),
                                __float_as_uint(state.v[2]), __float_as_uint(state.v[3])};
      store_remote_16(owner, values_ + slot * kValueBytes, words, barrier_);
      store_remote_8(owner, logits_ + slot * kLogitBytes, __float_as_uint(state.max), barrier_);
    }
  }

  /// Merges this block's share, in the order of the chunks: write(item, state).
  template <class Write>
  __device__ __forceinline__ void finish(Write write) const {
    if (threadIdx.x >= own()) return;
    if constexpr (kHasClusters) barrier_wait(barrier_, 0);
    for (int i = threadIdx.x; i < own(); i += blockDim.x) {
      MergedState<N> state;
      for (int b = 0; b < blocks; ++b) state.max = fmaxf(state.max, logit(b * share_ + i));
#pragma unroll 4
      for (int b = 0; b < blocks; ++b) {
        const float weight = weight_of(logit(b * share_ + i), state.max);
        state.sum += weight;
        if (weight == 0.0f) continue;  // values of no weight may be NaN
        const uint4 v = load_shared_16(values_ + (b * share_ + i) * kValueBytes);
        state.v[0] += __uint_as_float(v.x) * weight;
        state.v[1] += __uint_as_float(v.y) * weight;
        state.v[2] += __uint_as_float(v.z) * weight;
        state.v[3] += __uint_as_float(v.w) * weight;
      }
      write(rank * share_ + i, state);
    }
  }

 private:
  static_assert(N == 4);
  static constexpr int kValueBytes = 16, kLogitBytes = 8, kItemBytes = kValueBytes + kLogitBytes;

  static __host__ __device__ int share_of(int columns, int blocks) {
    return (columns * kPieces + blocks - 1) / blocks;
  }

  /// Items that this block merges.
  __device__ __forceinline__ int own() const { return max(0, min(share_, items_ - rank * share_)); }
  __device__ __forceinline__ float logit(int slot) const {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];"
                 : "=f"(x)
                 : "r"(logits_ + slot * kLogitBytes)
                 : "memory");
    return x;
  }

  const int items_, share_;
  const uint32_t values_, logits_, barrier_;
};

/// In its place where a kernel has no clusters.
struct NoCluster {
  static constexpr int blocks = 1;
  __device__ __forceinline__ void begin() const {}
  template <class State>
  __device__ __forceinline__ void send(int, const State&) const {}
  template <class Write>
  __device__ __forceinline__ void finish(Write) const {}
};

}  // namespace mlxcel::cuda
