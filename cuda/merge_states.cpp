#include "encoder.h"
#include "glue.h"
#include "launchers.h"

namespace mlxcel::cuda {

void merge_states(const MergeStatesParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream) {
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  launch_merge_states(params, device_ptr<void>(inputs[0]), device_ptr<float>(inputs[1]),
                      device_ptr<int32_t>(inputs[2]), device_ptr<void>(outputs[0]),
                      device_ptr<float>(outputs[1]), launch);
}

}  // namespace mlxcel::cuda
