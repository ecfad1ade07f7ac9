#include "plan/attention_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace mlxcel::plan {
namespace {

/// Query tiles of one request, as if each saw all of its pages (causal ones see fewer: the estimate
/// is an upper bound).
struct Load {
  float cost;     // of one tile that is not cut, in KV tokens of a decode tile
  int32_t tiles;  // query tiles
};

int32_t query_tokens(const AttentionProblem& p, int32_t request) {
  return p.qo_indptr == nullptr ? 1 : p.qo_indptr[request + 1] - p.qo_indptr[request];
}

/// Arithmetic of a tile against loading its K and V.
float weight(const AttentionProblem& p, const PlanTarget& t, int32_t q_len) {
  return std::max(1.0f, static_cast<float>(q_len) * static_cast<float>(p.group_size) /
                            static_cast<float>(t.rows_per_token));
}

/// Callers ask for chunks that give at most twice the tiles that there is room for: they fit int32.
float count_tiles(const std::vector<Load>& loads, float chunk) {
  const float inverse = 1.0f / chunk;
  int32_t tiles = 0;
  for (const Load& load : loads) {
    // In 32-bit integers, which are vectorised: a sum of floats would wait for each addition.
    const float parts = load.cost * inverse;
    const auto whole = static_cast<int32_t>(parts);
    tiles += load.tiles * std::max(1, whole + (static_cast<float>(whole) < parts ? 1 : 0));
  }
  return static_cast<float>(tiles);
}

/// The cost at which a tile is cut. Tries to fill 1, 2, ... rounds of the machine: more rounds
/// balance better, and pay more overhead.
float choose_chunk(const std::vector<Load>& loads, const PlanTarget& target, int32_t num_kv_heads) {
  float longest = 0, total = 0, uncut = 0;
  for (const Load& load : loads) {
    longest = std::max(longest, load.cost);
    total += load.cost * static_cast<float>(load.tiles);
    uncut += static_cast<float>(load.tiles);
  }
  const float least = static_cast<float>(target.min_chunk_tokens);
  if (longest <= least) return least;
  const float slots = static_cast<float>(target.slots) / static_cast<float>(num_kv_heads);
  const float overhead = static_cast<float>(target.tile_overhead);
  float best = 0, best_time = std::numeric_limits<float>::infinity();
  float high = longest;  // count_tiles(high) fits, and so it does in more rounds
  for (int32_t waves = 1; waves <= target.max_waves; ++waves) {
    const float room = static_cast<float>(waves) * slots;
    if (uncut > room) continue;
    float low = std::min(high, std::max(least, total / room));  // a shorter one cannot fit
    if (count_tiles(loads, low) <= room) {
      high = low;
    } else {
      while (high - low > 0.01f * high) {
        const float middle = 0.5f * (low + high);
        (count_tiles(loads, middle) <= room ? high : low) = middle;
      }
    }
    const float time = static_cast<float>(waves) * (high + overhead);
    if (time < best_time) {
      best_time = time;
      best = high;
    }
  }
  // More tiles than rounds: they fill the machine uncut, so only those that would outlast the rest
  // are cut.
  if (best == 0) best = std::max(least, 0.5f * total / slots);
  return best;
}

/// Orders tiles by cost, the most expensive first, so that the last worker to finish holds a short
/// one. 64 buckets: a counting sort is stable, linear, and exact enough.
std::vector<AttentionTile> longest_first(const std::vector<AttentionTile>& tiles,
                                         const std::vector<float>& costs) {
  constexpr int kBuckets = 64;
  const float most = *std::max_element(costs.begin(), costs.end());
  const float scale = most > 0 ? (kBuckets - 0.5f) / most : 0.0f;
  std::array<uint32_t, kBuckets + 1> next{};
  const auto bucket = [&](float cost) { return kBuckets - 1 - static_cast<int>(cost * scale); };
  for (float cost : costs) ++next[bucket(cost) + 1];
  for (int b = 0; b < kBuckets; ++b) next[b + 1] += next[b];
  std::vector<AttentionTile> sorted(tiles.size());
  for (size_t i = 0; i < tiles.size(); ++i) sorted[next[bucket(costs[i])]++] = tiles[i];
  return sorted;
}

/// Emits the tiles of the requests in turn.
class Builder {
 public:
  Builder(const AttentionProblem& problem, const PlanTarget& target, float chunk)
      : p_(problem), target_(target), chunk_(chunk) {}

  void add_request(int32_t request, int32_t tile_tokens) {
    const int32_t q_begin = p_.qo_indptr == nullptr ? request : p_.qo_indptr[request];
    const int32_t q_len = query_tokens(p_, request);
    for (int32_t i = 0; i < q_len; i += tile_tokens) {
      const int32_t n = std::min(tile_tokens, q_len - i);
      AttentionTile tile{};
      tile.request = request;
      tile.q_begin = q_begin + i;
      tile.q_len = n;
      span(tile, q_len, i);
      cut(tile);
    }
  }

  AttentionPlan finish() {
    plan_.merge_indptr.push_back(plan_.num_partials);
    if (!costs_.empty()) plan_.tiles = longest_first(plan_.tiles, costs_);
    return std::move(plan_);
  }

  void reserve(size_t tiles, size_t num_q) {
    plan_.tiles.reserve(tiles);
    costs_.reserve(tiles);
    plan_.merge_indptr.reserve(num_q + 1);
  }

 private:
  /// The pages that query tokens [first, first + tile.q_len) of q_len may see, whatever the length
  /// of the last page.
  void span(AttentionTile& tile, int32_t q_len, int32_t first) const {
    const int64_t pages = p_.kv_indptr[tile.request + 1] - p_.kv_indptr[tile.request];
    const int64_t size = p_.page_size;
    int64_t end = pages, begin = 0;
    if (p_.causal) {
      const int64_t tokens = pages * size - q_len + first + tile.q_len;
      end = std::clamp<int64_t>((tokens + size - 1) / size, 0, pages);
    }
    if (p_.window_left >= 0) {
      const int64_t own = (pages - 1) * size + 1 - q_len + first;
      begin = std::clamp<int64_t>((own - p_.window_left) / size, 0, end);
    }
    tile.page_begin = static_cast<int32_t>(begin);
    tile.page_end = static_cast<int32_t>(end);
  }

  /// Cuts a tile into chunks and gives them their partial rows.
  void cut(AttentionTile tile) {
    const int32_t begin = tile.page_begin, pages = tile.page_end - begin;
    const float w = weight(p_, target_, tile.q_len);
    int32_t chunks = 1, stride = 0, first = 0;
    if (p_.batch_invariant) {
      stride = std::max(1, target_.invariant_chunk_tokens / p_.page_size);
      first = begin / stride;
      chunks = std::max(1, (tile.page_end + stride - 1) / stride - first);
    } else if (pages > 1) {
      const float cost = static_cast<float>(pages) * static_cast<float>(p_.page_size) * w;
      chunks = std::clamp(static_cast<int32_t>(std::ceil(cost / chunk_)), 1, pages);
    }
    const bool direct = chunks == 1 && !p_.partial;
    for (int32_t i = 0; i < tile.q_len; ++i) {
      plan_.merge_indptr.push_back(plan_.num_partials + (direct ? 0 : i * chunks));
    }
    tile.group = direct ? -1 : plan_.num_groups++;
    for (int32_t c = 0; c < chunks; ++c) {
      if (p_.batch_invariant) {
        tile.page_begin = std::max(begin, (first + c) * stride);
        tile.page_end = std::min(begin + pages, (first + c + 1) * stride);
      } else {
        tile.page_begin = begin + static_cast<int32_t>(int64_t{pages} * c / chunks);
        tile.page_end = begin + static_cast<int32_t>(int64_t{pages} * (c + 1) / chunks);
      }
      tile.chunk = direct ? -1 : c;
      plan_.tiles.push_back(tile);
      costs_.push_back(static_cast<float>(tile.page_end - tile.page_begin) * w);
    }
    if (!direct) plan_.num_partials += tile.q_len * chunks;
    plan_.max_q_len = std::max(plan_.max_q_len, tile.q_len);
    plan_.max_chunks = std::max(plan_.max_chunks, chunks);
  }

  const AttentionProblem& p_;
  const PlanTarget& target_;
  float chunk_;
  AttentionPlan plan_;
  std::vector<float> costs_;
};

}  // namespace

AttentionPlan plan_attention(const AttentionProblem& problem, const PlanTarget& target) {
  const int32_t tile_tokens = std::max(1, target.tile_rows / problem.group_size);
  std::vector<Load> loads;
  loads.reserve(problem.batch);
  size_t num_q = 0;
  for (int32_t r = 0; r < problem.batch; ++r) {
    const int32_t q_len = query_tokens(problem, r);
    if (q_len == 0) continue;
    num_q += q_len;
    const int64_t pages = problem.kv_indptr[r + 1] - problem.kv_indptr[r];
    int64_t tokens = pages * problem.page_size;
    if (problem.window_left >= 0) {
      tokens =
          std::min<int64_t>(tokens, int64_t{problem.window_left} + std::min(q_len, tile_tokens));
    }
    loads.push_back(
        {static_cast<float>(tokens) * weight(problem, target, std::min(q_len, tile_tokens)),
         (q_len + tile_tokens - 1) / tile_tokens});
  }
  float chunk = 0;
  if (problem.batch_invariant) {
    chunk = static_cast<float>(target.invariant_chunk_tokens);
  } else if (!loads.empty()) {
    chunk = choose_chunk(loads, target, problem.num_kv_heads);
  }
  Builder builder(problem, target, chunk);
  size_t tiles = 0;
  for (const Load& load : loads) {
    tiles += load.tiles * static_cast<size_t>(1.0f + load.cost / std::max(chunk, 1.0f));
  }
  builder.reserve(tiles, num_q);
  for (int32_t r = 0; r < problem.batch; ++r) builder.add_request(r, tile_tokens);
  AttentionPlan plan = builder.finish();
  plan.chunk_tokens = static_cast<int64_t>(chunk);
  return plan;
}

}  // namespace mlxcel::plan
