#include "ops/paged_attention.h"

#include "common/pool.h"
#include "cpu/attention_arrays.h"
#include "cpu/eval.h"
#include "cpu/kernels/paged_attention.h"

namespace mlxcel {

void PagedAttention::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  check_pool_contiguous(op_, "k_pages", inputs[1]);
  check_pool_contiguous(op_, "v_pages", inputs[2]);
  const AttentionInputs in = attention_arrays(params_, inputs);
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  if (partial_) {
    encoder.dispatch(
        [params = params_, in, v = outputs[0].data<float>(), lse = outputs[1].data<float>()] {
          cpu::paged_attention_partial(params, in, v, lse);
        });
  } else {
    encoder.dispatch(
        [params = params_, in, out = outputs[0].data<void>(), lse = outputs[1].data<float>()] {
          cpu::paged_attention(params, in, out, lse);
        });
  }
}

}  // namespace mlxcel
