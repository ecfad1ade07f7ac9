#include "plan/attention_plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <span>

namespace mlxcel::plan {
namespace {

/// Query tiles of one request, as if each saw all of its pages (causal ones see fewer: the estimate
/// is an upper bound).
struct Load {
  float cost;     // of one tile that is not cut, in KV tokens of a decode tile
  float weight;   // of one of its KV tokens
  int32_t tiles;  // query tiles
  bool large;     // more than kDecodeRows query rows each
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
float count_tiles(std::span<const Load> loads, float chunk) {
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

/// The same where some tiles are shared. Those are bound by arithmetic and the others by loading,
/// so they had better run side by side: a shared tile may last as long as the launch, while short
/// ones take turns next to it. Where it does not even then, or where tiles take turns anyway, four
/// rounds make the end even.
/// `shared` are the first of the loads, `even` the slots that they had better fill as often as each
/// other: a few tiles more than that would leave the rest of the machine waiting for them.
float choose_shared_chunk(const std::vector<Load>& loads, size_t shared, const PlanTarget& target,
                          int32_t even, int32_t num_kv_heads) {
  const std::span<const Load> spans(loads.data(), shared);
  float longest = 0, total = 0, heaviest = 0;
  for (const Load& load : loads) {
    longest = std::max(longest, load.cost);
    total +=
        (load.cost + static_cast<float>(target.tile_overhead)) * static_cast<float>(load.tiles);
  }
  for (const Load& load : spans) heaviest = std::max(heaviest, load.weight);
  const float share = total * static_cast<float>(num_kv_heads) / static_cast<float>(target.slots);
  const float least = static_cast<float>(target.min_chunk_tokens);
  if (target.takes_turns) return std::max(least * heaviest, 0.25f * share);
  if (share >= longest) return std::max(least, 0.25f * share);
  const float turn = static_cast<float>(even) / static_cast<float>(num_kv_heads);
  const float room = turn * std::max(1.0f, std::round(count_tiles(spans, share) / turn));
  float low = share, high = longest;
  while (count_tiles(spans, low) > room && high - low > 0.01f * high) {
    const float middle = 0.5f * (low + high);
    (count_tiles(spans, middle) <= room ? high : low) = middle;
  }
  return std::max(least, count_tiles(spans, low) <= room ? low : high);
}

/// How many chunks all requests are cut into, where the longest is and one round has room for that:
/// the kernel merges so many without a detour through memory, so they may be shorter. 0: there is
/// no such number, or too few chunks for a request so long.
int32_t equal_chunks(const std::vector<Load>& loads, const PlanTarget& target,
                     int32_t num_kv_heads) {
  if (loads.empty() || target.max_cluster == 0) return 0;
  PlanTarget finer = target;
  finer.min_chunk_tokens /= 2;
  float longest = 0;
  int64_t tiles = 0;
  for (const Load& load : loads) {
    longest = std::max(longest, load.cost);
    tiles += load.tiles;
  }
  const int64_t room = target.slots / (std::max<int64_t>(tiles, 1) * num_kv_heads);
  if (room < 2) return 0;
  auto chunks = static_cast<int32_t>(std::ceil(longest / choose_chunk(loads, finer, num_kv_heads)));
  if (chunks > target.max_cluster) {
    if (longest > static_cast<float>(4 * target.min_chunk_tokens * target.max_cluster)) return 0;
    chunks = target.max_cluster;
  }
  return chunks > 1 && chunks <= room ? chunks : 0;
}

/// Orders tiles by cost, the most expensive first, so that the last worker to finish holds a short
/// one; those of more than `large_tokens` query tokens before all others. 64 buckets of cost: a
/// counting sort is stable, linear, and exact enough.
std::vector<AttentionTile> longest_first(const std::vector<AttentionTile>& tiles,
                                         const std::vector<float>& costs, int32_t large_tokens) {
  constexpr int kBuckets = 64;
  const float most = *std::max_element(costs.begin(), costs.end());
  const float scale = most > 0 ? (kBuckets - 0.5f) / most : 0.0f;
  std::array<uint32_t, 2 * kBuckets + 1> next{};
  const auto bucket = [&](size_t i) {
    const int at = kBuckets - 1 - static_cast<int>(costs[i] * scale);
    return tiles[i].q_len > large_tokens ? at : kBuckets + at;
  };
  for (size_t i = 0; i < tiles.size(); ++i) ++next[bucket(i) + 1];
  for (int b = 0; b < 2 * kBuckets; ++b) next[b + 1] += next[b];
  std::vector<AttentionTile> sorted(tiles.size());
  for (size_t i = 0; i < tiles.size(); ++i) sorted[next[bucket(i)]++] = tiles[i];
  return sorted;
}

/// Costs at which tiles are cut: large ones, and those of up to kDecodeRows query rows.
struct ChunkCosts {
  float large, decode;
  bool mixed;  // the launch runs both kinds side by side (PlanTarget::mixed_rows)
};

/// What the large tiles of a mixed launch had better cost more than on average, 768 tokens of 128
/// rows: a multiprocessor takes them one by one there, where two shorter ones would hide each
/// other's beginnings and ends (H200, 2026-11-30: prompts of 1,024 tokens take 2 % less, of 512
/// tokens 2 % more than in the other kernel).
constexpr float kMixedCost = 1536;

/// Whether large tiles that are not shared had better run in a mixed launch: beside decode tiles,
/// in a single round, or where they are long.
bool pays_mixed(const std::vector<Load>& large, bool decode, float slots) {
  float total = 0, tiles = 0;
  for (const Load& load : large) {
    total += load.cost * static_cast<float>(load.tiles);
    tiles += static_cast<float>(load.tiles);
  }
  return decode || tiles <= slots || total > kMixedCost * tiles;
}

/// `shared`: so many of the loads, the first, are of shared tiles.
ChunkCosts choose_chunks(const AttentionProblem& problem, const PlanTarget& target,
                         const std::vector<Load>& loads, size_t shared, int32_t most_tokens) {
  const auto alike = [](float chunk, bool mixed = false) {
    return ChunkCosts{chunk, chunk, mixed};
  };
  if (problem.batch_invariant) return alike(static_cast<float>(target.invariant_chunk_tokens));
  if (loads.empty()) return alike(0);
  const int32_t most_rows = most_tokens * problem.group_size;
  const bool large = target.large_slots > 0 && most_rows > target.small_rows;
  const bool may_mix = target.mixed_rows > 0 && most_rows > target.mixed_rows;
  PlanTarget kernel = target;  // that serves the launch
  if (large) kernel.slots = target.large_slots;
  if (shared > 0) {
    return alike(choose_shared_chunk(loads, shared, may_mix ? target : kernel, target.slots,
                                     problem.num_kv_heads),
                 may_mix);
  }
  // What is cut among large tiles is merged by a launch of its own: longer chunks pay for it.
  if (large) kernel.min_chunk_tokens *= 8;
  if (may_mix) {
    std::vector<Load> kinds[2];
    for (const Load& load : loads) kinds[load.large].push_back(load);
    const float slots = static_cast<float>(target.slots) / static_cast<float>(problem.num_kv_heads);
    if (pays_mixed(kinds[1], !kinds[0].empty(), slots)) {
      kernel.slots = target.slots;
      return {choose_chunk(kinds[1], kernel, problem.num_kv_heads),
              choose_chunk(kinds[0], target, problem.num_kv_heads), true};
    }
  }
  return alike(choose_chunk(loads, kernel, problem.num_kv_heads));
}

/// Emits the tiles of the shared spans, then those of the requests, in turn.
class Builder {
 public:
  Builder(const AttentionProblem& problem, const PlanTarget& target, const CascadeLevels& levels,
          const ChunkCosts& chunk, int32_t chunks_each, int32_t tile_tokens)
      : p_(problem),
        target_(target),
        levels_(levels),
        chunk_(chunk),
        tile_tokens_(tile_tokens),
        large_tokens_(chunk.mixed ? kDecodeRows / problem.group_size
                                  : std::numeric_limits<int32_t>::max()),
        shared_(problem.batch) {
    plan_.chunks_each = chunks_each;
  }

  void reserve(size_t tiles, size_t num_q) {
    plan_.tiles.reserve(tiles);
    costs_.reserve(tiles);
    plan_.merge_indptr.reserve(num_q + 1);
  }

  /// Adds the chunks of a shared span: its tiles are cut alike, so that every token of a tile has
  /// the same number of chunks before it.
  void add_shared(const SharedSpan& span) {
    const int32_t begin = levels_.token_indptr[span.first];
    const int32_t count = levels_.token_indptr[span.last] - begin;
    const int32_t q_len = std::min(count, tile_tokens_);
    const Chunks chunks = cut(span.page_begin, span.page_end, q_len);
    const Shared before = shared_[levels_.requests[span.first]];
    for (int32_t i = 0; i < count; i += tile_tokens_) {
      AttentionTile tile{};
      tile.request = levels_.requests[span.first];
      tile.q_begin = begin + i;
      tile.q_len = std::min(tile_tokens_, count - i);
      tile.shared = 1;
      tile.group = -1;
      add_tiles(tile, chunks, before.chunks, weight(p_, target_, tile.q_len));
    }
    for (int32_t i = span.first; i < span.last; ++i) {
      Shared& s = shared_[levels_.requests[i]];
      if (s.levels == 0) {
        s.page_begin = span.page_begin;
        ++plan_.num_members;
      }
      s.page_end = span.page_end;
      s.chunks += chunks.count;
      plan_.num_levels = std::max(plan_.num_levels, ++s.levels);
    }
    plan_.shared_pages += span.page_end - span.page_begin;
    plan_.shared_chunks += chunks.count;
  }

  void add_request(int32_t request) {
    const int32_t q_begin = p_.qo_indptr == nullptr ? request : p_.qo_indptr[request];
    const int32_t q_len = query_tokens(p_, request);
    for (int32_t i = 0; i < q_len; i += tile_tokens_) {
      AttentionTile tile{};
      tile.request = request;
      tile.q_begin = q_begin + i;
      tile.q_len = std::min(tile_tokens_, q_len - i);
      add_private(tile, q_len, i);
    }
  }

  AttentionPlan finish() {
    plan_.merge_indptr.push_back(plan_.num_partials);
    plan_.token_order = levels_.token_order;
    for (const AttentionTile& tile : plan_.tiles) plan_.num_large += tile.q_len > large_tokens_;
    if (!costs_.empty() && plan_.chunks_each == 0) {
      plan_.tiles = longest_first(plan_.tiles, costs_, large_tokens_);
    }
    return std::move(plan_);
  }

 private:
  /// What shared tiles hold of a request: pages [page_begin, page_end) in spans of `levels` nodes.
  struct Shared {
    int32_t page_begin = 0, page_end = 0, chunks = 0, levels = 0;
  };

  /// A span of pages in chunks.
  struct Chunks {
    int32_t begin, end, count;
  };

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

  /// Cuts pages [begin, end) of tiles of q_len query tokens into one chunk or more.
  Chunks cut(int32_t begin, int32_t end, int32_t q_len) const {
    const int32_t pages = end - begin;
    int32_t count = std::max(1, plan_.chunks_each);
    if (p_.batch_invariant) {
      for (int32_t at = fixed_chunk_after(p_, target_, begin); at < end; ++count) {
        at = fixed_chunk_after(p_, target_, at);
      }
    } else if (pages > 1 && plan_.chunks_each == 0) {
      const float cost =
          static_cast<float>(pages) * static_cast<float>(p_.page_size) * weight(p_, target_, q_len);
      const float chunk = q_len > large_tokens_ ? chunk_.large : chunk_.decode;
      count = std::clamp(static_cast<int32_t>(std::ceil(cost / chunk)), 1, pages);
    }
    return {begin, end, count};
  }

  /// The tiles of a request's query tokens: what shared tiles do not hold of the pages that they
  /// see. In front of the shared pages there are some where a window starts in them.
  void add_private(AttentionTile tile, int32_t q_len, int32_t first) {
    span(tile, q_len, first);
    const Shared& held = shared_[tile.request];
    const float w = weight(p_, target_, tile.q_len);
    std::array<Chunks, 2> parts;
    size_t num_parts = 0;
    if (held.chunks == 0) {
      parts[num_parts++] = cut(tile.page_begin, tile.page_end, tile.q_len);
    } else {
      if (tile.page_begin < held.page_begin) {
        parts[num_parts++] = cut(tile.page_begin, held.page_begin, tile.q_len);
      }
      parts[num_parts++] = cut(held.page_end, tile.page_end, tile.q_len);
    }
    int32_t chunks = held.chunks;
    for (size_t i = 0; i < num_parts; ++i) chunks += parts[i].count;
    const bool direct = chunks == 1 && !p_.partial;
    for (int32_t i = 0; i < tile.q_len; ++i) {
      plan_.merge_indptr.push_back(plan_.num_partials + (direct ? 0 : i * chunks));
    }
    if (!direct) plan_.num_partials += tile.q_len * chunks;
    tile.group = direct || held.chunks > 0 ? -1 : plan_.num_groups++;
    int32_t next = direct ? -1 : held.chunks;
    for (size_t i = 0; i < num_parts; ++i) {
      add_tiles(tile, parts[i], next, w);
      next += parts[i].count;
    }
    plan_.max_chunks = std::max(plan_.max_chunks, chunks);
  }

  /// One tile a chunk, numbered from `number` on. Chunks of large tiles end where the blocks of
  /// keys do that their kernel takes at once: part of a block costs as much as a whole one, and
  /// more code.
  void add_tiles(AttentionTile tile, const Chunks& chunks, int32_t number, float w) {
    const int64_t pages = chunks.end - chunks.begin;
    const int32_t block = std::max(1, kLargeKeys / p_.page_size);
    const bool blocks = tile.q_len > large_tokens_ && pages >= int64_t{block} * chunks.count;
    int32_t at = chunks.begin;
    for (int32_t c = 0; c < chunks.count; ++c) {
      tile.page_begin = at;
      if (p_.batch_invariant) {
        at = std::min(chunks.end, fixed_chunk_after(p_, target_, at));
      } else {
        auto length = static_cast<int32_t>(pages * (c + 1) / chunks.count);
        if (blocks && c + 1 < chunks.count) length = (length + block / 2) / block * block;
        at = chunks.begin + length;
      }
      tile.page_end = at;
      tile.chunk = number < 0 ? -1 : number + c;
      plan_.tiles.push_back(tile);
      costs_.push_back(static_cast<float>(tile.page_end - tile.page_begin) * w);
    }
    plan_.max_q_len = std::max(plan_.max_q_len, tile.q_len);
  }

  const AttentionProblem& p_;
  const PlanTarget& target_;
  const CascadeLevels& levels_;
  ChunkCosts chunk_;
  int32_t tile_tokens_;
  int32_t large_tokens_;        // tiles of more query tokens are large
  std::vector<Shared> shared_;  // [batch]
  AttentionPlan plan_;
  std::vector<float> costs_;
};

/// Length of the fixed chunk that starts at a page: a quarter of what lies before it, so that a
/// prefix of any length is nearly made of whole chunks, and never so short that merging it counts.
int32_t fixed_chunk_pages(const AttentionProblem& p, const PlanTarget& target, int32_t page) {
  const int64_t tokens = int64_t{page} * p.page_size;
  const auto quarter = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(tokens)) / 4);
  const auto longest =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(target.invariant_chunk_tokens)));
  const int64_t length = std::clamp(quarter, std::max<int64_t>(longest / 4, 1), longest);
  return static_cast<int32_t>(std::max<int64_t>(1, length / p.page_size));
}

}  // namespace

int32_t fixed_chunk_after(const AttentionProblem& problem, const PlanTarget& target, int32_t page) {
  const int32_t pages = fixed_chunk_pages(problem, target, page);
  return (page / pages + 1) * pages;
}

int32_t fixed_chunk_before(const AttentionProblem& problem, const PlanTarget& target,
                           int32_t page) {
  const int32_t pages = fixed_chunk_pages(problem, target, page);
  return page / pages * pages;
}

AttentionPlan plan_attention(const AttentionProblem& problem, const PlanTarget& target,
                             const CascadeLevels& levels) {
  const int32_t tile_tokens = std::max(1, target.tile_rows / problem.group_size);
  std::vector<int32_t> held(problem.batch);  // pages in shared tiles
  std::vector<Load> loads;
  loads.reserve(problem.batch + levels.spans.size());
  int32_t most_tokens = 0;  // of a tile
  const auto add_load = [&](int64_t tokens, int32_t q_len) {
    most_tokens = std::max(most_tokens, std::min(q_len, tile_tokens));
    const float w = weight(problem, target, std::min(q_len, tile_tokens));
    loads.push_back({static_cast<float>(tokens) * w, w, (q_len + tile_tokens - 1) / tile_tokens,
                     std::min(q_len, tile_tokens) * problem.group_size > kDecodeRows});
  };
  for (const SharedSpan& span : levels.spans) {
    const int32_t pages = span.page_end - span.page_begin;
    add_load(int64_t{pages} * problem.page_size,
             levels.token_indptr[span.last] - levels.token_indptr[span.first]);
    for (int32_t i = span.first; i < span.last; ++i) held[levels.requests[i]] += pages;
  }
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
    add_load(std::max<int64_t>(tokens - int64_t{held[r]} * problem.page_size, 0), q_len);
  }
  const ChunkCosts chunk = choose_chunks(problem, target, loads, levels.spans.size(), most_tokens);
  int32_t chunks_each = 0;
  if (levels.spans.empty() && !problem.batch_invariant && !problem.partial && !chunk.mixed &&
      most_tokens * problem.group_size <= target.small_rows) {
    chunks_each = equal_chunks(loads, target, problem.num_kv_heads);
  }
  Builder builder(problem, target, levels, chunk, chunks_each, tile_tokens);
  size_t tiles = 0;
  for (const Load& load : loads) {
    const float cut = load.large ? chunk.large : chunk.decode;
    tiles += load.tiles * static_cast<size_t>(1.0f + load.cost / std::max(cut, 1.0f));
  }
  builder.reserve(tiles, num_q);
  for (const SharedSpan& span : levels.spans) builder.add_shared(span);
  for (int32_t r = 0; r < problem.batch; ++r) builder.add_request(r);
  AttentionPlan plan = builder.finish();
  plan.chunk_tokens = static_cast<int64_t>(chunk.decode);
  return plan;
}

}  // namespace mlxcel::plan
