#include "cpu/kernels/sample_renorm.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "common/half.h"
#include "cpu/kernels/sample_row.h"
#include "cpu/kernels/sample_select.h"

namespace mlxcel::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kPositive = std::numeric_limits<float>::denorm_min();

Cut last(const std::vector<Candidate>& list) {
  if (list.empty()) return {kInfinity, -1};
  const Candidate c = *std::max_element(list.begin(), list.end(), ranks_before);
  return {c.value, c.index};
}

/// Which tokens of the row are kept.
Cut cut(RenormKind kind, RenormValue value, const TokenRow& row, std::vector<Candidate>& list) {
  const int32_t n = row.size();
  const bool logits = kind == RenormKind::top_k_mask;
  const float lowest = logits ? -kInfinity : kPositive;
  switch (kind) {
    case RenormKind::top_k_probs:
    case RenormKind::top_k_mask:
      if (value.k <= 0 || value.k >= n) break;
      row.list_top(value.k, lowest, list);
      return last(list);
    case RenormKind::top_p_probs: {
      if (value.p >= 1.0f) break;
      row.list(lowest, list);
      double total = 0.0;
      for (const Candidate& c : list) total += c.value;
      list.resize(list.empty() ? 0
                               : keep_mass(list.data(), list.size(), value.p * total,
                                           [](const Candidate& c) { return double{c.value}; }));
      return last(list);
    }
    case RenormKind::min_p_probs:
      if (!(value.p > 0.0f)) break;
      return {std::max(lowest, std::min(value.p, 1.0f) * row.x()[row.argmax()]), n};
  }
  return {lowest, n};
}

template <class T>
void write(RenormKind kind, Cut keep, const TokenRow& row, T* out) {
  const float* x = row.x();
  const int32_t n = row.size();
  if (kind == RenormKind::top_k_mask) {
    for (int32_t i = 0; i < n; ++i) out[i] = from_float<T>(keep.keeps(x[i], i) ? x[i] : -kInfinity);
    return;
  }
  double total = 0.0;
  for (int32_t i = 0; i < n; ++i) total += keep.keeps(x[i], i) ? x[i] : 0.0;
  const double scale = total > 0.0 ? 1.0 / total : 0.0;
  for (int32_t i = 0; i < n; ++i) {
    out[i] = from_float<T>(keep.keeps(x[i], i) ? static_cast<float>(x[i] * scale) : 0.0f);
  }
}

}  // namespace

void renorm(const RenormParams& params, const void* x, const RenormValue* values, void* out) {
  for_rows(params.batch, params.vocab, [&](size_t b) {
    thread_local TokenRow row;
    thread_local std::vector<Candidate> list;
    row.read(params.dtype, x, b, params.vocab);
    const Cut keep = cut(params.kind, values[b], row, list);
    const size_t at = b * params.vocab;
    switch (params.dtype) {
      case FloatType::f32:
        return write(params.kind, keep, row, static_cast<float*>(out) + at);
      case FloatType::f16:
        return write(params.kind, keep, row, static_cast<f16*>(out) + at);
      case FloatType::bf16:
        return write(params.kind, keep, row, static_cast<bf16*>(out) + at);
    }
  });
}

}  // namespace mlxcel::cpu
