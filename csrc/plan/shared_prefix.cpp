#include "plan/shared_prefix.h"

#include <algorithm>
#include <cstring>

namespace mlxcel::plan {
namespace {

/// Pages of a request that all of its query tokens see in full, whatever the length of the last
/// page; 0 for a request that asks nothing.
int32_t shareable_pages(const PageRows& rows, int32_t request) {
  const int64_t pages = rows.kv_indptr[request + 1] - rows.kv_indptr[request];
  const int64_t queries =
      rows.qo_indptr == nullptr ? 1 : rows.qo_indptr[request + 1] - rows.qo_indptr[request];
  if (pages == 0 || queries == 0) return 0;
  int64_t most = pages - 1;
  if (rows.causal) {
    // The first query token sees the fewest, with one token in the last page.
    const int64_t slots = (pages - 1) * rows.page_size + 2 - queries;
    most = std::min(most, std::max<int64_t>(slots, 0) / rows.page_size);
  }
  return static_cast<int32_t>(most);
}

int32_t offset_of(const PageRows& rows, int32_t request) {
  return rows.first_page_offset == nullptr ? 0 : rows.first_page_offset[request];
}

/// Equal elements at the front of two arrays of n.
int32_t common_front(const int32_t* a, const int32_t* b, int32_t n) {
  constexpr int32_t kRun = 32;
  int32_t i = 0;
  while (i + kRun <= n && std::memcmp(a + i, b + i, kRun * sizeof(int32_t)) == 0) i += kRun;
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

}  // namespace

SharedPrefixTree::SharedPrefixTree(const PageRows& rows) {
  limits_.resize(rows.batch);
  for (int32_t r = 0; r < rows.batch; ++r) {
    limits_[r] = shareable_pages(rows, r);
    if (limits_[r] > 0) order_.push_back(r);
  }
  sort(rows);
  add_nodes();
  keep_witnesses(rows);
}

void SharedPrefixTree::sort(const PageRows& rows) {
  const auto pages = [&](int32_t r) { return rows.kv_indices + rows.kv_indptr[r]; };
  const auto common = [&](int32_t a, int32_t b) {
    if (offset_of(rows, a) != offset_of(rows, b)) return 0;
    return common_front(pages(a), pages(b), std::min(limits_[a], limits_[b]));
  };
  std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    if (offset_of(rows, a) != offset_of(rows, b)) return offset_of(rows, a) < offset_of(rows, b);
    const int32_t n = common(a, b);
    if (n < limits_[a] && n < limits_[b]) return pages(a)[n] < pages(b)[n];
    return limits_[a] != limits_[b] ? limits_[a] < limits_[b] : a < b;
  });
  common_.assign(order_.size() + 1, 0);
  for (size_t i = 1; i < order_.size(); ++i) common_[i] = common(order_[i - 1], order_[i]);
}

/// Nodes are the intervals of neighbours that share more than those around them do.
void SharedPrefixTree::add_nodes() {
  struct Open {
    int32_t first, depth;
  };
  std::vector<Open> open{{0, 0}};
  const auto size = static_cast<int32_t>(order_.size());
  for (int32_t i = 1; i <= size; ++i) {
    int32_t first = i - 1;
    while (open.back().depth > common_[i]) {
      const Open closed = open.back();
      open.pop_back();
      first = closed.first;
      nodes_.push_back({first, i, std::max(common_[i], open.back().depth), closed.depth, -1});
    }
    if (open.back().depth < common_[i]) open.push_back({first, common_[i]});
  }
  std::sort(nodes_.begin(), nodes_.end(), [](const PrefixNode& a, const PrefixNode& b) {
    return a.first != b.first ? a.first < b.first : a.page_end < b.page_end;
  });
  std::vector<int32_t> path;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    while (!path.empty() && nodes_[path.back()].last <= nodes_[i].first) path.pop_back();
    if (!path.empty()) nodes_[i].parent = path.back();
    path.push_back(static_cast<int32_t>(i));
  }
}

void SharedPrefixTree::keep_witnesses(const PageRows& rows) {
  witness_indptr_.push_back(0);
  for (size_t i = 0; i < order_.size(); ++i) {
    const int32_t r = order_[i];
    const int32_t pages = std::min(std::max(common_[i], common_[i + 1]) + 1, limits_[r]);
    witnesses_.push_back(offset_of(rows, r));
    const int32_t* first = rows.kv_indices + rows.kv_indptr[r];
    witnesses_.insert(witnesses_.end(), first, first + pages);
    witness_indptr_.push_back(static_cast<int32_t>(witnesses_.size()));
  }
}

/// Whether request i in order, which ended after `ended` pages and has grown since, now goes on
/// with the page of another that has as many pages in common with it.
bool SharedPrefixTree::shares_more(const PageRows& rows, int32_t i, int32_t ended) const {
  const auto next_page = [&](int32_t at) {
    return rows.kv_indices[rows.kv_indptr[order_[at]] + ended];
  };
  const auto goes_on = [&](int32_t at) {
    return shareable_pages(rows, order_[at]) > ended && next_page(at) == next_page(i);
  };
  for (int32_t j = i; common_[j] >= ended && j > 0; --j) {
    if (goes_on(j - 1)) return true;
  }
  const auto size = static_cast<int32_t>(order_.size());
  for (int32_t j = i + 1; j < size && common_[j] >= ended; ++j) {
    if (goes_on(j)) return true;
  }
  return false;
}

bool SharedPrefixTree::holds_for(const PageRows& rows) const {
  if (rows.batch != static_cast<int32_t>(limits_.size())) return false;
  for (int32_t r = 0; r < rows.batch; ++r) {
    if (limits_[r] == 0 && shareable_pages(rows, r) > 0) return false;
  }
  for (size_t i = 0; i < order_.size(); ++i) {
    const int32_t r = order_[i], limit = shareable_pages(rows, r);
    const int32_t* witness = witnesses_.data() + witness_indptr_[i];
    const int32_t pages = witness_indptr_[i + 1] - witness_indptr_[i] - 1;
    if (limit < pages || witness[0] != offset_of(rows, r)) return false;
    if (std::memcmp(witness + 1, rows.kv_indices + rows.kv_indptr[r], pages * sizeof(int32_t)) !=
        0) {
      return false;
    }
    if (limit > limits_[r] && shares_more(rows, static_cast<int32_t>(i), limits_[r])) return false;
  }
  return true;
}

}  // namespace mlxcel::plan
