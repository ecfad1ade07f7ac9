#pragma once

#include "params/sample_edit.h"

namespace mlxcel::cpu {

/// logits (batch, vocab) of params.dtype, rows (batch), bias_ids and bias_values (nnz), counts (S,
/// vocab), masks (M, mask_words) -> out (batch, vocab) f32, which may be the logits where they are
/// f32. Runs on the thread pool.
void edit_logits(const EditLogitsParams& params, const void* logits, const EditRow* rows,
                 const int32_t* bias_ids, const float* bias_values, const uint32_t* counts,
                 const uint32_t* masks, float* out);

/// Counts token ids[i] in row rows[i] of counts (num_rows, vocab). A row of -1, and an id out of
/// range, is left out.
void count_tokens(const CountTokensParams& params, const int32_t* rows, const int32_t* ids,
                  uint32_t* counts);

}  // namespace mlxcel::cpu
