#pragma once

#include "kernels/mma.cuh"
#include "kernels/types.cuh"
#include "params/linear.h"

// Products of a few rows of x with a large weight: out = x w^T. The weight is read once, straight
// from memory into the registers of the tensor cores: a sum over k may be taken in any order, so
// each lane reads neighbouring elements of a row, and of x the same ones. A block has some rows of
// the weight, and its warps share k; tokens are the columns of the products.

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

/// Where a block's tiles of 16 weight rows lie. A gated layer computes silu(gate) * up: its weight
/// has all rows of gate, then those of up, and a tile has 8 of each, which meet in one lane.
template <int RowTiles, bool Gated>
struct TileRows {
  static constexpr int kFeatures = RowTiles * (Gated ? 8 : 16);  // of the output, a block
  int n;

  /// Row of the weight of a tile's row `lane / 4` (half 0) or that + 8 (half 1); in range.
  __device__ __forceinline__ int row(int tile, int half) const {
    const int g = threadIdx.x % 32 / 4;
    if constexpr (Gated) return min(feature(tile, 0), n / 2 - 1) + half * (n / 2);
    return min(static_cast<int>(blockIdx.x) * kFeatures + tile * 16 + half * 8 + g, n - 1);
  }
  /// Feature of the output that the lane's accumulators of that half are.
  __device__ __forceinline__ int feature(int tile, int half) const {
    const int g = threadIdx.x % 32 / 4;
    return static_cast<int>(blockIdx.x) * kFeatures + tile * (Gated ? 8 : 16) + half * 8 + g;
  }
};

/// Sums of the lane's elements of 16 x 8 products, in the layout of mma.m16n8k16.
template <int RowTiles, int TokenTiles>
using Sums = float[RowTiles][TokenTiles][4];

/// Adds up the warps' sums, in their order, and writes the output.
template <class T, int RowTiles, int TokenTiles, bool Gated, int Warps>
__device__ __forceinline__ void finish_linear(const LinearParams& p, const T* bias, T* out,
                                              const Sums<RowTiles, TokenTiles>& sums) {
  extern __shared__ float4 partial[];  // [Warps][RowTiles][TokenTiles][32]
  constexpr int kTiles = RowTiles * TokenTiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < RowTiles; ++r) {
#pragma unroll
    for (int t = 0; t < TokenTiles; ++t) {
      const float* c = sums[r][t];
      partial[(warp * kTiles + r * TokenTiles + t) * 32 + lane] = {c[0], c[1], c[2], c[3]};
    }
  }
  __syncthreads();
  const TileRows<RowTiles, Gated> rows{p.n};
  const int features = Gated ? p.n / 2 : p.n;
  for (int tile = warp; tile < kTiles; tile += Warps) {
    float c[4] = {};
#pragma unroll 4
    for (int w = 0; w < Warps; ++w) {
      const float4 add = partial[(w * kTiles + tile) * 32 + lane];
      c[0] += add.x, c[1] += add.y, c[2] += add.z, c[3] += add.w;
    }
    const int r = tile / TokenTiles, token = tile % TokenTiles * 8 + lane % 4 * 2;
    if (bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[i] += to_float(bias[rows.row(r, i / 2)]);
    }
#pragma unroll
    for (int i = 0; i < (Gated ? 2 : 4); ++i) {
      const int feature = rows.feature(r, i / 2);
      if (feature >= features || token + i % 2 >= p.rows) continue;
      float value = c[i];
      if constexpr (Gated) {
        // Rounded as the layers' outputs would be.
        const float gate = to_float(from_float<T>(c[i])), up = to_float(from_float<T>(c[i + 2]));
        value = gate / (1.0f + __expf(-gate)) * up;
      }
      out[static_cast<int64_t>(token + i % 2) * p.out_stride + feature] = from_float<T>(value);
    }
  }
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
template <class T, int RowTiles, int TokenTiles, bool Gated, int Warps>
__global__ void __launch_bounds__(Warps * 32, 1)
    dense_linear_kernel(const __grid_constant__ LinearParams p, const T* __restrict__ x,
                        const T* __restrict__ weight, const T* __restrict__ bias, T* out) {
  struct Weights {
    uint4 v[RowTiles][2][2];  // tile, half, first or second 32 elements
  };
  const int warp = threadIdx.x / 32, at = threadIdx.x % 4 * 8, steps = p.k / kLinearStep;
  const TileRows<RowTiles, Gated> rows{p.n};
  const T* from[RowTiles][2];
#pragma unroll
  for (int r = 0; r < RowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      from[r][h] = weight + static_cast<int64_t>(rows.row(r, h)) * p.k + at;
    }
  }
  const auto load = [&](Weights& w, int step) {
    if (step >= steps) return;
#pragma unroll
    for (int i = 0; i < RowTiles * 4; ++i) {
      const T* row = from[i / 4][i / 2 % 2] + step * kLinearStep + i % 2 * 32;
      w.v[i / 4][i / 2 % 2][i % 2] = load_weight(reinterpret_cast<const uint4*>(row));
    }
  };
  Sums<RowTiles, TokenTiles> sums = {};
  const auto multiply = [&](const Weights& w, int step) {
    if (step >= steps) return;
#pragma unroll
    for (int t = 0; t < TokenTiles; ++t) {
      const T* token = token_row(p, x, t) + step * kLinearStep + at;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 b = load_x(token + i * 32);
#pragma unroll
        for (int r = 0; r < RowTiles; ++r) {
          const uint4 &low = w.v[r][0][i], &high = w.v[r][1][i];
          mma_16x8x16<T>(sums[r][t], {low.x, high.x, low.y, high.y}, b.x, b.y);
          mma_16x8x16<T>(sums[r][t], {low.z, high.z, low.w, high.w}, b.z, b.w);
        }
      }
    }
  };
  Weights even, odd;
  load(even, warp);
#pragma unroll 1
  for (int step = warp; step < steps; step += 2 * Warps) {
    load(odd, step + Warps);
    multiply(even, step);
    load(even, step + 2 * Warps);
    multiply(odd, step + Warps);
  }
  finish_linear<T, RowTiles, TokenTiles, Gated, Warps>(p, bias, out, sums);
}

/// Unsigned 4-bit weights, w = scale * q + offset a group of 64 or 128. The tensor cores multiply
/// x by kBias + q, which is exact, one group after the other; scale and offset come behind, in f32.
template <class T, int RowTiles, int TokenTiles, bool Gated, int Warps>
__global__ void __launch_bounds__(Warps * 32, 1)
    q4_linear_kernel(const __grid_constant__ LinearParams p, const T* __restrict__ x,
                     const uint32_t* __restrict__ weight, const T* __restrict__ scales,
                     const T* __restrict__ offsets, const T* __restrict__ bias, T* out) {
  constexpr uint32_t kMagic = std::is_same_v<T, f16> ? 0x64006400u : 0x43004300u;
  constexpr uint32_t kOnes = std::is_same_v<T, f16> ? 0x3c003c00u : 0x3f803f80u;
  constexpr float kBias = std::is_same_v<T, f16> ? 1024.0f : 128.0f;
  constexpr int kBatch = 4;  // steps whose weights are in flight together
  struct Weights {
    uint2 v[RowTiles][2][kBatch];
  };
  const int warp = threadIdx.x / 32, quarter = threadIdx.x % 4, steps = p.k / kLinearStep;
  const int words = p.k / 8, groups = p.k / p.group_size;
  const TileRows<RowTiles, Gated> rows{p.n};
  const auto load = [&](Weights& w, int first) {
#pragma unroll
    for (int i = 0; i < RowTiles * 2 * kBatch; ++i) {
      const int r = i / (2 * kBatch), h = i / kBatch % 2, j = i % kBatch;
      if (first + j >= steps) continue;
      const uint32_t* row = weight + static_cast<int64_t>(rows.row(r, h)) * words;
      w.v[r][h][j] =
          load_weight(reinterpret_cast<const uint2*>(row + (first + j) * 8 + quarter * 2));
    }
  };
  Sums<RowTiles, TokenTiles> sums = {};
  const auto multiply = [&](const Weights& w, int first) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int step = first + j;
      if (step >= steps) return;
      const int group = step * kLinearStep / p.group_size;
      float scale[RowTiles][2], offset[RowTiles][2];
      uint32_t a[RowTiles][2][8];  // pairs (0, 4), (1, 5), (2, 6), (3, 7) of each eight
#pragma unroll
      for (int i = 0; i < RowTiles * 2; ++i) {
        const int r = i / 2, h = i % 2;
        const int64_t at = static_cast<int64_t>(rows.row(r, h)) * groups + group;
        scale[r][h] = to_float(scales[at]);
        offset[r][h] = to_float(offsets[at]) - kBias * scale[r][h];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          a[r][h][s] = (w.v[r][h][j].x >> (4 * s) & 0x000f000fu) | kMagic;
          a[r][h][s + 4] = (w.v[r][h][j].y >> (4 * s) & 0x000f000fu) | kMagic;
        }
      }
#pragma unroll
      for (int t = 0; t < TokenTiles; ++t) {
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
        for (int r = 0; r < RowTiles; ++r) {
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
  constexpr int kStride = Warps * kBatch;
  Weights even, odd;
  load(even, warp * kBatch);
#pragma unroll 1
  for (int step = warp * kBatch; step < steps; step += 2 * kStride) {
    load(odd, step + kStride);
    multiply(even, step);
    load(even, step + 2 * kStride);
    multiply(odd, step + kStride);
  }
  finish_linear<T, RowTiles, TokenTiles, Gated, Warps>(p, bias, out, sums);
}

}  // namespace mlxcel::cuda
