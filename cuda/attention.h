#pragma once

#include <span>

#include "attention_arrays.h"
#include "encoder.h"

namespace mlxcel::cuda {

/// Pointers to the inputs of an attention launch, in csrc/backend.h's order.
AttentionArrays attention_arrays(const PagedAttentionParams& params,
                                 std::span<const mx::array> inputs);

/// Makes the workspaces that the plan needs, and launches.
void encode_attention(const PagedAttentionParams& params, AttentionArrays arrays,
                      EncoderLaunch& launch, const mx::Stream& stream);

}  // namespace mlxcel::cuda
