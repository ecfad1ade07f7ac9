#include "ops/add_rms_norm.h"

#include "cpu/eval.h"
#include "cpu/kernels/add_rms_norm.h"

namespace mlxcel {

void AddRmsNorm::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch([params = params_, x = inputs[0].data<void>(), residual = inputs[1].data<void>(),
                    weight = inputs[2].data<void>(), normed = outputs[0].data<void>(),
                    new_residual = outputs[1].data<void>()] {
    cpu::add_rms_norm(params, x, residual, weight, normed, new_residual);
  });
}

}  // namespace mlxcel
