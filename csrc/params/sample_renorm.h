#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace mlxcel {

enum class RenormKind : int32_t {
  top_k_probs = 0,  // keep k, divide by their sum
  top_p_probs = 1,
  min_p_probs = 2,
  top_k_mask = 3  // logits: keep k, the rest is -inf
};

struct RenormParams {
  int32_t batch;
  int32_t vocab;
  FloatType dtype;  // of input and output
  RenormKind kind;
};
static_assert(sizeof(RenormParams) == 16);

/// The value of a row: an integer for top-k, else a share.
union RenormValue {
  int32_t k;
  float p;
};

}  // namespace mlxcel
