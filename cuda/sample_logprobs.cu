#include "kernels/sample_logprobs.cuh"

#include "launchers.h"
#include "sample_cluster.h"

namespace mlxcel::cuda {

void launch_token_logprobs(const TokenLogprobsParams& params, const void* logits,
                           const int32_t* ids, float* logprobs, int32_t* ranks, int32_t* top_ids,
                           float* top_logprobs, Launch& launch) {
  if (params.batch == 0) return;
  with_cluster(held_cluster(params.batch, params.vocab, sizeof(ListShared<16>)), [&](auto size) {
    constexpr int C = decltype(size)::value;
    const size_t shared = sizeof(ListShared<C>) + held_bytes(C, params.vocab);
    allow_cluster(logprobs_kernel<C>, C, 100);
    launch(logprobs_kernel<C>, static_cast<unsigned>(params.batch * C), kRowThreads, shared, params,
           logits_of(logits, params.dtype, params.vocab), ids,
           LogprobsOutput{logprobs, ranks, top_ids, top_logprobs});
  });
}

}  // namespace mlxcel::cuda
