#include "encoder.h"
#include "glue.h"
#include "launchers.h"

namespace mlxcel::cuda {

void chain_speculative_sample(const ChainParams& params, const Arrays& inputs, Arrays& outputs,
                              const mx::Stream& stream) {
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  launch_chain_speculative_sample(params, device_ptr<int32_t>(inputs[0]),
                                  device_ptr<float>(inputs[1]), device_ptr<float>(inputs[2]),
                                  device_ptr<ChainRow>(inputs[3]), device_ptr<int32_t>(outputs[0]),
                                  device_ptr<int32_t>(outputs[1]), launch);
}

}  // namespace mlxcel::cuda
