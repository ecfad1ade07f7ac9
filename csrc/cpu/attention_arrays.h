#pragma once

#include <span>

#include "backend.h"
#include "cpu/kernels/paged_attention.h"

namespace mlxcel {

/// Pointers to the inputs of an attention launch, in backend.h's order.
inline cpu::AttentionInputs attention_arrays(const PagedAttentionParams& params,
                                             std::span<const mx::array> inputs) {
  cpu::AttentionInputs in{};
  in.q = inputs[0].data<void>();
  in.k_pages = inputs[1].data<void>();
  in.v_pages = inputs[2].data<void>();
  in.kv_indptr = inputs[3].data<int32_t>();
  in.kv_indices = inputs[4].data<int32_t>();
  in.kv_last_page_len = inputs[5].data<int32_t>();
  in.tiles = inputs[6].data<AttentionTile>();
  in.merge_indptr = inputs[7].data<int32_t>();
  size_t next = 8;
  if (params.has_qo_indptr) in.qo_indptr = inputs[next++].data<int32_t>();
  if (params.has_first_page_offset) in.first_page_offset = inputs[next++].data<int32_t>();
  if (params.has_sinks) in.sinks = inputs[next++].data<float>();
  if (params.has_token_order) in.token_order = inputs[next++].data<int32_t>();
  return in;
}

}  // namespace mlxcel
