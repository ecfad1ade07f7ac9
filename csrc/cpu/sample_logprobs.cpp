#include "ops/sample_logprobs.h"

#include "cpu/eval.h"
#include "cpu/kernels/sample_logprobs.h"

namespace mlxcel {

void TokenLogprobs::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch([params = params_, logits = inputs[0].data<void>(),
                    ids = inputs[1].data<int32_t>(), logprobs = outputs[0].data<float>(),
                    ranks = outputs[1].data<int32_t>(), top_ids = outputs[2].data<int32_t>(),
                    top_logprobs = outputs[3].data<float>()] {
    cpu::token_logprobs(params, logits, ids, logprobs, ranks, top_ids, top_logprobs);
  });
}

}  // namespace mlxcel
