#include "kernels/sample_chain.cuh"

#include <algorithm>

#include "launchers.h"
#include "sample_cluster.h"

namespace mlxcel::cuda {

void launch_chain_speculative_sample(const ChainParams& params, const int32_t* draft_ids,
                                     const float* draft_probs, const float* target_probs,
                                     const ChainRow* rows, int32_t* ids, int32_t* num_accepted,
                                     Launch& launch, int cluster) {
  if (params.batch == 0) return;
  if (cluster == 0) {
    const DeviceInfo& device = device_info();
    cluster = std::max(cluster_for(params.batch, params.vocab, device.num_sms),
                       std::min(2, device.max_cluster));
  }
  with_cluster(cluster, [&](auto size) {
    constexpr int C = decltype(size)::value;
    allow_cluster(chain_kernel<C>, C);
    launch(chain_kernel<C>, static_cast<unsigned>(params.batch * C), kRowThreads, 0, params,
           draft_ids, draft_probs, target_probs, rows, ids, num_accepted);
  });
}

}  // namespace mlxcel::cuda
