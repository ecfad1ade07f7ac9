#pragma once

#include "sample_select.h"

namespace mlxcel {

// Draws by the Gumbel-max rule. sample_scan draws from all tokens of a row, in parts, since noise
// is dear and rows are long; sample_pick joins the parts. Where rows have filters, sample_filter
// takes the place of sample_pick: the winner over all tokens, where it is kept, is the winner over
// the kept ones, since the noise is the same. Else the kept set is selected and drawn from.

METAL_FUNC bool has_top_k(SampleRow row, int vocab) {
  return row.top_k > 0 && row.top_k < vocab;
}

// Grid: (parts of `part_size` tokens, rows).
template <typename T>
[[kernel]] void sample_scan(const device T* logits [[buffer(0)]],        // [B, V]
                            const device SampleRow* rows [[buffer(1)]],  // [B]
                            device RowSummary* parts [[buffer(2)]],      // [B, parts]
                            constant SampleParams& params [[buffer(3)]],
                            constant int& part_size [[buffer(4)]],  // a multiple of 4
                            uint3 group [[threadgroup_position_in_grid]],
                            uint3 groups [[threadgroups_per_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint3 threads [[threads_per_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup RowSummary slots[kScanSimdgroups];
  const SampleRow row = rows[group.y];
  const DrawKey key = draw_key(row);
  const float scale = kLog2e / row.temperature;
  const bool noise = !is_greedy(row) && !has_top_k(row, params.vocab);
  const device T* x = logits + size_t(group.y) * size_t(params.vocab);

  RowSummary mine = no_summary();
  const int begin = int(group.x) * part_size;
  const int end = min(begin + part_size, params.vocab);
  for (int first = begin + 4 * int(thread_index); first < end; first += 4 * int(threads.x)) {
    uint4 bits = uint4(0);
    if (noise) bits = philox(key, uint(first) / 4, RngStream::gumbel);
    MLXCEL_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (first + i >= end) continue;
      const float v = float(x[first + i]);
      if (isnan(v)) mine.has_nan = 1;
      offer(mine.top, v, first + i);
      if (noise) offer(mine.drawn, fma(v, scale, gumbel_of(bits[i])), first + i);
    }
  }
  mine = threadgroup_summary(mine, slots, simdgroup, lane, num_simdgroups);
  if (thread_index == 0) parts[size_t(group.y) * groups.x + group.x] = mine;
}

// Writes a row's result; the id is in range whatever the row holds.
METAL_FUNC void write_draw(int row, RowSummary all, Leader drawn, int turned_down, device int* ids,
                           device bool* valid, device int* rounds) {
  const int id = drawn.index != kNoToken ? drawn.index : all.top.index;
  ids[row] = max(id, 0);
  valid[row] = all.top.index != kNoToken && all.has_nan == 0;
  rounds[row] = turned_down;
}

// One row's filters, in terms of raw logits.
struct RowFilter {
  TokenWeight weight;  // of the distribution that the filters see
  float scale;         // of the draw, to log2 units
  float lowest;        // min-p keeps logits from here on; finite
  float top_p;
  int top_k;  // 0: off
  bool joint;
};

METAL_FUNC RowFilter row_filter(constant SampleParams& params, SampleRow row, float row_max) {
  const float temperature = params.temperature_last != 0 ? 1.0f : row.temperature;
  RowFilter filter;
  filter.weight = {WeightKind::exponential, row_max, kLog2e / temperature};
  filter.scale = kLog2e / row.temperature;
  filter.lowest = -FLT_MAX;
  if (row.min_p > 0.0f) {
    const float gap = precise::log(min(row.min_p, 1.0f)) * temperature;
    filter.lowest = max(-FLT_MAX, row_max + gap);
  }
  filter.top_p = row.top_p;
  filter.top_k = has_top_k(row, params.vocab) ? row.top_k : 0;
  filter.joint = params.joint != 0;
  return filter;
}

// The leading token among those that the cut keeps.
template <typename Tokens>
METAL_FUNC Leader draw_within(Tokens tokens, Cut cut, RowFilter filter, DrawKey key,
                              threadgroup RowShared& shared, RowThread at) {
  RowSummary mine = no_summary();
  for (int i = at.index; i < tokens.size; i += at.count) {
    const float v = tokens.value(i);
    const int index = tokens.index(i);
    if (!cut.keeps(v, index)) continue;
    const uint4 bits = philox(key, uint(index) / 4, RngStream::gumbel);
    offer(mine.drawn, fma(v - filter.weight.max, filter.scale, gumbel_of(bits[index % 4])), index);
  }
  return row_summary(mine, shared, at).drawn;
}

// Draws from the tokens that the filters keep of those within the cut. `target`: the mass that
// top-p keeps, 0: its share of what top-k left.
template <typename Tokens>
METAL_FUNC Leader draw_filtered(Tokens tokens, Cut cut, ulong target, RowFilter filter, DrawKey key,
                                threadgroup RowShared& shared, RowThread at) {
  if (filter.top_k > 0) cut = select(tokens, cut, each_one(), ulong(filter.top_k), shared, at);
  if (filter.top_p < 1.0f) {
    if (target == 0)
      target = share_of(filter.top_p, total_of(tokens, cut, filter.weight, shared, at));
    cut = select(tokens, cut, filter.weight, target, shared, at);
  }
  return draw_within(tokens, cut, filter, key, shared, at);
}

// Grid: one threadgroup a row.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kMostRowSimdgroups * 32)]] void sample_filter(
    const device T* logits [[buffer(0)]],          // [B, V]
    const device SampleRow* rows [[buffer(1)]],    // [B]
    const device RowSummary* parts [[buffer(2)]],  // [B, num_parts]
    device int* ids [[buffer(3)]],                 // [B]
    device bool* valid [[buffer(4)]],              // [B]
    device int* rounds [[buffer(5)]],              // [B]
    constant SampleParams& params [[buffer(6)]], constant int& num_parts [[buffer(7)]],
    uint row_index [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup RowShared shared;
  const RowThread at = {int(thread_index), int(threads), simdgroup, num_simdgroups, lane};
  const int vocab = params.vocab;
  const SampleRow row = rows[row_index];
  const RowSummary all = join_parts(parts + size_t(row_index) * size_t(num_parts), num_parts, lane);
  const bool draws = !is_greedy(row) && all.has_nan == 0 && isfinite(all.top.score);
  if (!draws || !is_filtered(row, vocab)) {
    if (thread_index == 0)
      write_draw(int(row_index), all, draws ? all.drawn : all.top, 0, ids, valid, rounds);
    return;
  }
  const RowFilter filter = row_filter(params, row, all.top.score);
  const DrawKey key = draw_key(row);
  const RowTokens<T> tokens = {logits + size_t(row_index) * size_t(vocab), vocab};
  const Cut finite = {-FLT_MAX, kLastIndex};
  Cut cut = {filter.lowest, kLastIndex};

  ulong target = 0;
  if (filter.top_p < 1.0f && (filter.joint || filter.top_k == 0)) {
    const ulong total = total_of(tokens, filter.joint ? finite : cut, filter.weight, shared, at);
    target = share_of(filter.top_p, total);
  }
  int turned_down = 0;
  if (filter.top_k == 0) {
    const float value = float(tokens.row[max(all.drawn.index, 0)]);
    if (all.drawn.index != kNoToken && cut.keeps(value, all.drawn.index)) {
      const Cut before = {value, all.drawn.index - 1};
      if (target == 0 || total_of(tokens, before, filter.weight, shared, at) < target) {
        if (thread_index == 0) write_draw(int(row_index), all, all.drawn, 0, ids, valid, rounds);
        return;
      }
      cut = before;
      turned_down = 1;
    }
  } else if (filter.top_k <= at.count) {
    float mine = -INFINITY;
    for (int i = at.index; i < vocab; i += at.count) mine = max(mine, tokens.value(i));
    cut = near_top(mine, filter.top_k, cut, shared, at);
  }
  const int num_listed = list_tokens(tokens, cut, shared, at);
  Leader drawn;
  if (num_listed <= kListed)
    drawn = draw_filtered(listed(shared, num_listed), cut, target, filter, key, shared, at);
  else
    drawn = draw_filtered(tokens, cut, target, filter, key, shared, at);
  if (thread_index == 0) write_draw(int(row_index), all, drawn, turned_down, ids, valid, rounds);
}

}  // namespace mlxcel

// One simdgroup a row.
[[kernel]] void sample_pick(const device mlxcel::RowSummary* parts [[buffer(2)]],  // [B, num_parts]
                            device int* ids [[buffer(3)]],                         // [B]
                            device bool* valid [[buffer(4)]],                      // [B]
                            device int* rounds [[buffer(5)]],                      // [B]
                            constant int& num_parts [[buffer(7)]],
                            uint row [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]]) {
  const mlxcel::RowSummary all =
      mlxcel::join_parts(parts + size_t(row) * size_t(num_parts), num_parts, lane);
  if (lane == 0) mlxcel::write_draw(int(row), all, all.drawn, 0, ids, valid, rounds);
}
