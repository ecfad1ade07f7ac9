#include "launchers.h"
#include "library.h"

namespace mlxcel::metal {

void merge_states(const MergeStatesParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream) {
  for (mx::array& out : outputs) allocate(out);
  if (outputs[0].size() == 0) return;
  auto* pipeline = kernel(stream, sources::k_merge_states, "merge_states", {params.dtype});
  auto& encoder = mx::metal::get_command_encoder(stream);
  encoder.set_compute_pipeline_state(pipeline);
  for (int i = 0; i < 3; ++i) encoder.set_input_array(inputs[i], i);
  for (int i = 0; i < 2; ++i) encoder.set_output_array(outputs[i], 3 + i);
  encoder.set_bytes(params, 5);
  const size_t width = threadgroup_size(pipeline, std::min(params.head_dim, 256));
  encoder.dispatch_threads(MTL::Size(params.head_dim, params.num_heads, params.num_out),
                           MTL::Size(width, 1, 1));
}

}  // namespace mlxcel::metal
