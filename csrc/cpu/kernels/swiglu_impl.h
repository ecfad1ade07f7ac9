#pragma once

#include "cpu/kernels/simd.h"
#include "cpu/kernels/swiglu.h"

namespace mlxcel::cpu {
namespace {

inline vfloat silu_times(vfloat gate, vfloat up) {
  constexpr float kLog2e = 1.4426950408889634f;
  return gate / (1.0f + exp2(gate * -kLog2e)) * up;
}

template <class T>
void swiglu_row(int n, const T* gate, const T* up, T* out) {
  const int body = n - n % kLanes;
  for (int i = 0; i < body; i += kLanes) store(out + i, silu_times(load(gate + i), load(up + i)));
  if (body == n) return;
  // The tail takes the same arithmetic, on a copy.
  T g[kLanes] = {}, u[kLanes] = {}, o[kLanes];
  for (int i = body; i < n; ++i) g[i - body] = gate[i], u[i - body] = up[i];
  store(o, silu_times(load(g), load(u)));
  for (int i = body; i < n; ++i) out[i] = o[i - body];
}

template <class T>
void swiglu_rows(const SwigluParams& params, int64_t begin, int64_t end, const T* gate, const T* up,
                 T* out) {
  const int64_t stride = int64_t{params.features} * (params.merged ? 2 : 1);
  if (params.merged) up = gate + params.features;
  for (int64_t row = begin; row < end; ++row) {
    swiglu_row(params.features, gate + row * stride, up + row * stride,
               out + row * params.features);
  }
}

void swiglu_range(const SwigluParams& params, int64_t begin, int64_t end, const void* gate,
                  const void* up, void* out) {
  const auto run = [&]<class T>(T* typed_out) {
    swiglu_rows(params, begin, end, static_cast<const T*>(gate), static_cast<const T*>(up),
                typed_out);
  };
  switch (params.dtype) {
    case FloatType::f32:
      return run(static_cast<float*>(out));
    case FloatType::f16:
      return run(static_cast<f16*>(out));
    case FloatType::bf16:
      return run(static_cast<bf16*>(out));
  }
}

}  // namespace
}  // namespace mlxcel::cpu
