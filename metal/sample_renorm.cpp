#include "launchers.h"
#include "library.h"

namespace mlxcel::metal {

void renorm(const RenormParams& params, const Arrays& inputs, Arrays& outputs,
            const mx::Stream& stream) {
  allocate(outputs[0]);
  if (params.batch == 0) return;
  auto* pipeline = kernel(stream, sources::k_sample_renorm, "renorm", {params.dtype});
  auto& encoder = mx::metal::get_command_encoder(stream);
  encoder.set_compute_pipeline_state(pipeline);
  for (int i = 0; i < 2; ++i) encoder.set_input_array(inputs[i], i);
  encoder.set_output_array(outputs[0], 2);
  encoder.set_bytes(params, 3);
  encoder.dispatch_threadgroups(MTL::Size(params.batch, 1, 1),
                                MTL::Size(row_threads(pipeline, params.vocab), 1, 1));
}

}  // namespace mlxcel::metal
