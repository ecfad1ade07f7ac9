#pragma once

// Readers of weights for linear_impl.h. All formats are read alike: four 32-bit words from each of
// kLanes rows are transposed, so that a vector holds one word of kLanes rows (lane = row), and a
// word is unpacked into 1 (f32), 2 (f16, bf16), 4 (q8) or 8 (q4) vectors of neighbours along k.
// Lanes that are rows make the sum over k run in one lane: its order is the same for every vector
// width, and there are no horizontal sums.

#include "cpu/kernels/linear_table.h"
#include "cpu/kernels/simd.h"

namespace mlxcel::cpu {
namespace {

constexpr int kMinGroup = 32;
constexpr int kGroupsInBlock = kBlockK / kMinGroup;
constexpr int kWords = 4;

// Not std::min: that has external linkage (see CMakeLists.txt on files with their own flags).
inline int smaller(int a, int b) {
  return a < b ? a : b;
}

/// a * b + c, rounded once where the machine can; never left to the compiler's choice, because all
/// paths must round alike.
inline vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX2__)
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

/// out[i] holds word i of the rows that start at p[0..kLanes).
inline void transpose_words(const char* const* p, int64_t offset, vuint* out) {
#if defined(__AVX2__)
  const auto pair = [&](int i) {
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p[i] + offset))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(p[i + 4] + offset)), 1);
  };
  const __m256i a = pair(0), b = pair(1), c = pair(2), d = pair(3);
  const __m256i ab_lo = _mm256_unpacklo_epi32(a, b), ab_hi = _mm256_unpackhi_epi32(a, b);
  const __m256i cd_lo = _mm256_unpacklo_epi32(c, d), cd_hi = _mm256_unpackhi_epi32(c, d);
  out[0] = (vuint)_mm256_unpacklo_epi64(ab_lo, cd_lo);
  out[1] = (vuint)_mm256_unpackhi_epi64(ab_lo, cd_lo);
  out[2] = (vuint)_mm256_unpacklo_epi64(ab_hi, cd_hi);
  out[3] = (vuint)_mm256_unpackhi_epi64(ab_hi, cd_hi);
#else
  vuint r[kWords];
  for (int i = 0; i < kWords; ++i) std::memcpy(&r[i], p[i] + offset, sizeof(vuint));
  const vuint ab_lo = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
  const vuint ab_hi = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const vuint cd_lo = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
  const vuint cd_hi = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  out[0] = __builtin_shufflevector(ab_lo, cd_lo, 0, 1, 4, 5);
  out[1] = __builtin_shufflevector(ab_lo, cd_lo, 2, 3, 6, 7);
  out[2] = __builtin_shufflevector(ab_hi, cd_hi, 0, 1, 4, 5);
  out[3] = __builtin_shufflevector(ab_hi, cd_hi, 2, 3, 6, 7);
#endif
}

inline vfloat to_vfloat(vuint v) {
  return __builtin_convertvector((vint)v, vfloat);
}

/// The f16 in the low half of every word.
inline vfloat low_half_to_float(vuint v) {
#if defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (vfloat)_mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000)));
#elif defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)v)));
#else
  // See half.h: a multiplication by 2^112 moves the exponent's bias.
  const vuint rest = (v & 0x7fffu) << 13;
  const vfloat scaled = (vfloat)rest * 0x1p112f;
  const vuint special = (vuint)((v & 0x7c00u) == 0x7c00u);
  const vuint bits = (special & (0x7f800000u | rest)) | (~special & (vuint)scaled);
  const vuint signed_bits = bits | ((v & 0x8000u) << 16);
  return (vfloat)signed_bits;
#endif
}

/// unpack<j>(word) is the j-th of kPerWord neighbours along k.
template <WeightFormat>
struct Format;

template <>
struct Format<WeightFormat::f32> {
  static constexpr int kPerWord = 1;
  static constexpr bool kQuantized = false;
  static vfloat unpack(vuint v, int) { return (vfloat)v; }
};

template <>
struct Format<WeightFormat::bf16> {
  static constexpr int kPerWord = 2;
  static constexpr bool kQuantized = false;
  static vfloat unpack(vuint v, int j) {
    const vuint u = j == 0 ? v << 16 : v & 0xffff0000u;
    return (vfloat)u;
  }
};

template <>
struct Format<WeightFormat::f16> {
  static constexpr int kPerWord = 2;
  static constexpr bool kQuantized = false;
  static vfloat unpack(vuint v, int j) { return low_half_to_float(j == 0 ? v & 0xffffu : v >> 16); }
};

template <>
struct Format<WeightFormat::q4> {
  static constexpr int kPerWord = 8;
  static constexpr bool kQuantized = true;
  static vfloat unpack(vuint v, int j) { return to_vfloat((v >> (4 * j)) & 15u); }
};

template <>
struct Format<WeightFormat::q8> {
  static constexpr int kPerWord = 4;
  static constexpr bool kQuantized = true;
  static vfloat unpack(vuint v, int j) { return to_vfloat((v >> (8 * j)) & 255u); }
};

/// kLanes neighbouring rows of the weight: lane i is row n0 + i. Lanes past the last row repeat it;
/// their results are dropped.
template <WeightFormat F>
class RowGroup {
 public:
  static constexpr int kPerWord = Format<F>::kPerWord;
  static constexpr int kStep = kWords * kPerWord;  // elements of a row in one transposed load
  static constexpr bool kQuantized = Format<F>::kQuantized;

  void open(const LinearParams& params, const LinearArrays& arrays, int n0) {
    const int64_t row_bytes = static_cast<int64_t>(params.k) * 4 / kPerWord;
    params_ = &params;
    for (int i = 0; i < kLanes; ++i) {
      row_[i] = smaller(n0 + i, params.n - 1);
      p_[i] = static_cast<const char*>(arrays.weight) + row_[i] * row_bytes;
    }
    scales_ = arrays.scales;
    offsets_ = arrays.offsets;
  }

  /// Prepares the scales of elements [k0, k0 + kBlockK).
  void enter_block(int k0) {
    if constexpr (kQuantized) {
      switch (params_->scales) {
        case FloatType::f32:
          return load_groups<float>(k0);
        case FloatType::f16:
          return load_groups<f16>(k0);
        case FloatType::bf16:
          return load_groups<bf16>(k0);
      }
    }
  }

  /// Words of elements [k, k + kStep), where `valid` of them exist.
  void load_words(int k, int valid, vuint* words) const {
    if (valid >= kStep) {
      transpose_words(p_, static_cast<int64_t>(k) * 4 / kPerWord, words);
      return;
    }
    // The end of dense rows whose length is no multiple of kStep: nothing past a row is read.
    char tail[kLanes][16] = {};
    const char* p[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      std::memcpy(tail[i], p_[i] + static_cast<int64_t>(k) * 4 / kPerWord, valid * 4 / kPerWord);
      p[i] = tail[i];
    }
    transpose_words(p, 0, words);
  }

  int group_in_block(int k) const {
    if constexpr (kQuantized) return k % kBlockK / params_->group_size;
    return 0;
  }

  vfloat dequantize(vuint word, int j, int group) const {
    const vfloat q = Format<F>::unpack(word, j);
    if constexpr (kQuantized) return fma(q, scale_[group], offset_[group]);
    return q;
  }

 private:
  template <class S>
  void load_groups(int k0) {
    const int groups = params_->k / params_->group_size;
    const int first = k0 / params_->group_size;
    const int count = smaller(kBlockK / params_->group_size, groups - first);
    const auto transpose = [&](const void* from, vfloat* to) {
      float rows[kLanes][kGroupsInBlock];
      const char* p[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const S* row = static_cast<const S*>(from) + row_[i] * groups + first;
        S part[kGroupsInBlock] = {};
        if (count < kGroupsInBlock) {  // nothing past a row is read
          for (int g = 0; g < count; ++g) part[g] = row[g];
          row = part;
        }
        for (int g = 0; g < kGroupsInBlock; g += kLanes) store(rows[i] + g, load(row + g));
        p[i] = reinterpret_cast<const char*>(rows[i]);
      }
      for (int g = 0; g < kGroupsInBlock; g += kWords) {
        vuint words[kWords];
        transpose_words(p, g * sizeof(float), words);
        for (int i = 0; i < kWords; ++i) to[g + i] = (vfloat)words[i];
      }
    };
    transpose(scales_, scale_);
    transpose(offsets_, offset_);
  }

  const LinearParams* params_;
  int64_t row_[kLanes];
  const char* p_[kLanes];
  const void* scales_;
  const void* offsets_;
  vfloat scale_[kGroupsInBlock];
  vfloat offset_[kGroupsInBlock];
};

}  // namespace
}  // namespace mlxcel::cpu
