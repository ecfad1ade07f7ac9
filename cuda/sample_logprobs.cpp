#include "encoder.h"
#include "glue.h"
#include "launchers.h"

namespace mlxcel::cuda {

void token_logprobs(const TokenLogprobsParams& params, const Arrays& inputs, Arrays& outputs,
                    const mx::Stream& stream) {
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  launch_token_logprobs(params, device_ptr<void>(inputs[0]), device_ptr<int32_t>(inputs[1]),
                        device_ptr<float>(outputs[0]), device_ptr<int32_t>(outputs[1]),
                        device_ptr<int32_t>(outputs[2]), device_ptr<float>(outputs[3]), launch);
}

}  // namespace mlxcel::cuda
