#include "encoder.h"
#include "glue.h"
#include "launchers.h"

namespace mlxcel::cuda {

void rope_append(const RopeAppendParams& params, const Arrays& inputs, Arrays& outputs,
                 const mx::Stream& stream) {
  // The pools stay where they are: the outputs are new handles on the inputs' buffers.
  outputs[1].copy_shared_buffer(inputs[3]);
  outputs[2].copy_shared_buffer(inputs[4]);
  EncoderLaunch launch(stream);
  launch.declare(inputs, outputs, stream);
  launch_rope_append(
      params,
      {device_ptr<void>(inputs[0]), device_ptr<void>(inputs[1]), device_ptr<void>(inputs[2]),
       int64_t{params.num_qo_heads} * params.head_dim,
       int64_t{params.num_kv_heads} * params.head_dim, device_ptr<int32_t>(inputs[5]),
       device_ptr<int32_t>(inputs[6]), device_ptr<float>(inputs[7]), device_ptr<void>(outputs[0]),
       device_ptr<void>(outputs[1]), device_ptr<void>(outputs[2])},
      launch);
}

}  // namespace mlxcel::cuda
