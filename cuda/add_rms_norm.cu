#include "kernels/add_rms_norm.cuh"

#include <algorithm>

#include "launchers.h"

namespace mlxcel::cuda {

void launch_add_rms_norm(const AddRmsNormParams& params, const void* x, const void* residual,
                         const void* weight, void* normed, void* new_residual, Launch& launch) {
  if (params.rows == 0) return;
  dispatch(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kMaxThreads = 1024;
    const bool wide =
        params.hidden % kWide<T> == 0 && all_aligned(16, x, residual, weight, normed, new_residual);
    const int pieces = wide ? params.hidden / kWide<T> : params.hidden;
    // Few rows: as many threads as the row has pieces, for the shortest critical path. Many rows:
    // two pieces a thread halve the cost of the block reduction.
    const int per_thread = std::max((pieces + kMaxThreads - 1) / kMaxThreads,
                                    params.rows > device_info().num_sms && pieces >= 256 ? 2 : 1);
    const int threads =
        std::min(kMaxThreads, ((pieces + per_thread - 1) / per_thread + 31) / 32 * 32);
    auto run = [&](auto kernel) {
      launch(kernel, static_cast<unsigned>(params.rows), threads, 0, params,
             static_cast<const T*>(x), static_cast<const T*>(residual),
             static_cast<const T*>(weight), static_cast<T*>(normed), static_cast<T*>(new_residual));
    };
    if (!wide)
      run(add_rms_norm_kernel<T, 1, 0>);
    else if (per_thread == 1)
      run(add_rms_norm_kernel<T, kWide<T>, 1>);
    else if (per_thread == 2)
      run(add_rms_norm_kernel<T, kWide<T>, 2>);
    else
      run(add_rms_norm_kernel<T, kWide<T>, 0>);
  });
}

}  // namespace mlxcel::cuda
