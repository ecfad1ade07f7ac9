#pragma once

#include <optional>
#include <span>

#include "attention_arrays.h"
#include "encoder.h"

namespace mlxcel::cuda {

/// Pointers to the inputs of an attention launch, in csrc/backend.h's order.
AttentionArrays attention_arrays(const PagedAttentionParams& params,
                                 std::span<const mx::array> inputs);

/// Gives the arrays the workspaces that the plan needs; returns the counters among them, which the
/// launch must declare as written.
std::optional<mx::array> add_workspaces(const PagedAttentionParams& params, AttentionArrays& arrays,
                                        const mx::Stream& stream);

}  // namespace mlxcel::cuda
