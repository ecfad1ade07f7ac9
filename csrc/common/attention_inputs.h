#pragma once

#include <span>

#include "mlx/array.h"
#include "params/attention_inputs.h"

namespace mlxcel {

namespace mx = mlx::core;

/// Pointers to the inputs of an attention launch, which are in backend.h's order. get<T>(array)
/// is an array's pointer on the device that reads it.
template <class Get>
AttentionInputs attention_inputs(const PagedAttentionParams& params,
                                 std::span<const mx::array> inputs, const Get& get) {
  AttentionInputs in{};
  in.q = get.template operator()<void>(inputs[0]);
  in.k_pages = get.template operator()<void>(inputs[1]);
  in.v_pages = get.template operator()<void>(inputs[2]);
  in.kv_indptr = get.template operator()<int32_t>(inputs[3]);
  in.kv_indices = get.template operator()<int32_t>(inputs[4]);
  in.kv_last_page_len = get.template operator()<int32_t>(inputs[5]);
  in.tiles = get.template operator()<AttentionTile>(inputs[6]);
  in.merge_indptr = get.template operator()<int32_t>(inputs[7]);
  size_t next = 8;
  if (params.has_qo_indptr) in.qo_indptr = get.template operator()<int32_t>(inputs[next++]);
  if (params.has_first_page_offset) {
    in.first_page_offset = get.template operator()<int32_t>(inputs[next++]);
  }
  if (params.has_sinks) in.sinks = get.template operator()<float>(inputs[next++]);
  if (params.has_token_order) in.token_order = get.template operator()<int32_t>(inputs[next++]);
  return in;
}

}  // namespace mlxcel
