#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace mlxcel {

/// How the weight of a linear layer is stored.
enum class WeightFormat : int32_t {
  f32 = 0,  // dense, (n, k)
  f16 = 1,
  bf16 = 2,
  q4 = 3,  // 4 and 8 bits, little-endian in uint32 words: (n, k * bits / 32)
  q8 = 4,
};

/// Values of a row that one 32-bit word of the weight holds.
constexpr int32_t values_per_word(WeightFormat format) {
  switch (format) {
    case WeightFormat::f32:
      return 1;
    case WeightFormat::f16:
    case WeightFormat::bf16:
      return 2;
    case WeightFormat::q8:
      return 4;
    case WeightFormat::q4:
      return 8;
  }
  return 0;
}

/// Rows of a weight that the packed layout interleaves.
constexpr int32_t kPackedRows = 64;

/// out[m, n] = sum_k x[m, k] * w[n, k] + bias[n]; quantized: w = scale * q + offset, one scale and
/// one offset per group of `group_size` neighbours along k. Arrays are row-contiguous.
/// packed: kPackedRows = P rows of the weight are interleaved, (ceil(n / P), words of a row, P)
/// uint32 with a zero-padded last word, and (ceil(n / P), k / group_size, P) scales and offsets.
struct LinearParams {
  int64_t rows;  // of x and out
  int32_t n;     // out features
  int32_t k;     // in features
  WeightFormat format;
  int32_t group_size;  // 32, 64 or 128; 0 where dense
  FloatType dtype;     // of x and out
  FloatType scales;    // of scales and offsets
  FloatType bias;      // of the bias vector
  int32_t has_bias;    // 0 or 1
  int32_t packed;      // 0 or 1
  int32_t out_stride;  // elements from one row of out to the next, n or more
};
static_assert(sizeof(LinearParams) == 48);

/// Whether the GPU kernels take a layer: few rows of f16 or bf16, against a weight of the same type
/// or of 4 bits in groups of 64 or 128 with scales of that type, not packed.
constexpr bool gpu_linear(const LinearParams& p) {
  constexpr int64_t kMaxRows = 64;
  const bool f16 = p.dtype == FloatType::f16;
  const bool dense = p.format == (f16 ? WeightFormat::f16 : WeightFormat::bf16);
  const bool q4 = p.format == WeightFormat::q4 && p.scales == p.dtype && p.group_size % 64 == 0;
  return (f16 || p.dtype == FloatType::bf16) && (dense || q4) && !p.packed &&
         (!p.has_bias || p.bias == p.dtype) && p.rows <= kMaxRows && p.k % 64 == 0;
}

}  // namespace mlxcel
