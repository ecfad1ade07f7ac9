#pragma once

#include "backend.h"

namespace mlxcel::metal {

// One launcher an op; see GpuBackend for inputs and outputs.
void add_rms_norm(const AddRmsNormParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream);
void merge_states(const MergeStatesParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream);
void paged_attention(const PagedAttentionParams& params, const Arrays& inputs, Arrays& outputs,
                     const mx::Stream& stream);
void paged_attention_partial(const PagedAttentionParams& params, const Arrays& inputs,
                             Arrays& outputs, const mx::Stream& stream);
void rope_append(const RopeAppendParams& params, const Arrays& inputs, Arrays& outputs,
                 const mx::Stream& stream);

}  // namespace mlxcel::metal
