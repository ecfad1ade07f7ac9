#include "kernels/sample_filter.cuh"
#include "launchers.h"
#include "sample_cluster.h"

namespace mlxcel::cuda {
void launch_sample(const SampleParams& params, const void* logits, const SampleRow* rows,
                   int32_t* ids, bool* valid, int32_t* rounds, Launch& launch, int cluster) {
  if (params.batch == 0) return;
  const bool filters = params.work == SampleWork::filters;
  if (cluster == 0) {
    cluster = filters ? held_cluster(params.batch, params.vocab)
                      : cluster_for(params.batch, params.vocab);
  }
  with_cluster(cluster, [&](auto size) {
    constexpr int C = decltype(size)::value;
    const auto kernel = filters ? filter_kernel<C> : draw_kernel<C>;
    const size_t shared = filters ? sizeof(ListShared<C>) + size_t{sizeof(float) * kTile} *
                                                                tiles_per_block<C>(params.vocab)
                                  : 0;
    allow_cluster(kernel, C);
    launch(kernel, static_cast<unsigned>(params.batch * C), kRowThreads, shared, params,
           logits_of(logits, params.dtype, params.vocab), rows, SampleOutput{ids, valid, rounds});
  });
}

}  // namespace mlxcel::cuda
