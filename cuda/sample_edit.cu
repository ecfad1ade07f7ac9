#include "kernels/sample_edit.cuh"

#include "launchers.h"

namespace mlxcel::cuda {

void launch_edit_logits(const EditLogitsParams& params, const void* logits, const EditRow* rows,
                        const int32_t* bias_ids, const float* bias_values, const uint32_t* counts,
                        const uint32_t* masks, float* out, Launch& launch) {
  if (params.batch == 0) return;
  const dim3 grid(params.batch, (params.vocab + kEditTile - 1) / kEditTile);
  dispatch(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    launch(edit_logits_kernel<T>, grid, kEditThreads, 0, params, static_cast<const T*>(logits),
           rows, bias_ids, bias_values, counts, masks, out);
  });
}

void launch_count_tokens(const CountTokensParams& params, const int32_t* rows, const int32_t* ids,
                         uint32_t* counts, Launch& launch) {
  if (params.num_tokens == 0 || params.num_rows == 0) return;
  constexpr unsigned kThreads = 256;
  if (params.reset) {
    launch(clear_counts_kernel, (params.vocab + kThreads - 1) / kThreads, kThreads, 0, params, rows,
           counts);
  }
  launch(count_tokens_kernel, (params.num_tokens + kThreads - 1) / kThreads, kThreads, 0, params,
         rows, ids, counts);
}

}  // namespace mlxcel::cuda
