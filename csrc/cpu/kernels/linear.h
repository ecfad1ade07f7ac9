#pragma once

#include "params/linear.h"

namespace mlxcel::cpu {

/// Operands of a linear layer, all row-contiguous; their types are in LinearParams.
struct LinearArrays {
  const void* x;        // (rows, k)
  const void* weight;   // (n, k), or (n, k * bits / 32) uint32
  const void* scales;   // (n, k / group_size), null where dense
  const void* offsets;  // the same
  const void* bias;     // (n), null where there is none
  void* out;            // (rows, n)
};

/// Runs on the thread pool. Every out[m, n] is summed in one order, which depends on k alone: runs
/// of kBlockK products, each run by fused multiply-adds in ascending k, and the runs' sums in
/// ascending order. So a row of x gives the same bits in any batch and with any number of threads.
void linear(const LinearParams& params, const LinearArrays& arrays);

}  // namespace mlxcel::cpu
