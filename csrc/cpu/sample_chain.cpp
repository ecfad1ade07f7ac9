#include "ops/sample_chain.h"

#include "cpu/eval.h"
#include "cpu/kernels/sample_chain.h"

namespace mlxcel {

void ChainSpeculativeSample::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch([params = params_, draft_ids = inputs[0].data<int32_t>(),
                    draft_probs = inputs[1].data<float>(), target_probs = inputs[2].data<float>(),
                    rows = reinterpret_cast<const ChainRow*>(inputs[3].data<uint32_t>()),
                    ids = outputs[0].data<int32_t>(), num_accepted = outputs[1].data<int32_t>()] {
    cpu::chain_speculative_sample(params, draft_ids, draft_probs, target_probs, rows, ids,
                                  num_accepted);
  });
}

}  // namespace mlxcel
