#pragma once

#include <cmath>

#include "cpu/kernels/add_rms_norm.h"
#include "cpu/kernels/simd.h"

namespace mlxcel::cpu {
namespace {

template <class T>
void add_rms_norm_row(const AddRmsNormParams& params, const T* x, const T* residual,
                      const T* weight, T* normed, T* new_residual) {
  const int n = params.hidden;
  const int body = n - n % kLanes;
  const T* total = x;
  if (residual != nullptr) {
    for (int i = 0; i < body; i += kLanes) {
      store(new_residual + i, load(x + i) + load(residual + i));
    }
    for (int i = body; i < n; ++i) {
      new_residual[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
    }
    total = new_residual;  // as rounded: what the next layer adds to
  }
  vfloat acc = {};
  for (int i = 0; i < body; i += kLanes) {
    const vfloat r = load(total + i);
    acc += r * r;
  }
  float squares = sum(acc);
  for (int i = body; i < n; ++i) squares += to_float(total[i]) * to_float(total[i]);
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(n) + params.eps);
  for (int i = 0; i < body; i += kLanes) {
    store(normed + i, load(total + i) * scale * (load(weight + i) + params.weight_bias));
  }
  for (int i = body; i < n; ++i) {
    normed[i] =
        from_float<T>(to_float(total[i]) * scale * (to_float(weight[i]) + params.weight_bias));
  }
}

template <class T>
void add_rms_norm_rows(const AddRmsNormParams& params, int64_t begin, int64_t end, const void* x,
                       const void* residual, const void* weight, void* normed, void* new_residual) {
  const auto* added = static_cast<const T*>(residual);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * params.hidden;
    add_rms_norm_row(params, static_cast<const T*>(x) + at, added == nullptr ? added : added + at,
                     static_cast<const T*>(weight), static_cast<T*>(normed) + at,
                     static_cast<T*>(new_residual) + at);
  }
}

void add_rms_norm_range(const AddRmsNormParams& params, int64_t begin, int64_t end, const void* x,
                        const void* residual, const void* weight, void* normed,
                        void* new_residual) {
  switch (params.dtype) {
    case FloatType::f32:
      return add_rms_norm_rows<float>(params, begin, end, x, residual, weight, normed,
                                      new_residual);
    case FloatType::f16:
      return add_rms_norm_rows<f16>(params, begin, end, x, residual, weight, normed, new_residual);
    case FloatType::bf16:
      return add_rms_norm_rows<bf16>(params, begin, end, x, residual, weight, normed, new_residual);
  }
}

}  // namespace
}  // namespace mlxcel::cpu
