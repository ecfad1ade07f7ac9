#include "ops/sample.h"

#include "cpu/eval.h"
#include "cpu/kernels/sample.h"

namespace mlxcel {

void Sample::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch([params = params_, logits = inputs[0].data<void>(),
                    rows = reinterpret_cast<const SampleRow*>(inputs[1].data<uint32_t>()),
                    ids = outputs[0].data<int32_t>(), valid = outputs[1].data<bool>(),
                    rounds = outputs[2].data<int32_t>()] {
    cpu::sample(params, logits, rows, ids, valid, rounds);
  });
}

}  // namespace mlxcel
