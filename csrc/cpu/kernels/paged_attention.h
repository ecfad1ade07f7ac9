#pragma once

#include <cstddef>

#include "params/attention_inputs.h"

namespace mlxcel::cpu {

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
