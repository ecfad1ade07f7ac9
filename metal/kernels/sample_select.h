#pragma once

#include "sample_draw.h"

// Exact selection from a row by one threadgroup. Tokens are ranked by value, largest first, and
// then by index, lowest first. Masses are integers, in units of 2^-40 of the largest token's: their
// sums do not depend on the order, so that every pass finds the same.

namespace mlxcel {

constant constexpr int kListed = 1024;  // tokens that fit into threadgroup memory
constant constexpr int kBins = 256;
constant constexpr int kMostRowSimdgroups = 16;
constant constexpr int kLastIndex = 0xffffff;  // above every token's index

struct RowShared {
  atomic_uint low[kBins];  // 64-bit sums of a histogram's bins, by halves
  atomic_uint high[kBins];
  int bin;      // that the search found
  ulong above;  // sum of the bins above it
  ulong here;   // sum of that bin
  atomic_uint num_listed;
  float values[kListed];
  int indices[kListed];
  ulong sums[kMostRowSimdgroups];
  RowSummary summaries[kMostRowSimdgroups];
};

// The calling thread's place in its threadgroup.
struct RowThread {
  int index;
  int count;  // threads
  uint simdgroup;
  uint num_simdgroups;
  uint lane;
};

// A token is kept where it ranks at or before the cut.
struct Cut {
  float value;
  int index;

  bool keeps(float v, int i) const thread { return v > value || (v == value && i <= index); }
};

// A row in device memory.
template <typename T>
struct RowTokens {
  const device T* row;
  int size;

  float value(int i) const thread { return float(row[i]); }
  int index(int i) const thread { return i; }
};

// The tokens of the list, in any order.
struct ListedTokens {
  const threadgroup float* values;
  const threadgroup int* indices;
  int size;

  float value(int i) const thread { return values[i]; }
  int index(int i) const thread { return indices[i]; }
};

METAL_FUNC ListedTokens listed(const threadgroup RowShared& shared, int size) {
  return {shared.values, shared.indices, size};
}

// w in units of 2^-40, rounded down; 0 <= w, about 1 at most.
METAL_FUNC ulong fixed_point(float w) {
  const float scaled = w * 65536.0f;
  const float whole = metal::floor(scaled);
  return (ulong(uint(whole)) << 24) + ulong(uint((scaled - whole) * 16777216.0f));
}

constant constexpr float kFixedUnit = 9.0949470e-13f;  // 2^-40

enum class WeightKind { one, exponential, proportional };

// What a token counts for in a sum.
struct TokenWeight {
  WeightKind kind;
  float max;    // the row's largest value: finite, and above 0 where proportional
  float scale;  // of the exponent, to log2 units

  ulong of(float v) const thread {
    if (kind == WeightKind::one) return 1;
    return fixed_point(kind == WeightKind::exponential ? fast::exp2((v - max) * scale) : v / max);
  }
};

METAL_FUNC TokenWeight each_one() {
  return {WeightKind::one, 0.0f, 0.0f};
}

// Sum over the simdgroup, and over its lanes before the caller's. The lanes' values are below 2^59.
METAL_FUNC ulong simd_total(ulong x) {
  const uint low = simd_sum(uint(x) & 0xffffffu);
  const uint middle = simd_sum(uint(x >> 24) & 0xffffffu);
  const uint high = simd_sum(uint(x >> 48));
  return ulong(low) + (ulong(middle) << 24) + (ulong(high) << 48);
}

METAL_FUNC ulong simd_before(ulong x) {
  const uint low = simd_prefix_exclusive_sum(uint(x) & 0xffffffu);
  const uint middle = simd_prefix_exclusive_sum(uint(x >> 24) & 0xffffffu);
  const uint high = simd_prefix_exclusive_sum(uint(x >> 48));
  return ulong(low) + (ulong(middle) << 24) + (ulong(high) << 48);
}

METAL_FUNC ulong threadgroup_total(ulong mine, threadgroup RowShared& shared, RowThread at) {
  mine = simd_total(mine);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the last sums have been read
  if (at.lane == 0) shared.sums[at.simdgroup] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_total(at.lane < at.num_simdgroups ? shared.sums[at.lane] : 0);
}

// At most once in a kernel: nothing keeps a second call from the slots that the first reads.
METAL_FUNC RowSummary row_summary(RowSummary mine, threadgroup RowShared& shared, RowThread at) {
  return threadgroup_summary(mine, shared.summaries, at.simdgroup, at.lane, at.num_simdgroups);
}

// Sum of the weights of the tokens that the cut keeps.
template <typename Tokens>
METAL_FUNC ulong total_of(Tokens tokens, Cut cut, TokenWeight weight, threadgroup RowShared& shared,
                          RowThread at) {
  ulong mine = 0;
  for (int i = at.index; i < tokens.size; i += at.count) {
    const float v = tokens.value(i);
    if (cut.keeps(v, tokens.index(i))) mine += weight.of(v);
  }
  return threadgroup_total(mine, shared, at);
}

// p * total, rounded down, but at least 1; 0 < p < 1.
METAL_FUNC ulong share_of(float p, ulong total) {
  const ulong parts = ulong(uint(p * 4294967296.0f));
  const ulong share = (total >> 32) * parts + (((total & 0xffffffffu) * parts) >> 32);
  return share > 0 ? share : 1;
}

// A token's rank as a number, larger for an earlier rank: 32 bits of the value in the order of
// floats (-0 is +0), 24 of the index.
METAL_FUNC ulong rank_key(float v, int index) {
  const uint bits = v == 0.0f ? 0u : as_type<uint>(v);
  const uint ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return ulong(ordered) << 24 | ulong(kLastIndex - index);
}

METAL_FUNC Cut cut_at(ulong key) {
  const uint ordered = uint(key >> 24);
  const uint bits = ordered >> 31 ? ordered & 0x7fffffffu : ~ordered;
  return {as_type<float>(bits), kLastIndex - int(key & 0xffffff)};
}

// Threadgroup atomics have 32 bits: the lower half hands its carry on.
METAL_FUNC void add_to_bin(threadgroup RowShared& shared, int bin, ulong x) {
  const uint low = uint(x);
  const uint before = atomic_fetch_add_explicit(&shared.low[bin], low, memory_order_relaxed);
  const uint high = uint(x >> 32) + (before + low < before ? 1 : 0);
  if (high != 0) atomic_fetch_add_explicit(&shared.high[bin], high, memory_order_relaxed);
}

METAL_FUNC ulong sum_of_bin(threadgroup RowShared& shared, int bin) {
  const uint low = atomic_load_explicit(&shared.low[bin], memory_order_relaxed);
  return ulong(atomic_load_explicit(&shared.high[bin], memory_order_relaxed)) << 32 | low;
}

// Finds, by one simdgroup, the bin in which the sum from the highest bin down reaches the target.
// A lane has a run of bins, lane 0 the highest.
METAL_FUNC void find_bin(ulong target, threadgroup RowShared& shared, uint lane) {
  constexpr int kRun = kBins / int(kSimdWidth);
  const int highest = kBins - 1 - int(lane) * kRun;
  ulong run = 0;
  for (int i = 0; i < kRun; ++i) run += sum_of_bin(shared, highest - i);
  ulong above = simd_before(run);
  if (above >= target || above + run < target) return;
  int bin = highest;
  ulong here = sum_of_bin(shared, bin);
  while (above + here < target) {
    above += here;
    here = sum_of_bin(shared, --bin);
  }
  shared.bin = bin;
  shared.above = above;
  shared.here = here;
}

// The cut after the smallest set of first tokens, among those that `within` keeps, whose weights
// reach the target; `within` itself where all together do not. A digit of the last token's key in
// each turn.
template <typename Tokens>
METAL_FUNC Cut select(Tokens tokens, Cut within, TokenWeight weight, ulong target,
                      threadgroup RowShared& shared, RowThread at) {
  ulong known = 0;  // mask of the key's digits that are found
  ulong key = 0;
  for (int shift = 48; shift >= 0; shift -= 8) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last search has been read
    for (int i = at.index; i < kBins; i += at.count) {
      atomic_store_explicit(&shared.low[i], 0u, memory_order_relaxed);
      atomic_store_explicit(&shared.high[i], 0u, memory_order_relaxed);
    }
    if (at.index == 0) shared.bin = -1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = at.index; i < tokens.size; i += at.count) {
      const float v = tokens.value(i);
      const int index = tokens.index(i);
      if (!within.keeps(v, index)) continue;
      const ulong rank = rank_key(v, index);
      if ((rank & known) == key) add_to_bin(shared, int(rank >> shift & 0xff), weight.of(v));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.simdgroup == 0) find_bin(target, shared, at.lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (shared.bin < 0) return within;
    target -= shared.above;
    key |= ulong(shared.bin) << shift;
    known |= 0xfful << shift;
    // The rest have one value, and often all of them are needed.
    const float value = cut_at(key).value;
    if (shift == 24 && target + weight.of(value) > shared.here)
      return {value, value == within.value ? within.index : kLastIndex};
  }
  return cut_at(key);
}

// Raises the cut to a value that at least k tokens reach, and few more where the large ones are
// spread over the row: the k-th largest of the threads' largest tokens. k <= at.count. Takes the
// list's place.
METAL_FUNC Cut near_top(float thread_max, int k, Cut within, threadgroup RowShared& shared,
                        RowThread at) {
  shared.values[at.index] = thread_max;
  shared.indices[at.index] = at.index;
  const Cut all = {-INFINITY, kLastIndex};
  const Cut top = select(listed(shared, at.count), all, each_one(), ulong(k), shared, at);
  if (top.value > within.value) return {top.value, kLastIndex};
  return within;
}

// Lists the tokens that the cut keeps and returns their number; above kListed the list holds some
// of them.
template <typename Tokens>
METAL_FUNC int list_tokens(Tokens tokens, Cut cut, threadgroup RowShared& shared, RowThread at) {
  if (at.index == 0) atomic_store_explicit(&shared.num_listed, 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = at.index; i < tokens.size; i += at.count) {
    const float v = tokens.value(i);
    if (!cut.keeps(v, tokens.index(i))) continue;
    const uint slot = atomic_fetch_add_explicit(&shared.num_listed, 1u, memory_order_relaxed);
    if (slot >= uint(kListed)) continue;
    shared.values[slot] = v;
    shared.indices[slot] = tokens.index(i);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return int(atomic_load_explicit(&shared.num_listed, memory_order_relaxed));
}

}  // namespace mlxcel
