#pragma once

// Merging of softmax states; include from *_impl.h only.

#include <algorithm>
#include <cmath>

#include "cpu/kernels/simd.h"

namespace mlxcel::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

/// Softmax states of one (row, head): normalised values `stride_v` apart and log2 denominators
/// `stride_lse` apart.
template <class T>
struct States {
  const T* v;
  int64_t stride_v;
  const float* lse;
  int64_t stride_lse;
  int64_t count;
};

/// sum[d] = the merged state's value in f32; returns its lse. One state is copied bit for bit. A
/// state with lse -inf is left out unread, so that garbage in its value cannot spread.
template <class T>
float merge(const States<T>& states, int head_dim, float* sum) {
  float most = kMinusInfinity;
  for (int64_t i = 0; i < states.count; ++i) {
    const float lse = states.lse[i * states.stride_lse];
    most = std::isnan(lse) ? lse : std::max(most, lse);
    if (std::isnan(most)) break;
  }
  std::fill(sum, sum + head_dim, 0.0f);
  if (most == kMinusInfinity) return most;
  float total = 0.0f;
  for (int64_t i = 0; i < states.count; ++i) {
    const float lse = states.lse[i * states.stride_lse];
    if (lse == kMinusInfinity) continue;
    const float w = lse == most ? 1.0f : std::exp2(lse - most);
    const T* v = states.v + i * states.stride_v;
    total += w;
    int d = 0;
    for (; d + kLanes <= head_dim; d += kLanes)
      store(sum + d, fma(splat(w), load(v + d), load(sum + d)));
    for (; d < head_dim; ++d) sum[d] += w * to_float(v[d]);
  }
  const float scale = 1.0f / total;
  for (int d = 0; d < head_dim; ++d) sum[d] *= scale;
  return most + std::log2(total);
}

template <class T>
void store_row(T* out, const float* values, int n) {
  int d = 0;
  for (; d + kLanes <= n; d += kLanes) store(out + d, load(values + d));
  for (; d < n; ++d) out[d] = from_float<T>(values[d]);
}

}  // namespace
}  // namespace mlxcel::cpu
