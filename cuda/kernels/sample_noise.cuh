#pragma once

#include "params/sample.h"

// The noise of csrc/cpu/kernels/philox.h, in f32. Scores are in units of log2, and a constant
// factor inside the outer logarithm is dropped: neither moves an argmax.

namespace mlxcel::cuda {

struct PhiloxKey {
  uint32_t seed[2];
  uint32_t draw[2];
};

__device__ __forceinline__ uint4 philox(const PhiloxKey& key, uint32_t block, RngStream stream) {
  uint32_t c0 = block, c1 = static_cast<uint32_t>(stream), c2 = key.draw[0], c3 = key.draw[1];
  uint32_t k0 = key.seed[0], k1 = key.seed[1];
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xd2511f53u) * c0;
    const uint64_t p1 = static_cast<uint64_t>(0xcd9e8d57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {c0, c1, c2, c3};
}

/// (k + 0.5) / 2^23 for the upper 23 bits k: exact.
__device__ __forceinline__ float uniform(uint32_t bits) {
  return __uint_as_float((bits >> 9) | 0x3f800000u) - 0x1.fffffep-1f;
}

/// 1 - uniform(bits), at most 2^-24 less.
__device__ __forceinline__ float below_one(uint32_t bits) {
  return 0x1.fffffep0f - __uint_as_float((bits >> 9) | 0x3f800000u);
}

/// The larger, or NaN where one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// -log2(u), an exponential variable up to a factor. The winners of a draw have u near 1, where the
/// fast logarithm loses its relative accuracy: a series in 1 - u takes over there.
__device__ __forceinline__ float exponential(uint32_t bits) {
  const float u = uniform(bits);
  const float v = 1.0f - u;
  float s = fmaf(v, 0.28853901f, 0.36067376f);
  s = fmaf(v, s, 0.48089835f);
  s = fmaf(v, s, 0.72134752f);
  s = fmaf(v, s, 1.44269504f) * v;
  return v < 0.0625f ? s : -fast_log2(u);
}

/// Gumbel noise in units of log2.
__device__ __forceinline__ float gumbel(uint32_t bits) {
  return -fast_log2(exponential(bits));
}

/// Keys in the order of the floats; -0 is +0.
__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t u = __float_as_uint(x + 0.0f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float from_order_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ uint32_t word(const uint4& r, int i) {
  return i == 0 ? r.x : i == 1 ? r.y : i == 2 ? r.z : r.w;
}

}  // namespace mlxcel::cuda
