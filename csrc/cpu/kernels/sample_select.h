#pragma once

#include <algorithm>
#include <cstddef>

#include "cpu/kernels/sample_passes.h"

namespace mlxcel::cpu {

inline bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.index < b.index);
}

/// Moves the smallest set of first-ranking candidates whose weights reach `target` to the front,
/// the last of the set last, and returns its size (n where all together do not reach it, at least
/// 1). Weighted quickselect: expected time is linear.
template <class Weight>
size_t keep_mass(Candidate* list, size_t n, double target, Weight weight) {
  size_t begin = 0, end = n;  // the last of the set is in [begin, end)
  double before = 0.0;        // weight of [0, begin)
  constexpr size_t kFew = 32;
  while (end - begin > kFew) {
    const size_t middle = begin + (end - begin) / 2;
    std::nth_element(list + begin, list + middle, list + end, ranks_before);
    double half = 0.0;
    for (size_t i = begin; i < middle; ++i) half += weight(list[i]);
    if (before + half >= target) {
      end = middle;
    } else {
      before += half;
      begin = middle;
    }
  }
  std::sort(list + begin, list + end, ranks_before);
  size_t size = begin;
  do {
    before += weight(list[size++]);
  } while (size < end && before < target);
  return size;
}

}  // namespace mlxcel::cpu
