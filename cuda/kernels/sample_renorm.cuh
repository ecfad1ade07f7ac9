#pragma once

#include <cfloat>

#include "kernels/sample_list.cuh"
#include "params/sample_renorm.h"

namespace mlxcel::cuda {

struct MaxOf {
  float max;
  uint32_t unused[3];
};

__device__ __forceinline__ MaxOf combine(const MaxOf& a, const MaxOf& b) {
  return {fmaxf(a.max, b.max), {}};
}

/// Which tokens a row keeps. `mass` is the row's sum of positive values, `max` its largest and
/// `thread_max` the calling thread's. Of probabilities only positive ones: what else a row holds
/// may be NaN or negative.
template <class Row>
__device__ __forceinline__ Cut renorm_cut(const Row& row, TokenList& list, RenormKind kind,
                                          RenormValue value, double mass, float thread_max,
                                          float max) {
  const int vocab = row.vocab();
  const Cut positive{FLT_TRUE_MIN, vocab - 1};
  const auto self = [](float v) { return v; };
  const auto top = [&](Cut within) {
    return value.k <= kMaxListed ? select_listed(row, list, value.k, within, thread_max, max)
                                 : row.select_top(value.k, within, max);
  };
  const bool has_top_k = value.k > 0 && value.k < vocab;
  switch (kind) {
    case RenormKind::top_k_probs:
      return has_top_k ? top(positive) : positive;
    case RenormKind::top_k_mask:
      return has_top_k ? top({-FLT_MAX, vocab - 1}) : Cut{-INFINITY, vocab - 1};
    case RenormKind::top_p_probs: {
      if (value.p >= 1.0f || !(mass > 0.0)) return positive;
      // Nothing reaches a target of 0; the first token reaches any smaller one than itself.
      const double target = fmaxf(value.p, 0.0f) * mass;
      // All tokens below this have less than half of what may be left out.
      const float floor = static_cast<float>((mass - target) / (2.0 * vocab));
      const Cut within{fmaxf(FLT_TRUE_MIN, fminf(floor, max)), vocab - 1};
      return row.select_mass(target > 0.0 ? target : FLT_TRUE_MIN, within, max, self);
    }
    default:
      return {fmaxf(FLT_TRUE_MIN, fminf(value.p, 1.0f) * max), vocab - 1};
  }
}

/// One read of the row and one write; the selection works in shared memory.
template <class T, int C>
__global__ void MLXCEL_CLUSTER(C) __launch_bounds__(kRowThreads)
    renorm_kernel(RenormParams params, Logits x, const RenormValue* __restrict__ values, T* out) {
  extern __shared__ float4 dynamic_shared[];
  auto& shared = *reinterpret_cast<ListShared<C>*>(dynamic_shared);
  RowCluster<C> cluster(shared.slots);
  auto held = kept_row(cluster, x, reinterpret_cast<float*>(&shared + 1), params.vocab);
  const int vocab = params.vocab;
  const bool mask = params.kind == RenormKind::top_k_mask;
  RowReader<C, 4> reader(x, cluster.row(), vocab, cluster.rank());
  const RenormValue value = values[cluster.row()];

  Sums sums{};
  float mass = 0.0f, max = mask ? -INFINITY : 0.0f;
  reader.for_quads([&](int tile, int, Quad q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!mask) q.at[i] = fmaxf(q.at[i], 0.0f);  // NaN too is 0
      mass += q.at[i];
      max = fmaxf(max, q.at[i]);
    }
    held.store(tile, q);
  });
  if (!mask) {
    sums.mass[0] = mass;
    sums = cluster.reduce(sums);
  }
  const float row_max = cluster.reduce(MaxOf{max, {}}).max;
  const Cut cut = renorm_cut(held, shared.list, params.kind, value, sums.mass[0], max, row_max);
  float scale = 1.0f;
  if (!mask) {
    const double kept =
        held.mass([](float v) { return v; }, [&](float v, int i) { return cut.keeps(v, i); });
    scale = kept > 0.0 ? static_cast<float>(1.0 / kept) : 0.0f;
  }
  const int64_t begin = static_cast<int64_t>(cluster.row()) * vocab;
  held.for_each([&](float v, int i) {
    if (i >= vocab) return;
    const bool keep = cut.keeps(v, i);
    out[begin + i] = from_float<T>(mask ? (keep ? v : -INFINITY) : (keep ? v * scale : 0.0f));
  });
}

}  // namespace mlxcel::cuda
