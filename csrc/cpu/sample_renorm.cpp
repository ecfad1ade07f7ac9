#include "ops/sample_renorm.h"

#include "cpu/eval.h"
#include "cpu/kernels/sample_renorm.h"

namespace mlxcel {

void Renorm::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch(
      [params = params_, x = inputs[0].data<void>(),
       values = static_cast<const RenormValue*>(static_cast<const void*>(inputs[1].data<void>())),
       out = outputs[0].data<void>()] { cpu::renorm(params, x, values, out); });
}

}  // namespace mlxcel
