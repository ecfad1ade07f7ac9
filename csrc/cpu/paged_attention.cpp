#include "ops/paged_attention.h"

#include "common/pool.h"
#include "cpu/eval.h"
#include "cpu/kernels/paged_attention.h"

namespace mlxcel {

void PagedAttention::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  check_pool_contiguous(op_, "k_pages", inputs[1]);
  check_pool_contiguous(op_, "v_pages", inputs[2]);
  cpu::AttentionInputs in{};
  in.q = inputs[0].data<void>();
  in.k_pages = inputs[1].data<void>();
  in.v_pages = inputs[2].data<void>();
  in.kv_indptr = inputs[3].data<int32_t>();
  in.kv_indices = inputs[4].data<int32_t>();
  in.kv_last_page_len = inputs[5].data<int32_t>();
  in.tiles = inputs[6].data<AttentionTile>();
  in.merge_indptr = inputs[7].data<int32_t>();
  size_t next = 8;
  if (params_.has_qo_indptr) in.qo_indptr = inputs[next++].data<int32_t>();
  if (params_.has_first_page_offset) in.first_page_offset = inputs[next++].data<int32_t>();
  if (params_.has_sinks) in.sinks = inputs[next++].data<float>();
  if (params_.has_token_order) in.token_order = inputs[next++].data<int32_t>();
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
