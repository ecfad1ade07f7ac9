#pragma once

#include "common.h"
#include "params/rope_append.h"

namespace mlxcel {

// The part of a turn by which one position turns a pair, inv_freq / (2 pi) mod 1, in units of
// 2^-64. Metal has no double, and an f32 angle is off by 0.004 radians at position 100,000;
// products of this number with a position are exact modulo one turn, up to 2^-33 of a turn at
// position 2^31.
METAL_FUNC ulong turns_per_position(float inv_freq) {
  const uint bits = as_type<uint>(inv_freq);
  const int exponent = int(bits >> 23 & 0xff);
  const ulong mantissa = ulong((bits & 0x7fffff) | 0x800000);
  // mantissa * floor(2^96 / (2 pi)), 120 bits.
  const ulong low = mantissa * 0x7f09d5f4ul;
  const ulong middle = mantissa * 0x9391054aul + (low >> 32);
  const ulong high = mantissa * 0x28be60dbul + (middle >> 32);
  const ulong tail = middle << 32 | (low & 0xfffffffful);
  const int shift = clamp(182 - exponent, 1, 127);
  const ulong turns = shift < 64 ? tail >> shift | high << (64 - shift) : high >> (shift - 64);
  return bits >> 31 ? 0ul - turns : turns;
}

// Cosine and sine of position * inv_freq, times `scale`.
METAL_FUNC float2 rotation(int position, float inv_freq, float scale) {
  const ulong turns = turns_per_position(inv_freq) * ulong(long(position));
  const uint quadrant = uint((turns + (1ul << 61)) >> 62);  // the nearest quarter turn
  const float x =
      float(long(turns - (ulong(quadrant) << 62))) * 1.0842022e-19f;  // 2^-63: units of pi
  const float c = scale * precise::cospi(x);
  const float s = scale * precise::sinpi(x);
  switch (quadrant) {
    case 0:
      return float2(c, s);
    case 1:
      return float2(-s, c);
    case 2:
      return float2(-c, -s);
    default:
      return float2(s, -c);
  }
}

// Elements of a head that one thread handles: `pair` of those that rotate, then two by two of the
// rest.
struct PairOfElements {
  int first, second;
  bool rotates;
};

METAL_FUNC PairOfElements pair_of_elements(constant RopeAppendParams& params, int pair) {
  const int half_dim = params.rotary_dim / 2;
  if (pair >= half_dim) {
    const int rest = params.rotary_dim + 2 * (pair - half_dim);
    return {rest, rest + 1, false};
  }
  if (params.interleaved != 0) return {2 * pair, 2 * pair + 1, true};
  return {pair, pair + half_dim, true};
}

template <typename T>
METAL_FUNC void rotate(const device T* from, device T* to, PairOfElements at, float2 cos_sin,
                       int head_dim) {
  if (at.rotates) {
    const float a = float(from[at.first]);
    const float b = float(from[at.second]);
    to[at.first] = T(a * cos_sin.x - b * cos_sin.y);
    to[at.second] = T(a * cos_sin.y + b * cos_sin.x);
  } else {
    to[at.first] = from[at.first];
    if (at.second < head_dim) to[at.second] = from[at.second];
  }
}

// Grid: (pairs of a head, heads of q and k in runs of kHeads, tokens), one thread each: the sine
// and cosine, dearer than the rest, serve kHeads heads.
template <typename T>
[[kernel]] void rope_append(const device T* q [[buffer(0)]],             // [tokens, Hq, D]
                            const device T* k [[buffer(1)]],             // [tokens, Hkv, D]
                            const device T* v [[buffer(2)]],             // [tokens, Hkv, D]
                            const device int* slots [[buffer(3)]],       // [tokens]
                            const device int* positions [[buffer(4)]],   // [tokens]
                            const device float* inv_freq [[buffer(5)]],  // [rotary_dim / 2]
                            device T* q_rot [[buffer(6)]],               // [tokens, Hq, D]
                            device T* k_pages [[buffer(7)]],             // by the strides of params
                            device T* v_pages [[buffer(8)]],
                            constant RopeAppendParams& params [[buffer(9)]],
                            uint3 at [[thread_position_in_grid]]) {
  constexpr int kHeads = 4;
  const int token = int(at.z);
  const int head_dim = params.head_dim;
  const PairOfElements pair = pair_of_elements(params, int(at.x));
  const float2 cos_sin =
      pair.rotates ? rotation(positions[token], inv_freq[at.x], params.scale) : float2(0.0f);

  const int slot = slots[token];
  const long page = slot / params.page_size;
  const long to = page * params.stride_page + (slot % params.page_size) * params.stride_token;

  const int begin = int(at.y) * kHeads;
  const int end = min(begin + kHeads, params.num_qo_heads + params.num_kv_heads);
  for (int head = begin; head < end; ++head) {
    if (head < params.num_qo_heads) {
      const size_t row =
          (size_t(token) * size_t(params.num_qo_heads) + size_t(head)) * size_t(head_dim);
      rotate(q + row, q_rot + row, pair, cos_sin, head_dim);
    } else if (slot >= 0 && page < params.num_pages) {
      const int kv_head = head - params.num_qo_heads;
      const size_t row =
          (size_t(token) * size_t(params.num_kv_heads) + size_t(kv_head)) * size_t(head_dim);
      const long out = to + kv_head * params.stride_head;
      rotate(k + row, k_pages + out, pair, cos_sin, head_dim);
      v_pages[out + pair.first] = v[row + pair.first];
      if (pair.second < head_dim) v_pages[out + pair.second] = v[row + pair.second];
    }
  }
}

}  // namespace mlxcel
