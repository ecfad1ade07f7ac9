#pragma once

#include <cfloat>

#include "kernels/sample_list.cuh"
#include "kernels/sample_noise.cuh"
#include "params/sample_logprobs.h"

namespace mlxcel::cuda {

/// Largest value of the row; NaN counts as absent.
struct RowMax {
  float max;
  uint32_t unused[3];
};

__device__ __forceinline__ RowMax combine(const RowMax& a, const RowMax& b) {
  return {fmaxf(a.max, b.max), {}};
}

struct LogprobsOutput {
  float* logprobs;
  int32_t* ranks;
  int32_t* top_ids;
  float* top_logprobs;
};

/// Reads each row once: its maximum, then from shared memory the mass, the rank of the given token
/// and the first num_top tokens, which rank 0's block puts in order by counting.
template <int C>
__global__ void MLXCEL_CLUSTER(C) __launch_bounds__(kRowThreads)
    logprobs_kernel(TokenLogprobsParams params, Logits logits, const int32_t* __restrict__ ids,
                    LogprobsOutput out) {
  extern __shared__ float4 dynamic_shared[];
  auto& shared = *reinterpret_cast<ListShared<C>*>(dynamic_shared);
  RowCluster<C> cluster(shared.slots);
  auto held = kept_row(cluster, logits, reinterpret_cast<float*>(&shared + 1), params.vocab);
  const int vocab = params.vocab, at = cluster.row(), num_top = params.num_top;
  RowReader<C, 4> reader(logits, at, vocab, cluster.rank());
  const int id = ids[at];
  const float drawn =
      id >= 0 && id < vocab ? logits.at(static_cast<int64_t>(at) * vocab + id) : -INFINITY;
  RowMax mine{-INFINITY, {}};
  reader.for_quads([&](int tile, int, const Quad& q) {
    held.store(tile, q);
#pragma unroll
    for (int i = 0; i < 4; ++i) mine.max = fmaxf(mine.max, q.at[i]);
  });
  const float thread_max = mine.max;
  const float max = cluster.reduce(mine).max;

  // -inf is a value like others here: a row may have fewer finite tokens than are asked for.
  float threshold = -INFINITY;
  if (num_top > 0 && num_top < vocab) {
    threshold = top_threshold(cluster, num_top, thread_max);
  }
  Sums sums{};
  float mass = 0.0f;
  int at_least = 0;
  held.for_each([&](float v, int i) {
    mass += fast_exp2((v - max) * 1.44269504f);
    at_least += v >= drawn && i < vocab;
  });
  sums.mass[0] = mass;
  sums.mass[1] = at_least;
  sums = cluster.reduce(sums);
  const float lse = max + log(static_cast<float>(sums.mass[0]));
  if (cluster.rank() == 0 && threadIdx.x == 0) {
    out.logprobs[at] = drawn - lse;
    out.ranks[at] = static_cast<int32_t>(sums.mass[1]);
  }
  if (num_top == 0) return;

  Cut cut{threshold, vocab - 1};
  Listed listed = send_to_list(held, shared.list, cut, 0.0f);
  if (listed.count > kListSlots) {
    // Too many tokens reach the threshold: select exactly, and list again.
    cut = held.select_top(num_top, {-FLT_MAX, vocab - 1}, max);
    listed = send_to_list(held, shared.list, cut, 0.0f);
  }
  if (cluster.rank() != 0) return;
  const int n = rank_list(shared.list, min(listed.count, kListSlots), num_top);
  for (int i = threadIdx.x; i < num_top; i += kRowThreads) {
    const uint64_t key = i < n ? shared.list.rank[i] : 0;
    out.top_ids[at * num_top + i] = i < n ? key_index(key) : 0;
    out.top_logprobs[at * num_top + i] = i < n ? key_value(key) - lse : -INFINITY;
  }
}

}  // namespace mlxcel::cuda
