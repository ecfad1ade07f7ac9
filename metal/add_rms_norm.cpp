#include "launchers.h"
#include "library.h"

namespace mlxcel::metal {

void add_rms_norm(const AddRmsNormParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream) {
  for (mx::array& out : outputs) allocate(out);
  if (params.rows == 0) return;
  auto* pipeline = kernel(stream, sources::k_add_rms_norm, "add_rms_norm", {params.dtype});
  auto& encoder = mx::metal::get_command_encoder(stream);
  encoder.set_compute_pipeline_state(pipeline);
  for (int i = 0; i < 3; ++i) encoder.set_input_array(inputs[i], i);
  encoder.set_output_array(outputs[0], 3);
  encoder.set_output_array(outputs[1], 4);
  encoder.set_bytes(params, 5);
  constexpr size_t kElementsPerThread = 4;  // of a row, in one go; as in the kernel
  const size_t threads = threadgroup_size(pipeline, ceil_div(params.hidden, kElementsPerThread));
  encoder.dispatch_threadgroups(MTL::Size(params.rows, 1, 1), MTL::Size(threads, 1, 1));
}

}  // namespace mlxcel::metal
