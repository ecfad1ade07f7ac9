#pragma once

// Register-blocked inner loops of attention over f32 rows. Include from *_impl.h only.
//
// Every score and every output element is computed by the same sequence of operations whatever rows
// and tokens are blocked together: scores add up in kLanes partial sums along head_dim, output
// elements add tokens in order. So a query row's result does not depend on its tile.

#include <type_traits>

#include "cpu/kernels/simd.h"

namespace mlxcel::cpu {
namespace {

constexpr int kQuad = 4;

/// The sums of four vectors, in one order for all lanes counts of an instruction set.
inline void store_sums(float* out, vfloat a, vfloat b, vfloat c, vfloat d) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const vfloat ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
                    __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  const vfloat cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
                    __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  const vfloat abcd = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                      __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  const __m128 sums =
      _mm_add_ps(_mm256_castps256_ps128((__m256)abcd), _mm256_extractf128_ps((__m256)abcd, 1));
  _mm_storeu_ps(out, sums);
#else
  out[0] = sum(a);
  out[1] = sum(b);
  out[2] = sum(c);
  out[3] = sum(d);
#endif
}

/// s[r * stride + t] = <q[r], k[t]> for Rows query rows and four tokens.
template <int Rows>
void dot_quad(const float* q, int head_dim, const float* const* k, float* s, int stride) {
  vfloat acc[Rows][kQuad] = {};
  for (int d = 0; d < head_dim; d += kLanes) {
    vfloat key[kQuad];
    for (int t = 0; t < kQuad; ++t) key[t] = load(k[t] + d);
    for (int r = 0; r < Rows; ++r) {
      const vfloat query = load(q + r * head_dim + d);
      for (int t = 0; t < kQuad; ++t) acc[r][t] += query * key[t];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    store_sums(s + r * stride, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
  }
}

/// o[r][d] += sum over t in [begin, end) of p[r * stride + t] * v[t][d], tokens in order, for Rows
/// rows and Vectors vectors from d on.
template <int Rows, int Vectors>
void accumulate_columns(float* o, int head_dim, const float* p, int stride, const float* const* v,
                        int begin, int end, int d) {
  vfloat acc[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int j = 0; j < Vectors; ++j) acc[r][j] = load(o + r * head_dim + d + j * kLanes);
  }
  for (int t = begin; t < end; ++t) {
    vfloat value[Vectors];
    for (int j = 0; j < Vectors; ++j) value[j] = load(v[t] + d + j * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const vfloat weight = splat(p[r * stride + t]);
      for (int j = 0; j < Vectors; ++j) acc[r][j] += weight * value[j];
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int j = 0; j < Vectors; ++j) store(o + r * head_dim + d + j * kLanes, acc[r][j]);
  }
}

template <int Rows>
void accumulate(float* o, int head_dim, const float* p, int stride, const float* const* v,
                int begin, int end) {
  if (begin >= end) return;
  int d = 0;
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    accumulate_columns<Rows, 2>(o, head_dim, p, stride, v, begin, end, d);
  }
  for (; d < head_dim; d += kLanes) {
    accumulate_columns<Rows, 1>(o, head_dim, p, stride, v, begin, end, d);
  }
}

/// cap * tanh(x / cap) where x and the result are in units of log2(e): x = logit * log2(e).
inline vfloat soft_cap(vfloat x, float cap) {
  constexpr float kLog2e = 1.44269504f;
  const vfloat t = x * (1.0f / (cap * kLog2e));  // logit / cap
  const vfloat t2 = t * t;
  // 1 - 2 / (1 + e^2t) cancels near 0; there the series is exact to f32.
  const vfloat series =
      t * (1.0f + t2 * (-1.0f / 3 + t2 * (2.0f / 15 + t2 * (-17.0f / 315 + t2 * (62.0f / 2835)))));
  const vfloat large = 1.0f - 2.0f / (1.0f + exp2(t * (2.0f * kLog2e)));
  return (t2 < 0.0625f ? series : large) * (cap * kLog2e);
}

}  // namespace
}  // namespace mlxcel::cpu
