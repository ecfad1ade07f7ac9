#pragma once

#include <cstdint>

#include "params/paged_attention.h"

namespace mlxcel::cuda {

/// Device pointers of one attention launch; csrc/backend.h has the shapes. Absent inputs are null.
struct AttentionArrays {
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
  void* out;            // null where only partial states are wanted
  float* lse;           // null where not wanted
  float* partial_v;     // [num_partials, Hq, D] f32
  float* partial_lse;   // [num_partials, Hq]
  int32_t* counters;    // [num_q, Hkv] zeros; null: nothing is merged inside the launch
  int32_t num_indices;  // elements of kv_indices
  int32_t evict_first;  // set by the launcher: K and V leave the L2 cache first
};

}  // namespace mlxcel::cuda
