#include "ops/sample_edit.h"

#include "common/pool.h"
#include "cpu/eval.h"
#include "cpu/kernels/sample_edit.h"

namespace mlxcel {

void EditLogits::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::edit_logits(params, in[0].data<void>(),
                     reinterpret_cast<const EditRow*>(in[1].data<uint32_t>()),
                     in[2].data<int32_t>(), in[3].data<float>(), in[4].data<uint32_t>(),
                     in[5].data<uint32_t>(), out[0].data<float>());
  });
}

void CountTokens::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  check_pool_contiguous(op_, "counts", inputs[0]);
  outputs[0].copy_shared_buffer(inputs[0]);
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::count_tokens(params, in[1].data<int32_t>(), in[2].data<int32_t>(),
                      out[0].data<uint32_t>());
  });
}

}  // namespace mlxcel
