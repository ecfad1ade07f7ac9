#include "encoder.h"
#include "glue.h"
#include "launchers.h"

namespace mlxcel::cuda {

void renorm(const RenormParams& params, const Arrays& inputs, Arrays& outputs,
            const mx::Stream& stream) {
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  launch_renorm(params, device_ptr<void>(inputs[0]), device_ptr<RenormValue>(inputs[1]),
                device_ptr<void>(outputs[0]), launch);
}

}  // namespace mlxcel::cuda
