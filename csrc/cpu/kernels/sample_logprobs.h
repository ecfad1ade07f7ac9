#pragma once

#include "params/sample_logprobs.h"

namespace mlxcel::cpu {

/// logits (batch, vocab), ids (batch) -> logprobs, ranks (batch), top_ids, top_logprobs (batch,
/// num_top). Runs on the thread pool.
void token_logprobs(const TokenLogprobsParams& params, const void* logits, const int32_t* ids,
                    float* logprobs, int32_t* ranks, int32_t* top_ids, float* top_logprobs);

}  // namespace mlxcel::cpu
