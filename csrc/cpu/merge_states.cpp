#include "ops/merge_states.h"

#include "cpu/eval.h"
#include "cpu/kernels/merge_states.h"

namespace mlxcel {

void MergeStates::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch([params = params_, v_in = inputs[0].data<void>(),
                    lse_in = inputs[1].data<float>(), o_indptr = inputs[2].data<int32_t>(),
                    v = outputs[0].data<void>(), lse = outputs[1].data<float>()] {
    cpu::merge_states(params, v_in, lse_in, o_indptr, v, lse);
  });
}

}  // namespace mlxcel
