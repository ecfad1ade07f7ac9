#pragma once

#include <cmath>
#include <cstring>

#include "cpu/kernels/rope_append.h"
#include "cpu/kernels/simd.h"

namespace mlxcel::cpu {
namespace {

constexpr int kMaxHalf = 512;  // rotary_dim / 2; the op allows head_dim up to 1024

struct Rotation {
  alignas(64) float cos[kMaxHalf];
  alignas(64) float sin[kMaxHalf];
};

// The angle is formed and reduced in f64: at position 100,000 an f32 product is off by 0.004
// radians.
void fill_rotation(Rotation& r, int32_t position, const float* inv_freq, int half, float scale) {
  for (int i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * static_cast<double>(inv_freq[i]);
    r.cos[i] = scale * static_cast<float>(std::cos(angle));
    r.sin[i] = scale * static_cast<float>(std::sin(angle));
  }
}

template <class T>
void rotate_head(const RopeAppendParams& p, const Rotation& r, const T* in, T* out) {
  const int half = p.rotary_dim / 2;
  int i = 0;
  if (p.interleaved != 0) {
    for (; i < half; ++i) {
      const float a = to_float(in[2 * i]), b = to_float(in[2 * i + 1]);
      out[2 * i] = from_float<T>(a * r.cos[i] - b * r.sin[i]);
      out[2 * i + 1] = from_float<T>(a * r.sin[i] + b * r.cos[i]);
    }
  } else {
    for (; i + kLanes <= half; i += kLanes) {
      const vfloat a = load(in + i), b = load(in + half + i);
      const vfloat c = load(r.cos + i), s = load(r.sin + i);
      store(out + i, a * c - b * s);
      store(out + half + i, a * s + b * c);
    }
    for (; i < half; ++i) {
      const float a = to_float(in[i]), b = to_float(in[half + i]);
      out[i] = from_float<T>(a * r.cos[i] - b * r.sin[i]);
      out[half + i] = from_float<T>(a * r.sin[i] + b * r.cos[i]);
    }
  }
  std::memcpy(out + p.rotary_dim, in + p.rotary_dim, sizeof(T) * (p.head_dim - p.rotary_dim));
}

template <class T>
void rope_append_tokens(const RopeAppendParams& p, size_t begin, size_t end, const T* q, const T* k,
                        const T* v, const int32_t* slots, const int32_t* positions,
                        const float* inv_freq, T* q_rot, T* k_pages, T* v_pages) {
  Rotation r;
  for (size_t token = begin; token < end; ++token) {
    fill_rotation(r, positions[token], inv_freq, p.rotary_dim / 2, p.scale);
    const size_t q_at = token * p.num_qo_heads * p.head_dim;
    for (int h = 0; h < p.num_qo_heads; ++h) {
      rotate_head(p, r, q + q_at + h * p.head_dim, q_rot + q_at + h * p.head_dim);
    }
    if (slots[token] < 0 || slots[token] / p.page_size >= p.num_pages) continue;
    const size_t kv_at = token * p.num_kv_heads * p.head_dim;
    const int64_t page = slots[token] / p.page_size, offset = slots[token] % p.page_size;
    const int64_t to = page * p.stride_page + offset * p.stride_token;
    for (int h = 0; h < p.num_kv_heads; ++h) {
      rotate_head(p, r, k + kv_at + h * p.head_dim, k_pages + to + h * p.stride_head);
      std::memcpy(v_pages + to + h * p.stride_head, v + kv_at + h * p.head_dim,
                  sizeof(T) * p.head_dim);
    }
  }
}

template <class T>
void rope_append_typed(const RopeAppendParams& p, size_t begin, size_t end, const void* q,
                       const void* k, const void* v, const int32_t* slots, const int32_t* positions,
                       const float* inv_freq, void* q_rot, void* k_pages, void* v_pages) {
  rope_append_tokens(p, begin, end, static_cast<const T*>(q), static_cast<const T*>(k),
                     static_cast<const T*>(v), slots, positions, inv_freq, static_cast<T*>(q_rot),
                     static_cast<T*>(k_pages), static_cast<T*>(v_pages));
}

void rope_append_range(const RopeAppendParams& p, size_t begin, size_t end, const void* q,
                       const void* k, const void* v, const int32_t* slots, const int32_t* positions,
                       const float* inv_freq, void* q_rot, void* k_pages, void* v_pages) {
  auto typed = &rope_append_typed<float>;
  if (p.dtype == FloatType::f16) typed = &rope_append_typed<f16>;
  if (p.dtype == FloatType::bf16) typed = &rope_append_typed<bf16>;
  typed(p, begin, end, q, k, v, slots, positions, inv_freq, q_rot, k_pages, v_pages);
}

}  // namespace
}  // namespace mlxcel::cpu
