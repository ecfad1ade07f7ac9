#pragma once

#include <algorithm>
#include <limits>

#include "cpu/kernels/philox.h"
#include "cpu/kernels/sample_passes.h"
#include "cpu/kernels/simd.h"

namespace mlxcel::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

template <class T>
void widen_row(const T* row, int32_t n, float* out) {
  const int32_t body = n - n % kLanes;
  for (int32_t i = 0; i < body; i += kLanes) store(out + i, load(row + i));
  for (int32_t i = body; i < n; ++i) out[i] = to_float(row[i]);
}

void widen(FloatType dtype, const void* row, int32_t n, float* out) {
  switch (dtype) {
    case FloatType::f32:
      return widen_row(static_cast<const float*>(row), n, out);
    case FloatType::f16:
      return widen_row(static_cast<const f16*>(row), n, out);
    case FloatType::bf16:
      return widen_row(static_cast<const bf16*>(row), n, out);
  }
}

inline bool any(vint mask) {
  uint64_t words[kLanes / 2], all = 0;
  std::memcpy(words, &mask, sizeof(words));
  for (int i = 0; i < kLanes / 2; ++i) all |= words[i];
  return all != 0;
}

/// Calls full(begin, block) for each whole block of a row and tail(i) for each token after them.
template <class Full, class Tail>
inline void for_blocks(int32_t n, Full full, Tail tail) {
  const int32_t blocks = n / kTokenBlock;
  for (int32_t b = 0; b < blocks; ++b) full(b * kTokenBlock, b);
  for (int32_t i = blocks * kTokenBlock; i < n; ++i) tail(i);
}

bool block_max(const float* x, int32_t n, float* out) {
  vint nan = {};
  bool tail_nan = false;
  const int32_t last = n / kTokenBlock;
  if (n % kTokenBlock != 0) out[last] = -kInf;
  for_blocks(
      n,
      [&](int32_t begin, int32_t b) {
        vfloat m = splat(-kInf);
        for (int i = 0; i < kTokenBlock; i += kLanes) {
          const vfloat v = load(x + begin + i);
          nan |= (v != v);
          m = vmax(v, m);  // keeps m where v is NaN
        }
        out[b] = max(m);
      },
      [&](int32_t i) {
        tail_nan |= x[i] != x[i];
        if (x[i] > out[last]) out[last] = x[i];
      });
  return any(nan) || tail_nan;
}

double mass(const float* x, int32_t n, const float* maxima, float max, float scale, float floor) {
  const float scale_log2 = scale * 1.44269504f;
  double total = 0.0;
  vfloat tail = splat(-kInf);
  int32_t tail_size = 0;
  for_blocks(
      n,
      [&](int32_t begin, int32_t b) {
        if (!(maxima[b] >= floor)) return;
        vfloat acc = {};
        for (int i = 0; i < kTokenBlock; i += kLanes) {
          const vfloat v = load(x + begin + i);
          const vint e = (vint)exp2((v - max) * scale_log2) & (v >= floor);
          acc += (vfloat)e;
        }
        total += sum(acc);
      },
      [&](int32_t i) {
        tail[tail_size] = x[i] >= floor ? x[i] : -kInf;
        if (++tail_size == kLanes) {
          total += sum(exp2((tail - max) * scale_log2));
          tail = splat(-kInf);
          tail_size = 0;
        }
      });
  if (tail_size > 0) total += sum(exp2((tail - max) * scale_log2));
  return total;
}

int32_t count_equal(const float* x, int32_t n, const float* maxima, float value) {
  int32_t count = 0;
  for_blocks(
      n,
      [&](int32_t begin, int32_t b) {
        if (maxima[b] < value) return;
        for (int i = 0; i < kTokenBlock; ++i) count += x[begin + i] == value;
      },
      [&](int32_t i) { count += x[i] == value; });
  return count;
}

int32_t collect(const float* x, int32_t n, const float* maxima, float floor, Candidate* out) {
  int32_t count = 0;
  const auto take = [&](int32_t i) {
    out[count] = {x[i], i};
    count += x[i] >= floor;  // without a branch: the next token overwrites what is not taken
  };
  for_blocks(
      n,
      [&](int32_t begin, int32_t b) {
        if (!(maxima[b] >= floor)) return;
        for (int i = 0; i < kTokenBlock; ++i) take(begin + i);
      },
      take);
  return count;
}

// Philox state of kLanes / 2 element blocks: one 32-bit word in the low half of each 64-bit lane.
// The upper halves hold leftovers of the products, which the widening multiplication ignores.
typedef uint64_t vwide __attribute__((vector_size(kLanes * 4)));
constexpr int kWideLanes = kLanes / 2;

inline vwide multiply_low(vwide a, uint32_t b) {
#if defined(__AVX512F__)
  return (vwide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (vwide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
  return (a & 0xffffffffu) * static_cast<uint64_t>(b);
#endif
}

struct WidePhilox {
  vwide word[4];
};

inline WidePhilox philox_wide(const SampleRow& row, uint32_t first_block) {
  vwide c0;
  for (int i = 0; i < kWideLanes; ++i) c0[i] = first_block + i;
  vwide c1 = vwide{} + static_cast<uint64_t>(RngStream::gumbel);
  vwide c2 = vwide{} + row.draw[0];
  vwide c3 = vwide{} + row.draw[1];
  uint32_t k0 = row.seed[0], k1 = row.seed[1];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const vwide p0 = multiply_low(c0, kPhiloxMul0);
    const vwide p1 = multiply_low(c2, kPhiloxMul1);
    c0 = (p1 >> 32) ^ c1 ^ static_cast<uint64_t>(k0);
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ static_cast<uint64_t>(k1);
    c3 = p0;
    k0 += kPhiloxWeyl0;
    k1 += kPhiloxWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

/// Whether any of the random words reaches `least`.
inline bool any_reaches(const WidePhilox& r, uint32_t least) {
  const vuint v01 = (vuint)((r.word[0] & 0xffffffffu) | (r.word[1] << 32));
  const vuint v23 = (vuint)((r.word[2] & 0xffffffffu) | (r.word[3] << 32));
  return any((v01 >= least) | (v23 >= least));
}

/// The Gumbel-max rule over score(x) + noise, where score is monotone.
template <class Score>
inline Draw gumbel_argmax(const float* x, int32_t n, const float* maxima, Score score, Cut cut,
                          const SampleRow& row, const GumbelTable& table) {
  constexpr int kGroup = 4 * kWideLanes;  // tokens of one call of philox_wide
  static_assert(kTokenBlock % kGroup == 0);
  Draw best{-std::numeric_limits<double>::infinity(), n};
  for (int32_t b = 0; b * kTokenBlock < n; ++b) {
    // The logarithms are left to the few tokens whose noise could lift them to the lead.
    if (!(maxima[b] >= cut.value)) continue;
    const double top = score(maxima[b]);
    if (top + kMaxGumbel < best.score) continue;
    const int32_t begin = b * kTokenBlock, end = std::min(n, begin + kTokenBlock);
    for (int32_t at = begin; at < end; at += kGroup) {
      const WidePhilox r = philox_wide(row, static_cast<uint32_t>(at) / 4);
      const uint32_t least = table.above(best.score - top);
      if (!any_reaches(r, least)) continue;
      for (int32_t i = 0; i < std::min(kGroup, end - at); ++i) {
        const uint32_t bits = static_cast<uint32_t>(r.word[i % 4][i / 4]);
        if (bits >= least && cut.keeps(x[at + i], at + i)) {
          best.offer(score(x[at + i]) + gumbel(bits), at + i);
        }
      }
    }
  }
  return best;
}

Draw draw_logits(const float* x, int32_t n, const float* maxima, double scale, Cut cut,
                 const SampleRow& row, const GumbelTable& table) {
  return gumbel_argmax(x, n, maxima, [scale](float v) { return v * scale; }, cut, row, table);
}

Draw draw_weights(const float* x, int32_t n, const float* maxima, const SampleRow& row,
                  const GumbelTable& table) {
  const Cut positive{std::numeric_limits<float>::denorm_min(), n};
  return gumbel_argmax(
      x, n, maxima, [](float v) { return std::log(static_cast<double>(v)); }, positive, row, table);
}

constexpr SamplePasses kPasses{widen,   block_max,   mass,        count_equal,
                               collect, draw_logits, draw_weights};

}  // namespace
}  // namespace mlxcel::cpu
