#pragma once

// Readers of weights for linear_impl.h. The kernels know one layout: groups of kGroupRows rows of
// the weight, word by word, [group][word][row in group]. So a vector holds one word of kLanes rows,
// and a word is unpacked into 1 (f32), 2 (f16, bf16), 4 (q8) or 8 (q4) vectors of neighbours along
// k. Lanes that are rows make the sum over k run in one lane: its order is the same for every
// vector width, there are no horizontal sums, and memory is read front to back. Weights in MLX's
// row-major layout pass through a copy of one block of k.

#include "cpu/kernels/linear_table.h"
#include "cpu/kernels/simd.h"

namespace mlxcel::cpu {
namespace {

constexpr int kMinGroup = 32;
constexpr int kGroupsInBlock = kBlockK / kMinGroup;

// Not std::min: that has external linkage (see CMakeLists.txt on files with their own flags).
constexpr int smaller(int a, int b) {
  return a < b ? a : b;
}

/// fma(splat(*x), b, c); where kFoldsBroadcasts, as one instruction (compilers load *x first where
/// it is needed twice).
inline vfloat fma_broadcast(const float* x, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(b), "m"(*x));
  return c;
#else
  return fma(splat(*x), b, c);
#endif
}
constexpr bool kFoldsBroadcasts = kLanes == 16;

inline vuint load_word(const uint32_t* p) {
  vuint v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline vfloat to_vfloat(vuint v) {
  return __builtin_convertvector((vint)v, vfloat);
}

/// The f16 in the low half of every word; the high halves are zero.
inline vfloat half_to_float(vuint v) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)v));
#elif defined(__AVX2__)
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

/// unpack(word, j) is the j-th of kPerWord neighbours along k. raise(word, j) is the same times a
/// power of two, 1 / lower(j), where that saves instructions: x * lower(j) times it is the same
/// product, rounded alike (for |x| above 1e-30, whose fractions are no subnormals).
template <WeightFormat>
struct Format;

template <WeightFormat F>
struct DenseFormat {
  static constexpr bool kQuantized = false;
  static constexpr float lower(int) { return 1.0f; }
  static vfloat raise(vuint v, int j) { return Format<F>::unpack(v, j); }
};

template <int Bits>
struct QuantizedFormat {
  static constexpr int kPerWord = 32 / Bits;
  static constexpr bool kQuantized = true;
  static constexpr uint32_t kMask = (1u << Bits) - 1;
  static vfloat unpack(vuint v, int j) { return to_vfloat((v >> (Bits * j)) & kMask); }

  /// A mask in place leaves q * 2^(Bits * j), but for the last value, which would turn negative.
  static constexpr float lower(int j) {
    return j + 1 == kPerWord ? 1.0f : 1.0f / static_cast<float>(1u << (Bits * j));
  }
  static vfloat raise(vuint v, int j) {
    return to_vfloat(j + 1 == kPerWord ? v >> (Bits * j) : v & (kMask << (Bits * j)));
  }
};

template <>
struct Format<WeightFormat::f32> : DenseFormat<WeightFormat::f32> {
  static constexpr int kPerWord = 1;
  static vfloat unpack(vuint v, int) { return (vfloat)v; }
};

template <>
struct Format<WeightFormat::bf16> : DenseFormat<WeightFormat::bf16> {
  static constexpr int kPerWord = 2;
  static vfloat unpack(vuint v, int j) {
    const vuint u = j == 0 ? v << 16 : v & 0xffff0000u;
    return (vfloat)u;
  }
};

template <>
struct Format<WeightFormat::f16> : DenseFormat<WeightFormat::f16> {
  static constexpr int kPerWord = 2;
  static vfloat unpack(vuint v, int j) { return half_to_float(j == 0 ? v & 0xffffu : v >> 16); }
};

template <>
struct Format<WeightFormat::q4> : QuantizedFormat<4> {};

template <>
struct Format<WeightFormat::q8> : QuantizedFormat<8> {};

/// Words [w0, w1) of rows [n0, n0 + Rows) of a row-major weight, as to[word - w0][row]. Rows past
/// the last repeat it. A row ends after `row_bytes`, which may be in the middle of a word.
template <int Rows>
void interleave_words(const LinearParams& params, const void* weight, int64_t row_bytes, int n0,
                      int64_t w0, int64_t w1, uint32_t* to) {
  const char* p[Rows];
  for (int i = 0; i < Rows; ++i) {
    p[i] = static_cast<const char*>(weight) + smaller(n0 + i, params.n - 1) * row_bytes;
  }
  int64_t w = w0;
  for (; (w + 4) * 4 <= row_bytes && w + 4 <= w1; w += 4, to += 4 * Rows) {
    typedef uint32_t word4 __attribute__((vector_size(16)));
    for (int half = 0; half < Rows; half += 4) {
      word4 r[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&r[i], p[half + i] + 4 * w, 16);
      const word4 ab_lo = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
      const word4 ab_hi = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
      const word4 cd_lo = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
      const word4 cd_hi = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
      const word4 out[4] = {__builtin_shufflevector(ab_lo, cd_lo, 0, 1, 4, 5),
                            __builtin_shufflevector(ab_lo, cd_lo, 2, 3, 6, 7),
                            __builtin_shufflevector(ab_hi, cd_hi, 0, 1, 4, 5),
                            __builtin_shufflevector(ab_hi, cd_hi, 2, 3, 6, 7)};
      for (int i = 0; i < 4; ++i) std::memcpy(to + i * Rows + half, &out[i], 16);
    }
  }
  for (; w < w1; ++w, to += Rows) {
    for (int i = 0; i < Rows; ++i) {
      to[i] = 0;
      std::memcpy(to + i, p[i] + 4 * w, smaller(4, static_cast<int>(row_bytes - 4 * w)));
    }
  }
}

/// Scales (or offsets) of quantization groups [g0, g1) of the same rows, as to[group - g0][row].
template <int Rows, class S>
void interleave_scales(const LinearParams& params, const S* scales, int n0, int g0, int g1, S* to) {
  const int64_t groups = params.k / params.group_size;
  for (int i = 0; i < Rows; ++i) {
    const S* row = scales + smaller(n0 + i, params.n - 1) * groups;
    for (int g = g0; g < g1; ++g) to[(g - g0) * Rows + i] = row[g];
  }
}

/// One block of k of `Rows` rows, ready for the kernels. Rows divides kGroupRows. Prefetches: each
/// pass fetches the next block of k, else prefetch_next() does, once for all passes.
template <WeightFormat F, int Rows, bool Prefetches = true>
class Block {
 public:
  static constexpr int kPerWord = Format<F>::kPerWord;
  static constexpr bool kQuantized = Format<F>::kQuantized;
  static constexpr int kVectors = Rows / kLanes;

  /// Elements [k0, k1) of rows [n0, n0 + Rows), of which the first exists; n0 is a multiple of
  /// Rows, k0 of kBlockK.
  void open(const LinearParams& params, const LinearArrays& arrays, int n0, int k0, int k1) {
    const int64_t row_words = (params.k + kPerWord - 1) / kPerWord;
    const int64_t w0 = k0 / kPerWord;
    packed_ = params.packed;
    if (params.packed) {
      stride_ = kGroupRows;
      words_ = static_cast<const uint32_t*>(arrays.weight) +
               (n0 / kGroupRows * row_words + w0) * kGroupRows + n0 % kGroupRows;
    } else {
      stride_ = Rows;
      interleave_words<Rows>(params, arrays.weight, int64_t{params.k} * 4 / kPerWord, n0, w0,
                             (k1 + kPerWord - 1) / kPerWord, copy_);
      words_ = copy_;
    }
    if constexpr (kQuantized) {
      type_ = params.scales;
      if (type_ == FloatType::f32) {
        open_scales<float>(params, arrays, n0, k0, k1);
      } else {
        open_scales<f16>(params, arrays, n0, k0, k1);
      }
    }
  }

  /// step(k, j, words) for elements k in [begin, end) in ascending order: they are the j-th of the
  /// words, R vectors of neighbouring rows from `row` on. begin is a multiple of kPerWord.
  template <int R, class Step>
  [[gnu::always_inline]] void for_each_word(int row, int begin, int end, const Step& step) const {
    vuint words[R];
    int w = begin / kPerWord;
    const auto load_words = [&]() __attribute__((always_inline)) {
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        words[r] = load_word(words_ + w * stride_ + row + r * kLanes);
      });
    };
    for (; (w + 1) * kPerWord <= end; ++w) {
      if (Prefetches && packed_) prefetch_next_word<R>(w, row);
      load_words();
      unroll<kPerWord>([&](auto j)
                           __attribute__((always_inline)) { step(w * kPerWord + j, j, words); });
    }
    if (w * kPerWord < end) {  // a dense row of odd length ends in the first half of a word
      load_words();
      step(w * kPerWord, std::integral_constant<int, 0>{}, words);
    }
  }

  /// step(k, weight) for the same elements, where weight(r) are the weights of vector r of rows,
  /// raised (see Format).
  template <int R, class Step>
  [[gnu::always_inline]] void for_each_k(int row, int begin, int end, const Step& step) const {
    for_each_word<R>(
        row, begin, end, [&](int k, auto j, const vuint* words) __attribute__((always_inline)) {
          step(k, [&](auto r)
                      __attribute__((always_inline)) { return Format<F>::raise(words[r], j); });
        });
  }

  /// f(r, scale, offset) for quantization group g and each of R vectors of rows, from `row` on.
  template <int R, class Fn>
  [[gnu::always_inline]] void for_each_scale(int g, int row, const Fn& f) const {
    const auto run = [&]<class S>(const S*) __attribute__((always_inline)) {
      const S* scales = static_cast<const S*>(scales_) + g * stride_ + row;
      const S* offsets = static_cast<const S*>(offsets_) + g * stride_ + row;
      if (packed_) {
        unroll<(R * kLanes * static_cast<int>(sizeof(S)) + 63) / 64>(
            [&](auto line) __attribute__((always_inline)) {
              constexpr int kLine = 64 / static_cast<int>(sizeof(S));
              __builtin_prefetch(scales + kGroupsInBlock * kGroupRows + line * kLine);
              __builtin_prefetch(offsets + kGroupsInBlock * kGroupRows + line * kLine);
            });
      }
      unroll<R>([&](auto r) __attribute__((always_inline)) {
        f(r, load(scales + r * kLanes), load(offsets + r * kLanes));
      });
    };
    switch (type_) {
      case FloatType::f32:
        return run(static_cast<const float*>(nullptr));
      case FloatType::f16:
        return run(static_cast<const f16*>(nullptr));
      case FloatType::bf16:
        return run(static_cast<const bf16*>(nullptr));
    }
  }

  /// Fetches words of elements [begin, end) of the next block of k into L2.
  void prefetch_next(int begin, int end) const {
    if (!packed_) return;
    for (int w = begin / kPerWord; w < end / kPerWord; ++w) prefetch_next_word<kVectors>(w, 0);
  }

 private:
  /// Fetches what the next block of k has in place of word w of R vectors of rows, into L2: the
  /// packed layout is read front to back, at an even pace, while this block is multiplied. The
  /// hardware's own prefetchers reach 6.5 GB/s of a memory that gives 8.6 to one core (EPYC,
  /// shared).
  template <int R>
  [[gnu::always_inline]] void prefetch_next_word(int w, int row) const {
    unroll<(R * kLanes * 4 + 63) / 64>([&](auto line) __attribute__((always_inline)) {
      __builtin_prefetch(words_ + (w + kBlockK / kPerWord) * stride_ + row + line * 16, 0, 2);
    });
  }

  template <class S>  // float, or f16 for both 16-bit types
  void open_scales(const LinearParams& params, const LinearArrays& arrays, int n0, int k0, int k1) {
    const S* scales = static_cast<const S*>(arrays.scales);
    const S* offsets = static_cast<const S*>(arrays.offsets);
    const int g0 = k0 / params.group_size, g1 = k1 / params.group_size;
    if (params.packed) {
      const int64_t groups = params.k / params.group_size;
      const int64_t at = (n0 / kGroupRows * groups + g0) * kGroupRows + n0 % kGroupRows;
      scales_ = scales + at;
      offsets_ = offsets + at;
    } else {
      interleave_scales<Rows>(params, scales, n0, g0, g1, reinterpret_cast<S*>(scale_copy_));
      interleave_scales<Rows>(params, offsets, n0, g0, g1, reinterpret_cast<S*>(offset_copy_));
      scales_ = scale_copy_;
      offsets_ = offset_copy_;
    }
  }

  bool packed_;
  int stride_;  // rows from one word to the next
  const uint32_t* words_;
  const void* scales_;
  const void* offsets_;
  FloatType type_;
  alignas(64) uint32_t copy_[kBlockK / kPerWord * Rows];
  alignas(64) char scale_copy_[kGroupsInBlock * Rows * 4];
  alignas(64) char offset_copy_[kGroupsInBlock * Rows * 4];
};

}  // namespace
}  // namespace mlxcel::cpu
