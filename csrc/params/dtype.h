#pragma once

#include <cstdint>

// A constant of namespace scope: Metal wants to know its address space.
#if defined(__METAL_VERSION__)
#define MLXCEL_CONSTANT constant constexpr
#else
#define MLXCEL_CONSTANT constexpr
#endif

namespace mlxcel {

/// Floating-point types that pools, activations and logits may have.
enum class FloatType : int32_t { f32 = 0, f16 = 1, bf16 = 2 };

}  // namespace mlxcel
