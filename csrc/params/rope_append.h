#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace mlxcel {

/// Rotates q and k by their positions and writes k and v into the pages. Strides are in elements.
struct RopeAppendParams {
  int32_t num_tokens;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;   // even, at most head_dim; the rest of a head is copied
  int32_t interleaved;  // 0: pairs (i, i + rotary_dim / 2), NeoX; 1: pairs (2i, 2i + 1)
  int32_t page_size;
  int32_t num_pages;
  int64_t stride_page;  // of both pools
  int64_t stride_token;
  int64_t stride_head;
  float scale;         // multiplies cos and sin (yarn's attention factor), else 1
  FloatType dtype;     // of q, k and v
  FloatType kv_dtype;  // of pools: dtype, or on CPU 16 bits beside f32
};
static_assert(sizeof(RopeAppendParams) == 72);

}  // namespace mlxcel
