#include "cpu/kernels/sample_row.h"

#include <algorithm>
#include <functional>

#include "cpu/kernels/sample_select.h"

namespace mlxcel::cpu {

int32_t TokenRow::argmax() const {
  const auto best = std::max_element(maxima_.begin(), maxima_.end());
  const int32_t begin = static_cast<int32_t>(best - maxima_.begin()) * kTokenBlock;
  for (int32_t i = begin; i < std::min(n_, begin + kTokenBlock); ++i) {
    if (x_[i] == *best) return i;
  }
  return 0;
}

void TokenRow::list_top(size_t k, float floor, std::vector<Candidate>& out) const {
  if (k <= maxima_.size()) {
    // The k largest block maxima are k tokens at or above the k-th of them.
    thread_local std::vector<float> best;
    best = maxima_;
    std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<>());
    floor = std::max(floor, best[k - 1]);
  }
  list(floor, out);
  if (out.size() <= k) return;
  std::nth_element(out.begin(), out.begin() + (k - 1), out.end(), ranks_before);
  out.resize(k);
}

}  // namespace mlxcel::cpu
