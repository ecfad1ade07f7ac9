#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace mlxcel {

/// new_residual = x + residual (rounded to the dtype);
/// normed = new_residual / sqrt(mean(new_residual^2) + eps) * (weight + weight_bias).
struct AddRmsNormParams {
  int64_t rows;
  int32_t hidden;  // elements a row; rows are contiguous
  FloatType dtype;
  float eps;
  float weight_bias;
};
static_assert(sizeof(AddRmsNormParams) == 24);

}  // namespace mlxcel
