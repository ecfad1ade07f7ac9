#pragma once

#include "params/swiglu.h"

namespace mlxcel::cpu {

/// out (rows, features) = silu(gate) * up. merged: gate_up (rows, 2 * features), up unused; else
/// gate and up are (rows, features). All of params.dtype. Runs on the thread pool.
void swiglu(const SwigluParams& params, const void* gate, const void* up, void* out);

}  // namespace mlxcel::cpu
