#include "ops/merge_states.h"

#include "cpu/eval.h"
#include "cpu/kernels/merge_states.h"

namespace mlxcel {

void MergeStates::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::merge_states(params, in[0].data<void>(), in[1].data<float>(), in[2].data<int32_t>(),
                      out[0].data<void>(), out[1].data<float>());
  });
}

}  // namespace mlxcel
