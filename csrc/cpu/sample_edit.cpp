#include "ops/sample_edit.h"

#include "common/pool.h"
#include "cpu/eval.h"
#include "cpu/kernels/sample_edit.h"

namespace mlxcel {

void EditLogits::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch([params = params_, logits = inputs[0].data<void>(),
                    rows = reinterpret_cast<const EditRow*>(inputs[1].data<uint32_t>()),
                    bias_ids = inputs[2].data<int32_t>(), bias_values = inputs[3].data<float>(),
                    counts = inputs[4].data<uint32_t>(), masks = inputs[5].data<uint32_t>(),
                    out = outputs[0].data<float>()] {
    cpu::edit_logits(params, logits, rows, bias_ids, bias_values, counts, masks, out);
  });
}

void CountTokens::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  check_pool_contiguous(op_, "counts", inputs[0]);
  outputs[0].copy_shared_buffer(inputs[0]);
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch(
      [params = params_, rows = inputs[1].data<int32_t>(), ids = inputs[2].data<int32_t>(),
       counts = outputs[0].data<uint32_t>()] { cpu::count_tokens(params, rows, ids, counts); });
}

}  // namespace mlxcel
