#include "plan/cascade.h"

#include <algorithm>

namespace mlxcel::plan {
namespace {

/// The cheapest choice of nodes to share, by dynamic programming: what a node and those below it
/// cost depends on the choices above it only through the page that they have read up to.
class LevelSearch {
 public:
  LevelSearch(const SharedPrefixTree& tree, const AttentionProblem& problem,
              const PlanTarget& target, const CascadeCosts& costs, const CascadeFloors& floors)
      : tree_(tree), p_(problem), target_(target), costs_(costs), floors_(floors) {
    tile_tokens_ = std::max(1, target.tile_rows / problem.group_size);
    measure_members();
    measure_nodes();
  }

  CascadeLevels run() {
    CascadeLevels levels;
    const auto size = static_cast<int32_t>(nodes().size());
    known_.assign(static_cast<size_t>(size) * (most_depth_ + 1), {});
    float flat = 0.0f, best = 0.0f;
    for (int32_t i = 0; i < size; ++i) {
      flat += tokens(nodes()[i].page_end - nodes()[i].page_begin) * rate(nodes()[i]);
      if (nodes()[i].parent < 0) best += cost(i, -1);
    }
    for (int32_t i = 0; i < size; ++i) {
      if (nodes()[i].parent < 0) collect(i, -1, levels);
    }
    const float saved = (flat - best - slowed(levels)) * static_cast<float>(p_.num_kv_heads) /
                        static_cast<float>(target_.slots);
    if (levels.spans.empty() || (!by_floors() && saved <= costs_.launch)) return {};
    order_tokens(levels);
    return levels;
  }

 private:
  struct Choice {
    float cost = -1.0f;  // not known
    bool keep = false;
  };

  const std::vector<PrefixNode>& nodes() const { return tree_.nodes(); }
  bool by_floors() const { return floors_.min_pages > 0 || floors_.min_members > 0; }
  float tokens(int32_t pages) const {
    return static_cast<float>(pages) * static_cast<float>(p_.page_size);
  }

  int32_t queries(int32_t request) const {
    return p_.qo_indptr == nullptr ? 1 : p_.qo_indptr[request + 1] - p_.qo_indptr[request];
  }

  /// Cost for a KV token of a tile with that many query tokens, if others read the KV token too.
  float tile_rate(int32_t q_len) const {
    return std::max(costs_.reread, static_cast<float>(q_len * p_.group_size) * costs_.row);
  }

  /// The same of all tiles of a run of query tokens.
  float tiles_rate(int32_t q_len) const {
    const int32_t rest = q_len % tile_tokens_;
    return static_cast<float>(q_len / tile_tokens_) * tile_rate(tile_tokens_) +
           (rest > 0 ? tile_rate(rest) : 0.0f);
  }

  /// Sums over the members in order: a node's are differences.
  void measure_members() {
    rates_.push_back(0.0f);
    query_tokens_.push_back(0);
    for (const int32_t r : tree_.order()) {
      rates_.push_back(rates_.back() + tiles_rate(queries(r)));
      query_tokens_.push_back(query_tokens_.back() + queries(r));
    }
  }

  void measure_nodes() {
    for (size_t i = 0; i < nodes().size(); ++i) {
      const PrefixNode& node = nodes()[i];
      depth_.push_back(node.parent < 0 ? 0 : depth_[node.parent] + 1);
      most_depth_ = std::max(most_depth_, depth_.back());
      loose_.push_back(rate(node));
      if (node.parent >= 0) loose_[node.parent] -= rate(node);
      children_.emplace_back();
      if (node.parent >= 0) children_[node.parent].push_back(static_cast<int32_t>(i));
      seen_from_.push_back(first_seen(node));
      ends_.push_back(p_.batch_invariant ? fixed_chunk_before(p_, target_, node.page_end)
                                         : node.page_end);
    }
  }

  /// The first page from which on all query tokens of the members see everything.
  int32_t first_seen(const PrefixNode& node) const {
    if (p_.window_left < 0) return 0;
    int64_t most = 0;
    for (int32_t i = node.first; i < node.last; ++i) {
      const int32_t r = tree_.order()[i];
      const int64_t end = int64_t{p_.kv_indptr[r + 1] - p_.kv_indptr[r]} * p_.page_size;
      most = std::max(most, end - 1 - p_.window_left);
    }
    return static_cast<int32_t>((most + p_.page_size - 1) / p_.page_size);
  }

  float rate(const PrefixNode& node) const { return rates_[node.last] - rates_[node.first]; }

  /// Where the tiles of node i would start if those of node `above` (-1: none) end before it.
  int32_t begin(int32_t i, int32_t above) const { return above < 0 ? seen_from_[i] : ends_[above]; }

  float shared_cost(int32_t i, int32_t above) const {
    const PrefixNode& node = nodes()[i];
    const int32_t q = query_tokens_[node.last] - query_tokens_[node.first];
    const int32_t tiles = (q + tile_tokens_ - 1) / tile_tokens_;
    // The first shared span also makes its members' own spans write partial rows.
    const int32_t partials = q * p_.group_size * (above < 0 ? 2 : 1);
    return tokens(ends_[i] - begin(i, above)) * tiles_rate(q) +
           static_cast<float>(tiles) * costs_.tile + static_cast<float>(partials) * costs_.merge;
  }

  bool may_keep(int32_t i, int32_t above) const {
    if (p_.batch_invariant && p_.window_left >= 0) return false;
    const int32_t pages = ends_[i] - begin(i, above);
    return pages > 0 && pages >= floors_.min_pages &&
           nodes()[i].last - nodes()[i].first >= floors_.min_members;
  }

  /// Least cost of node i and those below it, of reading all from the end of `above` on.
  float cost(int32_t i, int32_t above) {
    const size_t at = static_cast<size_t>(i) * (most_depth_ + 1) +
                      static_cast<size_t>(above < 0 ? 0 : depth_[above] + 1);
    if (known_[at].cost >= 0.0f) return known_[at].cost;
    const PrefixNode& node = nodes()[i];
    const int32_t from = above < 0 ? 0 : ends_[above];
    Choice choice{tokens(node.page_end - from) * loose_[i], false};
    for (const int32_t child : children_[i]) choice.cost += cost(child, above);
    if (may_keep(i, above)) {
      float kept = shared_cost(i, above) + tokens(node.page_end - ends_[i]) * loose_[i] +
                   tokens(begin(i, above) - from) * rate(node);
      for (const int32_t child : children_[i]) kept += cost(child, i);
      if (by_floors() || kept < choice.cost) choice = {kept, true};
    }
    known_[at] = choice;
    return choice.cost;
  }

  /// What the tiles that are not shared take longer for company.
  float slowed(const CascadeLevels& levels) const {
    int64_t pages = p_.kv_indptr[p_.batch];
    for (const SharedSpan& span : levels.spans) {
      pages -= int64_t{span.last - span.first} * (span.page_end - span.page_begin);
    }
    return static_cast<float>(pages * p_.page_size) * (costs_.other - 1.0f);
  }

  void collect(int32_t i, int32_t above, CascadeLevels& levels) {
    const size_t at = static_cast<size_t>(i) * (most_depth_ + 1) +
                      static_cast<size_t>(above < 0 ? 0 : depth_[above] + 1);
    if (known_[at].keep) {
      const PrefixNode& node = nodes()[i];
      levels.spans.push_back({node.first, node.last, begin(i, above), ends_[i]});
      above = i;
    }
    for (const int32_t child : children_[i]) collect(child, above, levels);
  }

  /// Numbers the members that the spans name, in the tree's order, and lists their query tokens.
  void order_tokens(CascadeLevels& levels) const {
    levels.requests = tree_.order();
    levels.token_indptr = query_tokens_;
    levels.token_order.reserve(query_tokens_.back());
    for (const int32_t r : levels.requests) {
      const int32_t first = p_.qo_indptr == nullptr ? r : p_.qo_indptr[r];
      for (int32_t t = 0; t < queries(r); ++t) levels.token_order.push_back(first + t);
    }
  }

  const SharedPrefixTree& tree_;
  const AttentionProblem& p_;
  const PlanTarget& target_;
  const CascadeCosts& costs_;
  const CascadeFloors& floors_;
  int32_t tile_tokens_, most_depth_ = 0;
  // Of the first i requests in the tree's order: cost of reading one KV token by each on its own,
  // and query tokens.
  std::vector<float> rates_;
  std::vector<int32_t> query_tokens_;
  // Of each node: nodes above it, the same cost of members that are in no node below it, nodes
  // directly below it, first page that may be shared, and end of the pages that may.
  std::vector<int32_t> depth_;
  std::vector<float> loose_;
  std::vector<std::vector<int32_t>> children_;
  std::vector<int32_t> seen_from_, ends_;
  std::vector<Choice> known_;  // by node and depth of the shared node above it
};

}  // namespace

CascadeLevels choose_levels(const SharedPrefixTree& tree, const AttentionProblem& problem,
                            const PlanTarget& target, const CascadeCosts& costs,
                            const CascadeFloors& floors) {
  return LevelSearch(tree, problem, target, costs, floors).run();
}

}  // namespace mlxcel::plan
