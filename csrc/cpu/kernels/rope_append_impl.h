#pragma once

#include <cstring>

#include "cpu/kernels/rope_append.h"
#include "cpu/kernels/simd.h"

namespace mlxcel::cpu {
namespace {

struct Rotation {
  const float* cos;
  const float* sin;
};

/// What is rounded to `Out`: finite f32 values beyond its range become the largest of it, since one
/// infinite key would turn all attention of its request to NaN. Infinities and NaN stay: they are
/// errors from elsewhere, to be seen.
template <class Out, class In>
vfloat in_range(vfloat x) {
  if constexpr (!std::is_same_v<Out, In>) {
    constexpr float kLargest = std::is_same_v<Out, f16> ? 65504.0f : 0x1.fep127f;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    x = (x > kLargest) & (x < kInfinity) ? splat(kLargest) : x;
    x = (x < -kLargest) & (x > -kInfinity) ? splat(-kLargest) : x;
  }
  return x;
}

template <class Out, class In>
Out to_page(float x) {
  return from_float<Out>(in_range<Out, In>(splat(x))[0]);
}

/// Copies n elements, rounding where the types differ.
template <class In, class Out>
void copy_elements(const In* in, Out* out, int n) {
  if constexpr (std::is_same_v<In, Out>) {
    std::memcpy(out, in, sizeof(In) * n);
  } else {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, in_range<Out, In>(load(in + i)));
    for (; i < n; ++i) out[i] = to_page<Out, In>(to_float(in[i]));
  }
}

template <class In, class Out>
void rotate_head(const RopeAppendParams& p, const Rotation& r, const In* in, Out* out) {
  const int half = p.rotary_dim / 2;
  int i = 0;
  if (p.interleaved != 0) {
    for (; i < half; ++i) {
      const float a = to_float(in[2 * i]), b = to_float(in[2 * i + 1]);
      out[2 * i] = to_page<Out, In>(a * r.cos[i] - b * r.sin[i]);
      out[2 * i + 1] = to_page<Out, In>(a * r.sin[i] + b * r.cos[i]);
    }
  } else {
    for (; i + kLanes <= half; i += kLanes) {
      const vfloat a = load(in + i), b = load(in + half + i);
      const vfloat c = load(r.cos + i), s = load(r.sin + i);
      store(out + i, in_range<Out, In>(a * c - b * s));
      store(out + half + i, in_range<Out, In>(a * s + b * c));
    }
    for (; i < half; ++i) {
      const float a = to_float(in[i]), b = to_float(in[half + i]);
      out[i] = to_page<Out, In>(a * r.cos[i] - b * r.sin[i]);
      out[half + i] = to_page<Out, In>(a * r.sin[i] + b * r.cos[i]);
    }
  }
  copy_elements(in + p.rotary_dim, out + p.rotary_dim, p.head_dim - p.rotary_dim);
}

template <class T, class Page>
void rope_append_tokens(const RopeAppendParams& p, size_t begin, size_t end,
                        const RopeAppendArrays& in) {
  const T *q = static_cast<const T*>(in.q), *k = static_cast<const T*>(in.k);
  const T* v = static_cast<const T*>(in.v);
  T* q_rot = static_cast<T*>(in.q_rot);
  Page *k_pages = static_cast<Page*>(in.k_pages), *v_pages = static_cast<Page*>(in.v_pages);
  const int half = p.rotary_dim / 2;
  for (size_t token = begin; token < end; ++token) {
    const float* cosines = in.rotations + static_cast<int64_t>(token) * 2 * half;
    const Rotation r{cosines, cosines + half};
    const T* q_token = q + token * in.q_stride;
    T* q_to = q_rot + token * p.num_qo_heads * p.head_dim;
    for (int h = 0; h < p.num_qo_heads; ++h) {
      rotate_head(p, r, q_token + h * p.head_dim, q_to + h * p.head_dim);
    }
    const int32_t slot = in.slots[token];
    if (slot < 0 || slot / p.page_size >= p.num_pages) continue;
    const int64_t kv_at = static_cast<int64_t>(token) * in.kv_stride;
    const int64_t page = slot / p.page_size, offset = slot % p.page_size;
    const int64_t to = page * p.stride_page + offset * p.stride_token;
    for (int h = 0; h < p.num_kv_heads; ++h) {
      rotate_head(p, r, k + kv_at + h * p.head_dim, k_pages + to + h * p.stride_head);
      copy_elements(v + kv_at + h * p.head_dim, v_pages + to + h * p.stride_head, p.head_dim);
    }
  }
}

void rope_append_range(const RopeAppendParams& p, size_t begin, size_t end,
                       const RopeAppendArrays& arrays) {
  auto tokens = &rope_append_tokens<float, float>;
  if (p.dtype == FloatType::f16) tokens = &rope_append_tokens<f16, f16>;
  if (p.dtype == FloatType::bf16) tokens = &rope_append_tokens<bf16, bf16>;
  if (p.dtype == FloatType::f32) {
    if (p.kv_dtype == FloatType::f16) tokens = &rope_append_tokens<float, f16>;
    if (p.kv_dtype == FloatType::bf16) tokens = &rope_append_tokens<float, bf16>;
  }
  tokens(p, begin, end, arrays);
}

}  // namespace
}  // namespace mlxcel::cpu
