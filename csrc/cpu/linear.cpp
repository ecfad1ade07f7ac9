#include "cpu/kernels/linear.h"

#include "cpu/eval.h"
#include "ops/linear.h"

namespace mlxcel {

void Linear::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  const bool quantized = params_.group_size != 0;
  cpu::LinearArrays arrays{};
  arrays.x = inputs[0].data<void>();
  arrays.weight = inputs[1].data<void>();
  arrays.scales = quantized ? inputs[2].data<void>() : nullptr;
  arrays.offsets = quantized ? inputs[3].data<void>() : nullptr;
  arrays.bias = params_.has_bias ? inputs.back().data<void>() : nullptr;
  arrays.out = outputs[0].data<void>();
  encoder.dispatch([params = params_, arrays] { cpu::linear(params, arrays); });
}

}  // namespace mlxcel
