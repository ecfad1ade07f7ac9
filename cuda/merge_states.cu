#include "kernels/merge_states.cuh"

#include <algorithm>

#include "launchers.h"

namespace mlxcel::cuda {

void launch_merge_states(const MergeStatesParams& params, const void* v_in, const float* lse_in,
                         const int32_t* o_indptr, void* v_out, float* lse_out, Launch& launch) {
  if (params.num_out == 0 || params.num_heads == 0 || params.head_dim == 0) return;
  dispatch(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto run = [&](auto kernel, int n) {
      constexpr int kThreads = 128;
      const int64_t pieces =
          static_cast<int64_t>(params.num_out) * params.num_heads * (params.head_dim / n);
      const int64_t blocks = std::min<int64_t>((pieces + kThreads - 1) / kThreads,
                                               static_cast<int64_t>(device_info().num_sms) * 16);
      launch(kernel, static_cast<unsigned>(blocks), kThreads, 0, params,
             static_cast<const T*>(v_in), lse_in, o_indptr, static_cast<T*>(v_out), lse_out);
    };
    if (params.head_dim % kWide<T> == 0 && all_aligned(16, v_in, v_out)) {
      run(merge_states_kernel<T, kWide<T>>, kWide<T>);
    } else {
      run(merge_states_kernel<T, 1>, 1);
    }
  });
}

}  // namespace mlxcel::cuda
