#pragma once

#include "params/paged_attention.h"

namespace mlxcel {

/// Pointers to what an attention launch reads. Shapes are in backend.h, meanings in
/// paged_attention.h; absent inputs are null.
struct AttentionInputs {
  const void* q;
  const void* k_pages;
  const void* v_pages;
  const int32_t* kv_indptr;
  const int32_t* kv_indices;
  const int32_t* kv_last_page_len;
  const AttentionTile* tiles;
  const int32_t* merge_indptr;
  const int32_t* qo_indptr;
  const int32_t* first_page_offset;
  const float* sinks;
  const int32_t* token_order;
};

}  // namespace mlxcel
