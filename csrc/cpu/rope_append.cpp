#include "ops/rope_append.h"

#include <vector>

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
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    std::vector<float> rotations(static_cast<size_t>(params.num_tokens) * params.rotary_dim);
    cpu::rope_rotations(params, in[6].data<int32_t>(), in[7].data<float>(), rotations.data());
    const cpu::RopeAppendArrays arrays{in[0].data<void>(),
                                       in[1].data<void>(),
                                       in[2].data<void>(),
                                       int64_t{params.num_qo_heads} * params.head_dim,
                                       int64_t{params.num_kv_heads} * params.head_dim,
                                       in[5].data<int32_t>(),
                                       rotations.data(),
                                       out[0].data<void>(),
                                       out[1].data<void>(),
                                       out[2].data<void>()};
    cpu::rope_append(params, arrays);
  });
}

}  // namespace mlxcel
