#include "ops/paged_attention.h"

#include "common/pool.h"
#include "cpu/attention_arrays.h"
#include "cpu/eval.h"
#include "cpu/kernels/paged_attention.h"

namespace mlxcel {

void PagedAttention::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  check_pool_contiguous(op_, "k_pages", inputs[1]);
  check_pool_contiguous(op_, "v_pages", inputs[2]);
  cpu_dispatch(stream(), inputs, outputs,
               [params = params_, partial = partial_](const Arrays& in, Arrays& out) {
                 const AttentionInputs arrays = attention_arrays(params, in);
                 if (partial) {
                   cpu::paged_attention_partial(params, arrays, out[0].data<float>(),
                                                out[1].data<float>());
                 } else {
                   cpu::paged_attention(params, arrays, out[0].data<void>(), out[1].data<float>());
                 }
               });
}

}  // namespace mlxcel
