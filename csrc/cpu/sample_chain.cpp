#include "ops/sample_chain.h"

#include "cpu/eval.h"
#include "cpu/kernels/sample_chain.h"

namespace mlxcel {

void ChainSpeculativeSample::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::chain_speculative_sample(params, in[0].data<int32_t>(), in[1].data<float>(),
                                  in[2].data<float>(),
                                  reinterpret_cast<const ChainRow*>(in[3].data<uint32_t>()),
                                  out[0].data<int32_t>(), out[1].data<int32_t>());
  });
}

}  // namespace mlxcel
