#include "kernels/rope_append.cuh"

#include "launchers.h"

namespace mlxcel::cuda {

void launch_rope_append(const RopeAppendParams& params, const void* q, const void* k, const void* v,
                        const int32_t* slots, const int32_t* positions, const float* inv_freq,
                        void* q_rot, void* k_pages, void* v_pages, Launch& launch) {
  if (params.num_tokens == 0) return;
  dispatch(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int unit = params.interleaved ? params.rotary_dim : params.rotary_dim / 2;
    const bool wide = params.head_dim % kWide<T> == 0 && unit % kWide<T> == 0 &&
                      all_aligned(16, q, k, v, q_rot, k_pages, v_pages);
    const int n = wide ? kWide<T> : 1;
    const int items = rope_items(params, n) * (params.num_qo_heads + 2 * params.num_kv_heads);
    auto run = [&](auto kernel) {
      const int slices = (items + 511) / 512;
      const int threads = ((items + slices - 1) / slices + 31) / 32 * 32;
      launch(kernel, dim3(static_cast<unsigned>(params.num_tokens), static_cast<unsigned>(slices)),
             threads, params.rotary_dim / 2 * sizeof(float2), params, static_cast<const T*>(q),
             static_cast<const T*>(k), static_cast<const T*>(v), slots, positions, inv_freq,
             static_cast<T*>(q_rot), static_cast<T*>(k_pages), static_cast<T*>(v_pages));
    };
    if (wide)
      run(rope_append_kernel<T, kWide<T>>);
    else
      run(rope_append_kernel<T, 1>);
  });
}

}  // namespace mlxcel::cuda
