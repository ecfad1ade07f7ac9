#pragma once

#include "launch.h"
#include "params/add_rms_norm.h"

namespace mlxcel::cuda {

// The launchers: device pointers and params in, kernels into `launch`. They know no MLX. Shapes are
// those of csrc/backend.h. Nothing is enqueued for empty shapes.

void launch_add_rms_norm(const AddRmsNormParams& params, const void* x, const void* residual,
                         const void* weight, void* normed, void* new_residual, Launch& launch);

}  // namespace mlxcel::cuda
