#pragma once

// Register-blocked inner loops of attention over f32 rows. Include from *_impl.h only.
//
// Every score and every output element is computed by the same sequence of operations whatever rows
// and tokens are blocked together: scores add up in kLanes partial sums along head_dim, output
// elements add tokens in order. So a query row's result does not depend on its tile.

#include <bit>

#include "cpu/kernels/simd.h"

namespace mlxcel::cpu {
namespace {

constexpr int kQuad = 4;

// Within each quad of lanes: x0 y0 x1 y1, x2 y2 x3 y3, x0 x1 y0 y1 and x2 x3 y2 y3.
#if defined(__AVX512F__)
inline vfloat interleave_low(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
inline vfloat interleave_high(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
inline vfloat low_halves(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
}
inline vfloat high_halves(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
#elif defined(__AVX2__)
inline vfloat interleave_low(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13);
}
inline vfloat interleave_high(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
}
inline vfloat low_halves(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 0, 1, 8, 9, 4, 5, 12, 13);
}
inline vfloat high_halves(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
}
#else
inline vfloat interleave_low(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 0, 4, 1, 5);
}
inline vfloat interleave_high(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 2, 6, 3, 7);
}
inline vfloat low_halves(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 0, 1, 4, 5);
}
inline vfloat high_halves(vfloat x, vfloat y) {
  return __builtin_shufflevector(x, y, 2, 3, 6, 7);
}
#endif

/// out[i] = the lanes of vector i of four, reduced by `op` in one order for each vector: lanes 0
/// and 2 and lanes 1 and 3 of each quad, then these two, then the quads, neighbours first.
template <class Op>
[[gnu::always_inline]] inline void reduce(float* out, vfloat a, vfloat b, vfloat c, vfloat d,
                                          Op op) {
  const vfloat ab = op(interleave_low(a, b), interleave_high(a, b));
  const vfloat cd = op(interleave_low(c, d), interleave_high(c, d));
  vfloat all = op(low_halves(ab, cd), high_halves(ab, cd));
#if defined(__AVX512F__)
  all = op(all,
           __builtin_shufflevector(all, all, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  all = op(all,
           __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
#elif defined(__AVX2__)
  all = op(all, __builtin_shufflevector(all, all, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
  std::memcpy(out, &all, kQuad * sizeof(float));
}

[[gnu::always_inline]] inline vfloat add(vfloat a, vfloat b) {
  return a + b;
}

/// s[r * stride + t] = <q[r], k[t]> for Rows query rows and four tokens. A vector of a K row is
/// Step vectors behind the one before. Dim is head_dim, where it is known when this is compiled, or
/// 0.
template <int Rows, int Dim = 0, int Step = 1, class K>
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
      const vfloat key = in_register(load(row + d * Step));
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

/// out[l * stride + i] = lane l of vector i of four.
[[gnu::always_inline]] inline void transpose(float* out, int64_t stride, vfloat a, vfloat b,
                                             vfloat c, vfloat d) {
  const vfloat ab = interleave_low(a, b), cd = interleave_low(c, d);
  const vfloat upper_ab = interleave_high(a, b), upper_cd = interleave_high(c, d);
  // Lanes i, i + 4, ... of all four.
  const vfloat lanes[kQuad] = {low_halves(ab, cd), high_halves(ab, cd),
                               low_halves(upper_ab, upper_cd), high_halves(upper_ab, upper_cd)};
  unroll<kQuad>([&](auto i) __attribute__((always_inline)) {
    float quads[kLanes];
    store(quads, lanes[i]);
    for (int l = 0; l < kLanes; l += kQuad) {
      std::memcpy(out + (i + l) * stride, quads + l, kQuad * sizeof(float));
    }
  });
}

/// Adds up what `reduce` does, in its order, where each lane's part is a vector: pairwise. For N
/// sums at a time.
template <int N>
struct PairwiseSum {
  vfloat waiting[std::bit_width(unsigned{kLanes}) - 1][N];

  /// The lane whose parts come in that turn of kLanes: of each quad 0, 2, 1, 3.
  static constexpr int lane(unsigned turn) {
    return (turn & ~3u) | (turn & 1) << 1 | (turn >> 1 & 1);
  }

  /// Takes that lane's parts; behind the last turn, they are the totals.
  template <unsigned Turn>
  [[gnu::always_inline]] void add(vfloat (&sums)[N]) {
    constexpr int kPairs = std::countr_one(Turn);
    unroll<kPairs>([&](auto level) __attribute__((always_inline)) {
      unroll<N>([&](auto i) __attribute__((always_inline)) { sums[i] += waiting[level][i]; });
    });
    if constexpr (Turn + 1 < kLanes) {
      unroll<N>([&](auto i) __attribute__((always_inline)) { waiting[kPairs][i] = sums[i]; });
    }
  }
};

/// s[v][t] = <query rows, k[t]> for Vectors * kLanes query rows, which lie as lanes, and Keys
/// tokens. q is (Vectors, kLanes, head_dim / kLanes) vectors: element d of the rows is at [d %
/// kLanes][d / kLanes]. k is (head_dim / kLanes, Step) vectors, of which Keys count, s (Vectors,
/// Block). The same sums as dot_quad's, in its order, but without shuffles. Calls meanwhile(turn)
/// for kLanes turns.
template <int Vectors, int Keys, int Step, int Block, class Meanwhile>
[[gnu::always_inline]] inline void dot_lanes(const float* q, int head_dim, const float* k, float* s,
                                             const Meanwhile& meanwhile) {
  vfloat acc[Vectors * Keys];
  PairwiseSum<Vectors * Keys> pairwise;
  unroll<kLanes>([&](auto turn) __attribute__((always_inline)) {
    constexpr int lane = pairwise.lane(turn);
    meanwhile(turn);
    unroll<Vectors * Keys>([&](auto i) __attribute__((always_inline)) { acc[i] = vfloat{}; });
    const float* row = q + lane * head_dim;
    const float* key = k + lane;
    for (int d = 0; d < head_dim; d += kLanes, row += kLanes, key += Step * kLanes) {
      vfloat query[Vectors];
      unroll<Vectors>([&](auto v) __attribute__((always_inline)) {
        query[v] = in_register(load(row + v * head_dim * kLanes));
      });
      unroll<Keys>([&](auto t) __attribute__((always_inline)) {
        const vfloat x = in_register(splat(key[t * kLanes]));
        unroll<Vectors>([&](auto v) __attribute__((always_inline)) {
          acc[v * Keys + t] = fma(query[v], x, acc[v * Keys + t]);
        });
      });
    }
    pairwise.template add<turn>(acc);
  });
  unroll<Vectors>([&](auto v) __attribute__((always_inline)) {
    unroll<Keys>([&](auto t) __attribute__((always_inline)) {
      store(s + (v * Block + t) * kLanes, acc[v * Keys + t]);
    });
  });
}

/// Where weights lie: that of row r and token t at r * Row + t * Token.
template <int Row, int Token>
struct WeightLayout {
  static constexpr int row = Row, token = Token;
};

/// What `accumulate` does meanwhile, where there is nothing to do.
struct Nothing {
  void operator()(int) const {}
};

/// o[r][d] += sum over t in [begin, end) of weight (r, t) * v(t)[d], tokens in order, for Rows rows
/// of o, head_dim apart, and d below Vectors * kLanes. v(t) is a pointer. Calls meanwhile(i) before
/// the i-th quad of tokens, of which the last may be a part.
template <class Layout, int Rows, int Vectors, class Values, class Meanwhile>
void accumulate(float* o, int head_dim, const float* p, const Values& v, int begin, int end,
                const Meanwhile& meanwhile) {
  if (begin >= end) return;
  vfloat acc[Rows][Vectors];
  unroll<Rows>([&](auto r) {
    unroll<Vectors>([&](auto j) { acc[r][j] = load(o + r * head_dim + j * kLanes); });
  });
  const auto add = [&](int t) __attribute__((always_inline)) {
    vfloat weight[Rows];
    unroll<Rows>([&](auto r) { weight[r] = splat(p[r * Layout::row + t * Layout::token]); });
    const auto* row = v(t);
    unroll<Vectors>([&](auto j) {
      const vfloat value = in_register(load(row + j * kLanes));
      unroll<Rows>([&](auto r) { acc[r][j] = fma(weight[r], value, acc[r][j]); });
    });
  };
  int t = begin, i = 0;
  for (; t + kQuad <= end; t += kQuad, ++i) {
    meanwhile(i);
    // Unrolled, stacked tiles take 2 % less; tiles that read V straight from the pool take 2 %
    // more.
    if constexpr (Layout::token != 1) {
      unroll<kQuad>([&](auto j) __attribute__((always_inline)) { add(t + j); });
    } else {
#pragma GCC unroll 1
      for (int j = 0; j < kQuad; ++j) add(t + j);
    }
  }
  if (t < end) meanwhile(i);
  for (; t < end; ++t) add(t);
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

/// The same for kLanes rows that lie as lanes: p[t].
template <int Block>
void online_softmax_lanes(float* p, float* m, float* l, float* factor) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  vfloat part[kQuad];
  unroll<kQuad>([&](auto i) { part[i] = load(m); });
  for (int t = 0; t < Block; t += kQuad) {
    unroll<kQuad>([&](auto i) { part[i] = vmax(part[i], load(p + (t + i) * kLanes)); });
  }
  const vfloat most = vmax(vmax(part[0], part[1]), vmax(part[2], part[3]));
  const vfloat base = most == -kInfinity ? vfloat{} : most;
  vfloat total[1];
  PairwiseSum<1> pairwise;
  unroll<kLanes>([&](auto turn) __attribute__((always_inline)) {
    total[0] = vfloat{};
    unroll<Block / kLanes>([&](auto i) __attribute__((always_inline)) {
      float* weight = p + (i * kLanes + pairwise.lane(turn)) * kLanes;
      const vfloat w = exp2(load(weight) - base);
      store(weight, w);
      total[0] += w;
    });
    pairwise.template add<turn>(total);
  });
  const vfloat change = exp2(load(m) - base);
  store(factor, change);
  store(l, load(l) * change + total[0]);
  store(m, most);
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
