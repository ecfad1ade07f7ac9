#pragma once

#include "backend.h"

namespace mlxcel::cuda {

// One function per entry of GpuBackend: allocates outputs, declares arrays, calls the launcher.

void add_rms_norm(const AddRmsNormParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream);

void merge_states(const MergeStatesParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream);

void rope_append(const RopeAppendParams& params, const Arrays& inputs, Arrays& outputs,
                 const mx::Stream& stream);

}  // namespace mlxcel::cuda
