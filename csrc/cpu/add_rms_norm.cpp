#include "ops/add_rms_norm.h"

#include "cpu/eval.h"
#include "cpu/kernels/add_rms_norm.h"

namespace mlxcel {

void AddRmsNorm::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::add_rms_norm(params, in[0].data<void>(), in[1].data<void>(), in[2].data<void>(),
                      out[0].data<void>(), out[1].data<void>());
  });
}

}  // namespace mlxcel
