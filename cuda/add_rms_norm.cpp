#include "encoder.h"
#include "glue.h"
#include "launchers.h"

namespace mlxcel::cuda {

void add_rms_norm(const AddRmsNormParams& params, const Arrays& inputs, Arrays& outputs,
                  const mx::Stream& stream) {
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  launch_add_rms_norm(params, device_ptr<void>(inputs[0]), device_ptr<void>(inputs[1]),
                      device_ptr<void>(inputs[2]), device_ptr<void>(outputs[0]),
                      device_ptr<void>(outputs[1]), launch);
}

}  // namespace mlxcel::cuda
