#pragma once

#include <cfloat>

#include "kernels/sample_select.cuh"
#include "params/sample_renorm.h"

namespace mlxcel::cuda {

struct MaxOf {
  float max;
  uint32_t unused[3];
};

__device__ __forceinline__ MaxOf combine(const MaxOf& a, const MaxOf& b) {
  return {fmaxf(a.max, b.max), {}};
}

template <int C>
struct alignas(16) RenormShared {
  ExchangeSlots<C> slots;
};

/// Which tokens a row keeps. `mass` is the row's sum of positive values, `max` its largest. Of
/// probabilities only positive ones: what else a row holds may be NaN or negative.
template <class Row>
__device__ __forceinline__ Cut renorm_cut(const Row& row, RenormKind kind, RenormValue value,
                                          double mass, float max) {
  const int vocab = row.vocab();
  const Cut positive{FLT_TRUE_MIN, vocab - 1}, all{-INFINITY, vocab - 1};
  const auto self = [](float v) { return v; };
  switch (kind) {
    case RenormKind::top_k_probs:
      return value.k > 0 && value.k < vocab ? row.select_top(value.k, positive) : positive;
    case RenormKind::top_k_mask:
      return value.k > 0 && value.k < vocab ? row.select_top(value.k, {-FLT_MAX, vocab - 1}) : all;
    case RenormKind::top_p_probs: {
      if (value.p >= 1.0f || !(mass > 0.0)) return positive;
      // Nothing reaches a target of 0; the first token reaches any smaller one than itself.
      const double target = fmaxf(value.p, 0.0f) * mass;
      return row.select_mass(target > 0.0 ? target : FLT_TRUE_MIN, positive, self);
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
  auto& shared = *reinterpret_cast<RenormShared<C>*>(dynamic_shared);
  RowCluster<C> cluster(shared.slots);
  auto held = kept_row(cluster, x, reinterpret_cast<float*>(&shared + 1), params.vocab);
  const int vocab = params.vocab;
  const bool mask = params.kind == RenormKind::top_k_mask;
  RowReader<C, 4> reader(x, cluster.row(), vocab, cluster.rank());
  const RenormValue value = values[cluster.row()];

  Sums sums{};
  float mass = 0.0f, max = 0.0f;
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
    max = cluster.reduce(MaxOf{max, {}}).max;
  }
  const Cut cut = renorm_cut(held, params.kind, value, sums.mass[0], max);
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
