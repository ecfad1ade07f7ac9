#include "kernels/rope_append.cuh"

#include "launchers.h"

namespace mlxcel::cuda {

void launch_rope_append(const RopeAppendParams& params, const RopeAppendArrays& a, Launch& launch) {
  if (params.num_tokens == 0) return;
  dispatch(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int unit = params.interleaved ? params.rotary_dim : params.rotary_dim / 2;
    const bool wide = params.head_dim % kWide<T> == 0 && unit % kWide<T> == 0 &&
                      a.q_stride % kWide<T> == 0 && a.kv_stride % kWide<T> == 0 &&
                      all_aligned(16, a.q, a.k, a.v, a.q_rot, a.k_pages, a.v_pages);
    const int n = wide ? kWide<T> : 1;
    const int items = rope_items(params, n), heads = params.num_qo_heads + 2 * params.num_kv_heads;
    auto run = [&](auto kernel, int table_bytes) {
      const int slices = (items * heads + 511) / 512, rows = (heads + slices - 1) / slices;
      launch(kernel, dim3(static_cast<unsigned>(params.num_tokens), static_cast<unsigned>(slices)),
             dim3(static_cast<unsigned>(items), static_cast<unsigned>(rows)), table_bytes, params,
             static_cast<const T*>(a.q), static_cast<const T*>(a.k), static_cast<const T*>(a.v),
             a.q_stride, a.kv_stride, a.slots, a.positions, a.inv_freq, static_cast<T*>(a.q_rot),
             static_cast<T*>(a.k_pages), static_cast<T*>(a.v_pages));
    };
    const int pairs = params.rotary_dim / 2;
    if (wide)
      run(rope_append_kernel<T, kWide<T>>, RopeTable<kWide<T>>::bytes(pairs));
    else
      run(rope_append_kernel<T, 1>, RopeTable<1>::bytes(pairs));
  });
}

}  // namespace mlxcel::cuda
