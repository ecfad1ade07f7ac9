#include "ops/rope_append.h"

#include "common/pool.h"
#include "cpu/eval.h"
#include "cpu/kernels/rope_append.h"

namespace mlxcel {

void RopeAppend::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  check_pool_contiguous(op_, "k_pages", inputs[3]);
  check_pool_contiguous(op_, "v_pages", inputs[4]);
  outputs[1].copy_shared_buffer(inputs[3]);
  outputs[2].copy_shared_buffer(inputs[4]);
  auto& encoder = cpu_encode(stream(), inputs, outputs);
  encoder.dispatch([params = params_, q = inputs[0].data<void>(), k = inputs[1].data<void>(),
                    v = inputs[2].data<void>(), slots = inputs[5].data<int32_t>(),
                    positions = inputs[6].data<int32_t>(), inv_freq = inputs[7].data<float>(),
                    q_rot = outputs[0].data<void>(), k_pages = outputs[1].data<void>(),
                    v_pages = outputs[2].data<void>()] {
    cpu::rope_append(params, q, k, v, slots, positions, inv_freq, q_rot, k_pages, v_pages);
  });
}

}  // namespace mlxcel
