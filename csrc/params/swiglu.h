#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace mlxcel {

/// out = gate / (1 + exp(-gate)) * up, element by element.
struct SwigluParams {
  int64_t rows;
  int32_t features;  // elements a row of out
  int32_t merged;    // 1: gate and up are the halves of one (rows, 2 * features) array
  FloatType dtype;
};
static_assert(sizeof(SwigluParams) == 24);

}  // namespace mlxcel
