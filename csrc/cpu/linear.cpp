#include "cpu/kernels/linear.h"

#include "cpu/eval.h"
#include "ops/linear.h"

namespace mlxcel {

namespace {

/// Weight, scales and offsets, which start at inputs[first].
cpu::LinearArrays weight_arrays(const LinearParams& params, const Arrays& inputs, int first) {
  cpu::LinearArrays arrays{};
  arrays.weight = inputs[first].data<void>();
  if (params.group_size != 0) {
    arrays.scales = inputs[first + 1].data<void>();
    arrays.offsets = inputs[first + 2].data<void>();
  }
  return arrays;
}

}  // namespace

void Linear::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  cpu::LinearArrays arrays = weight_arrays(params_, inputs, 1);
  arrays.x = inputs[0].data<void>();
  arrays.bias = params_.has_bias ? inputs.back().data<void>() : nullptr;
  arrays.out = outputs[0].data<void>();
  encoder.dispatch([params = params_, arrays] { cpu::linear(params, arrays); });
}

void PackLinear::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  const bool quantized = params_.group_size != 0;
  encoder.dispatch([params = params_, arrays = weight_arrays(params_, inputs, 0),
                    weight = outputs[0].data<void>(),
                    scales = quantized ? outputs[1].data<void>() : nullptr,
                    offsets = quantized ? outputs[2].data<void>() : nullptr] {
    cpu::pack_linear(params, arrays, weight, scales, offsets);
  });
}

void PackedRows::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch([params = params_, arrays = weight_arrays(params_, inputs, 1),
                    ids = inputs[0].data<int32_t>(),
                    out = outputs[0].data<void>()] { cpu::linear_rows(params, arrays, ids, out); });
}

}  // namespace mlxcel
