#pragma once

#include "mlx/ops.h"

namespace mlxcel {

namespace mx = mlx::core;

/// `a` itself where it is known to be row-contiguous, else a node that makes it so. Every node
/// costs 2 to 3 us to evaluate on CUDA, and most inputs (weights, page tables, plans) are evaluated
/// arrays.
inline mx::array row_contiguous(const mx::array& a, mx::Stream s) {
  const bool known = a.status() == mx::array::Status::available && !a.is_tracer();
  return known && a.flags().row_contiguous ? a : mx::contiguous(a, false, s);
}

}  // namespace mlxcel
