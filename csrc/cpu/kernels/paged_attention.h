#pragma once

#include <cstddef>

#include "params/paged_attention.h"

namespace mlxcel::cpu {

/// What a launch reads. Shapes are in backend.h, meanings in params/paged_attention.h.
struct AttentionInputs {
  const void* q;
  const void* k_pages;
  const void* v_pages;
  const int32_t* kv_indptr;
  const int32_t* kv_indices;
  const int32_t* kv_last_page_len;
  const AttentionTile* tiles;
  const int32_t* merge_indptr;
  const int32_t* qo_indptr;          // or nullptr
  const int32_t* first_page_offset;  // or nullptr
  const float* sinks;                // or nullptr
  const int32_t* token_order;        // or nullptr
};

/// out (num_q, num_qo_heads, head_dim) of params.dtype, lse (num_q, num_qo_heads) f32 log2.
void paged_attention(const PagedAttentionParams& params, const AttentionInputs& in, void* out,
                     float* lse);

/// v (num_partials, num_qo_heads, head_dim) f32 normalised, lse (num_partials, num_qo_heads) f32
/// log2. Every tile must have a partial row.
void paged_attention_partial(const PagedAttentionParams& params, const AttentionInputs& in,
                             float* v, float* lse);

/// At least n floats from the start of a cache line on, the calling thread's until its next call.
float* attention_scratch(size_t n);

}  // namespace mlxcel::cpu
