#include "kernels/sample_filter.cuh"
#include "kernels/sample_top_k.cuh"
#include "launchers.h"
#include "sample_cluster.h"

namespace mlxcel::cuda {

void launch_sample(const SampleParams& params, const void* logits, const SampleRow* rows,
                   int32_t* ids, bool* valid, int32_t* rounds, Launch& launch, int cluster) {
  if (params.batch == 0) return;
  const Logits input = logits_of(logits, params.dtype, params.vocab);
  const SampleOutput out{ids, valid, rounds};
  const auto run = [&](auto kernel, int size, size_t shared, int carveout) {
    allow_cluster(kernel, size, carveout);
    launch(kernel, static_cast<unsigned>(params.batch * size), kRowThreads, shared, params, input,
           rows, out);
  };
  const int sms = device_info().num_sms;
  SampleWork work = params.work;
  // Few rows: their blocks have few tokens each, and hold them as cheaply as they stream them.
  if (work == SampleWork::top_k && params.batch <= 16 && cluster == 0) work = SampleWork::filters;
  switch (work) {
    case SampleWork::greedy:
    case SampleWork::temperature:
      if (cluster == 0) cluster = cluster_for(params.batch, params.vocab, sms * 9 / 10);
      return with_cluster(
          cluster, [&](auto size) { run(draw_kernel<size>, size, sizeof(DrawShared<size>), 100); });
    case SampleWork::top_k:
      if (cluster == 0) cluster = cluster_for(params.batch, params.vocab, sms * 9 / 10);
      return with_cluster(cluster, [&](auto size) {
        run(top_k_kernel<size>, size, sizeof(TopKShared<size>), 100);
      });
    case SampleWork::filters:
      if (cluster == 0) {
        cluster = held_cluster(params.batch, params.vocab, sizeof(ListShared<16>));
      }
      return with_cluster(cluster, [&](auto size) {
        run(filter_kernel<size>, size, sizeof(ListShared<size>) + held_bytes(size, params.vocab),
            100);
      });
  }
}

}  // namespace mlxcel::cuda
