#pragma once

// Vectors of f32 for the CPU kernels, as wide as the file's instruction set: 4 lanes (SSE2, NEON),
// 8 (AVX2), 16 (AVX-512). How a kernel is compiled for several: X_impl.h holds the code; X.cpp
// includes it for the baseline; X_avx2.cpp (and X_avx512.cpp, where it pays) include it too and
// export a pointer to the entry point; X.cpp picks one by cpu_features(). Include this file from
// *_impl.h only. Everything here has internal linkage, so that the linker cannot swap an AVX copy
// into a baseline file.

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "common/half.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace mlxcel {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vfloat __attribute__((vector_size(kLanes * 4)));
typedef int32_t vint __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vuint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vhalf __attribute__((vector_size(kLanes * 2)));

/// f(0), ..., f(N - 1) with constant arguments: arrays of vectors indexed by them live in
/// registers, where GCC 12 keeps those of an unrolled loop on the stack.
template <int N, class F>
[[gnu::always_inline]] inline void unroll(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

// A C-style cast between vectors of one size keeps the bits.

inline vfloat splat(float x) {
  return x - vfloat{};
}

inline vfloat load(const float* p) {
  vfloat v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline vfloat load(const bf16* p) {
  // By name where there is one: of __builtin_convertvector GCC makes six instructions instead of
  // one.
#if defined(__AVX512F__)
  const vuint u =
      (vuint)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  const vuint u =
      (vuint)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vhalf h;
  std::memcpy(&h, p, sizeof(h));
  const vuint u = __builtin_convertvector(h, vuint);
#endif
  return (vfloat)(u << 16);
}

inline vfloat load(const f16* p) {
#if defined(__AVX512F__)
  const __m512 v = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (vfloat)v;
#elif defined(__AVX2__)
  const __m256 v = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (vfloat)v;
#elif defined(__aarch64__)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)));
#else
  vfloat v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

/// The vector itself, in a register: GCC would rather load it again for every use, where loads are
/// what bounds the loop, or hoist loads until sums no longer fit the registers.
[[gnu::always_inline]] inline vfloat in_register(vfloat x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

/// Two vectors of consecutive elements.
struct VectorPair {
  vfloat first, second;
};

template <class T>
inline VectorPair load_pair(const T* p) {
  return {load(p), load(p + kLanes)};
}

#if defined(__AVX512F__)
// One instruction a vector, where `load` takes two, and one load: a copy into the upper half of
// each lane, above zeros. (AVX512BW; files for AVX-512 are compiled with it.)
inline VectorPair load_pair(const bf16* p) {
  const auto all = (__m512i)in_register((vfloat)_mm512_loadu_si512(p));
  const auto lanes_from = [all](int first) __attribute__((always_inline)) {
    alignas(64) uint16_t from[2 * kLanes] = {};
    for (int i = 0; i < kLanes; ++i) from[2 * i + 1] = static_cast<uint16_t>(first + i);
    return (vfloat)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_load_si512(from), all);
  };
  return {lanes_from(0), lanes_from(kLanes)};
}
#endif

inline void store(float* p, vfloat v) {
  std::memcpy(p, &v, sizeof(v));
}

inline void store(bf16* p, vfloat v) {
  const vuint u = (vuint)v;
  const vuint rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vuint nan = (vuint)(v != v);
  const vuint bits = (nan & ((u >> 16) | 0x40u)) | (~nan & rounded);
  const vhalf h = __builtin_convertvector(bits, vhalf);
  std::memcpy(p, &h, sizeof(h));
}

inline void store(f16* p, vfloat v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(v)));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<f16>(v[i]);
#endif
}

/// a * b + c, rounded once where the machine can. Never left to the compiler, because all paths
/// must round alike: GCC 13 takes two roundings in some loops that sum up, and one in others. So
/// the kernels are compiled with -ffp-contract=off.
inline vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

inline float sum(vfloat v) {
  float s[kLanes];
  std::memcpy(s, &v, sizeof(s));
  for (int w = kLanes / 2; w > 0; w /= 2) {
    for (int i = 0; i < w; ++i) s[i] += s[i + w];
  }
  return s[0];
}

inline vfloat vmax(vfloat a, vfloat b) {
  return a > b ? a : b;
}

inline float max(vfloat v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

/// 2^x, relative error below 2e-7 in [-126, 127]; 0 below -126 (-inf included), 2^127 above 127.
/// NaN stays NaN.
inline vfloat exp2(vfloat x) {
  // What is below -126 may turn into anything until it is dropped at the end.
#if defined(__AVX512F__)
  const __mmask16 keep = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  x = (vfloat)_mm512_maskz_min_ps(keep, _mm512_set1_ps(127.0f), (__m512)x);
#elif defined(__AVX2__)
  const __m256 keep = _mm256_cmp_ps((__m256)x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
  x = (vfloat)_mm256_min_ps(_mm256_set1_ps(127.0f), (__m256)x);
#else
  const vint keep = (x >= -126.0f) | (x != x);
  x = x > 127.0f ? splat(127.0f) : x;
#endif
  // Adding 1.5 * 2^23 leaves round(x) in the low bits of the mantissa.
  const vfloat shifted = x + 12582912.0f;
  const vfloat r = x - (shifted - 12582912.0f);
  const vuint exponent = ((vuint)shifted << 23) + 0x3f800000u;
  // Taylor coefficients ln(2)^k / k!; |r| <= 0.5.
  vfloat p = splat(1.5252733e-5f);
  p = fma(p, r, splat(1.5403530e-4f));
  p = fma(p, r, splat(1.3333558e-3f));
  p = fma(p, r, splat(9.6181291e-3f));
  p = fma(p, r, splat(5.5504109e-2f));
  p = fma(p, r, splat(2.4022651e-1f));
  p = fma(p, r, splat(6.9314718e-1f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_mul_ps(keep, (__m512)p, (__m512)exponent);
#elif defined(__AVX2__)
  return (vfloat)_mm256_and_ps(keep, (__m256)(p * (vfloat)exponent));
#else
  return (vfloat)((vint)(p * (vfloat)exponent) & keep);
#endif
}

}  // namespace
}  // namespace mlxcel
