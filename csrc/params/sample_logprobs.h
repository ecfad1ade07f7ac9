#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace mlxcel {

MLXCEL_CONSTANT int kMaxTopLogprobs = 64;

struct TokenLogprobsParams {
  int32_t batch;
  int32_t vocab;
  int32_t num_top;  // 0..kMaxTopLogprobs, at most vocab
  FloatType dtype;
};
static_assert(sizeof(TokenLogprobsParams) == 16);

}  // namespace mlxcel
