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
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::LinearArrays arrays = weight_arrays(params, in, 1);
    arrays.x = in[0].data<void>();
    arrays.bias = params.has_bias ? in.back().data<void>() : nullptr;
    arrays.out = out[0].data<void>();
    cpu::linear(params, arrays);
  });
}

void PackLinear::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    const bool quantized = params.group_size != 0;
    cpu::pack_linear(params, weight_arrays(params, in, 0), out[0].data<void>(),
                     quantized ? out[1].data<void>() : nullptr,
                     quantized ? out[2].data<void>() : nullptr);
  });
}

void PackedRows::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::linear_rows(params, weight_arrays(params, in, 1), in[0].data<int32_t>(),
                     out[0].data<void>());
  });
}

}  // namespace mlxcel
