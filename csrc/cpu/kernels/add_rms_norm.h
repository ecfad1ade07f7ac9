#pragma once

#include "params/add_rms_norm.h"

namespace mlxcel::cpu {

/// x, residual, normed, new_residual (rows, hidden) and weight (hidden), all of params.dtype.
/// new_residual may alias x or residual; normed may not. Without a residual (null) this is the norm
/// of x alone: new_residual is not written, and normed may be x. Runs on the thread pool.
void add_rms_norm(const AddRmsNormParams& params, const void* x, const void* residual,
                  const void* weight, void* normed, void* new_residual);

}  // namespace mlxcel::cpu
