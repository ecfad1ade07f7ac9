#pragma once

#include <cstdint>
#include <cstring>

namespace mlxcel {

// Storage types of the CPU kernels. Arithmetic is always f32; these convert, rounding to nearest
// even. Each conversion also exists over vectors inside the per-instruction-set kernels
// (cpu/kernels/simd.h).

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

// Internal linkage: a file compiled for AVX must not lend its copy to a baseline file.
namespace {

inline float to_float(float x) {
  return x;
}

inline float to_float(bf16 x) {
  const uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t rest = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  // A multiplication by 2^112 moves the exponent's bias from 15 to 127 and is exact for subnormals
  // too.
  float f;
  std::memcpy(&f, &rest, 4);
  f *= 0x1p112f;
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((x.bits & 0x7c00) == 0x7c00) u = 0x7f800000u | rest;
  u |= sign;
  std::memcpy(&f, &u, 4);
  return f;
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline bf16 from_float<bf16>(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((u >> 16) | 0x40)};
  return bf16{static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}

template <>
inline f16 from_float<f16>(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000);
  u &= 0x7fffffffu;
  uint16_t bits;
  if (u > 0x7f800000u) {
    bits = 0x7e00;
  } else if (u >= 0x47800000u) {  // 65536 and above
    bits = 0x7c00;
  } else if (u <
             0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal's bits at the bottom
    float f;
    std::memcpy(&f, &u, 4);
    f += 0.5f;
    uint32_t v;
    std::memcpy(&v, &f, 4);
    bits = static_cast<uint16_t>(v - 0x3f000000u);
  } else {
    bits = static_cast<uint16_t>((u + 0xc8000fffu + ((u >> 13) & 1)) >> 13);
  }
  return f16{static_cast<uint16_t>(bits | sign)};
}

}  // namespace
}  // namespace mlxcel
