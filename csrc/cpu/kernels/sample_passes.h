#pragma once

#include <cstdint>

#include "params/sample.h"

namespace mlxcel::cpu {

/// Tokens are ranked by value, largest first, and then by index, lowest first. A token is kept
/// where it ranks at or before the cut.
struct Cut {
  float value;
  int32_t index;

  bool keeps(float v, int32_t i) const { return v > value || (v == value && i <= index); }
};

struct Candidate {
  float value;
  int32_t index;
};

/// The leading token so far of a Gumbel-max draw.
struct Draw {
  double score;
  int32_t index;

  /// Equal scores go to the lower index, in whatever order tokens are offered.
  void offer(double s, int32_t i) {
    if (s > score || (s == score && i < index)) *this = {s, i};
  }
};

/// Rows are summarised in blocks of this many tokens: a block whose maximum cannot matter is
/// skipped whole.
constexpr int kTokenBlock = 64;

/// Which random words can give a certain noise, without a logarithm. Entry i is a lower bound of
/// the words whose Gumbel noise exceeds i / 16 - 4.
class GumbelTable {
 public:
  static const GumbelTable& instance();
  /// A bound for noise above `gap`.
  uint32_t above(double gap) const {
    const double at = (gap + 4.0) * 16.0;
    if (!(at > 0.0)) return 0;  // also where the gap is NaN or -inf
    return bits_[at < kSize - 1 ? static_cast<int>(at) : kSize - 1];
  }

 private:
  GumbelTable();

  static constexpr int kSize = 21 * 16;
  uint32_t bits_[kSize];
};

/// The passes over a row of f32 logits that are compiled per instruction set. `block_max` has the
/// maximum of each block of the row.
struct SamplePasses {
  /// Writes the row as f32.
  void (*widen)(FloatType dtype, const void* row, int32_t n, float* out);
  /// Fills block_max, NaN left out; returns whether the row has a NaN.
  bool (*block_max)(const float* x, int32_t n, float* block_max);
  /// Sum of exp((x - max) * scale) over x >= floor.
  double (*mass)(const float* x, int32_t n, const float* block_max, float max, float scale,
                 float floor);
  /// Number of x == value.
  int32_t (*count_equal)(const float* x, int32_t n, const float* block_max, float value);
  /// Writes the tokens with x >= floor, in order of index; returns their number.
  int32_t (*collect)(const float* x, int32_t n, const float* block_max, float floor,
                     Candidate* out);
  /// argmax of x * scale + noise over the tokens that the cut keeps; index n where it keeps none.
  Draw (*draw_logits)(const float* x, int32_t n, const float* block_max, double scale, Cut cut,
                      const SampleRow& row, const GumbelTable& table);
  /// argmax of log(x) + noise over x > 0: a draw in proportion to x. Index n where there is none.
  Draw (*draw_weights)(const float* x, int32_t n, const float* block_max, const SampleRow& row,
                       const GumbelTable& table);
};

const SamplePasses& sample_passes();

inline int32_t num_token_blocks(int32_t n) {
  return (n + kTokenBlock - 1) / kTokenBlock;
}

}  // namespace mlxcel::cpu
