#include "cpu/kernels/sample_edit.h"

#include <algorithm>
#include <limits>

#include "common/parallel.h"
#include "cpu/kernels/sample_passes.h"

namespace mlxcel::cpu {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();

void forbid(const uint32_t* mask, int32_t words, int32_t vocab, float* x) {
  for (int32_t w = 0; w < words && w * 32 < vocab; ++w) {
    const uint32_t bits = mask[w];
    if (bits == 0xffffffffu) continue;
    const int32_t begin = w * 32, end = std::min(vocab, begin + 32);
    for (int32_t i = begin; i < end; ++i) {
      if (((bits >> (i - begin)) & 1) == 0) x[i] = kForbidden;
    }
  }
  if (words * 32 < vocab) std::fill(x + words * 32, x + vocab, kForbidden);
}

void penalise(const EditRow& row, const uint32_t* counts, int32_t vocab, float* x) {
  for (int32_t i = 0; i < vocab; ++i) {
    if (counts[i] == 0) continue;
    const uint32_t in_output = counts[i] & ~kInPrompt;
    x[i] = x[i] > 0.0f ? x[i] / row.repetition : x[i] * row.repetition;
    if (in_output > 0) x[i] -= row.frequency * static_cast<float>(in_output) + row.presence;
  }
}

}  // namespace

void edit_logits(const EditLogitsParams& params, const void* logits, const EditRow* rows,
                 const int32_t* bias_ids, const float* bias_values, const uint32_t* counts,
                 const uint32_t* masks, float* out) {
  const int64_t vocab = params.vocab;
  const size_t item = params.dtype == FloatType::f32 ? 4 : 2;
  parallel_for(params.batch, 16384 / vocab + 1, [&](size_t begin, size_t end) {
    for (size_t b = begin; b < end; ++b) {
      const EditRow& row = rows[b];
      float* x = out + b * vocab;
      const void* from = static_cast<const char*>(logits) + b * vocab * item;
      if (from != x) sample_passes().widen(params.dtype, from, params.vocab, x);
      if (row.mask_row >= 0 && row.mask_row < params.num_masks) {
        forbid(masks + int64_t{row.mask_row} * params.mask_words, params.mask_words, params.vocab,
               x);
      }
      for (int32_t i = std::max(row.bias_begin, 0); i < std::min(row.bias_end, params.num_bias);
           ++i) {
        if (bias_ids[i] >= 0 && bias_ids[i] < vocab) x[bias_ids[i]] += bias_values[i];
      }
      if (row.counts_row >= 0 && row.counts_row < params.num_counts) {
        penalise(row, counts + row.counts_row * vocab, params.vocab, x);
      }
    }
  });
}

void count_tokens(const CountTokensParams& params, const int32_t* rows, const int32_t* ids,
                  uint32_t* counts) {
  const auto valid = [&](int32_t row) { return row >= 0 && row < params.num_rows; };
  if (params.reset && params.num_tokens > 0 && valid(rows[0])) {
    std::fill_n(counts + int64_t{rows[0]} * params.vocab, params.vocab, 0u);
  }
  for (int32_t i = 0; i < params.num_tokens; ++i) {
    if (!valid(rows[i]) || ids[i] < 0 || ids[i] >= params.vocab) continue;
    uint32_t& count = counts[int64_t{rows[i]} * params.vocab + ids[i]];
    if (params.reset)
      count |= kInPrompt;
    else
      ++count;
  }
}

}  // namespace mlxcel::cpu
