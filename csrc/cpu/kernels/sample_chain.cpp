#include "cpu/kernels/sample_chain.h"

#include <algorithm>

#include "cpu/kernels/philox.h"
#include "cpu/kernels/sample_row.h"

namespace mlxcel::cpu {
namespace {

/// A token drawn in proportion to relu(target - draft), or to the target where that is zero
/// everywhere (or draft is null).
int32_t draw(const float* target, const float* draft, const SampleRow& row, TokenRow& tokens,
             int32_t vocab) {
  if (draft != nullptr) {
    tokens.make(vocab, [&](float* out) {
      for (int32_t i = 0; i < vocab; ++i) out[i] = std::max(target[i] - draft[i], 0.0f);
    });
    const Draw d = tokens.draw_weights(row);
    if (d.index < vocab) return d.index;
  }
  tokens.read(FloatType::f32, target, 0, vocab);
  const Draw d = tokens.draw_weights(row);
  return d.index < vocab ? d.index : tokens.argmax();
}

}  // namespace

void chain_speculative_sample(const ChainParams& params, const int32_t* draft_ids,
                              const float* draft_probs, const float* target_probs,
                              const ChainRow* rows, int32_t* ids, int32_t* num_accepted) {
  const size_t n = params.num_draft, vocab = params.vocab;
  for_rows(params.batch, params.vocab, [&](size_t b) {
    thread_local TokenRow tokens;
    const int32_t* drafted = draft_ids + b * n;
    const float* draft = draft_probs + b * n * vocab;
    const float* target = target_probs + b * (n + 1) * vocab;
    int32_t* out = ids + b * (n + 1);
    SampleRow row{};
    std::copy(rows[b].seed, rows[b].seed + 2, row.seed);
    const auto at_position = [&](size_t i) {
      const uint64_t first = rows[b].draw[0] | static_cast<uint64_t>(rows[b].draw[1]) << 32;
      row.draw[0] = static_cast<uint32_t>(first + i);
      row.draw[1] = static_cast<uint32_t>((first + i) >> 32);
    };
    size_t pos = 0;
    for (; pos < n; ++pos) {
      const int32_t id = drafted[pos];
      if (id < 0 || id >= params.vocab) break;
      at_position(pos);
      const double u = uniform(philox(row, 0, RngStream::accept).word[0]);
      if (!(u * draft[pos * vocab + id] < target[pos * vocab + id])) break;
      out[pos] = id;
    }
    at_position(pos);
    out[pos] =
        draw(target + pos * vocab, pos < n ? draft + pos * vocab : nullptr, row, tokens, vocab);
    std::fill(out + pos + 1, out + n + 1, -1);
    num_accepted[b] = static_cast<int32_t>(pos);
  });
}

}  // namespace mlxcel::cpu
