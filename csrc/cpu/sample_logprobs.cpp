#include "ops/sample_logprobs.h"

#include "cpu/eval.h"
#include "cpu/kernels/sample_logprobs.h"

namespace mlxcel {

void TokenLogprobs::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::token_logprobs(params, in[0].data<void>(), in[1].data<int32_t>(), out[0].data<float>(),
                        out[1].data<int32_t>(), out[2].data<int32_t>(), out[3].data<float>());
  });
}

}  // namespace mlxcel
