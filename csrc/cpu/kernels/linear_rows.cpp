#include <limits>

#include "common/half.h"
#include "common/parallel.h"
#include "cpu/kernels/linear.h"
#include "cpu/kernels/linear_table.h"

namespace mlxcel::cpu {
namespace {

float float_at(FloatType type, const void* p, int64_t i) {
  switch (type) {
    case FloatType::f32:
      return static_cast<const float*>(p)[i];
    case FloatType::f16:
      return to_float(static_cast<const f16*>(p)[i]);
    case FloatType::bf16:
      return to_float(static_cast<const bf16*>(p)[i]);
  }
  return 0.0f;
}

float dense_value(WeightFormat format, uint32_t word, int j) {
  const uint16_t half = static_cast<uint16_t>(word >> (16 * j));
  if (format == WeightFormat::f16) return to_float(f16{half});
  if (format == WeightFormat::bf16) return to_float(bf16{half});
  float f;
  std::memcpy(&f, &word, 4);
  return f;
}

/// Row n of a packed weight, value by value: a step of the model takes few rows.
template <class T>
void copy_row(const LinearParams& params, const LinearArrays& arrays, int n, T* out) {
  const int per_word = values_per_word(params.format);
  const int64_t row_words = (params.k + per_word - 1) / per_word;
  const uint32_t* words = static_cast<const uint32_t*>(arrays.weight) +
                          n / kGroupRows * row_words * kGroupRows + n % kGroupRows;
  if (params.group_size == 0) {
    for (int k = 0; k < params.k; ++k) {
      const uint32_t word = words[k / per_word * kGroupRows];
      out[k] = from_float<T>(dense_value(params.format, word, k % per_word));
    }
    return;
  }
  const int bits = 32 / per_word;
  const uint32_t mask = (1u << bits) - 1;
  const int64_t groups = params.k / params.group_size;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = (n / kGroupRows * groups + g) * kGroupRows + n % kGroupRows;
    const float scale = float_at(params.scales, arrays.scales, at);
    const float offset = float_at(params.scales, arrays.offsets, at);
    for (int64_t k = g * params.group_size; k < (g + 1) * params.group_size; ++k) {
      const uint32_t word = words[k / per_word * kGroupRows];
      const float q = static_cast<float>(word >> (k % per_word * bits) & mask);
      out[k] = from_float<T>(scale * q + offset);
    }
  }
}

template <class T>
void copy_rows(const LinearParams& params, const LinearArrays& arrays, const int32_t* ids,
               int64_t begin, int64_t end, T* out) {
  for (int64_t i = begin; i < end; ++i) {
    T* row = out + i * params.k;
    if (ids[i] >= 0 && ids[i] < params.n) {
      copy_row(params, arrays, ids[i], row);
    } else {
      for (int k = 0; k < params.k; ++k) {
        row[k] = from_float<T>(std::numeric_limits<float>::quiet_NaN());
      }
    }
  }
}

}  // namespace

void linear_rows(const LinearParams& params, const LinearArrays& arrays, const int32_t* ids,
                 void* out) {
  parallel_for(params.rows, 16384 / params.k + 1, [&](size_t begin, size_t end) {
    switch (params.dtype) {
      case FloatType::f32:
        return copy_rows(params, arrays, ids, begin, end, static_cast<float*>(out));
      case FloatType::f16:
        return copy_rows(params, arrays, ids, begin, end, static_cast<f16*>(out));
      case FloatType::bf16:
        return copy_rows(params, arrays, ids, begin, end, static_cast<bf16*>(out));
    }
  });
}

}  // namespace mlxcel::cpu
