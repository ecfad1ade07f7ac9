#pragma once

#include "kernels/sample_cluster.cuh"
#include "kernels/sample_noise.cuh"

// Exact selection over a row that a cluster holds in shared memory. Tokens are ranked by value,
// largest first, and then by index, lowest first.

namespace mlxcel::cuda {

/// A token is kept where it ranks at or before the cut.
struct Cut {
  float value;
  int index;

  __device__ __forceinline__ bool keeps(float v, int i) const {
    return v > value || (v == value && i <= index);
  }
};

/// The token's rank as one number, larger for an earlier rank.
__device__ __forceinline__ uint64_t rank_key(float value, int index) {
  return static_cast<uint64_t>(order_key(value)) << 32 | ~static_cast<uint32_t>(index);
}
__device__ __forceinline__ float key_value(uint64_t key) {
  return from_order_key(static_cast<uint32_t>(key >> 32));
}
__device__ __forceinline__ int key_index(uint64_t key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

/// Sums over the cluster.
struct Sums {
  double mass[2];
};

__device__ __forceinline__ Sums combine(const Sums& a, const Sums& b) {
  return {{a.mass[0] + b.mass[0], a.mass[1] + b.mass[1]}};
}

/// The tokens from some value on.
struct Above {
  double mass;
  int count;
  int unused;
};

__device__ __forceinline__ Above combine(const Above& a, const Above& b) {
  return {a.mass + b.mass, a.count + b.count, 0};
}

/// Selection over the tokens of a row. Row::for_quads(fn) calls fn(index of the first of four
/// tokens, the four) for the calling thread's tokens, in order of index.
template <class Row, int C>
class RowSelect {
 public:
  using Cluster = RowCluster<C>;

  __device__ __forceinline__ RowSelect(RowCluster<C>& cluster, int vocab)
      : cluster_(cluster), vocab_(vocab) {}

  __device__ __forceinline__ RowCluster<C>& cluster() const { return cluster_; }
  __device__ __forceinline__ int vocab() const { return vocab_; }

  /// Calls fn(value, index) for each token.
  template <class Fn>
  __device__ __forceinline__ void for_each(Fn fn) const {
    self().for_quads([&](int index, const Quad& q) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fn(q.at[i], index + i);
    });
  }

  /// Number of tokens in the row for which test(value, index) holds.
  template <class Test>
  __device__ __forceinline__ int count(Test test) const {
    int mine = 0;
    for_each([&](float v, int i) { mine += test(v, i); });
    return cluster_.sum(mine);
  }

  /// Sum of weight(value) over the tokens for which test(value, index) holds. It never shrinks
  /// where the set grows: the terms are added in a fixed order.
  template <class Weight, class Test>
  __device__ __forceinline__ double mass(Weight weight, Test test) const {
    float mine = 0.0f;
    for_each([&](float v, int i) { mine += test(v, i) ? weight(v) : 0.0f; });
    return cluster_.reduce(Sums{{mine, 0.0}}).mass[0];
  }

  /// Number and weight of the tokens of at least `value` that `within` keeps.
  template <class Weight>
  __device__ __forceinline__ Above above(Weight weight, float value, Cut within) const {
    Above mine{};
    float mass = 0.0f;
    for_each([&](float v, int i) {
      const bool counts = v >= value && within.keeps(v, i);
      mass += counts ? weight(v) : 0.0f;
      mine.count += counts;
    });
    mine.mass = mass;
    return cluster_.reduce(mine);
  }

  /// The cut after the first k tokens of those that `within` keeps; none is larger than `max`.
  __device__ __forceinline__ Cut select_top(int k, Cut within, float max) const {
    const auto no_weight = [](float) { return 0.0f; };
    const Above all = above(no_weight, within.value, within);
    if (all.count <= k) return within;
    return select(
        no_weight, k, within, all, max, [](const Above& a) { return static_cast<double>(a.count); },
        [&](const Above& a, float) { return k - a.count; });
  }

  /// The cut after the smallest set of first tokens whose weights reach `target`, as all that
  /// `within` keeps do; none is larger than `max`.
  template <class Weight>
  __device__ __forceinline__ Cut select_mass(double target, Cut within, float max,
                                             Weight weight) const {
    const Above all = above(weight, within.value, within);
    return select(
        weight, target, within, all, max, [](const Above& a) { return a.mass; },
        [&](const Above& a, float value) {
          const double each = weight(value);
          return ::max(1, static_cast<int>(ceil((target - a.mass) / each)));
        });
  }

 private:
  /// The smallest set whose measure reaches `target`, by a search for its least value that halves
  /// the range of keys in one step and interpolates the measure in the next, until one token is
  /// left between sets that reach it and sets that do not: at most 64 steps. Of tokens of one value
  /// it takes missing(those above it, value).
  template <class Weight, class Measure, class Missing>
  __device__ __forceinline__ Cut select(Weight weight, double target, Cut within, const Above& all,
                                        float max, Measure measure, Missing missing) const {
    uint32_t low = order_key(within.value), high = order_key(max) + 1;
    Above reached = all, short_of{};
#pragma unroll 1
    for (bool halve = true; high - low > 1 && reached.count - short_of.count > 1; halve = !halve) {
      const uint32_t range = high - low;
      uint32_t step = range / 2;
      if (!halve) {
        const double over = fmax(measure(reached) - target, 0.0);
        const double share = over / (measure(reached) - measure(short_of));
        step = min(::max(static_cast<uint32_t>(share * range), 1u), range - 1);
      }
      const Above at = above(weight, from_order_key(low + step), within);
      if (measure(at) >= target)
        low += step, reached = at;
      else
        high = low + step, short_of = at;
    }
    const float value = from_order_key(low);
    const int equal = reached.count - short_of.count;
    if (equal > 1) {
      const int n = missing(short_of, value);
      if (n < equal) return {value, nth_equal(value, n)};
    }
    return {value, value == within.value ? within.index : vocab_ - 1};
  }

  /// Index of the n-th (from 1) of the tokens of this value. 18 steps.
  __device__ __forceinline__ int nth_equal(float value, int n) const {
    int index = 0;
#pragma unroll 1
    for (int bit = 1 << 17; bit != 0; bit /= 2) {
      const int trial = index | bit;
      if (count([&](float v, int i) { return v == value && i < trial; }) < n) index = trial;
    }
    return index;
  }

  __device__ __forceinline__ const Row& self() const { return static_cast<const Row&>(*this); }

  RowCluster<C>& cluster_;
  int vocab_;
};

/// A row in the cluster's shared memory. Each thread reads only what it wrote itself.
template <int C>
class HeldRow : public RowSelect<HeldRow<C>, C> {
 public:
  __device__ __forceinline__ HeldRow(RowCluster<C>& cluster, float* values, int vocab)
      : RowSelect<HeldRow<C>, C>(cluster, vocab), values_(values) {}

  __device__ __forceinline__ void store(int tile, const Quad& q) {
    const float4 v{q.at[0], q.at[1], q.at[2], q.at[3]};
    *reinterpret_cast<float4*>(values_ + tile * kTile + 4 * threadIdx.x) = v;
  }

  template <class Fn>
  __device__ __forceinline__ void for_quads(Fn fn) const {
    const int tiles = tiles_per_block(C, this->vocab());
    const int first = this->cluster().rank() * kTile + 4 * static_cast<int>(threadIdx.x);
#pragma unroll 2
    for (int t = 0; t < tiles; ++t) {
      const float4 v = *reinterpret_cast<const float4*>(values_ + t * kTile + 4 * threadIdx.x);
      fn(t * C * kTile + first, Quad{{v.x, v.y, v.z, v.w}});
    }
  }

 private:
  float* values_;
};

/// A row that is read again, from L2 where it is still there.
template <int C>
class ReadRow : public RowSelect<ReadRow<C>, C> {
 public:
  __device__ __forceinline__ ReadRow(RowCluster<C>& cluster, const Logits& logits, int vocab)
      : RowSelect<ReadRow<C>, C>(cluster, vocab), logits_(logits) {}

  /// The logits stay where they are.
  __device__ __forceinline__ void store(int, const Quad&) const {}

  template <class Fn>
  __device__ __forceinline__ void for_quads(Fn fn) const {
    RowReader<C, 2> reader(logits_, this->cluster().row(), this->vocab(), this->cluster().rank());
    reader.for_quads([&](int, int index, const Quad& q) { fn(index, q); });
  }

 private:
  const Logits& logits_;
};

/// What kernels that look at a row several times work on: a cluster holds it in `values`; a single
/// block, whose shared memory it may not fit, reads it again.
template <int C>
__device__ __forceinline__ auto kept_row(RowCluster<C>& cluster, const Logits& logits,
                                         float* values, int vocab) {
  if constexpr (C == 1)
    return ReadRow<C>(cluster, logits, vocab);
  else
    return HeldRow<C>(cluster, values, vocab);
}

}  // namespace mlxcel::cuda
