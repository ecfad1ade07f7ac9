#include "encoder.h"
#include "glue.h"
#include "launchers.h"

namespace mlxcel::cuda {

void edit_logits(const EditLogitsParams& params, const Arrays& inputs, Arrays& outputs,
                 const mx::Stream& stream) {
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  launch_edit_logits(params, device_ptr<void>(inputs[0]), device_ptr<EditRow>(inputs[1]),
                     device_ptr<int32_t>(inputs[2]), device_ptr<float>(inputs[3]),
                     device_ptr<uint32_t>(inputs[4]), device_ptr<uint32_t>(inputs[5]),
                     device_ptr<float>(outputs[0]), launch);
}

void count_tokens(const CountTokensParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream) {
  outputs[0].copy_shared_buffer(inputs[0]);
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  launch_count_tokens(params, device_ptr<int32_t>(inputs[1]), device_ptr<int32_t>(inputs[2]),
                      device_ptr<uint32_t>(outputs[0]), launch);
}

}  // namespace mlxcel::cuda
