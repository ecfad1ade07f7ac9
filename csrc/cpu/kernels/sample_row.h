#pragma once

#include <cstddef>
#include <vector>

#include "common/parallel.h"
#include "cpu/kernels/sample_passes.h"

namespace mlxcel::cpu {

/// One row of n tokens as f32 with its block maxima, in buffers that a thread keeps.
class TokenRow {
 public:
  /// Takes row `b` of a (batch, n) array; copies it only where it is not f32.
  void read(FloatType dtype, const void* data, size_t b, int32_t n) {
    const size_t item = dtype == FloatType::f32 ? 4 : 2;
    const void* row = static_cast<const char*>(data) + b * n * item;
    x_ = static_cast<const float*>(row);
    if (dtype != FloatType::f32) passes_.widen(dtype, row, n, buffer(n));
    summarise(n);
  }

  /// Takes values that fill(float* out) writes.
  template <class Fill>
  void make(int32_t n, Fill&& fill) {
    fill(buffer(n));
    summarise(n);
  }

  const float* x() const { return x_; }
  int32_t size() const { return n_; }
  bool has_nan() const { return nan_; }
  const std::vector<float>& block_max() const { return maxima_; }

  /// The first token among the largest; 0 where all are NaN.
  int32_t argmax() const;
  /// Sum of exp((x - max) * scale) over x >= floor.
  double mass(float max, double scale, float floor) const {
    return passes_.mass(x_, n_, maxima_.data(), max, static_cast<float>(scale), floor);
  }
  int32_t count_equal_before(int32_t end, float value) const {
    return passes_.count_equal(x_, end, maxima_.data(), value);
  }
  Draw draw_logits(double scale, Cut cut, const SampleRow& row) const {
    return passes_.draw_logits(x_, n_, maxima_.data(), scale, cut, row, GumbelTable::instance());
  }
  Draw draw_weights(const SampleRow& row) const {
    return passes_.draw_weights(x_, n_, maxima_.data(), row, GumbelTable::instance());
  }

  /// The tokens with x >= floor, in order of index.
  void list(float floor, std::vector<Candidate>& out) const {
    out.resize(n_ + 1);
    out.resize(passes_.collect(x_, n_, maxima_.data(), floor, out.data()));
  }
  /// The first k tokens in rank, or fewer, among those with x >= floor; in no order.
  void list_top(size_t k, float floor, std::vector<Candidate>& out) const;

 private:
  float* buffer(int32_t n) {
    buffer_.resize(n);
    x_ = buffer_.data();
    return buffer_.data();
  }
  void summarise(int32_t n) {
    n_ = n;
    maxima_.resize(num_token_blocks(n));
    nan_ = passes_.block_max(x_, n, maxima_.data());
  }

  const SamplePasses& passes_ = sample_passes();
  const float* x_ = nullptr;
  int32_t n_ = 0;
  bool nan_ = false;
  std::vector<float> maxima_, buffer_;
};

/// parallel_for over rows of n tokens.
template <class Fn>
void for_rows(int32_t batch, int32_t n, Fn&& fn) {
  parallel_for(batch, 16384 / n + 1, [&](size_t begin, size_t end) {
    for (size_t b = begin; b < end; ++b) fn(b);
  });
}

}  // namespace mlxcel::cpu
