#pragma once

#include <cooperative_groups.h>

#include "kernels/chain.cuh"
#include "kernels/mma.cuh"
#include "kernels/types.cuh"
#include "params/linear.h"

// Products of a few rows of x with a large weight: out = x w^T. The weight is read once, straight
// from memory into the registers of the tensor cores: a sum over k may be taken in any order, so
// each lane reads neighbouring elements of a row, and of x the same ones. Tokens are the columns of
// the products.

namespace mlxcel::cuda {

constexpr int kLinearStep = 64;  // elements of k that a warp takes at a time

/// Weight data is read once: it stays out of L1, where x is kept.
__device__ __forceinline__ uint4 load_weight(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_weight(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p));
  return v;
}

/// How a block shares the work. Warps that have the same rows share k; so do the blocks of a
/// cluster. A gated layer computes silu(gate) * up: its weight has all rows of gate, then those of
/// up, and a tile has 8 of each, which meet in one lane.
template <int RowTiles, int TokenTiles, int RowWarps, int KWarps, int Cluster, bool Gated>
struct LinearTile {
  static constexpr int kRowTiles = RowTiles;      // of 16 rows, a warp
  static constexpr int kTokenTiles = TokenTiles;  // of 8 tokens
  static constexpr int kKWarps = KWarps;
  static constexpr int kCluster = Cluster;
  static constexpr bool kGated = Gated;
  static constexpr int kThreads = RowWarps * KWarps * 32;
  static constexpr int kBlockTiles = RowWarps * RowTiles;
  static constexpr int kFeatures = kBlockTiles * (Gated ? 8 : 16);  // of the output
  static constexpr size_t kShared = sizeof(float4) * KWarps * kBlockTiles * TokenTiles * 32;

  /// Sums of the lane's elements of 16 x 8 products, in the layout of mma.m16n8k16.
  using Sums = float[RowTiles][TokenTiles][4];

  static __device__ __forceinline__ int row_warp() { return threadIdx.x / 32 % RowWarps; }
  static __device__ __forceinline__ int k_warp() { return threadIdx.x / 32 / RowWarps; }
  static __device__ __forceinline__ int rank() { return static_cast<int>(blockIdx.x) % Cluster; }
  /// Which of those that share k the warp is, and how many they are.
  static __device__ __forceinline__ int part() { return rank() * KWarps + k_warp(); }
  static constexpr int kParts = Cluster * KWarps;

  /// Row of the weight, of the block's tile: its row `lane / 4` (half 0) or that + 8 (half 1).
  static __device__ __forceinline__ int row(int n, int tile, int half) {
    if constexpr (Gated) return min(feature(tile, 0), n / 2 - 1) + half * (n / 2);
    return min(feature(tile, half), n - 1);
  }
  /// Feature of the output that the lane's accumulators of that half are.
  static __device__ __forceinline__ int feature(int tile, int half) {
    const int block = static_cast<int>(blockIdx.x) / Cluster;
    return block * kFeatures + tile * (Gated ? 8 : 16) + half * 8 + threadIdx.x % 32 / 4;
  }
};

/// Adds up the sums of all that share k, in their order, and writes the output.
template <class T, class Tile>
__device__ __forceinline__ void finish_linear(const LinearParams& p, const T* bias, T* out,
                                              const typename Tile::Sums& sums) {
  extern __shared__ float4 partial[];  // [kKWarps][kBlockTiles][kTokenTiles][32]
  constexpr int kTiles = Tile::kBlockTiles * Tile::kTokenTiles;
  const int lane = threadIdx.x % 32;
  const int first =
      (Tile::k_warp() * Tile::kBlockTiles + Tile::row_warp() * Tile::kRowTiles) * Tile::kTokenTiles;
#pragma unroll
  for (int r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
    for (int t = 0; t < Tile::kTokenTiles; ++t) {
      const float* c = sums[r][t];
      partial[(first + r * Tile::kTokenTiles + t) * 32 + lane] = {c[0], c[1], c[2], c[3]};
    }
  }
  if constexpr (Tile::kCluster == 1)
    __syncthreads();
  else
    cooperative_groups::this_cluster().sync();
  const int features = Tile::kGated ? p.n / 2 : p.n;
  constexpr int kStride = Tile::kThreads / 32 * Tile::kCluster;
  for (int i = threadIdx.x / 32 * Tile::kCluster + Tile::rank(); i < kTiles; i += kStride) {
    float c[4] = {};
#pragma unroll
    for (int block = 0; block < Tile::kCluster; ++block) {
      const float4* theirs = partial;
      if constexpr (Tile::kCluster > 1) {
        theirs = cooperative_groups::this_cluster().map_shared_rank(partial, block);
      }
#pragma unroll
      for (int w = 0; w < Tile::kKWarps; ++w) {
        const float4 add = theirs[(w * kTiles + i) * 32 + lane];
        c[0] += add.x, c[1] += add.y, c[2] += add.z, c[3] += add.w;
      }
    }
    const int tile = i / Tile::kTokenTiles, token = i % Tile::kTokenTiles * 8 + lane % 4 * 2;
    if (bias != nullptr) {
#pragma unroll
      for (int j = 0; j < 4; ++j) c[j] += to_float(bias[Tile::row(p.n, tile, j / 2)]);
    }
#pragma unroll
    for (int j = 0; j < (Tile::kGated ? 2 : 4); ++j) {
      const int feature = Tile::feature(tile, j / 2);
      if (feature >= features || token + j % 2 >= p.rows) continue;
      float value = c[j];
      if constexpr (Tile::kGated) {
        // Rounded as the layers' outputs would be.
        const float gate = to_float(from_float<T>(c[j])), up = to_float(from_float<T>(c[j + 2]));
        value = gate / (1.0f + __expf(-gate)) * up;
      }
      out[static_cast<int64_t>(token + j % 2) * p.out_stride + feature] = from_float<T>(value);
    }
  }
  // A block's shared memory stays until the others have read it.
  if constexpr (Tile::kCluster > 1) cooperative_groups::this_cluster().sync();
}

/// The lane's elements of x: 16 bytes at `at` of the token `lane / 4` of each tile.
template <class T>
__device__ __forceinline__ const T* token_row(const LinearParams& p, const T* x, int tile) {
  const int token = tile * 8 + threadIdx.x % 32 / 4;
  return x + min(static_cast<int64_t>(token), p.rows - 1) * p.k;
}
template <class T>
__device__ __forceinline__ uint4 load_x(const T* x) {
  return __ldg(reinterpret_cast<const uint4*>(x));
}

/// Dense weights of x's type.
template <class T, class Tile>
__device__ __forceinline__ void dense_linear(const LinearParams& p, const T* __restrict__ x,
                                             const T* __restrict__ weight,
                                             const T* __restrict__ bias, T* out) {
  struct Weights {
    uint4 v[Tile::kRowTiles][2][2];  // tile, half, first or second 32 elements
  };
  const int at = threadIdx.x % 4 * 8, steps = p.k / kLinearStep;
  const T* from[Tile::kRowTiles][2];
#pragma unroll
  for (int i = 0; i < Tile::kRowTiles * 2; ++i) {
    const int64_t row = Tile::row(p.n, Tile::row_warp() * Tile::kRowTiles + i / 2, i % 2);
    from[i / 2][i % 2] = weight + row * p.k + at;
  }
  const auto load = [&](Weights& w, int step) {
    if (step >= steps) return;
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles * 4; ++i) {
      const T* row = from[i / 4][i / 2 % 2] + step * kLinearStep + i % 2 * 32;
      w.v[i / 4][i / 2 % 2][i % 2] = load_weight(reinterpret_cast<const uint4*>(row));
    }
  };
  typename Tile::Sums sums = {};
  const auto multiply = [&](const Weights& w, int step) {
    if (step >= steps) return;
#pragma unroll
    for (int t = 0; t < Tile::kTokenTiles; ++t) {
      const T* token = token_row(p, x, t) + step * kLinearStep + at;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 b = load_x(token + i * 32);
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) {
          const uint4 &low = w.v[r][0][i], &high = w.v[r][1][i];
          mma_16x8x16<T>(sums[r][t], {low.x, high.x, low.y, high.y}, b.x, b.y);
          mma_16x8x16<T>(sums[r][t], {low.z, high.z, low.w, high.w}, b.z, b.w);
        }
      }
    }
  };
  Weights even, odd;
  start_next();
  load(even, Tile::part());
  await_previous();
#pragma unroll 1
  for (int step = Tile::part(); step < steps; step += 2 * Tile::kParts) {
    load(odd, step + Tile::kParts);
    multiply(even, step);
    load(even, step + 2 * Tile::kParts);
    multiply(odd, step + Tile::kParts);
  }
  finish_linear<T, Tile>(p, bias, out, sums);
}

/// Unsigned 4-bit weights, w = scale * q + offset a group of 64 or 128. The tensor cores multiply
/// x by kBias + q, which is exact, one group after the other; scale and offset come behind, in f32.
template <class T, class Tile>
__device__ __forceinline__ void q4_linear(const LinearParams& p, const T* __restrict__ x,
                                          const uint32_t* __restrict__ weight,
                                          const T* __restrict__ scales,
                                          const T* __restrict__ offsets, const T* __restrict__ bias,
                                          T* out) {
  constexpr uint32_t kMagic = std::is_same_v<T, f16> ? 0x64006400u : 0x43004300u;
  constexpr uint32_t kOnes = std::is_same_v<T, f16> ? 0x3c003c00u : 0x3f803f80u;
  constexpr float kBias = std::is_same_v<T, f16> ? 1024.0f : 128.0f;
  constexpr int kBatch = 4;  // steps whose weights are in flight together
  constexpr int kRowTiles = Tile::kRowTiles;
  struct Weights {
    uint2 v[kRowTiles][2][kBatch];
  };
  const int quarter = threadIdx.x % 4, steps = p.k / kLinearStep;
  const int words = p.k / 8, groups = p.k / p.group_size;
  const auto load = [&](Weights& w, int first) {
#pragma unroll
    for (int i = 0; i < kRowTiles * 2 * kBatch; ++i) {
      const int r = i / (2 * kBatch), h = i / kBatch % 2, j = i % kBatch;
      if (first + j >= steps) continue;
      const int64_t row = Tile::row(p.n, Tile::row_warp() * kRowTiles + r, h);
      const uint32_t* from = weight + row * words + (first + j) * 8 + quarter * 2;
      w.v[r][h][j] = load_weight(reinterpret_cast<const uint2*>(from));
    }
  };
  typename Tile::Sums sums = {};
  const auto multiply = [&](const Weights& w, int first) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int step = first + j;
      if (step >= steps) return;
      float scale[kRowTiles][2], offset[kRowTiles][2];
      uint32_t a[kRowTiles][2][8];  // pairs (0, 4), (1, 5), (2, 6), (3, 7) of each eight
#pragma unroll
      for (int i = 0; i < kRowTiles * 2; ++i) {
        const int r = i / 2, h = i % 2;
        const int64_t row = Tile::row(p.n, Tile::row_warp() * kRowTiles + r, h);
        const int64_t group = row * groups + step * kLinearStep / p.group_size;
        scale[r][h] = to_float(scales[group]);
        offset[r][h] = to_float(offsets[group]) - kBias * scale[r][h];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          a[r][h][s] = (w.v[r][h][j].x >> (4 * s) & 0x000f000fu) | kMagic;
          a[r][h][s + 4] = (w.v[r][h][j].y >> (4 * s) & 0x000f000fu) | kMagic;
        }
      }
#pragma unroll
      for (int t = 0; t < Tile::kTokenTiles; ++t) {
        const T* token = token_row(p, x, t) + step * kLinearStep + quarter * 16;
        uint32_t b[8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 v = load_x(token + i * 8);
          b[4 * i] = __byte_perm(v.x, v.z, 0x5410);
          b[4 * i + 1] = __byte_perm(v.x, v.z, 0x7632);
          b[4 * i + 2] = __byte_perm(v.y, v.w, 0x5410);
          b[4 * i + 3] = __byte_perm(v.y, v.w, 0x7632);
        }
        float total[4] = {};  // of x over the group, the same in all rows
#pragma unroll
        for (int s = 0; s < 8; s += 2) {
          mma_16x8x16<T>(total, {kOnes, kOnes, kOnes, kOnes}, b[s], b[s + 1]);
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          float c[4] = {};
#pragma unroll
          for (int s = 0; s < 8; s += 2) {
            mma_16x8x16<T>(c, {a[r][0][s], a[r][1][s], a[r][0][s + 1], a[r][1][s + 1]}, b[s],
                           b[s + 1]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[r][t][i] += scale[r][i / 2] * c[i] + offset[r][i / 2] * total[i % 2];
          }
        }
      }
    }
  };
  constexpr int kStride = Tile::kParts * kBatch;
  Weights even, odd;
  start_next();
  load(even, Tile::part() * kBatch);
  await_previous();
#pragma unroll 1
  for (int step = Tile::part() * kBatch; step < steps; step += 2 * kStride) {
    load(odd, step + kStride);
    multiply(even, step);
    load(even, step + 2 * kStride);
    multiply(odd, step + kStride);
  }
  finish_linear<T, Tile>(p, bias, out, sums);
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    dense_linear_kernel(const __grid_constant__ LinearParams p, const T* x, const T* weight,
                        const T* bias, T* out) {
  dense_linear<T, Tile>(p, x, weight, bias, out);
}

template <class T, class Tile>
__global__ void __cluster_dims__(Tile::kCluster, 1, 1) __launch_bounds__(Tile::kThreads)
    dense_linear_cluster_kernel(const __grid_constant__ LinearParams p, const T* x, const T* weight,
                                const T* bias, T* out) {
  dense_linear<T, Tile>(p, x, weight, bias, out);
}

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    q4_linear_kernel(const __grid_constant__ LinearParams p, const T* x, const uint32_t* weight,
                     const T* scales, const T* offsets, const T* bias, T* out) {
  q4_linear<T, Tile>(p, x, weight, scales, offsets, bias, out);
}

template <class T, class Tile>
__global__ void __cluster_dims__(Tile::kCluster, 1, 1) __launch_bounds__(Tile::kThreads)
    q4_linear_cluster_kernel(const __grid_constant__ LinearParams p, const T* x,
                             const uint32_t* weight, const T* scales, const T* offsets,
                             const T* bias, T* out) {
  q4_linear<T, Tile>(p, x, weight, scales, offsets, bias, out);
}

}  // namespace mlxcel::cuda
