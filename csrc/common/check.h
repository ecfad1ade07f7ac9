#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "mlx/array.h"
#include "mlx/utils.h"
#include "params/dtype.h"

namespace mlxcel {

namespace mx = mlx::core;

/// Throws std::invalid_argument (ValueError in Python): "[op] <parts...>".
template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "[" << op << "] ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

inline void check_shape(const char* op, const char* argument, const mx::array& a,
                        const mx::Shape& wanted) {
  if (a.shape() != wanted) {
    fail(op, argument, " must have shape ", wanted, ", got ", a.shape(), ".");
  }
}

inline void check_ndim(const char* op, const char* argument, const mx::array& a, size_t ndim,
                       const char* axes) {
  if (a.ndim() != ndim) {
    fail(op, argument, " must have ", ndim, " dimensions ", axes, ", got shape ", a.shape(), ".");
  }
}

inline void check_dtype(const char* op, const char* argument, const mx::array& a,
                        mx::Dtype wanted) {
  if (a.dtype() != wanted) fail(op, argument, " must be ", wanted, ", got ", a.dtype(), ".");
}

/// The FloatType of `a`, which must be float32, float16 or bfloat16.
inline FloatType float_type(const char* op, const char* argument, const mx::array& a) {
  if (a.dtype() == mx::float32) return FloatType::f32;
  if (a.dtype() == mx::float16) return FloatType::f16;
  if (a.dtype() == mx::bfloat16) return FloatType::bf16;
  fail(op, argument, " must be float32, float16 or bfloat16, got ", a.dtype(), ".");
}

}  // namespace mlxcel
