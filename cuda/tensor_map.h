#pragma once

#include <cuda.h>

#include "params/paged_attention.h"

namespace mlxcel::cuda {

/// Describes a K or V pool of 16-bit elements to the tensor memory accelerator: coordinates are
/// (0, 0, 0, KV head, group of eight tokens), boxes up to 16 tokens, which arrive as SwizzledRows.
/// `promotion`: what L2 reads of memory at least. Without one, decode reads 5 % faster (H200,
/// 2026-11-30).
CUtensorMap pool_map(const PagedAttentionParams& params, const void* pool,
                     CUtensorMapL2promotion promotion);

/// Groups of eight tokens from a page to the next, as the map counts them.
inline int page_groups(const PagedAttentionParams& params) {
  return static_cast<int>(params.stride_page / (8 * params.stride_token));
}

}  // namespace mlxcel::cuda
