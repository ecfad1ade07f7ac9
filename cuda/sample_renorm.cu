#include "kernels/sample_renorm.cuh"

#include "launchers.h"
#include "sample_cluster.h"

namespace mlxcel::cuda {

void launch_renorm(const RenormParams& params, const void* x, const RenormValue* values, void* out,
                   Launch& launch) {
  if (params.batch == 0) return;
  dispatch(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_cluster(held_cluster(params.batch, params.vocab, sizeof(ListShared<16>)), [&](auto size) {
      constexpr int C = decltype(size)::value;
      const size_t shared = sizeof(ListShared<C>) + held_bytes(C, params.vocab);
      allow_cluster(renorm_kernel<T, C>, C, 100);
      launch(renorm_kernel<T, C>, static_cast<unsigned>(params.batch * C), kRowThreads, shared,
             params, logits_of(x, params.dtype, params.vocab), values, static_cast<T*>(out));
    });
  });
}

}  // namespace mlxcel::cuda
