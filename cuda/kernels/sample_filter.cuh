#pragma once

#include <cfloat>
#include <climits>

#include "kernels/sample_draw.cuh"
#include "kernels/sample_list.cuh"

// Draws among the tokens that top-k, min-p and top-p keep. The row is read from device memory once.
//
// A small top-k lists its tokens and finishes in one block. Without it a draw from a superset is
// made while the row is read: where its winner is kept, it is the winner of the kept set too, since
// the noise is the same. Else the next draw is among the tokens that rank before it. After
// kMaxRounds of these the kept set is selected exactly.

namespace mlxcel::cuda {

constexpr int kMaxRounds = 4;

/// One row's filters, in terms of raw logits.
struct RowFilter {
  float max;
  float scale;    // of the draw, to log2 units
  float weights;  // of the distribution that the filters see: weight = 2^((x - max) * weights)
  float floor;    // min-p keeps x >= floor; finite
  float top_p;
  bool joint;

  __device__ RowFilter(const SampleParams& params, const SampleRow& row, float row_max)
      : max(row_max),
        scale(draw_scale(row)),
        weights(params.temperature_last ? 1.44269504f : scale),
        floor(-FLT_MAX),
        top_p(row.top_p),
        joint(params.joint) {
    if (row.min_p > 0.0f) {
      const double temperature = params.temperature_last ? 1.0 : row.temperature;
      const double lowest =
          row_max + log(static_cast<double>(fminf(1.0f, row.min_p))) * temperature;
      floor = fmaxf(-FLT_MAX, __double2float_ru(lowest));
    }
  }

  __device__ float weight(float x) const { return fast_exp2((x - max) * weights); }
};

/// Filters and draws in rank 0's block, from its list of the first k tokens of n.
__device__ __forceinline__ void draw_from_list(const RowFilter& filter, const PhiloxKey& key,
                                               TokenList& list, int n, int k, double row_mass,
                                               int row, int vocab, const SampleOutput& out) {
  n = rank_list(list, n, k, [&](int rank, uint64_t token) {
    const int index = key_index(token);
    const uint4 bits = philox(key, index / 4, RngStream::gumbel);
    list.score[rank] = fmaf(key_value(token), filter.scale, gumbel(word(bits, index % 4)));
  });
  if (threadIdx.x >= kWarp) return;
  const int lane = threadIdx.x;
  float total = 0.0f;
  int kept = 0;  // min-p leaves out the last ones
  for (int i = lane; i < n; i += kWarp) {
    const float v = key_value(list.rank[i]);
    total += v >= filter.floor ? filter.weight(v) : 0.0f;
    kept += v >= filter.floor;
  }
  n = static_cast<int>(__reduce_add_sync(0xffffffffu, kept));
  total = filter.joint ? static_cast<float>(row_mass) : warp_sum(total);
  const float target = filter.top_p < 1.0f ? filter.top_p * total : INFINITY;

  Leader leader = Leader::none(vocab);
  float before = 0.0f;  // mass of the tokens before this chunk
  for (int begin = 0; begin < n && before < target; begin += kWarp) {
    const int i = begin + lane;
    const uint64_t token = i < n ? list.rank[i] : 0;
    const float weight = i < n ? filter.weight(key_value(token)) : 0.0f;
    float until = weight;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, until, step);
      if (lane >= step) until += other;
    }
    const float mine = __shfl_up_sync(0xffffffffu, until, 1);
    if (i < n && before + (lane == 0 ? 0.0f : mine) < target) {
      const int index = key_index(token);
      const float score = list.score[i];
      if (score > leader.score || (score == leader.score && index < leader.index)) {
        leader = {0.0f, score, key_value(token), index};
      }
    }
    before += __shfl_sync(0xffffffffu, until, kWarp - 1);
  }
  leader.max = 0.0f;
  leader = warp_reduce(leader);
  if (lane == 0) out.write(row, leader, vocab, 0);
}

/// The leader among the tokens that the cut keeps, in all threads.
template <class Row>
__device__ __forceinline__ Leader draw_within(const Row& row, Cut cut, float scale,
                                              const PhiloxKey& key) {
  Leader leader = Leader::none(row.vocab());
  row.for_quads([&](int index, const Quad& q) {
    Quad kept;
    bool any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool keep = cut.keeps(q.at[i], index + i);
      kept.at[i] = keep ? q.at[i] : -INFINITY;
      any |= keep;
    }
    if (any) offer_quad<true>(leader, kept, index, scale, key);
  });
  leader.max = leader.score;
  return row.cluster().reduce(leader);
}

template <int C>
__global__ void MLXCEL_CLUSTER(C) __launch_bounds__(kRowThreads, 2)
    filter_kernel(SampleParams params, Logits logits, const SampleRow* __restrict__ rows,
                  SampleOutput out) {
  extern __shared__ float4 dynamic_shared[];
  auto& shared = *reinterpret_cast<ListShared<C>*>(dynamic_shared);
  RowCluster<C> cluster(shared.slots);
  auto held = kept_row(cluster, logits, reinterpret_cast<float*>(&shared + 1), params.vocab);
  const int vocab = params.vocab, at = cluster.row();
  const RowParams row_params(rows, at);
  RowReader<C, 4> reader(logits, at, vocab, cluster.rank());
  const SampleRow row = row_params.take();
  const PhiloxKey key = philox_key(row);
  const bool has_top_k = row.top_k > 0 && row.top_k < vocab;
  const bool noise = !is_greedy(row) && !has_top_k;  // else the leader is the argmax

  Leader leader = Leader::none(vocab);
  bool nan = false;
  const auto read = [&](auto with_noise) {
    reader.for_quads([&](int tile, int index, const Quad& q) {
      held.store(tile, q);
      track_max(leader, nan, q);
      offer_quad<decltype(with_noise)::value>(leader, q, index, draw_scale(row), key);
    });
  };
  if (noise)
    read(std::true_type{});
  else
    read(std::false_type{});
  const float thread_max = leader.max;
  if (nan) leader.max = NAN;
  leader = cluster.reduce(leader);

  const bool writes = cluster.rank() == 0 && threadIdx.x == 0;
  if (!(leader.max < INFINITY) || leader.index == vocab || is_greedy(row) ||
      !is_filtered(row, vocab)) {
    if (writes) out.write(at, leader, vocab, 0);
    return;
  }
  const RowFilter filter(params, row, leader.max);
  const auto weight = [&](float v) { return filter.weight(v); };
  Cut cut{filter.floor, vocab};
  if (has_top_k) {
    if (row.top_k <= kMaxListed) {
      const float threshold = fmaxf(filter.floor, top_threshold(cluster, row.top_k, thread_max));
      float mass = 0.0f;
      if (filter.joint) held.for_each([&](float v, int) { mass += filter.weight(v); });
      const Listed listed = send_to_list(held, shared.list, {threshold, vocab - 1}, mass);
      if (listed.count <= kListSlots) {
        if (cluster.rank() == 0) {
          draw_from_list(filter, key, shared.list, listed.count, row.top_k, listed.extra, at, vocab,
                         out);
        }
        return;
      }
    }
    cut = held.select_top(row.top_k, cut, filter.max);
  }
  bool drawn = !has_top_k && cut.keeps(leader.value, leader.index);
  double target = 0.0;
  int round = 0;
  for (;; ++round) {
    if (!drawn) leader = draw_within(held, cut, filter.scale, key);
    if (filter.top_p >= 1.0f || round == kMaxRounds) break;
    float total = 0.0f, above = 0.0f;
    held.for_each([&](float v, int i) {
      const float w = filter.weight(v);
      total += filter.joint || cut.keeps(v, i) ? w : 0.0f;
      above += v > leader.value || (v == leader.value && i < leader.index) ? w : 0.0f;
    });
    const Sums sums = cluster.reduce(Sums{{total, above}});
    if (round == 0) target = filter.top_p * sums.mass[0];
    if (sums.mass[1] < target) break;
    cut = {leader.value, leader.index - 1};
    if (round + 1 == kMaxRounds) cut = held.select_mass(target, cut, filter.max, weight);
    drawn = false;
  }
  if (writes) out.write(at, leader, vocab, round);
}

}  // namespace mlxcel::cuda
