#include "encoder.h"
#include "glue.h"
#include "launchers.h"

namespace mlxcel::cuda {

void linear(const LinearParams& params, const Arrays& inputs, Arrays& outputs,
            const mx::Stream& stream) {
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  LinearArrays arrays{};
  arrays.x = device_ptr<void>(inputs[0]);
  arrays.weight = device_ptr<void>(inputs[1]);
  if (params.group_size != 0) {
    arrays.scales = device_ptr<void>(inputs[2]);
    arrays.offsets = device_ptr<void>(inputs[3]);
  }
  if (params.has_bias) arrays.bias = device_ptr<void>(inputs.back());
  arrays.out = device_ptr<void>(outputs[0]);
  launch_linear(params, arrays, false, launch);
}

}  // namespace mlxcel::cuda
