#include "encoder.h"
#include "glue.h"
#include "launchers.h"

namespace mlxcel::cuda {

void sample(const SampleParams& params, const Arrays& inputs, Arrays& outputs,
            const mx::Stream& stream) {
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  launch_sample(params, device_ptr<void>(inputs[0]), device_ptr<SampleRow>(inputs[1]),
                device_ptr<int32_t>(outputs[0]), device_ptr<bool>(outputs[1]),
                device_ptr<int32_t>(outputs[2]), launch);
}

}  // namespace mlxcel::cuda
