#pragma once

#include <cstdint>
#include <vector>

namespace mlxcel::plan {

/// The page rows of a batch, and how much of each its query tokens see.
struct PageRows {
  const int32_t* kv_indptr;          // [batch + 1] pages
  const int32_t* kv_indices;         // page ids
  const int32_t* first_page_offset;  // [batch] or nullptr
  const int32_t* qo_indptr;          // [batch + 1] query tokens, or nullptr: one token a request
  int32_t batch;
  int32_t page_size;
  bool causal;
};

/// Requests whose page rows are equal up to page_end. Its part of the prefix, which the nodes above
/// it do not hold, is [page_begin, page_end).
struct PrefixNode {
  int32_t first;  // its members are order[first, last), two or more
  int32_t last;
  int32_t page_begin;
  int32_t page_end;
  int32_t parent;  // index, -1: none
};

/// The common prefixes of a batch's page rows.
///
/// Pages are shared where ids are equal at equal positions from the front on. A page counts only if
/// every query token of the request sees all of it, whatever the length of the last page (which
/// never counts): the tree holds while rows get no other pages. A request without query tokens is
/// in no node.
class SharedPrefixTree {
 public:
  explicit SharedPrefixTree(const PageRows& rows);

  /// Whether the tree of `rows` is this one. Cheap where rows have only grown at their ends; false
  /// may also mean that it was not cheap to tell.
  bool holds_for(const PageRows& rows) const;

  /// Requests in depth-first order: the members of each node are neighbours.
  const std::vector<int32_t>& order() const { return order_; }

  /// Parents before children.
  const std::vector<PrefixNode>& nodes() const { return nodes_; }

 private:
  void sort(const PageRows& rows);
  void add_nodes();
  void keep_witnesses(const PageRows& rows);
  bool shares_more(const PageRows& rows, int32_t i, int32_t ended) const;

  std::vector<int32_t> order_;
  std::vector<PrefixNode> nodes_;
  std::vector<int32_t> limits_;  // [batch] pages that may be shared
  std::vector<int32_t>
      common_;  // [order + 1] pages that order[i - 1] and order[i] share; 0 at ends
  // What the tree was concluded from: of each request in order the offset of its first page, and
  // its pages up to the first that no neighbour has.
  std::vector<int32_t> witnesses_;
  std::vector<int32_t> witness_indptr_;
};

}  // namespace mlxcel::plan
