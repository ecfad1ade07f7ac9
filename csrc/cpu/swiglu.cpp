#include "ops/swiglu.h"

#include "cpu/eval.h"
#include "cpu/kernels/swiglu.h"

namespace mlxcel {

void Swiglu::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::swiglu(params, in[0].data<void>(), params.merged ? nullptr : in[1].data<void>(),
                out[0].data<void>());
  });
}

}  // namespace mlxcel
