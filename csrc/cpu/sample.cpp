#include "ops/sample.h"

#include "cpu/eval.h"
#include "cpu/kernels/sample.h"

namespace mlxcel {

void Sample::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  cpu_dispatch(stream(), inputs, outputs, [params = params_](const Arrays& in, Arrays& out) {
    cpu::sample(params, in[0].data<void>(),
                reinterpret_cast<const SampleRow*>(in[1].data<uint32_t>()), out[0].data<int32_t>(),
                out[1].data<bool>(), out[2].data<int32_t>());
  });
}

}  // namespace mlxcel
