#include "launchers.h"
#include "library.h"

namespace mlxcel::metal {

void token_logprobs(const TokenLogprobsParams& params, const Arrays& inputs, Arrays& outputs,
                    const mx::Stream& stream) {
  for (mx::array& out : outputs) allocate(out);
  if (params.batch == 0) return;
  auto* pipeline = kernel(stream, sources::k_sample_logprobs, "token_logprobs", {params.dtype});
  auto& encoder = mx::metal::get_command_encoder(stream);
  encoder.set_compute_pipeline_state(pipeline);
  for (int i = 0; i < 2; ++i) encoder.set_input_array(inputs[i], i);
  for (int i = 0; i < 4; ++i) {
    if (outputs[i].size() > 0) {
      encoder.set_output_array(outputs[i], 2 + i);
    } else {
      mx::array unused = workspace({1}, outputs[i].dtype(), stream);
      encoder.set_output_array(unused, 2 + i);
    }
  }
  encoder.set_bytes(params, 6);
  encoder.dispatch_threadgroups(MTL::Size(params.batch, 1, 1),
                                MTL::Size(row_threads(pipeline, params.vocab), 1, 1));
}

}  // namespace mlxcel::metal
