#pragma once

#include "params/sample.h"

namespace mlxcel::cpu {

/// logits (batch, vocab) of params.dtype, rows (batch) -> ids, valid, rounds (batch each). `rounds`
/// counts the draws that top-p turned down. Runs on the thread pool.
void sample(const SampleParams& params, const void* logits, const SampleRow* rows, int32_t* ids,
            bool* valid, int32_t* rounds);

}  // namespace mlxcel::cpu
