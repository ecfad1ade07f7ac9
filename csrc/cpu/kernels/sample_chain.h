#pragma once

#include "params/sample_chain.h"

namespace mlxcel::cpu {

/// draft_ids (batch, n), draft_probs (batch, n, vocab), target_probs (batch, n + 1, vocab), rows
/// (batch) -> ids (batch, n + 1), num_accepted (batch), where n = params.num_draft. Runs on the
/// thread pool.
void chain_speculative_sample(const ChainParams& params, const int32_t* draft_ids,
                              const float* draft_probs, const float* target_probs,
                              const ChainRow* rows, int32_t* ids, int32_t* num_accepted);

}  // namespace mlxcel::cpu
