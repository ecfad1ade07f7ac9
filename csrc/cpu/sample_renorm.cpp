#include "ops/sample_renorm.h"

#include "cpu/eval.h"
#include "cpu/kernels/sample_renorm.h"

namespace mlxcel {

void Renorm::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::renorm(params, in[0].data<void>(),
                static_cast<const RenormValue*>(static_cast<const void*>(in[1].data<void>())),
                out[0].data<void>());
  });
}

}  // namespace mlxcel
