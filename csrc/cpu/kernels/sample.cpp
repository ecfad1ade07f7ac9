#include "cpu/kernels/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/parallel.h"
#include "cpu/kernels/philox.h"
#include "cpu/kernels/sample_passes.h"
#include "cpu/kernels/top_p.h"

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
  RowSampler(const SampleParams& params, const SampleRow& row, const float* x,
             std::vector<float>& maxima, std::vector<Candidate>& list)
      : params_(params), row_(row), n_(params.vocab), x_(x), maxima_(maxima), list_(list) {}

  Result run() {
    maxima_.resize((n_ + kTokenBlock - 1) / kTokenBlock);
    const bool nan = passes_.block_max(x_, n_, maxima_.data());
    const int32_t top = argmax();
    max_ = x_[top];
    if (!(max_ >= kLowest)) return {top, false, 0};
    if (nan || is_greedy(row_) || max_ == kInfinity) return {top, !nan, 0};

    scale_ = 1.0 / row_.temperature;
    filter_scale_ = params_.temperature_last ? 1.0 : scale_;
    Cut keep{floor(), n_};
    const bool listed = row_.top_k > 0 && row_.top_k < n_;
    if (listed) keep = top_k(keep);
    if (row_.top_p < 1.0f) {
      const double target = row_.top_p * total(keep, listed);
      if (!listed) return top_p_by_rejection(keep, target);
      keep = top_p_of_list(target);
    }
    return {listed ? draw_listed(keep) : draw(keep).index, true, 0};
  }

 private:
  int32_t argmax() const {
    const auto best = std::max_element(maxima_.begin(), maxima_.end());
    const int32_t begin = static_cast<int32_t>(best - maxima_.begin()) * kTokenBlock;
    for (int32_t i = begin; i < std::min(n_, begin + kTokenBlock); ++i) {
      if (x_[i] == *best) return i;
    }
    return 0;  // NaN alone
  }

  /// The lowest value that min-p keeps.
  float floor() const {
    if (!(row_.min_p > 0.0f)) return kLowest;
    const double share = std::min(1.0, static_cast<double>(row_.min_p));
    return std::max(kLowest, round_up(max_ + std::log(share) / filter_scale_));
  }

  double weight(float v) const { return std::exp((static_cast<double>(v) - max_) * filter_scale_); }

  double mass(float floor) const {
    return passes_.mass(x_, n_, maxima_.data(), max_, static_cast<float>(filter_scale_), floor);
  }

  /// Mass of which top-p keeps a share.
  double total(Cut keep, bool listed) const {
    if (params_.joint) return mass(kLowest);
    if (!listed) return mass(keep.value);
    double sum = 0.0;
    for (const Candidate& c : list_) sum += weight(c.value);
    return sum;
  }

  void collect(float floor) {
    list_.resize(n_ + 1);
    list_.resize(passes_.collect(x_, n_, maxima_.data(), floor, list_.data()));
  }

  /// Lists the top_k tokens among the kept.
  Cut top_k(Cut keep) {
    const size_t k = row_.top_k;
    float floor = keep.value;
    if (k <= maxima_.size()) {
      // The k largest block maxima are k tokens at or above the k-th of them.
      std::vector<float> best(maxima_);
      std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<>());
      floor = std::max(floor, best[k - 1]);
    }
    collect(floor);
    if (list_.size() <= k) return keep;
    std::nth_element(list_.begin(), list_.begin() + (k - 1), list_.end(), ranks_before);
    list_.resize(k);
    return {list_[k - 1].value, list_[k - 1].index};
  }

  Cut top_p_of_list(double target) {
    list_.resize(keep_mass(list_.data(), list_.size(), target,
                           [this](const Candidate& c) { return weight(c.value); }));
    return {list_.back().value, list_.back().index};
  }

  Result top_p_by_rejection(Cut keep, double target) {
    for (int32_t round = 0; round < kMaxRounds; ++round) {
      const Draw d = draw(keep);
      const float v = x_[d.index];
      const int32_t ties = passes_.count_equal(x_, d.index, maxima_.data(), v);
      const double above = mass(std::nextafter(v, kInfinity)) + ties * weight(v);
      if (above < target) return {d.index, true, round};
      keep = {v, d.index - 1};
    }
    collect(keep.value);
    std::erase_if(list_, [&](const Candidate& c) { return !keep.keeps(c.value, c.index); });
    return {draw_listed(top_p_of_list(target)), true, kMaxRounds};
  }

  Draw draw(Cut keep) const {
    static const GumbelTable table;
    return passes_.gumbel_argmax(x_, n_, maxima_.data(), scale_, keep, row_, table);
  }

  int32_t draw_listed(Cut keep) const {
    if (list_.size() > kShortList) return draw(keep).index;
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
  const float* x_;
  std::vector<float>& maxima_;
  std::vector<Candidate>& list_;
  const SamplePasses& passes_ = sample_passes();
  float max_ = 0.0f;
  double scale_ = 1.0;         // of the draw
  double filter_scale_ = 1.0;  // of the distribution that the filters see
};

}  // namespace

void sample(const SampleParams& params, const void* logits, const SampleRow* rows, int32_t* ids,
            bool* valid, int32_t* rounds) {
  const size_t item = params.dtype == FloatType::f32 ? 4 : 2;
  const size_t grain = 16384 / params.vocab + 1;
  parallel_for(params.batch, grain, [&](size_t begin, size_t end) {
    thread_local std::vector<float> wide, maxima;
    thread_local std::vector<Candidate> list;
    for (size_t b = begin; b < end; ++b) {
      const void* row = static_cast<const char*>(logits) + b * params.vocab * item;
      const float* x = static_cast<const float*>(row);
      if (params.dtype != FloatType::f32) {
        wide.resize(params.vocab);
        sample_passes().widen(params.dtype, row, params.vocab, wide.data());
        x = wide.data();
      }
      const Result r = RowSampler(params, rows[b], x, maxima, list).run();
      ids[b] = r.id;
      valid[b] = r.valid;
      rounds[b] = r.rounds;
    }
  });
}

}  // namespace mlxcel::cpu
