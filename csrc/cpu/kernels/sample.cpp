#include "cpu/kernels/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernels/philox.h"
#include "cpu/kernels/sample_row.h"
#include "cpu/kernels/sample_select.h"

// A token is drawn by the Gumbel-max rule over the tokens that the filters keep:
//   argmax over kept i of logit_i / temperature - log(-log(u_i)).
// Any superset may be searched first: where its winner is kept, it is the winner of the kept set
// too, since the noise is the same. So top-p alone draws from all tokens, asks for the mass that
// ranks above the winner, and draws again from those above where that was too much.

namespace mlxcel::cpu {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Each turned-down draw leaves, on average, less than half of the mass above it. After this many
// the tokens that are left are selected from exactly.
constexpr int kMaxRounds = 8;

// Up to here the noise of listed tokens is computed one by one; above, by a pass over the row.
constexpr size_t kShortList = 1024;

struct Result {
  int32_t id;
  bool valid;
  int32_t rounds;
};

/// The smallest float at or above x.
float round_up(double x) {
  const float f = static_cast<float>(x);
  return f < x ? std::nextafter(f, kInfinity) : f;
}

class RowSampler {
 public:
  RowSampler(const SampleParams& params, const SampleRow& row, const TokenRow& tokens,
             std::vector<Candidate>& list)
      : params_(params), row_(row), n_(params.vocab), tokens_(tokens), list_(list) {}

  Result run() {
    const int32_t top = tokens_.argmax();
    max_ = tokens_.x()[top];
    if (!(max_ >= kLowest)) return {top, false, 0};
    if (tokens_.has_nan() || is_greedy(row_) || max_ == kInfinity) {
      return {top, !tokens_.has_nan(), 0};
    }
    scale_ = 1.0 / row_.temperature;
    filter_scale_ = params_.temperature_last ? 1.0 : scale_;
    Cut keep{floor(), n_};
    const bool listed = row_.top_k > 0 && row_.top_k < n_;
    if (listed) {
      tokens_.list_top(row_.top_k, keep.value, list_);
      keep = last_listed();
    }
    if (row_.top_p < 1.0f) {
      const double target = row_.top_p * total(keep, listed);
      if (!listed) return top_p_by_rejection(keep, target);
      keep = top_p_of_list(target);
    }
    return {listed ? draw_listed(keep) : draw(keep), true, 0};
  }

 private:
  /// The lowest value that min-p keeps.
  float floor() const {
    if (!(row_.min_p > 0.0f)) return kLowest;
    const double share = std::min(1.0, static_cast<double>(row_.min_p));
    return std::max(kLowest, round_up(max_ + std::log(share) / filter_scale_));
  }

  double weight(float v) const { return std::exp((static_cast<double>(v) - max_) * filter_scale_); }
  double mass(float floor) const { return tokens_.mass(max_, filter_scale_, floor); }

  /// Mass of which top-p keeps a share.
  double total(Cut keep, bool listed) const {
    if (params_.joint) return mass(kLowest);
    if (!listed) return mass(keep.value);
    double sum = 0.0;
    for (const Candidate& c : list_) sum += weight(c.value);
    return sum;
  }

  Cut last_listed() const {
    const Candidate last = *std::max_element(list_.begin(), list_.end(), ranks_before);
    return {last.value, last.index};
  }

  Cut top_p_of_list(double target) {
    list_.resize(keep_mass(list_.data(), list_.size(), target,
                           [this](const Candidate& c) { return weight(c.value); }));
    return last_listed();
  }

  Result top_p_by_rejection(Cut keep, double target) {
    for (int32_t round = 0; round < kMaxRounds; ++round) {
      const int32_t id = draw(keep);
      const float v = tokens_.x()[id];
      const double above =
          mass(std::nextafter(v, kInfinity)) + tokens_.count_equal_before(id, v) * weight(v);
      if (above < target) return {id, true, round};
      keep = {v, id - 1};
    }
    tokens_.list(keep.value, list_);
    std::erase_if(list_, [&](const Candidate& c) { return !keep.keeps(c.value, c.index); });
    keep = top_p_of_list(target);
    return {draw_listed(keep), true, kMaxRounds};
  }

  int32_t draw(Cut keep) const { return tokens_.draw_logits(scale_, keep, row_).index; }

  int32_t draw_listed(Cut keep) const {
    if (list_.size() > kShortList) return draw(keep);
    Draw best{-std::numeric_limits<double>::infinity(), n_};
    for (const Candidate& c : list_) {
      const PhiloxBlock r = philox(row_, static_cast<uint32_t>(c.index) / 4, RngStream::gumbel);
      best.offer(c.value * scale_ + gumbel(r.word[c.index % 4]), c.index);
    }
    return best.index;
  }

  const SampleParams& params_;
  const SampleRow& row_;
  const int32_t n_;
  const TokenRow& tokens_;
  std::vector<Candidate>& list_;
  float max_ = 0.0f;
  double scale_ = 1.0;         // of the draw
  double filter_scale_ = 1.0;  // of the distribution that the filters see
};

}  // namespace

void sample(const SampleParams& params, const void* logits, const SampleRow* rows, int32_t* ids,
            bool* valid, int32_t* rounds) {
  for_rows(params.batch, params.vocab, [&](size_t b) {
    thread_local TokenRow tokens;
    thread_local std::vector<Candidate> list;
    tokens.read(params.dtype, logits, b, params.vocab);
    const Result r = RowSampler(params, rows[b], tokens, list).run();
    ids[b] = r.id;
    valid[b] = r.valid;
    rounds[b] = r.rounds;
  });
}

}  // namespace mlxcel::cpu
