#pragma once

#include <cstdint>

namespace mlxcel {

/// Floating-point types that pools, activations and logits may have.
enum class FloatType : int32_t { f32 = 0, f16 = 1, bf16 = 2 };

}  // namespace mlxcel
