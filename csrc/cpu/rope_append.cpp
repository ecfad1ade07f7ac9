#include "ops/rope_append.h"

#include "common/pool.h"
#include "cpu/eval.h"
#include "cpu/kernels/rope_append.h"

namespace mlxcel {

void RopeAppend::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  check_pool_contiguous(op_, "k_pages", inputs[3]);
  check_pool_contiguous(op_, "v_pages", inputs[4]);
  check_pools_apart(op_, inputs[3], inputs[4]);
  outputs[1].copy_shared_buffer(inputs[3]);
  outputs[2].copy_shared_buffer(inputs[4]);
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  const cpu::RopeAppendArrays arrays{inputs[0].data<void>(),
                                     inputs[1].data<void>(),
                                     inputs[2].data<void>(),
                                     int64_t{params_.num_qo_heads} * params_.head_dim,
                                     int64_t{params_.num_kv_heads} * params_.head_dim,
                                     inputs[5].data<int32_t>(),
                                     inputs[6].data<int32_t>(),
                                     inputs[7].data<float>(),
                                     outputs[0].data<void>(),
                                     outputs[1].data<void>(),
                                     outputs[2].data<void>()};
  encoder.dispatch([params = params_, arrays] { cpu::rope_append(params, arrays); });
}

}  // namespace mlxcel
