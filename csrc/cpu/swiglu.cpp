#include "ops/swiglu.h"

#include "cpu/eval.h"
#include "cpu/kernels/swiglu.h"

namespace mlxcel {

void Swiglu::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch([params = params_, gate = inputs[0].data<void>(),
                    up = params_.merged ? nullptr : inputs[1].data<void>(),
                    out = outputs[0].data<void>()] { cpu::swiglu(params, gate, up, out); });
}

}  // namespace mlxcel
