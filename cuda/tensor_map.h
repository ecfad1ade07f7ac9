#pragma once

#include <cuda.h>

#include "params/paged_attention.h"

namespace mlxcel::cuda {

/// Describes a K or V pool of 16-bit elements to the tensor memory accelerator: coordinates are
/// (dimension, token of the page, KV head, page), boxes 64 dimensions of up to 64 tokens, which
/// arrive in the 128-byte swizzle.
CUtensorMap pool_map(const PagedAttentionParams& params, const void* pool);

}  // namespace mlxcel::cuda
