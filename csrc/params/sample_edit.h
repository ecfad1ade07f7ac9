#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace mlxcel {

/// What is done to one row of logits, in this order: mask, bias, penalties. Rows travel as one
/// [batch, 8] array of 32-bit words.
struct EditRow {
  float repetition;    // 1: off
  float presence;      // 0: off
  float frequency;     // 0: off
  int32_t counts_row;  // row of the counts, -1: no penalties
  int32_t mask_row;    // row of the masks, -1: every token is allowed
  int32_t bias_begin;  // span of the bias entries; the ids of a row are all different
  int32_t bias_end;
  int32_t reserved;
};
static_assert(sizeof(EditRow) == 32);

struct EditLogitsParams {
  int32_t batch;
  int32_t vocab;
  FloatType dtype;     // of the logits; the result is f32
  int32_t mask_words;  // 32-bit words of a mask; tokens beyond them are forbidden
  // Rows come from the caller as they are: what points beyond these counts as absent.
  int32_t num_bias;
  int32_t num_counts;
  int32_t num_masks;
};
static_assert(sizeof(EditLogitsParams) == 28);

/// A count of occurrences in the output, and a flag for the prompt.
MLXCEL_CONSTANT uint32_t kInPrompt = 0x80000000u;

struct CountTokensParams {
  int32_t num_tokens;
  int32_t num_rows;  // of the counts
  int32_t vocab;
  int32_t reset;  // 1: clears the first token's row and marks the tokens as the prompt's
};
static_assert(sizeof(CountTokensParams) == 16);

}  // namespace mlxcel
