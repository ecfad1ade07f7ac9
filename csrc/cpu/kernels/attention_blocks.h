#pragma once

// Register-blocked inner loops of attention over f32 rows. Include from *_impl.h only.
//
// Every score and every output element is computed by the same sequence of operations whatever rows
// and tokens are blocked together: scores add up in kLanes partial sums along head_dim, output
// elements add tokens in order. So a query row's result does not depend on its tile.

#include "cpu/kernels/simd.h"

namespace mlxcel::cpu {
namespace {

constexpr int kQuad = 4;

/// out[i] = the lanes of vector i of four, reduced by `op` in one order for each vector.
template <class Op>
[[gnu::always_inline]] inline void reduce(float* out, vfloat a, vfloat b, vfloat c, vfloat d,
                                          Op op) {
#if defined(__AVX512F__)
  const vfloat ab =
      op(__builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
         __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31));
  const vfloat cd =
      op(__builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
         __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31));
  const vfloat quarters = op(
      __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
      __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  const vfloat halves = op(quarters, __builtin_shufflevector(quarters, quarters, 4, 5, 6, 7, 0, 1,
                                                             2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  const vfloat all = op(halves, __builtin_shufflevector(halves, halves, 8, 9, 10, 11, 12, 13, 14,
                                                        15, 0, 1, 2, 3, 4, 5, 6, 7));
  std::memcpy(out, &all, kQuad * sizeof(float));
#elif defined(__AVX2__)
  const vfloat ab = op(__builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13),
                       __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15));
  const vfloat cd = op(__builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13),
                       __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15));
  const vfloat abcd = op(__builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13),
                         __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15));
  const vfloat all = op(abcd, __builtin_shufflevector(abcd, abcd, 4, 5, 6, 7, 0, 1, 2, 3));
  std::memcpy(out, &all, kQuad * sizeof(float));
#else
  const vfloat in[kQuad] = {a, b, c, d};
  for (int i = 0; i < kQuad; ++i) {
    vfloat v = in[i];
    for (int w = kLanes / 2; w > 0; w /= 2) {
      vfloat upper = v;
      for (int l = 0; l < w; ++l) upper[l] = v[l + w];
      v = op(v, upper);
    }
    out[i] = v[0];
  }
#endif
}

[[gnu::always_inline]] inline vfloat add(vfloat a, vfloat b) {
  return a + b;
}

/// s[r * stride + t] = <q[r], k[t]> for Rows query rows and four tokens. Dim is head_dim, where it
/// is known when this is compiled, or 0.
template <int Rows, int Dim = 0, class K>
[[gnu::always_inline]] inline void dot_quad(const float* q, int head_dim, const K* k0, const K* k1,
                                            const K* k2, const K* k3, float* s, int stride) {
  vfloat acc[Rows][kQuad] = {};
  const auto add_products = [&](int d) __attribute__((always_inline)) {
    vfloat query[Rows];
    unroll<Rows>([&](auto r) __attribute__((always_inline)) {
      query[r] = in_register(load(q + r * head_dim + d));
    });
    unroll<kQuad>([&](auto t) __attribute__((always_inline)) {
      const K* row = t == 0 ? k0 : t == 1 ? k1 : t == 2 ? k2 : k3;
      const vfloat key = in_register(load(row + d));
      unroll<Rows>([&](auto r) __attribute__((always_inline)) {
        acc[r][t] = fma(query[r], key, acc[r][t]);
      });
    });
  };
  if constexpr (Dim != 0) {
    unroll<Dim / kLanes>([&](auto i) __attribute__((always_inline)) { add_products(i * kLanes); });
  } else {
    for (int d = 0; d < head_dim; d += kLanes) add_products(d);
  }
  unroll<Rows>([&](auto r) __attribute__((always_inline)) {
    reduce(s + r * stride, acc[r][0], acc[r][1], acc[r][2], acc[r][3], add);
  });
}

/// o[r][d] += sum over t in [begin, end) of p[r * stride + t] * v(t)[d], tokens in order, for Rows
/// rows of o, head_dim apart, and d below Vectors * kLanes. v(t) is a pointer.
template <int Rows, int Vectors, class Values>
void accumulate(float* o, int head_dim, const float* p, int stride, const Values& v, int begin,
                int end) {
  if (begin >= end) return;
  vfloat acc[Rows][Vectors];
  unroll<Rows>([&](auto r) {
    unroll<Vectors>([&](auto j) { acc[r][j] = load(o + r * head_dim + j * kLanes); });
  });
  for (int t = begin; t < end; ++t) {
    vfloat weight[Rows];
    unroll<Rows>([&](auto r) { weight[r] = splat(p[r * stride + t]); });
    const auto* row = v(t);
    unroll<Vectors>([&](auto j) {
      const vfloat value = in_register(load(row + j * kLanes));
      unroll<Rows>([&](auto r) { acc[r][j] = fma(weight[r], value, acc[r][j]); });
    });
  }
  unroll<Rows>([&](auto r) {
    unroll<Vectors>([&](auto j) { store(o + r * head_dim + j * kLanes, acc[r][j]); });
  });
}

/// Turns kBlock scores of each of Rows rows into weights 2^(score - m), and the rows' maxima m,
/// denominators l and the factors of what was summed up before accordingly.
template <int Rows, int Block>
void online_softmax(float* p, float* m, float* l, float* factor) {
  vfloat most[kQuad] = {}, total[kQuad] = {};
  unroll<Rows>([&](auto r) { most[r] = load(p + r * Block); });
  for (int t = kLanes; t < Block; t += kLanes) {
    unroll<Rows>([&](auto r) { most[r] = vmax(most[r], load(p + r * Block + t)); });
  }
  float largest[kQuad], sums[kQuad], base[Rows], change[kLanes] = {};
  reduce(largest, most[0], most[1], most[2], most[3], vmax);
  unroll<Rows>([&](auto r) {
    const float next = m[r] > largest[r] ? m[r] : largest[r];
    // A row that has seen nothing: -inf - 0 is -inf, where -inf - -inf would be NaN.
    base[r] = next == -std::numeric_limits<float>::infinity() ? 0.0f : next;
    change[r] = m[r] - base[r];
    m[r] = next;
  });
  for (int t = 0; t < Block; t += kLanes) {
    unroll<Rows>([&](auto r) {
      const vfloat w = exp2(load(p + r * Block + t) - base[r]);
      store(p + r * Block + t, w);
      total[r] += w;
    });
  }
  reduce(sums, total[0], total[1], total[2], total[3], add);
  store(change, exp2(load(change)));
  unroll<Rows>([&](auto r) {
    factor[r] = change[r];
    l[r] = l[r] * factor[r] + sums[r];
  });
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
